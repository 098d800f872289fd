"""The model-predictive policy: what its models learn, and what it does in the lab."""

from __future__ import annotations

import numpy as np
import pytest

from swiftcruise.baselines.power_model import PowerPlanner
from swiftcruise.baselines.speed_model import Lengths, SpeedModel, expected_packing
from swiftcruise.envs.plants.simulated import SimulatedPlant
from swiftcruise.envs.scenarios.splits import load_scenarios
from swiftcruise.runtime.errors import ConfigError
from swiftcruise.runtime.guard import SafetyGuard
from swiftcruise.runtime.loop import ControlLoop
from swiftcruise.runtime.planner import pack
from swiftcruise.runtime.policy import make_policy
from swiftcruise.runtime.telemetry import Telemetry

ONE = np.ones(1)


def run(policy, scenarios, intervals: int = 120) -> tuple[list[Telemetry], np.ndarray, np.ndarray]:
    """Telemetry, log speed over the reference, and temperature, each by interval."""
    plant = SimulatedPlant(load_scenarios(scenarios))
    rows, speed, heat = [], [], []
    for telemetry, _ in ControlLoop(policy, SafetyGuard()).run(plant, intervals, seed=0):
        rows.append(telemetry)
        speed.append(np.log(plant.state["tokens_per_s"] / plant.assembly.constants["reference_tokens_per_s"]))
        heat.append(plant.state["temperature_c"].copy())
    return rows, np.array(speed), np.array(heat)


@pytest.mark.parametrize("budget", [512, 1024, 2048, 8192])
@pytest.mark.parametrize("launch_tokens", [100.0, 1000.0])
@pytest.mark.parametrize("samples", [16, 64])
def test_packing_is_foreseen_as_the_planner_does_it(budget, launch_tokens, samples):
    rng = np.random.default_rng(0)
    steps = np.clip(rng.lognormal(np.log(300) - 0.32, 0.8, (60, samples)), 16, 2048).astype(int)
    plans = [pack(step.tolist(), token_budget=budget, launch_tokens=launch_tokens) for step in steps]
    count, padded = np.mean([len(p) for p in plans]), np.mean([sum(m.tokens for m in p) for p in plans])
    lengths = Lengths(
        ONE * samples, ONE * steps.mean(), ONE * np.quantile(steps, 0.95) / steps.mean(), ONE * steps.max()
    )
    unlimited = np.full(1, np.nan)
    packing = expected_packing(lengths, np.full((1, 1), float(budget)), ONE * launch_tokens, unlimited, unlimited)
    assert packing.micro_batches[0, 0] == pytest.approx(count, rel=0.35)
    assert packing.padded_tokens[0, 0] == pytest.approx(padded, rel=0.25)
    assert packing.recomputed_tokens[0, 0] == 0.0


def test_tokens_that_do_not_fit_uncheckpointed_are_expected_to_be_recomputed():
    lengths = Lengths(ONE * 64, ONE * 200.0, ONE * 2.0, ONE * 1000.0)
    budgets = np.array([[1000.0, 4000.0, 16000.0]])
    packing = expected_packing(lengths, budgets, ONE * 1e5, ONE * 2000.0, ONE * 16000.0)
    share = packing.recomputed_tokens[0] / packing.padded_tokens[0]
    assert share[0] == 0.0
    assert 0.2 < share[1] < share[2] <= 1.0


def learnt(slow_from: int = 1000, slowdown: float = 1.5) -> np.ndarray:
    model, rng = SpeedModel(), np.random.default_rng(0)
    for k in range(60):
        micro_batches, padded = rng.uniform(2, 30), rng.uniform(8000, 16000)
        recomputed = padded * rng.uniform(0, 1)
        seconds = 0.05 * micro_batches + 1e-4 * padded + 4e-5 * recomputed
        seconds *= rng.normal(1, 0.01) * (slowdown if k >= slow_from else 1.0)
        model.observe(ONE * micro_batches, ONE * padded, ONE * recomputed, ONE * seconds, ONE * 0.8)
    return model.coefficients[0]


def test_the_costs_of_a_step_are_identified():
    assert learnt() == pytest.approx([0.05, 1e-4, 4e-5], rel=0.1)


def test_a_neighbour_is_not_learnt_as_the_cost_of_a_token():
    assert learnt(slow_from=50) == pytest.approx([0.05, 1e-4, 4e-5], rel=0.15)


