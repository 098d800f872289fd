"""The comparison: the episodes are those of a live run's loop, the same again, and add up to what is told of them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from swiftcruise.agents import cells, hindsight
from swiftcruise.agents.cells import Cell, assembly_of, run_cells, scenarios_digest
from swiftcruise.agents.compare import (
    BEST_STATIC,
    BEST_STATIC_SPLIT,
    CLAIRVOYANT,
    DEFAULT,
    Comparison,
    every_policy,
    run,
)
from swiftcruise.agents.episodes import FIGURES, episode_keys, run_episodes
from swiftcruise.agents.output import write
from swiftcruise.agents.statistics import bootstrap_interval, interquartile_mean
from swiftcruise.agents.validation import validate
from swiftcruise.cli.main import app
from swiftcruise.envs.controlled import CompiledGuard, judge
from swiftcruise.envs.objectives import DEFAULT_WEIGHTS, OBJECTIVES, WORST
from swiftcruise.envs.plants.assembly import assemble
from swiftcruise.envs.plants.simulated import SimulatedPlant
from swiftcruise.envs.scenarios.scenario import scenario_from
from swiftcruise.envs.scenarios.splits import SPLITS, frozen, load_split, manifest
from swiftcruise.runtime.controls import CONTROL_FIELDS, Controls
from swiftcruise.runtime.guard import SafetyGuard
from swiftcruise.runtime.loop import ControlLoop
from swiftcruise.runtime.policy import REGISTRY, make_policy
from swiftcruise.runtime.telemetry import TELEMETRY_FIELDS, Telemetry

HORIZON = 12
POLICIES = (DEFAULT, "pid", "mpc", BEST_STATIC, BEST_STATIC_SPLIT, CLAIRVOYANT)


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> str:
    """A file with five scenarios."""
    path = tmp_path_factory.mktemp("scenarios") / "few.json"
    path.write_text(json.dumps([frozen(scenario) for scenario in load_split("val")[:5]]))
    return str(path)


@pytest.fixture(scope="module")
def comparison(split) -> Comparison:
    return Comparison((split,), POLICIES, seeds=2, horizon=HORIZON)


@pytest.fixture(scope="module")
def out(comparison, tmp_path_factory) -> Path:
    """What a comparison left."""
    folder = tmp_path_factory.mktemp("compared")
    write(run(comparison, folder / "cells"), folder)
    return folder


@pytest.fixture(scope="module")
def document(out):
    return json.loads((out / "results.json").read_text())


def rows_of(document, policy):
    return [row for row in document["rows"] if row["policy"] == policy]


# ---------------------------------------------------------------- episodes


class Erratic:
    """Asks for anything, fails now and then, and decides for each plant as if it were alone."""

    def reset(self, n, seed=None):
        self.n, self.decisions = n, 0

    def act(self, telemetry):
        self.decisions += 1
        if self.decisions % 7 == 0:
            raise RuntimeError("does not know")
        rng = np.random.default_rng(self.decisions)
        asked = {name: np.full(self.n, 2.0 ** rng.uniform(-2, 18)) for name in CONTROL_FIELDS}
        asked["memory_target"] = asked["memory_target"] % 1.0
        asked["checkpoint_fraction"] = np.full(self.n, np.nan)
        asked["power_limit_w"] = telemetry.temperature_c * 4.0
        return Controls.of(self.n, **asked)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def diagnostics(self):
        return {}


def test_episodes_are_those_that_each_training_has_alone_in_the_loop_of_a_live_run():
    assembly = assembly_of("test-hard", 30)
    chosen = np.array([3, 40, 70, 95])
    keys = episode_keys(assembly.scenarios, 0)[chosen]
    together = run_episodes(Erratic(), assembly, keys, chosen, horizon=30)
    for i, scenario in enumerate(chosen):
        plant = SimulatedPlant(assembly, 1)
        plant.start(np.zeros(1, np.int64), keys[i : i + 1], chosen[i : i + 1])
        limits = assembly.limits[assembly.constants["limits"][scenario]]
        loop = ControlLoop(Erratic(), SafetyGuard(limits))
        loop.reset(1, 0)
        sums = dict.fromkeys((*OBJECTIVES, "tokens", "joules", "ooms", "violated"), 0.0)
        for _ in range(30):
            plant.step(loop.decide(plant.telemetry).controls)
            terms, violations = judge(plant)
            for name, term in zip(OBJECTIVES, terms[0], strict=True):
                sums[name] += term
            for name, field in (("tokens", "real_tokens"), ("joules", "interval_j"), ("ooms", "ooms")):
                sums[name] += plant.state[field][0]
            sums["violated"] += violations[0] > 0
        assert {name: together[name][i] for name in sums} == sums
    assert together["failures"].tolist() == [4] * 4
    assert together.keys() == FIGURES.keys()


def test_a_job_that_ran_out_of_memory_for_good_trains_nothing_any_more():
    leak = {"disturbances": [{"kind": "memory-creep", "rate": 1.0}]}
    leaking = [scenario_from(frozen(scenario) | leak, scenario.name) for scenario in load_split("val")]
    assembly, keys, every = assemble(leaking, 120), episode_keys(leaking, 0), np.arange(len(leaking))
    some, more = (run_episodes(make_policy("static"), assembly, keys, every, horizon=t) for t in (117, 120))
    lost = some["unrecovered"] == 1
    assert lost.any()
    further = {name: (more[name] - some[name])[lost] for name in FIGURES}
    for name in ("throughput", "energy", "cost"):
        assert further[name] == pytest.approx(3 * WORST)
    assert further["seconds"] == pytest.approx(3 * assembly.constants["interval_s"][lost])
    for name in ("safety", "tokens", "joules", "ooms", "violated", "unrecovered"):
        assert not further[name].any(), name


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_the_compiled_guard_decides_as_the_one_of_a_live_run_to_the_last_bit(seed):
    rng = np.random.default_rng(seed)
    assembly = assembly_of("val", 30)
    n = 6
    which = rng.integers(len(assembly.limits), size=n)
    many = CompiledGuard(assembly.limits, which)
    many.reset(n)
    single = [SafetyGuard(assembly.limits[i]) for i in which]
    for t in range(8):
        telemetry = Telemetry.from_rows(2.0 ** rng.uniform(-3, 14, (n, len(TELEMETRY_FIELDS)))).replace(time_s=t)
        asked = 2.0 ** rng.uniform(-3, 20, (n, len(CONTROL_FIELDS)))
        asked[rng.random(asked.shape) < 0.2] = np.nan
        decided = many.apply(Controls.from_rows(asked), telemetry)
        for i, guard in enumerate(single):
            alone = guard.apply(Controls.from_rows(asked[i : i + 1]), Telemetry.from_rows(telemetry.rows()[i : i + 1]))
            assert np.array_equal(alone.controls.rows()[0], decided.controls.rows()[i], equal_nan=True)
            assert np.array_equal(alone.flags[0], decided.flags[i])
        if t == 4:
            state = json.loads(json.dumps(many.state_dict()))
            many.reset(n)
            many.load_state_dict(state)


def test_a_guard_for_other_plants_is_refused():
    guard = CompiledGuard(assembly_of("val", 30).limits, np.zeros(3, np.int64))
    guard.reset(3)
    with pytest.raises(ValueError, match="the guard is of 3 plants"):
        guard.apply(Controls.of(2), Telemetry.of(2))


def test_the_first_seed_has_the_keys_of_the_frozen_split_and_each_other_its_own():
    scenarios = load_split("test-id")
    assert episode_keys(scenarios, 0).tolist() == [scenario.seed for scenario in scenarios]
    assert len({key for seed in range(3) for key in episode_keys(scenarios, seed).tolist()}) == 3 * len(scenarios)
    assert episode_keys(scenarios[5:], 2).tolist() == episode_keys(scenarios, 2)[5:].tolist()


# ---------------------------------------------------------------- results


def test_every_episode_has_a_row_and_the_hash_of_its_scenarios(document, split, comparison):
    assert len(document["rows"]) == len(POLICIES) * 5 * 2
    assert document["splits"] == {split: {"sha256": scenarios_digest(split)}}
    assert scenarios_digest("test-ood") == manifest("test-ood").sha256
    assert document["policies"]["mpc"]["energy"] == DEFAULT_WEIGHTS[1]
    assert document["policies"]["pid"]["setpoint"] == 0.7


def test_the_default_scores_0_and_nothing_more_than_the_oracle(document):
    assert [row["score"] for row in rows_of(document, DEFAULT)] == pytest.approx([0.0] * 10, abs=1e-12)
    assert all(row["score"] <= 1.0 and row["return"] <= row["bound"] for row in document["rows"])
    for row in document["rows"]:
        terms = sum(weight * row[name] for name, weight in zip(OBJECTIVES, DEFAULT_WEIGHTS, strict=True))
        assert row["return"] == pytest.approx(terms)


def test_hindsight_finds_the_best_setting_of_the_grid(document, split):
    best = {(row["scenario"], row["seed"]): row["return"] for row in rows_of(document, BEST_STATIC)}
    one = rows_of(document, BEST_STATIC_SPLIT)
    assert len({json.dumps(row["setting"]) for row in one}) == 1
    assert {row["throughput_ratio_to_best_static"] for row in one} == {1.0}
    assembly = assembly_of(split, HORIZON)
    some = hindsight.GRID[::40]
    sums = np.zeros((len(some), 5))
    for seed in range(2):
        keys = episode_keys(assembly.scenarios, seed)
        figures = hindsight.run_settings(some, assembly, keys, np.arange(5), horizon=HORIZON)
        sums += sum(weight * figures[name] for name, weight in zip(OBJECTIVES, DEFAULT_WEIGHTS, strict=True))
    for i, scenario in enumerate(assembly.scenarios):
        assert sum(best[scenario.name, seed] for seed in range(2)) >= sums[:, i].max() - 1e-9


def test_a_fixed_setting_is_the_static_policy(split):
    assembly = assembly_of(split, HORIZON)
    keys, all_ = episode_keys(assembly.scenarios, 0), np.arange(5)
    setting = hindsight.Setting(token_budget=4096.0, memory_target=0.8, power=1.0, num_workers=2.0)
    held = hindsight.run_settings((setting,), assembly, keys, all_, horizon=HORIZON)
    policy = make_policy("static", token_budget=4096, memory_target=0.8, num_workers=2)
    static = run_episodes(policy, assembly, keys, all_, horizon=HORIZON)
    assert all(np.array_equal(held[name][0], static[name]) for name in FIGURES)


def test_the_more_energy_counts_the_less_of_it_the_best_settings_use(document):
    for policy in (BEST_STATIC, BEST_STATIC_SPLIT):
        front = [point["energy_per_token"] for point in document["front"] if point["policy"] == policy]
        assert len(front) == 5
        assert front == sorted(front, reverse=True)
        assert front[0] > front[-1]
    assert len([point for point in document["front"] if point["policy"] == "mpc"]) == 5
    assert len([point for point in document["front"] if point["policy"] == "pid"]) == 1


def test_the_summary_is_what_the_rows_say(document, out, split):
    summary = json.loads((out / "summary.json").read_text())
    scores = {p: np.array([row["score"] for row in rows_of(document, p)]).reshape(5, 2) for p in POLICIES}
    name = f"mpc/{split}"
    assert summary[f"{name}/score_iqm"] == pytest.approx(float(interquartile_mean(scores["mpc"])))
    low, high = bootstrap_interval(interquartile_mean, scores["mpc"])
    assert (summary[f"{name}/score_low"], summary[f"{name}/score_high"]) == pytest.approx((low, high))
    pair = bootstrap_interval(lambda a, b: interquartile_mean(a) - interquartile_mean(b), scores["mpc"], scores["pid"])
    told = [summary[f"{name}/versus/pid/difference_{end}"] for end in ("low", "high")]
    assert told == pytest.approx(pair)
    rows = rows_of(document, "mpc")
    ratios = [math.log(row["throughput_ratio_to_best_static"]) for row in rows]
    assert summary[f"{name}/throughput_ratio_to_best_static"] == pytest.approx(math.exp(np.mean(ratios)))
    assert summary[f"{name}/violated_interval_share"] == sum(r["violated_intervals"] for r in rows) / (10 * HORIZON)
    assert summary[f"{name}/unrecovered_ooms"] == sum(row["unrecovered_ooms"] for row in rows)
    assert summary[f"{name}/optimality_gap"] == pytest.approx(1 - scores["mpc"].mean())


def test_figures_tables_and_hparams_are_there(out, split):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for name in ("scores", "profiles", "front", "safety"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "ladder.md").read_text().count("\n| ") == len(POLICIES) + 2
    run_folder = next((out / "tensorboard").glob("mpc_*"))
    events = EventAccumulator(str(run_folder))
    events.Reload()
    assert "compare/score_iqm" in events.Tags()["scalars"]


# ---------------------------------------------------------------- again


def test_what_was_run_is_not_run_again_and_gives_the_same_file(comparison, out, tmp_path, monkeypatch):
    def never(cell):
        raise AssertionError(f"{cell.label} was run again")

    monkeypatch.setattr(Cell, "run", never)
    write(run(comparison, out / "cells"), tmp_path)
    assert (tmp_path / "results.json").read_bytes() == (out / "results.json").read_bytes()
    assert (tmp_path / "summary.json").read_bytes() == (out / "summary.json").read_bytes()


def test_an_interrupted_comparison_goes_on_where_it_was(split, tmp_path):
    pid, static = (Cell(split, 0, HORIZON, (), policy=name) for name in ("pid", "static"))
    seen = []
    run_cells([pid], tmp_path, done=seen.append)
    (file,) = tmp_path.glob("*.npz")
    whole = file.read_bytes()
    run_cells([pid, static], tmp_path)
    assert len(list(tmp_path.glob("*.npz"))) == 2
    file.write_bytes(whole[:100])  # a disk that was full
    again = run_cells([pid], tmp_path)[pid]
    assert again.keys() == FIGURES.keys()
    assert seen == [pid]


def test_other_code_scenarios_or_options_are_another_cell(split, monkeypatch):
    cell = Cell(split, 0, HORIZON, (), policy="pid")
    others = [Cell(split, 1, HORIZON, (), policy="pid"), Cell("val-000", 0, HORIZON, (), policy="pid")]
    prints = {each.fingerprint for each in (cell, *others)}
    monkeypatch.setattr(cells, "code_digest", lambda: "another")
    assert len(prints | {cell.fingerprint}) == 4


def test_results_are_validated_and_a_changed_row_is_told(out, tmp_path):
    assert validate(out / "results.json") == []
    document = json.loads((out / "results.json").read_text())
    document["rows"][3]["ooms"] = 41
    changed = tmp_path / "results.json"
    changed.write_text(json.dumps(document))
    told = validate(changed)
    assert len(told) == 1
    assert told[0].startswith(f"{DEFAULT}/")
    assert "ooms 41 is now " in told[0]


@pytest.mark.slow
def test_two_processes_find_what_one_finds(split):
    few = Comparison((split,), (DEFAULT, "pid", BEST_STATIC), horizon=4)
    assert run(few, jobs=2).document() == run(few).document()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_policy_exceeds_the_oracle_in_any_episode_of_any_test_split():
    splits = tuple(name for name in SPLITS if name.startswith("test"))
    rows = run(Comparison(splits, every_policy(), seeds=2), jobs=2).rows()
    assert len(rows) == len(splits) * len(every_policy()) * 96 * 2
    assert max(row["score"] for row in rows) <= 1.0
    assert {row["policy_failures"] for row in rows if row["policy"] != CLAIRVOYANT} == {0}


def test_a_policy_that_fails_is_run_as_in_a_live_run_and_told(split, monkeypatch):
    monkeypatch.setitem(REGISTRY, "erratic", Erratic)
    result = run(Comparison((split,), ("erratic",), horizon=HORIZON))
    assert {row["policy_failures"] for row in result.rows() if row["policy"] == "erratic"} == {1}


def test_a_policy_file_is_compared_with_its_options(split, tmp_path):
    file = tmp_path / "tuned.yaml"
    file.write_text("policy: mpc\npolicy_options: {memory_target: 0.8, energy: 0.0}\n")
    few = Comparison((split,), (str(file), "mpc"), horizon=2)
    document = run(few).document()
    assert document["policies"][str(file)] == document["policies"]["mpc"] | {"memory_target": 0.8, "energy": 0.0}
    cell = Cell(split, 0, 2, (), policy=str(file))
    before = cell.fingerprint
    cells.policy_digest.cache_clear()
    file.write_text(file.read_text().replace("0.8", "0.7"))
    assert cell.fingerprint != before


# ---------------------------------------------------------------- the command


def test_the_command_compares_and_validates(split, tmp_path):
    cli = CliRunner()
    words = ["compare", "--split", split, "--policies", "pid,best-static-split", "--horizon", "4"]
    done = cli.invoke(app, [*words, "--weights", "throughput=1,safety=1", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "best-static-split" in done.output
    results = tmp_path / "results.json"
    assert json.loads(results.read_text())["weights"] == dict(zip(OBJECTIVES, (1.0, 0.0, 1.0, 0.0), strict=True))
    assert cli.invoke(app, ["compare", "--validate", str(results)]).exit_code == 0
    results.write_text(results.read_text().replace('"violated_intervals": 0', '"violated_intervals": 3'))
    done = cli.invoke(app, ["compare", "--validate", str(results)])
    assert done.exit_code == 1
    assert "violated_intervals 3 is now 0" in done.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--split", "test-od"], "did you mean 'test-ood'"),
        (["--policies", "pidd"], "did you mean 'pid'"),
        (["--policies", ","], "policies is empty"),
        (["--weights", "speed=1"], "the objectives are"),
        (["--weights", "throughput"], "write throughput=1,"),
        (["--weights", "energy=1"], "safety"),
        (["--seeds", "0"], "seeds=0"),
        (["--horizon", "0"], "horizon=0"),
        (["--jobs", "0"], "jobs=0"),
        (["--validate", "/gone.json"], "no results of a comparison"),
    ],
)
def test_a_mistake_is_told_at_once(words, says, tmp_path):
    usual = ["--split", "val-000", "--policies", "pid", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, ["compare", *usual, *words])
    assert done.exit_code == 2
    assert says in done.output
    assert not (tmp_path / "out").exists()
