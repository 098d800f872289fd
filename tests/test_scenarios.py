"""Scenarios: the frozen splits are what they say, and one's own are loaded or refused with a remedy."""

import json
import re
from pathlib import Path
from random import Random

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from swiftcruise.cli.main import app
from swiftcruise.envs.plants import physics
from swiftcruise.envs.plants.profile import GIB, load_framework, load_hardware, load_model
from swiftcruise.envs.plants.setting import coefficients
from swiftcruise.envs.scenarios.distributions import LogUniform, OneOf, Range, Uniform, Whole
from swiftcruise.envs.scenarios.disturbances import KINDS, HostLoad, HotRoom, SlowDisk
from swiftcruise.envs.scenarios.drawing import HELD_OUT
from swiftcruise.envs.scenarios.limits import Limits, limited_by
from swiftcruise.envs.scenarios.scenario import Scenario
from swiftcruise.envs.scenarios.splits import (
    MANIFESTS,
    SEED,
    SPLITS,
    draw_split,
    frozen,
    load_scenarios,
    load_split,
    manifest,
    read_manifest,
)
from swiftcruise.runtime.errors import ConfigError

ROOT = Path(__file__).parent.parent
LIKE_TRAIN = ("train", "val", "test-id")
PLAIN = {"name": "mine", "hardware": "a100-80g", "workload": {"model": "qwen-7b"}}


def everything():
    return [scenario for name in SPLITS for scenario in load_split(name)]


def names_in(scenarios):
    """Models, hardware, data and families of disturbances that occur."""
    return {
        "models": {s.workload.model for s in scenarios},
        "hardware": {s.hardware for s in scenarios},
        "data": {s.workload.data for s in scenarios},
        "disturbances": {d.kind for s in scenarios for d in s.disturbances},
    }


def with_(**changes):
    return Scenario.model_validate(PLAIN | changes)


# -- the frozen splits -------------------------------------------------------------------------------------------------


def test_every_split_is_as_large_as_it_says_and_names_its_scenarios():
    for name, split in SPLITS.items():
        assert [s.name for s in load_split(name)] == [f"{name}-{i:03d}" for i in range(split.count)]
        assert split.count >= 64


def test_the_tests_fix_their_random_draws_and_training_does_not():
    assert all(scenario.seed is None for scenario in load_split("train"))
    seeds = [scenario.seed for name in SPLITS if name != "train" for scenario in load_split(name)]
    assert None not in seeds
    assert len(set(seeds)) == len(seeds)


def test_no_scenario_occurs_twice():
    bare = [json.dumps(frozen(s) | {"name": "", "seed": 0}, sort_keys=True) for s in everything()]
    assert len(set(bare)) == len(bare)


@pytest.mark.parametrize("name", SPLITS)
def test_drawing_anew_gives_the_frozen_split(name):
    part = 24  # the first ones do not depend on how many are drawn
    assert draw_split(name, part, SEED) == load_split(name)[:part], (
        "the generator or a profile has changed; a frozen split stays as it is, so count up drawing.VERSION if new "
        "manifests are wanted: python -m swiftcruise.envs.scenarios.splits --write envs/scenarios/manifests"
    )


def test_another_seed_gives_other_scenarios_with_other_names():
    one, other = draw_split("val", 3, 1), draw_split("val", 3, 2)
    assert {s.name for s in one}.isdisjoint({s.name for s in [*other, *load_split("val")]})
    assert all(a.mismatch != b.mismatch for a, b in zip(one, other, strict=True))


def test_held_out_models_devices_data_and_disturbances_never_occur_in_training():
    for name in LIKE_TRAIN:
        found = names_in(load_split(name))
        assert all(found[kind].isdisjoint(HELD_OUT[kind]) for kind in HELD_OUT)
    ood = load_split("test-ood")
    found = names_in(ood)
    assert all(found[kind] == set(HELD_OUT[kind]) for kind in ("models", "hardware", "data"))
    disturbed = [s for s in ood if s.disturbances]
    assert len(disturbed) > 64
    assert all({d.kind for d in s.disturbances} & set(HELD_OUT["disturbances"]) for s in disturbed)
    assert found["disturbances"] == {kind.replace("_", "-") for kind in KINDS}
    assert all(manifest(name).held_out == {kind: list(names) for kind, names in HELD_OUT.items()} for name in SPLITS)