def test_a_change_at_a_held_budget_says_nothing_about_other_budgets():
    model = SpeedModel()
    octave = np.array([10.0])
    for k in range(20):
        model.compare(octave, ONE * (0.5 if k > 5 else 0.0), np.array([False]), np.array([True]))
    remainder, unknown = model.remainder(np.array([[9.0, 10.0, 11.0]]))
    assert np.abs(remainder).max() < 1e-9
    assert unknown[0, 1] < 0.5 < unknown[0, 0]


@pytest.mark.parametrize("octave", [9.0, 11.0])
def test_the_first_measurement_after_a_move_is_about_the_budget(octave):
    model = SpeedModel()
    still, new, known = np.array([False]), np.array([True]), np.array([True])
    model.compare(ONE * 10.0, ONE * 0.0, still, known)
    model.compare(ONE * octave, ONE * 0.2, new, known)
    remainder, _ = model.remainder(np.array([[octave, 10.0]]))
    assert remainder[0, 0] > 0.1 > abs(remainder[0, 1])


SOME = ["val-000", "val-006", "val-010", "val-014", "val-018", "val-024", "val-045", "val-051"]


def test_it_is_faster_than_the_rule_on_known_devices():
    mpc, rule = run(make_policy("mpc", energy=0.0), SOME)[1], run(make_policy("rule"), SOME)[1]
    assert mpc[20:].mean() > rule[20:].mean() + 0.02
    assert mpc[20:].mean() > -0.1


def test_energy_is_saved_only_where_it_has_a_weight():
    indifferent = run(make_policy("mpc", energy=0.0), SOME, 40)[0]
    thrifty = run(make_policy("mpc", energy=1.0), SOME, 40)[0]
    full = indifferent[0].power_limit_w
    assert (indifferent[-1].power_limit_w == full).all()
    joules = [np.nanmean([t.energy_j / t.real_tokens for t in rows[20:]], axis=0) for rows in (thrifty, indifferent)]
    assert np.mean(joules[0] / joules[1]) < 0.95
    assert (thrifty[-1].power_limit_w > 0.5 * full).all()  # not over the cliff


def test_an_energy_budget_is_kept_by_pacing_where_leaving_power_alone_breaks_it():
    ahead = {}
    for name in ("rule", "mpc"):
        rows = run(make_policy(name), ["val-009", "val-033", "val-057"])[0]
        ahead[name] = np.max([t.energy_budget_used - t.job_progress for t in rows], axis=0)
    assert (ahead["rule"] > 0.02).all()
    assert (ahead["mpc"] < 0.02).all()


def test_a_temperature_limit_is_kept_by_slowing_early():
    hot = {}
    for name in ("rule", "mpc"):
        rows, _, heat = run(make_policy(name), ["val-030"])
        hot[name] = np.mean(heat[:, 0] > rows[0].temperature_limit_c[0])
    assert hot["rule"] > 0.5
    assert hot["mpc"] < 0.03


def test_heat_that_throttles_is_met_with_less_power():
    share = {}
    for name in ("rule", "mpc"):
        rows = run(make_policy(name, **({"energy": 0.0} if name == "mpc" else {})), ["val-059"])[0]
        share[name] = np.nanmean([t.throttled[0] for t in rows])
    assert share["rule"] > 0.2
    assert share["mpc"] < 0.5 * share["rule"]


def test_a_device_without_a_power_limit_is_asked_for_none():
    planner = PowerPlanner(1.0, 0.3)
    for _ in range(3):
        assert np.isnan(
            planner.plan(Telemetry.of(1, power_w=100.0, temperature_c=80.0, temperature_limit_c=60.0))
        ).all()


def test_each_out_of_memory_error_widens_the_margin_and_time_narrows_it():
    policy = make_policy("mpc")
    targets = [policy.act(Telemetry.of(1, oom_count=float(k in (1, 2)))).memory_target[0] for k in range(40)]
    assert targets[0] == pytest.approx(0.90)
    assert targets[2] < targets[1] < targets[0] - 0.04
    assert targets[2] < targets[20] < targets[39] < 0.90


@pytest.mark.parametrize("bad", [{"throughput": -1}, {"energy": np.inf}, {"memory_target": 90}, {"max_workers": -1}])
def test_bad_options_are_refused_by_name(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        make_policy("mpc", **bad)


def test_weights_of_nothing_leave_nothing_to_plan():
    with pytest.raises(ConfigError, match="throughput=0"):
        make_policy("mpc", throughput=0, energy=0)
