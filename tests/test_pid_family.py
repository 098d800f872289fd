"""Override control, the loops through power, and the policies with several or changing gains."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftcruise.baselines.fuzzy import CENTRES, SETS, FuzzyPID, infer, memberships
from swiftcruise.baselines.gain_scheduled import GainScheduledPID
from swiftcruise.baselines.multi_loop import MultiLoopPID
from swiftcruise.baselines.override import OverrideControl
from swiftcruise.baselines.pid import PIDController
from swiftcruise.baselines.pid_policies import UtilizationPID
from swiftcruise.baselines.power_loops import PowerGovernor, PowerPID, ThermalPID
from swiftcruise.envs.plants.simulated import SimulatedPlant
from swiftcruise.envs.scenarios.scenario import Scenario
from swiftcruise.runtime.controls import ControlLimits, Limit
from swiftcruise.runtime.errors import ConfigError
from swiftcruise.runtime.guard import SafetyGuard
from swiftcruise.runtime.loop import ControlLoop
from swiftcruise.runtime.policy import Policy, make_policy
from swiftcruise.runtime.telemetry import TELEMETRY_FIELDS, Telemetry

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
NAMES = ("pid-thermal", "pid-power", "multi-loop", "gain-scheduled", "fuzzy-pid")

A40 = Scenario.model_validate(
    {
        "name": "a40",
        "hardware": "a40",
        "workload": {"model": "qwen3-0.6b", "data": "chat", "max_length": 1024, "batch": 32},
        "host": {"ambient_c": 34.0},
        "seed": 1,
    }
)
HOT = A40.model_copy(update={"host": A40.host.model_copy(update={"ambient_c": 45.0})})
COOL_JOB = A40.model_validate(A40.model_dump() | {"name": "cool", "budgets": {"temperature_c": 60.0}})
FRUGAL_JOB = A40.model_validate(A40.model_dump() | {"name": "frugal", "budgets": {"energy": 0.7}})
CROWDED = A40.model_validate(
    A40.model_dump()
    | {"name": "crowded", "disturbances": [{"kind": "neighbours", "arrival": 0.1, "memory": [0.3, 0.3]}]}
)
LIMITS = ControlLimits(power_limit_w=Limit(100.0, 300.0, dwell=1))


def drive(policy: Policy, scenarios: list[Scenario], intervals: int = 120) -> list[Telemetry]:
    plant = SimulatedPlant(scenarios)
    return [telemetry for telemetry, _ in ControlLoop(policy, SafetyGuard(LIMITS)).run(plant, intervals, seed=0)]


def column(telemetry: list[Telemetry], name: str) -> np.ndarray:
    """Shape (intervals, plants)."""
    return np.array([getattr(t, name) for t in telemetry])


# -- override control --------------------------------------------------------------------------------------------------


def two_loops() -> OverrideControl:
    loops = {name: PIDController(0.3, 0.5, 0.0, 0.0, tracking_time=1.5) for name in ("first", "second")}
    return OverrideControl(loops)


def test_the_loop_that_asks_for_least_has_the_actuator():
    override, at = two_loops(), np.array([10.0])
    for _ in range(30):
        # Each settles its measurement, the actuator relative to a ceiling of its own, at 0.
        at = override.update({"first": at - 12.0, "second": at - 11.0}, at)
    assert at == pytest.approx([11.0], abs=1e-3)
    assert override.selected == 1


@pytest.mark.parametrize("intervals", [40, 2000])
def test_a_loop_takes_over_within_some_intervals_however_long_another_had_the_actuator(intervals):
    override, at = two_loops(), np.array([10.0])
    for _ in range(intervals):
        at = override.update({"first": at - 13.0, "second": at - 11.0}, at)
    assert at == pytest.approx([11.0], abs=1e-3)
    trace = []
    for _ in range(8):
        at = override.update({"first": at - 9.0, "second": at - 11.0}, at)
        trace.append(at[0])
    assert trace[1] < 11.0  # it had not wound up
    assert trace[-1] == pytest.approx(9.0, abs=0.2)


@given(st.floats(-5, 5), st.floats(5, 15))
@settings(max_examples=30)
def test_a_loop_that_is_measured_for_the_first_time_begins_at_the_setting_in_force(error, setting):
    override = two_loops()
    nothing = np.array([np.nan])
    assert override.update({"first": nothing, "second": nothing}, np.array([setting])) == np.inf
    assert override.update({"first": np.array([error]), "second": nothing}, np.array([setting])) == setting


# -- power -------------------------------------------------------------------------------------------------------------


def test_temperature_settles_below_its_setpoint_and_takes_no_more_power_than_that_needs():
    temperature = column(drive(ThermalPID(58.0), [A40]), "temperature_c")[30:]
    assert temperature.max() <= 60.0
    assert temperature.mean() == pytest.approx(58.0, abs=1.0)


def test_a_job_s_temperature_limit_is_kept_with_a_margin():
    free, bound = drive(make_policy("static"), [COOL_JOB]), drive(ThermalPID(), [COOL_JOB])
    assert column(free, "temperature_c").max() > 62.0
    assert column(bound, "temperature_c")[20:].mean() == pytest.approx(58.0, abs=1.0)
    assert column(bound, "temperature_c")[20:].max() <= 60.0


def test_a_device_that_throttled_once_is_kept_below_that_temperature():
    hot = HOT.model_copy(update={"mismatch": HOT.mismatch.model_copy(update={"cooling": 1.4})})
    free, bound = drive(make_policy("static"), [hot]), drive(ThermalPID(95.0), [hot])
    assert column(free, "throttled")[20:].mean() > 0.5
    assert column(bound, "throttled").max() > 0.0
    assert column(bound, "throttled")[20:].max() == 0.0
    assert column(bound, "tokens_per_s")[20:].mean() > column(free, "tokens_per_s")[20:].mean()


def test_a_clock_held_down_by_something_else_than_heat_costs_no_power():
    governor = PowerGovernor()
    seen = {"temperature_c": 45.0, "throttled": 1.0, "power_limit_w": 300.0}
    assert all(governor.update(Telemetry.of(1, **seen)) == 300.0 for _ in range(10))


def test_an_energy_budget_is_drawn_at_the_pace_of_the_job():
    free, paced = drive(make_policy("static"), [FRUGAL_JOB]), drive(PowerPID(), [FRUGAL_JOB])
    ahead = column(paced, "energy_budget_used") - column(paced, "job_progress")
    assert column(free, "energy_budget_used")[-1] > 1.05
    assert ahead.max() < 0.02
    assert ahead[-1] == pytest.approx(0.0, abs=0.005)
    # A job without such a budget is left alone.
    assert (column(drive(PowerPID(), [A40], 20), "power_limit_w") == 300.0).all()


def test_mean_power_is_held_at_what_was_asked():
    power = column(drive(PowerPID(power_w=200.0), [A40]), "power_w")[30:]
    assert power.mean() == pytest.approx(200.0, rel=0.02)


def test_a_loop_that_could_not_have_its_way_does_not_wind_up():
    governor = PowerGovernor(temperature_c=70.0)
    hot = {"temperature_c": 90.0, "power_limit_w": 250.0}  # the limit at the start; it stays there, whatever is asked
    for _ in range(200):
        governor.update(Telemetry.of(1, **hot))
    cool = [governor.update(Telemetry.of(1, temperature_c=60.0, power_limit_w=250.0))[0] for _ in range(4)]
    assert cool[-1] == pytest.approx(250.0)


def test_without_a_power_limit_none_is_asked_for():
    for name in ("pid-thermal", "pid-power", "multi-loop"):
        hot = Telemetry.of(1, temperature_c=99.0, energy_budget_used=0.9, job_progress=0.1)
        assert np.isnan(make_policy(name).act(hot).power_limit_w).all(), name


# -- several loops -----------------------------------------------------------------------------------------------------


def test_all_limits_are_kept_at_once_and_the_training_is_faster_for_it():
    scenarios = [A40, COOL_JOB, FRUGAL_JOB, CROWDED]
    static, several = drive(make_policy("static"), scenarios), drive(MultiLoopPID(), scenarios)
    speed = [column(t, "tokens_per_s").mean(axis=0) for t in (static, several)]
    assert (speed[1] / speed[0] > [1.2, 1.0, 1.2, 1.2]).all()
    assert column(several, "temperature_c")[20:, 1].max() <= 60.0
    assert (column(several, "energy_budget_used") - column(several, "job_progress"))[:, 2].max() < 0.02
    assert np.nanmax(column(several, "memory_device_fraction")[60:]) <= 0.95


def test_the_budget_grows_until_layers_would_have_to_be_checkpointed():
    last = drive(MultiLoopPID(utilization=0.999), [A40])[-1]
    policy = MultiLoopPID(utilization=0.999)
    policy.reset(1)
    budget = 512.0
    for _ in range(30):  # a device that is never full
        seen = {"fill": 0.3, "fit_tokens_uncheckpointed": 4096.0, "fit_tokens_checkpointed": 32768.0}
        budget = policy.act(Telemetry.of(1, token_budget=budget, memory_peak_fraction=0.5, **seen)).token_budget[0]
    assert budget == pytest.approx(4096.0, rel=0.02)
    assert policy.explain() == "budget held by recomputation"
    assert last.checkpoint_fraction[0] < 0.1


def test_padding_lowers_what_counts_as_full():
    def settled(real: float) -> float:
        policy, budget = MultiLoopPID(), 1024.0
        for _ in range(300):
            fill = budget / (budget + 400.0)
            seen = {"fill": fill, "data_wait_fraction": 0.0, "real_tokens": real, "padded_tokens": 1000.0}
            budget = policy.act(Telemetry.of(1, token_budget=budget, **seen)).token_budget[0]
        return budget / (budget + 400.0)

    assert settled(real=1000.0) == pytest.approx(0.98, abs=0.005)
    assert settled(real=800.0) == pytest.approx(1 - 0.5 * 0.25, abs=0.005)


def test_an_out_of_memory_error_halves_the_budget_and_makes_it_careful_for_a_while():
    policy = MultiLoopPID()
    seen = {"fill": 0.5, "token_budget": 4096.0, "fit_tokens_uncheckpointed": 8192.0}
    before = policy.act(Telemetry.of(1, **seen))
    after = policy.act(Telemetry.of(1, oom_count=1.0, **seen))
    later = [policy.act(Telemetry.of(1, **seen)).memory_target[0] for _ in range(200)][-1]
    assert after.token_budget[0] == pytest.approx(2048.0)
    assert before.memory_target[0] - after.memory_target[0] == pytest.approx(0.10)
    assert later == pytest.approx(before.memory_target[0], abs=0.01)


# -- gains that change -------------------------------------------------------------------------------------------------


def fill_at(octaves: np.ndarray) -> np.ndarray:
    return np.exp2(octaves) / (np.exp2(octaves) + 512.0)


def climb(policy: Policy, setpoint: float, start: float = 128.0, intervals: int = 60) -> np.ndarray:
    """Fill under a policy that starts from an empty device."""
    policy.reset(1)
    budget, fills = start, []
    for _ in range(intervals):
        fill = float(fill_at(np.log2(np.array(budget))))
        fills.append(fill)
        budget = policy.act(Telemetry.of(1, fill=fill, data_wait_fraction=0.0, token_budget=budget)).token_budget[0]
    return np.array(fills)


@pytest.mark.parametrize("setpoint", [0.5, 0.9, 0.95])
@pytest.mark.parametrize("make", [GainScheduledPID, FuzzyPID])
def test_fill_settles_at_its_setpoint_wherever_that_is(make, setpoint):
    assert climb(make(setpoint), setpoint)[-20:] == pytest.approx(np.full(20, setpoint), abs=0.02)


def test_scheduled_gains_are_faster_where_the_plant_answers_little():
    fixed = UtilizationPID(0.95, 0.02, 0.03, 0.0, signal="fill", compress=False)
    missing = [np.abs(climb(p, 0.95) - 0.95)[20:30].mean() for p in (fixed, GainScheduledPID(0.95))]
    assert missing[1] < 0.7 * missing[0]


def test_a_schedule_of_one_changes_nothing():
    plain, scheduled = UtilizationPID(0.8, 0.02, 0.03, 0.01, signal="fill", compress=False), GainScheduledPID(
        0.8, 0.02, 0.03, 0.01, schedule=[[0.5, 1.0]], recompute=True
    )  # fmt: skip
    assert climb(plain, 0.8) == pytest.approx(climb(scheduled, 0.8), abs=1e-9)


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=8))
def test_memberships_are_triangles_that_sum_to_one(values):
    shares = memberships(values)
    assert shares.sum(axis=1) == pytest.approx(np.ones(len(values)))
    assert ((shares > 0).sum(axis=1) <= 2).all()
    assert np.array_equal(memberships(CENTRES), np.eye(len(SETS)))


@given(st.floats(-3, 3), st.floats(-3, 3))
def test_inferred_gains_lie_in_their_ranges_and_treat_both_signs_alike(error, change):
    said, mirrored = infer([error], [change]), infer([-error], [-change])
    assert 0.0 <= said.kp[0] <= 1.0
    assert 0.0 <= said.kd[0] <= 1.0
    assert 2.0 - 1e-9 <= said.alpha[0] <= 5.0 + 1e-9
    for one, other in zip(said, mirrored, strict=True):
        assert one == pytest.approx(other)


def test_rules_ask_for_a_fast_response_far_away_and_a_damped_one_in_passing_the_setpoint():
    far, passing = infer([1.0], [0.0]), infer([0.0], [1.0])
    assert far.kp > 0.9 > 0.1 > passing.kp
    assert far.kd < 0.1 < 0.9 < passing.kd
    assert (far.alpha, passing.alpha) == (pytest.approx([2.0]), pytest.approx([5.0]))


# -- all of them -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded() -> list[Telemetry]:
    return drive(MultiLoopPID(), [FRUGAL_JOB, CROWDED, COOL_JOB], 40)


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_policy_continues_where_it_was(name, recorded):
    original, copy = make_policy(name), make_policy(name)
    original.reset(3)
    for row in recorded[:20]:
        original.act(row)
    copy.load_state_dict(json.loads(json.dumps(original.state_dict())))
    for row in recorded[20:]:
        for plant in range(3):
            assert copy.act(row).plant(plant) == original.act(row).plant(plant)


@pytest.mark.parametrize("name", NAMES)
def test_many_plants_decide_as_each_would_alone(name, recorded):
    together, alone = make_policy(name), make_policy(name)
    together.reset(3)
    alone.reset(1)
    for row in recorded:
        expected = alone.act(Telemetry.from_plants([row.plant(1)])).plant(0)
        assert together.act(row).plant(1) == pytest.approx(expected, rel=1e-9)
    assert {np.shape(values) for values in together.diagnostics().values()} == {(3,)}


measured = st.sampled_from([np.nan, 0.0, 0.3, 1.0, 2.0, 90.0, 700.0, 1e12, np.inf])
rows = st.lists(
    st.lists(measured, min_size=len(TELEMETRY_FIELDS), max_size=len(TELEMETRY_FIELDS)), min_size=1, max_size=6
)


@given(rows, st.sampled_from(NAMES))
@settings(max_examples=100)
def test_whatever_is_measured_a_proposal_is_a_number_or_unset(rows, name):
    loop = ControlLoop(make_policy(name), SafetyGuard())
    loop.reset(1)
    for row in rows:
        proposed = loop.decide(Telemetry.of(1, **dict(zip(TELEMETRY_FIELDS, row, strict=True)))).proposed
        for control, values in proposed.items():
            assert np.isnan(values[0]) or 0 <= values[0] < np.inf, control
    assert not loop._warned


@pytest.mark.parametrize("name", NAMES)
def test_silent_sensors_hold_the_controls(name):
    policy = make_policy(name)
    policy.reset(1)
    in_force = {"token_budget": 2048.0, "power_limit_w": 250.0, "num_workers": 1.0}
    for _ in range(10):
        asked = policy.act(Telemetry.of(1, **in_force))
        for control, value in in_force.items():
            assert getattr(asked, control)[0] in (value, pytest.approx(np.nan, nan_ok=True)), control


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("pid", {"signal": "power"}),
        ("pid", {"recompute": 1}),
        ("pid-thermal", {"temperature_c": 300}),
        ("pid-thermal", {"margin_c": -1}),
        ("pid-power", {"power_w": 0}),
        ("multi-loop", {"utilization": 98}),
        ("multi-loop", {"recomputation": np.nan}),
        ("multi-loop", {"memory_target": 0}),
        ("multi-loop", {"memory_cap": 0.5}),
        ("multi-loop", {"max_workers": -1}),
        ("gain-scheduled", {"schedule": [[0.5, 1.0], [0.4, 2.0]]}),
        ("gain-scheduled", {"schedule": [[0.5, 0.0]]}),
        ("gain-scheduled", {"schedule": "fast"}),
        ("fuzzy-pid", {"ultimate_gain": 0}),
        ("fuzzy-pid", {"error_span": np.inf}),
        ("fuzzy-pid", {"kp": 1.0}),
    ],
)
def test_bad_options_are_refused_by_name(name, bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        make_policy(name, **bad)


# -- the pictures ------------------------------------------------------------------------------------------------------


def test_the_step_responses_show_what_anti_windup_and_filter_are_for(tmp_path):
    sys.path.insert(0, str(BENCHMARKS))
    try:
        found = importlib.import_module("step_response").main(["--out", str(tmp_path), "--json", str(tmp_path / "f")])
    finally:
        sys.path.remove(str(BENCHMARKS))
    assert found == json.loads((tmp_path / "f").read_text())
    assert found["late_none"] > 10 > 1 > max(found["late_clamping"], found["late_back-calculation"])
    assert found["above_none"] > 0.5 > 0.05 > max(found["above_clamping"], found["above_back-calculation"])
    assert found["jitter_filtered"] < 0.6 * found["jitter_unfiltered"]
    assert {path.name for path in tmp_path.glob("*.png")} == {"pid_step_response.png", "fuzzy_memberships.png"}