def test_everything_that_is_not_held_out_occurs_in_training():
    trained, all_names = names_in(load_split("train")), names_in(everything())
    assert all(trained[kind] | set(HELD_OUT[kind]) == all_names[kind] for kind in HELD_OUT)


def test_a_tenth_of_the_scenarios_is_undisturbed():
    for name in ("train", "val", "test-id", "test-ood"):
        scenarios = load_split(name)
        assert 0.05 < sum(not s.disturbances for s in scenarios) / len(scenarios) < 0.2


def test_the_hard_split_is_hard_in_every_way_and_training_in_none():
    hard = load_split("test-hard")
    for scenario in hard:
        by_kind = {d.kind: d for d in scenario.disturbances}
        assert by_kind["neighbours"].arrival == 1.0
        assert "long-bursts" in by_kind
        assert "hot-room" in by_kind or "fan-fault" in by_kind
        assert scenario.preview.share <= 0.5
        assert abs(scenario.mismatch.memory_model) > 0.1
    assert sum(s.dead_time for s in hard) > 24
    assert sum(s.dropout > 0 for s in hard) > 24
    budgeted = [s for s in hard if s.budgets.energy or s.budgets.temperature_c]
    assert 32 < len(budgeted) < 64
    for scenario in budgeted:
        if scenario.budgets.energy:
            assert 0.5 <= scenario.budgets.energy <= 0.8
        if scenario.budgets.temperature_c:
            below = load_hardware(scenario.hardware).throttle_celsius.value - scenario.budgets.temperature_c
            assert 2 <= below <= 8
    for scenario in load_split("train"):
        assert abs(scenario.mismatch.memory_model) <= 0.1
        assert scenario.dropout <= 0.02
        assert all(d.arrival <= 0.15 for d in scenario.disturbances if d.kind == "neighbours")


def test_every_scenario_can_be_trained():
    framework = load_framework()
    for scenario in everything():
        work, hardware = scenario.workload, load_hardware(scenario.hardware)
        scaled = hardware.replace({"activation_scale": scenario.mismatch.activations}, "test")
        _, memory = coefficients(scaled, load_model(work.model), work.setting)
        neighbour = max([d.memory[1] for d in scenario.disturbances if d.kind == "neighbours"], default=0.0)
        room = (framework.usable_share.value - neighbour) * hardware.memory_gib.value * GIB
        least = framework.least_fragmentation.value
        longest = work.max_length
        assert not physics.runs_out_of_memory(memory, longest, longest, 1.0, least, room), scenario.name
        coolest = scenario.host.ambient_c + sum(d.degrees for d in scenario.disturbances if d.kind == "hot-room")
        resistance = hardware.thermal_resistance.value * scenario.mismatch.cooling
        for disturbance in scenario.disturbances:
            resistance *= disturbance.factor if disturbance.kind == "fan-fault" else 1.0
        coolest += resistance * hardware.least_power_w.value
        limit = scenario.budgets.temperature_c or hardware.throttle_celsius.value
        assert coolest < limit, scenario.name


def test_no_split_is_trivial():
    for name in SPLITS:
        limits = [limited_by(scenario) for scenario in load_split(name)]
        share = {kind: sum(kind in found for found in limits) / len(limits) for kind in ("memory", "compute", "heat")}
        assert share["memory"] > 0.25
        assert share["compute"] > 0.25
        assert share["heat"] > 0.05
        if name != "test-ood":  # large models, and no images
            assert sum("launch" in found for found in limits) / len(limits) > 0.25
            assert sum("cores" in found for found in limits) > 1


# -- what limits a scenario --------------------------------------------------------------------------------------------


