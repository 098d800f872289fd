"""The simulated plant: what holds in every scenario, and what control has to reckon with."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftcruise.envs.plants.simulated import SimulatedPlant
from swiftcruise.envs.scenarios.disturbances import KINDS
from swiftcruise.envs.scenarios.scenario import Budgets, Host, Mismatch, Preview, Scenario, Workload, scenario_from
from swiftcruise.envs.scenarios.splits import load_split
from swiftcruise.runtime.controls import CONTROL_FIELDS, Controls
from swiftcruise.runtime.errors import ConfigError
from swiftcruise.runtime.guard import SafetyGuard
from swiftcruise.runtime.loop import ControlLoop
from swiftcruise.runtime.plant import Plant
from swiftcruise.runtime.policy import make_policy
from swiftcruise.runtime.telemetry import TELEMETRY_FIELDS, Telemetry

SPLITS = ("train", "val", "test-id", "test-ood", "test-hard")
EVERYWHERE = [scenario for split in SPLITS for scenario in load_split(split)]
QUIET = Scenario(
    name="quiet",
    hardware="a100-80g",
    workload=Workload(model="qwen-7b", data="benchmark", max_length=8192, batch=32),
    noise=0.0,
)
#: What a simulation does not have a sensor for.
NEVER_MEASURED = {"host_memory_fraction", "loss"}
OFTEN_MISSING = {  # silent sensors, a CPU, no preview, no budget
    "gpu_utilization", "power_w", "energy_j", "temperature_c", "clock_fraction", "throttled", "power_limit_w",
    "cpu_threads", "upcoming_mean", "upcoming_p95", "upcoming_max", "energy_budget_used", "temperature_limit_c",
}  # fmt: skip


def plant_of(scenario: Scenario = QUIET, n: int = 1, **changes) -> SimulatedPlant:
    plant = SimulatedPlant(scenario.model_copy(update=changes), n)
    plant.reset(0)
    return plant


def disturbed(kind: str, **parameters) -> Scenario:
    return scenario_from(QUIET.data() | {"disturbances": [{"kind": kind, **parameters}]}, kind)


def steady(plant: SimulatedPlant, intervals: int = 5, **controls) -> Telemetry:
    for _ in range(intervals):
        telemetry = plant.step(Controls.of(plant.n, **controls))
    return telemetry


def side_by_side(scenario: Scenario = QUIET, intervals: int = 1, **controls) -> Telemetry:
    """Plants that differ in nothing but the controls given as lists."""
    n = len(next(iter(controls.values())))
    plant = SimulatedPlant(scenario, n)
    plant.start(np.arange(n), np.full(n, 7, dtype=np.uint64), np.zeros(n, dtype=np.int64))
    return steady(plant, intervals, **controls)


# ---------------------------------------------------------------- everywhere


def test_nothing_is_nan_or_infinite_anywhere_under_any_controls():
    plant = SimulatedPlant(EVERYWHERE)
    plant.reset(1)
    rng = np.random.default_rng(2)
    for _ in range(25):
        wild = {
            "token_budget": 2.0 ** rng.uniform(-2, 24, plant.n),
            "micro_batch_cap": rng.choice([1.0, 3.0, 4096.0, -5.0], plant.n),
            "memory_target": rng.uniform(-0.5, 1.5, plant.n),
            "checkpoint_fraction": rng.choice([np.nan, 0.0, 0.4, 1.0], plant.n),
            "num_workers": rng.choice([np.nan, 0.0, 1.0, 500.0], plant.n),
            "power_limit_w": rng.uniform(0, 2000, plant.n),
            "cpu_threads": rng.choice([0.0, 1.0, 64.0], plant.n),
        }
        telemetry = plant.step(Controls.of(plant.n, **wild))
        for name in set(TELEMETRY_FIELDS) - NEVER_MEASURED - {"checkpoint_fraction"}:
            values = getattr(telemetry, name)
            assert (np.isfinite(values) | (np.isnan(values) if name in OFTEN_MISSING else False)).all(), name
        for name in plant.state.dtype.names:
            if plant.state.dtype[name].names is None:
                assert np.isfinite(plant.state[name].astype(float)).all(), name
        assert (plant.state["tokens_per_s"] >= 0).all()
        for name in ("data_wait_fraction", "fill", "memory_peak_fraction", "memory_device_fraction", "gpu_utilization"):
            values = getattr(telemetry, name)
            assert (np.isnan(values) | ((values >= 0) & (values <= 1))).all(), name


def test_energy_is_power_times_time_and_tokens_are_speed_times_time():
    plant = SimulatedPlant(EVERYWHERE)
    telemetry = plant.reset(3)
    for _ in range(5):
        known = np.isfinite(telemetry.power_w)
        assert known.any()
        assert telemetry.energy_j[known] == pytest.approx((telemetry.power_w * telemetry.interval_s)[known])
        assert telemetry.real_tokens == pytest.approx(telemetry.tokens_per_s * telemetry.interval_s)
        assert (telemetry.padded_tokens >= telemetry.real_tokens * (1 - 1e-9)).all()
        before = plant.state["energy_j"].copy()
        telemetry = plant.step(Controls.of(plant.n))
        assert plant.state["energy_j"] - before == pytest.approx(plant.state["interval_j"])


@pytest.mark.parametrize("split", SPLITS)
def test_equal_seeds_give_equal_trajectories_whatever_runs_beside(split):
    scenarios = load_split(split)[:12]
    together, alone = SimulatedPlant(scenarios), SimulatedPlant(scenarios)
    together.reset(5)
    drawn = together.state["key"].copy()
    for i in range(12):
        alone.start(np.array([i]), drawn[[i]], np.array([i]))
    controls = Controls.of(12, token_budget=8192.0, memory_target=0.8)
    for _ in range(20):
        together.step(controls)
        alone.step(controls)
    assert together.rows.tobytes() == alone.rows.tobytes()


def test_a_snapshot_brings_everything_back():
    plant = SimulatedPlant(load_split("test-hard")[:20])
    plant.reset(1)
    kept = plant.snapshot()
    first = [plant.step(Controls.of(20, token_budget=4096.0)).rows() for _ in range(10)]
    plant.restore(kept)
    again = [plant.step(Controls.of(20, token_budget=4096.0)).rows() for _ in range(10)]
    assert np.array(first).tobytes() == np.array(again).tobytes()
    with pytest.raises(ConfigError, match="20 plants, not 1"):
        plant_of().restore(kept)


def test_the_loop_of_a_live_run_controls_it():
    plant = SimulatedPlant(load_split("val")[:8])
    assert isinstance(plant, Plant)
    loop = ControlLoop(make_policy("pid-memory"), SafetyGuard())
    peaks = [telemetry.memory_peak_fraction for telemetry, _ in loop.run(plant, 40, seed=0)]
    assert np.isfinite(peaks).all()
    assert not loop.retired


# ---------------------------------------------------------------- memory


@given(st.floats(9, 17), st.floats(0, 4), st.sampled_from([0.0, 0.5, 1.0]))
def test_memory_grows_with_tokens_and_what_is_larger_than_what_fails_fails(exponent, octaves, fraction):
    budgets = [2.0**exponent, 2.0 ** (exponent + octaves)]
    telemetry = side_by_side(token_budget=budgets, checkpoint_fraction=[fraction] * 2, memory_target=[50.0] * 2)
    small, large = telemetry.memory_peak_fraction
    assert small <= large + 1e-12 or telemetry.oom_count[1] > 0
    assert telemetry.oom_count[0] <= telemetry.oom_count[1]


def test_the_memory_target_decides_how_much_is_checkpointed_and_costs_speed():
    telemetry = side_by_side(intervals=3, token_budget=[16384.0] * 3, memory_target=[0.7, 0.8, 0.9])
    assert (np.diff(telemetry.checkpoint_fraction) < 0).all()
    assert (np.diff(telemetry.tokens_per_s) > 0).all()
    assert (np.diff(telemetry.memory_peak_fraction) > 0).all()


def test_an_out_of_memory_is_survived_costs_time_and_teaches_the_memory_model():
    optimist = QUIET.model_copy(update={"mismatch": Mismatch(memory_model=-0.8)})
    telemetry = side_by_side(optimist, token_budget=[8192.0, 2.0**17], memory_target=[0.6, 1.0])
    assert telemetry.oom_count[0] == 0 < telemetry.oom_count[1]
    assert telemetry.tokens_per_s[1] < telemetry.tokens_per_s[0]
    assert telemetry.fit_tokens_checkpointed[1] < telemetry.fit_tokens_checkpointed[0]


def test_what_nothing_can_shrink_ends_the_job():
    crowded = disturbed("neighbours", arrival=1.0, memory=[0.9, 0.95])
    plant = plant_of(crowded)
    steady(plant, 2, token_budget=8192.0)
    assert plant.state["ended"][0] == 1.0


def test_changing_budgets_fragments_the_cache_which_is_flushed_at_a_cost():
    calm, restless = plant_of(), plant_of()
    for i in range(12):
        calm.step(Controls.of(token_budget=4096.0, memory_target=0.35))
        restless.step(Controls.of(token_budget=[1024.0, 4096.0][i % 2], memory_target=0.35))
    assert restless.state["fragmentation"][0] > 1.2 * calm.state["fragmentation"][0]
    pressed = steady(restless, 1, token_budget=60000.0, memory_target=0.93)
    assert pressed.allocation_retries[0] > 0
    assert restless.state["fragmentation"][0] == pytest.approx(1.15)


def test_memory_that_creeps_shows_and_leaves_less_room():
    plant = plant_of(disturbed("memory-creep", rate=0.5))
    first = plant.telemetry
    last = steady(plant, 60)
    assert last.memory_creep[0] == 0.5
    assert last.fit_tokens_checkpointed[0] < 0.9 * first.fit_tokens_checkpointed[0]


def test_a_wrong_memory_model_is_corrected_by_what_it_sees():
    plant = plant_of(mismatch=Mismatch(memory_model=-0.4))
    wrong, right = plant.telemetry.fit_tokens_checkpointed[0], plant_of().telemetry.fit_tokens_checkpointed[0]
    assert wrong > 1.2 * right
    assert steady(plant, 40).fit_tokens_checkpointed[0] == pytest.approx(right, rel=0.05)


# ---------------------------------------------------------------- speed, data, host


def test_large_micro_batches_spread_the_launch_cost():
    small = QUIET.model_copy(update={"workload": Workload(model="qwen3-0.6b", data="chat", batch=64)})
    telemetry = side_by_side(small, 3, token_budget=[1024.0, 16384.0])
    assert telemetry.tokens_per_s[1] > 1.1 * telemetry.tokens_per_s[0]
    assert telemetry.micro_batches_per_step[1] < telemetry.micro_batches_per_step[0]


def test_workers_hide_slow_loading_until_the_cores_are_taken():
    images = QUIET.data() | {"workload": {"model": "qwen-7b", "data": "multimodal", "batch": 32}}
    disk = {"kind": "slow-disk", "start": 1.0, "intervals": 1000, "factor": 50.0}
    slow = scenario_from(images | {"disturbances": [disk]}, "slow")
    wait = side_by_side(slow, 4, num_workers=[0.0, 1.0, 4.0, 8.0]).data_wait_fraction
    assert (np.diff(wait) < 0).all()
    few = slow.model_copy(update={"host": Host(cores=4)})
    crowded = side_by_side(few, 4, num_workers=[3.0, 16.0]).data_wait_fraction
    assert crowded[1] > 0.9 * crowded[0]  # five times the workers, and next to nothing gained


def test_new_workers_and_new_budgets_cost_time_once():
    plant = plant_of()
    usual = steady(plant).tokens_per_s[0]
    for change in ({"num_workers": 3.0}, {"token_budget": 20000.0}):
        first = plant.step(Controls.of(**change)).tokens_per_s[0]
        settled = steady(plant, 2).tokens_per_s[0]
        assert first < 0.98 * settled
        assert settled > 0.6 * usual


def test_controls_take_effect_after_the_dead_time():
    prompt, late = plant_of(), plant_of(dead_time=1)
    budget = CONTROL_FIELDS.index("token_budget")
    prompt.step(Controls.of(token_budget=4096.0))
    assert prompt.in_force[0, budget] == 4096
    # Telemetry tells what has been set: what the next change is measured against.
    assert late.step(Controls.of(token_budget=4096.0)).token_budget[0] == 4096
    assert late.in_force[0, budget] == 8192
    late.step(Controls.of())
    assert late.in_force[0, budget] == 4096


def test_ranks_wait_for_the_slowest_and_for_the_network():
    alone = QUIET.model_copy(update={"workload": QUIET.workload.model_copy(update={"tuner": "full", "batch": 256})})
    eight = alone.model_copy(update={"workload": alone.workload.model_copy(update={"ranks": 8})})
    slow_network = eight.model_copy(update={"host": Host(network_gbps=10.0)})
    straggling = scenario_from(
        eight.data() | {"disturbances": [{"kind": "stragglers", "start": 1.0, "intervals": 1000, "factor": 1.5}]}, "s"
    )
    speed = [plant_of(s, hardware="h200").state["tokens_per_s"][0] for s in (alone, eight, slow_network, straggling)]
    assert 4 * speed[0] < speed[1] < 8 * speed[0]
    assert speed[2] < 0.9 * speed[1]
    assert speed[3] < 0.75 * speed[1]


# ---------------------------------------------------------------- power and heat


def test_a_lower_power_limit_saves_energy_and_never_speeds_up():
    telemetry = side_by_side(intervals=3, power_limit_w=[150.0, 220.0, 300.0, 400.0])
    assert (np.diff(telemetry.tokens_per_s) >= 0).all()
    assert (np.diff(telemetry.power_w) > 0).all()
    per_token = telemetry.energy_j / telemetry.real_tokens
    assert per_token[1] < per_token[3]


def test_throttling_costs_more_than_a_power_limit_that_keeps_cool():
    hot = disturbed("fan-fault", start=1.0, intervals=1000, factor=2.0).model_copy(
        update={"host": Host(ambient_c=40.0)}
    )
    throttled = side_by_side(hot, 30, power_limit_w=[400.0, 400.0 * 0.4])
    assert throttled.throttled[0] > 0 == throttled.throttled[1]
    best = max(side_by_side(hot, 30, power_limit_w=[200.0, 220.0, 240.0, 260.0]).tokens_per_s)
    assert best > throttled.tokens_per_s[0]


def test_a_device_warms_up_as_a_first_order_system():
    plant = plant_of()
    temperatures = [plant.step(Controls.of()).temperature_c[0] for _ in range(30)]
    assert temperatures[0] < temperatures[2] < temperatures[6] <= temperatures[-1] + 1
    power, profile = plant.telemetry.power_w[0], plant.assembly.constants[0]
    assert temperatures[-1] == pytest.approx(profile["ambient_c"] + profile["thermal_resistance"] * power, abs=1.0)


# ---------------------------------------------------------------- what is known


def test_the_preview_shows_the_longest_sample_of_the_interval_to_come():
    plant = plant_of(load_split("train")[0], preview=Preview())
    for _ in range(20):
        told = plant.telemetry.upcoming_max[0]
        assert told == plant.state["now"]["longest"][0]
        assert plant.step(Controls.of(token_budget=1.0)).largest_micro_batch[0] == told


def test_a_preview_can_be_partial_wrong_or_absent():
    whole, part = Preview(), Preview(share=0.2)
    kept = [
        (float(plant.state["now"]["previewed"][0]), float(plant.state["now"]["longest"][0]))
        for preview in (whole, part)
        for plant in [plant_of(workload=Workload(model="qwen-7b", data="chat", max_length=32768), preview=preview)]
        for _ in range(30)
        if plant.step(Controls.of()) is not None
    ]
    assert all(shown == longest for shown, longest in kept[:30])
    assert any(shown < longest for shown, longest in kept[30:])
    assert all(shown <= longest for shown, longest in kept)
    assert math.isnan(plant_of(preview=Preview(share=0.0)).telemetry.upcoming_max[0])
    wrong = plant_of(preview=Preview(error=0.3))
    assert any(wrong.step(Controls.of()).upcoming_max[0] != wrong.state["now"]["longest"][0] for _ in range(10))


def test_budgets_of_a_job_are_told():
    plant = plant_of(budgets=Budgets(energy=0.5, temperature_c=70.0))
    telemetry = steady(plant, 9)
    assert telemetry.temperature_limit_c[0] == 70
    assert telemetry.energy_budget_used[0] == pytest.approx(
        plant.state["energy_j"][0] / plant.assembly.constants["energy_budget_j"][0]
    )
    assert telemetry.job_progress[0] == pytest.approx(10 / 121)


def test_silent_sensors_leave_the_rest_alone():
    loud, silent = plant_of(), plant_of(dropout=0.5)
    missing = 0
    for _ in range(20):
        a, b = loud.step(Controls.of()), silent.step(Controls.of())
        assert a.tokens_per_s == b.tokens_per_s
        missing += int(np.isnan(b.power_w[0]) and np.isnan(b.temperature_c[0]))
    assert 3 < missing < 17


# ---------------------------------------------------------------- disturbances


@pytest.mark.parametrize("kind", [kind.model_fields["kind"].default for kind in KINDS.values()])
def test_every_disturbance_acts_and_leaves_the_random_draws_of_the_others_alone(kind):
    """Lengths, noise and every other disturbance are drawn alike with and without it."""
    fields = KINDS[kind.replace("-", "_")].model_fields
    frequent = {name: value for name, value in {"start": 0.3, "arrival": 0.3, "intervals": 3.0, "period": 9.0,
                                                "every": 4.0}.items() if name in fields}  # fmt: skip
    ranks = Workload(model="qwen-7b", data="benchmark", max_length=8192, batch=32, ranks=2)
    base = QUIET.model_copy(update={"workload": ranks, "noise": 1.0})
    other = {"kind": "host-load", "start": 0.4} if kind != "host-load" else {"kind": "slow-disk", "start": 0.4}
    without = scenario_from(base.data() | {"disturbances": [other]}, "x")
    with_it = scenario_from(base.data() | {"disturbances": [other, {"kind": kind, **frequent}]}, "x")
    plants = [SimulatedPlant(s) for s in (without, with_it)]
    for plant in plants:
        plant.start(np.array([0]), np.array([11], dtype=np.uint64), np.array([0]))
    differs = False
    for _ in range(30):
        a, b = (plant.state["now"].copy() for plant in plants)
        watched = "host_load" if kind != "host-load" else "disk"
        assert a[watched] == b[watched]
        assert a["longest"] * b["length_scale"] == pytest.approx(b["longest"], abs=2) or b["longest"] == 8192
        differs |= a.tobytes() != b.tobytes()
        for plant in plants:
            plant.step(Controls.of())
    assert differs


def test_controls_for_another_number_of_plants_are_refused():
    with pytest.raises(ValueError, match="controls are for 2 plants, not 1"):
        plant_of().step(Controls.of(2))
    with pytest.raises(ConfigError, match="scenarios is empty"):
        SimulatedPlant([])
    with pytest.raises(ConfigError, match="n=0"):
        SimulatedPlant(QUIET, 0)
    long = QUIET.model_copy(update={"workload": Workload(model="qwen-72b", data="documents", max_length=32768)})
    with pytest.raises(ConfigError, match=r"'quiet' fits in no way: workload[.]max_length=32768 of qwen-72b on a100"):
        SimulatedPlant(long)


def test_an_absent_actuator_stays_absent():
    tiny = Workload(model="tiny", data="tiny", max_length=512)
    plant = plant_of(Scenario(name="cpu", hardware="cpu", workload=tiny, host=Host(cores=2)))
    telemetry = plant.step(Controls.of(power_limit_w=100.0, cpu_threads=1.0))
    assert math.isnan(telemetry.power_limit_w[0])
    assert telemetry.cpu_threads[0] == 1
    assert set(CONTROL_FIELDS) >= {"power_limit_w"}