def test_what_limits_a_scenario_follows_from_it():
    small = {"model": "qwen3-0.6b", "data": "multimodal", "max_length": 2048}
    assert limited_by(with_(workload={"model": "qwen-7b", "data": "chat", "max_length": 1024})) == ("launch",)
    assert limited_by(with_(workload={"model": "qwen-7b", "data": "benchmark", "max_length": 2048})) == ("compute",)
    documents = {"model": "qwen-7b", "data": "documents", "max_length": 4096}
    assert limited_by(with_(hardware="rtx3090", workload=documents)) == ("memory", "compute")
    assert "data" in limited_by(with_(workload=small))
    assert "cores" not in limited_by(with_(workload=small, host={"cores": 16}))
    assert "cores" in limited_by(with_(workload=small, host={"cores": 2}))
    assert "cores" in limited_by(with_(workload=small, host={"cores": 16}, disturbances=[SlowDisk(factor=10)]))
    busy = [HostLoad(share=(0.1, 0.9))]
    assert "cores" in limited_by(with_(workload=small, host={"cores": 16}, disturbances=busy))
    assert "heat" in limited_by(with_(disturbances=[HotRoom(degrees=25)]))


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        ({}, None),
        ({"hardware": "rtx3090", "workload": {"model": "qwen-14b"}}, "longest sample does not fit"),
        ({"disturbances": [{"kind": "neighbours", "memory": [0.1, 0.8]}]}, "longest sample does not fit"),
        ({"disturbances": [{"kind": "memory-creep", "rate": 0.5}]}, "longest sample does not fit"),
        ({"disturbances": [{"kind": "evaluations", "memory": 0.85}]}, "evaluation does not fit"),
        ({"host": {"ambient_c": 50}, "disturbances": [{"kind": "hot-room", "degrees": 30}]}, "cool enough"),
        ({"budgets": {"temperature_c": 30}}, "cool enough"),
        ({"hardware": "jetson-orin", "workload": {"model": "qwen-7b", "batch": 1024}}, "longer than 300 s"),
    ],
)
def test_a_scenario_in_which_no_policy_could_do_well_says_why(changes, obstacle):
    found = Limits(with_(**changes)).obstacle
    assert found is None if obstacle is None else obstacle in found


# -- distributions -----------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 10**9), low=st.floats(0.001, 100), ratio=st.floats(1.01, 100))
def test_draws_stay_within_their_bounds_and_have_three_digits(seed, low, ratio):
    random, high = Random(seed), low * ratio
    for value in (Uniform(low, high).draw(random), LogUniform(low, high).draw(random)):
        assert 0.995 * low <= value <= 1.005 * high
        assert value == float(f"{value:.3g}")
    bottom, top = Range(Uniform(0, low), Uniform(0, low)).draw(random)
    assert 0 <= bottom <= top <= 2.02 * low
    assert Whole(3, 5).draw(random) in (3, 4, 5)
    assert OneOf((1, "a"), (2, Whole(7, 7))).draw(random) in ("a", 7)


def test_choices_occur_as_often_as_their_weights_say():
    random = Random(1)
    drawn = [OneOf.of({"a": 3, "b": 1}).draw(random) for _ in range(4000)]
    assert 0.72 < drawn.count("a") / len(drawn) < 0.78


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_changed_split_is_refused_and_can_be_loaded_as_ones_own(tmp_path):
    path = tmp_path / "test-id.json"
    text = (MANIFESTS / "test-id.json").read_text()
    noise = f'"noise":{load_split("test-id")[0].noise}'
    path.write_text(text.replace(noise, '"noise":0.0', 1))
    with pytest.raises(ConfigError, match=r"test-id\.json: the frozen split was changed .* restore it .* your own"):
        read_manifest(path)
    own = load_scenarios(str(path))
    assert len(own) == len(load_split("test-id"))
    assert own[0].noise == 0.0
    path.write_text(text[:1000])
    with pytest.raises(ConfigError, match=r"not a manifest of a split .* restore it"):
        read_manifest(path)
    path.write_text(text)
    assert list(read_manifest(path).scenarios) == load_split("test-id")


def test_scenarios_come_from_splits_names_files_and_lists(tmp_path):
    one, several = tmp_path / "one.yaml", tmp_path / "several.json"
    one.write_text(yaml.safe_dump(PLAIN | {"disturbances": [{"kind": "hot-room"}]}))
    several.write_text(json.dumps([PLAIN, PLAIN | {"name": "other"}]))
    assert load_scenarios("val") == load_split("val")
    assert load_scenarios("test-id-017") == [load_split("test-id")[17]]
    assert load_scenarios(one)[0].disturbances == (HotRoom(),)
    assert load_scenarios(with_()) == [with_()]
    mixed = load_scenarios(["val-001", str(one), several, with_()])
    assert [s.name for s in mixed] == ["val-001", "mine", "mine", "other", "mine"]


def test_a_loaded_split_is_the_callers_own_list():
    load_split("val").clear()
    assert len(load_split("val")) == SPLITS["val"].count


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("test-idd", "unknown scenarios 'test-idd'; did you mean 'test-id'? Known: train, val"),
        ("val-64", "unknown scenario 'val-64'; val has val-000 to val-063"),
        ("somewhere", "unknown scenarios 'somewhere'; Known: train, val, test-id, test-ood, test-hard; one of theirs"),
        ("absent.yaml", "cannot read the scenarios absent.yaml"),
        ([], "no scenarios: name a split"),
        (PLAIN, "not dict; Scenario.model_validate makes a scenario of a mapping"),
        (3, "not int"),
        (["val", 3], "not int"),
    ],
)
def test_what_is_no_source_of_scenarios_is_refused_with_a_remedy(source, said):
    with pytest.raises(ConfigError) as refusal:
        load_scenarios(source)
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "expected a scenario (name, hardware, workload, ...) or a list of at least one"),
        ("just text", "expected a scenario"),
        ("a: b: c", "not valid YAML"),
        ("name: x", "hardware is missing: add it"),
        ([PLAIN, PLAIN], "name 'mine' occurs more than once"),
        (
            [PLAIN, PLAIN | {"name": "b", "hardware": "h101"}],
            "scenario 1 (b): unknown hardware profile 'h101'; did you",
        ),
        (PLAIN | {"noise": -1}, "noise: Input should be greater than or equal to 0, not -1"),
        (PLAIN | {"noize": 1}, "noize is unknown: remove it"),
        (PLAIN | {"workload": {"model": "qwen-7b", "data": "chatt"}}, "unknown dataset 'chatt'; did you mean 'chat'?"),
        (PLAIN | {"disturbances": [{"kind": "earthquake"}]}, "disturbances.0"),
    ],
)
def test_a_bad_file_is_refused_with_file_field_and_remedy(tmp_path, content, said):
    path = tmp_path / "own.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    with pytest.raises(ConfigError) as refusal:
        load_scenarios(str(path))
    assert str(refusal.value).startswith(str(path))
    assert said in str(refusal.value)


def test_splits_that_do_not_exist_or_are_empty_are_refused():
    for load in (load_split, lambda name: draw_split(name, 1, 0)):
        with pytest.raises(ConfigError, match="unknown split 'tests'; did you mean 'test-id'"):
            load("tests")
    with pytest.raises(ConfigError, match="count must be at least 1, not 0"):
        draw_split("val", 0, 0)


# -- package, documentation and command --------------------------------------------------------------------------------


def test_every_manifest_is_part_of_the_package():
    tomllib = pytest.importorskip("tomllib")
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "swiftcruise.envs.scenarios" in tool["packages"]
    patterns = tool["package-data"]["swiftcruise.envs.scenarios"]
    packed = {path.name for pattern in patterns for path in MANIFESTS.parent.glob(pattern)}
    assert packed == {f"{name}.json" for name in SPLITS}


def test_every_disturbance_and_its_parameters_are_explained():
    page = (ROOT / "docs" / "scenarios.md").read_text()
    explained = dict(re.findall(r"^\| `([\w-]+)` \| (.+) \|$", page.split("\n## ")[2], re.MULTILINE))
    for name, kind in KINDS.items():
        said = explained[name.replace("_", "-")]
        assert [field for field in kind.model_fields if field != "kind" and f"`{field}`" not in said] == []


def test_the_command_lists_splits_and_shows_scenarios(tmp_path):
    def run(*words):
        return CliRunner().invoke(app, ["scenarios", *words])  # 80 columns: names are not broken

    listed = run()
    assert listed.exit_code == 0
    for name in SPLITS:
        assert f" {name} " in listed.output
        assert manifest(name).sha256[:12] in listed.output
    assert all(name in listed.output for names in HELD_OUT.values() for name in names)
    table = run("val")
    assert all(scenario.name in table.output for scenario in load_split("val"))
    assert "64 scenarios; limited by" in table.output
    refused = run("test-idd")
    assert refused.exit_code == 2
    assert "did you mean 'test-id'?" in " ".join(refused.output.split())


def test_a_scenario_that_the_command_shows_can_be_loaded_again(tmp_path):
    path = tmp_path / "mine.yaml"
    for name in ("train-003", "test-hard-007"):
        path.write_text(CliRunner().invoke(app, ["scenarios", name]).output)
        assert load_scenarios(path) == load_scenarios(name)
    path.write_text(yaml.safe_dump(PLAIN | {"hardware": "rtx3090", "workload": {"model": "qwen-14b"}}))
    assert "no policy can do well here: the longest sample" in CliRunner().invoke(app, ["scenarios", str(path)]).output
