"""The static and the PID policies on small plants."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftcruise.baselines.pid_policies import MemoryPID, UtilizationPID
from swiftcruise.baselines.static import StaticPolicy
from swiftcruise.runtime.controls import Controls
from swiftcruise.runtime.errors import ConfigError
from swiftcruise.runtime.guard import SafetyGuard
from swiftcruise.runtime.loop import ControlLoop
from swiftcruise.runtime.policy import Policy, make_policy
from swiftcruise.runtime.telemetry import TELEMETRY_FIELDS, Telemetry


class Device:
    """Utilisation T / (T + 200) and memory 0.2 + T / 5000 at a budget of T tokens, both a little noisy."""

    def __init__(self, start: float = 64.0, n: int = 8, noise: float = 0.02, missing: tuple[str, ...] = ()) -> None:
        self.start, self.n, self.noise, self.missing = start, n, noise, missing

    def reset(self, seed=None) -> Telemetry:
        self.rng, self.time = np.random.default_rng(seed), 0.0
        self.budget, self.cap = np.full(self.n, self.start), np.full(self.n, 4.0)
        return self.measure()

    def step(self, controls: Controls) -> Telemetry:
        self.budget = np.where(np.isnan(controls.token_budget), self.budget, controls.token_budget)
        self.cap = np.where(np.isnan(controls.micro_batch_cap), self.cap, controls.micro_batch_cap)
        return self.measure()

    def close(self) -> None: ...

    def measure(self) -> Telemetry:
        self.time += 30.0
        used = self.budget / (self.budget + 200.0) + self.rng.normal(0, self.noise, self.n)
        memory = 0.2 + self.budget / 5000.0 * self.rng.uniform(1 - self.noise, 1 + self.noise, self.n)
        values = {
            "time_s": self.time,
            "gpu_utilization": np.clip(used, 0, 1),
            "memory_peak_fraction": np.fmin(memory, 1.0),
            "oom_count": (memory > 1).astype(float),
            "token_budget": self.budget,
            "micro_batch_cap": self.cap,
        }
        return Telemetry.of(self.n, **{k: v for k, v in values.items() if k not in self.missing})


def drive(policy: Policy, device: Device, intervals: int = 60) -> list[Telemetry]:
    return [t for t, _ in ControlLoop(policy, SafetyGuard()).run(device, intervals, seed=0)]


def test_static_holds_what_it_was_given_and_leaves_the_rest():
    controls = StaticPolicy(token_budget=512.0).act(Telemetry.of(3))
    assert controls.token_budget.tolist() == [512.0] * 3
    assert np.isnan(controls.power_limit_w).all()


def test_static_without_settings_leaves_everything_as_it_is():
    assert StaticPolicy().act(Telemetry.of(1)).plant(0) == {}


@pytest.mark.parametrize("bad", [{"token_bugdet": 5}, {"token_budget": -1}, {"num_workers": "two"}])
def test_static_refuses_what_is_no_control_value(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        make_policy("static", **bad)


@pytest.mark.parametrize("start", [64.0, 466.0, 3000.0])
@pytest.mark.parametrize("options", [{}, {"filter": "moving-average", "filter_intervals": 3}])
def test_utilisation_settles_at_its_setpoint(start, options):
    settled = drive(UtilizationPID(**options), Device(start))[30:]
    used = np.array([t.gpu_utilization for t in settled])
    assert used.mean() == pytest.approx(0.70, abs=0.02)
    assert used.std() < 0.06


def test_the_sample_cap_follows_the_budget_in_proportion():
    last = drive(UtilizationPID(), Device())[-1]
    assert last.micro_batch_cap / 4.0 == pytest.approx(last.token_budget / 64.0, rel=0.15)


def test_fill_stands_in_where_there_is_no_utilisation():
    policy = UtilizationPID()
    policy.reset(2)
    policy.act(Telemetry.of(2, gpu_utilization=[0.5, np.nan], fill=[0.9, 0.4], token_budget=100.0))
    assert policy.diagnostics()["measurement"] == pytest.approx([0.5, 0.4])
    assert policy.diagnostics()["error"] == pytest.approx([0.2, 0.3])


@pytest.mark.parametrize("start", [64.0, 1000.0, 20000.0])
def test_memory_settles_at_its_setpoint_below_the_cap(start):
    memory = np.array([t.memory_peak_fraction for t in drive(MemoryPID(), Device(start), 100)])
    assert memory[60:].mean() == pytest.approx(0.80, abs=0.04)
    if start < 3000:
        assert memory.max() < 0.90


def test_a_peak_above_the_cap_cuts_the_budget_at_once():
    policy = MemoryPID()
    policy.act(Telemetry.of(1, token_budget=1000.0, memory_peak_fraction=0.5))
    cut = policy.act(Telemetry.of(1, token_budget=1000.0, memory_peak_fraction=0.6, memory_device_fraction=0.96))
    assert cut.token_budget[0] == pytest.approx(1000.0 * 0.80 / 0.96)


@pytest.mark.parametrize("policy", [UtilizationPID(), MemoryPID()])
def test_an_out_of_memory_error_halves_the_micro_batch(policy):
    policy.reset(1)
    seen = {"gpu_utilization": 0.3, "memory_peak_fraction": 0.5, "micro_batch_cap": 8.0, "token_budget": 1000.0}
    policy.act(Telemetry.of(1, **seen))
    after = policy.act(Telemetry.of(1, oom_count=1.0, **seen))
    assert after.token_budget[0] == pytest.approx(500.0)
    assert after.micro_batch_cap[0] == pytest.approx(4.0)


@pytest.mark.parametrize("policy", [UtilizationPID(), MemoryPID()])
def test_a_guard_that_refuses_leaves_no_windup(policy):
    policy.reset(1)
    low = {"gpu_utilization": 0.1, "memory_peak_fraction": 0.1, "token_budget": 1000.0}
    for _ in range(200):
        policy.act(Telemetry.of(1, **low))  # asks for more, and never gets it
    high = {"gpu_utilization": 0.99, "memory_peak_fraction": 0.85, "token_budget": 1000.0}
    asked = [policy.act(Telemetry.of(1, **high)).token_budget[0] for _ in range(4)]
    assert asked[-1] < 1000.0


@pytest.mark.parametrize("policy", [UtilizationPID(), MemoryPID()])
def test_a_training_without_a_budget_starts_from_its_own_micro_batches(policy):
    policy.reset(1)
    own = {"micro_batches_per_step": 4.0, "optimizer_steps": 10.0, "padded_tokens": 12000.0}
    measured = {"gpu_utilization": 0.7, "memory_peak_fraction": 0.8}
    assert policy.act(Telemetry.of(1, **own, **measured)).token_budget == pytest.approx([300.0])


@pytest.mark.parametrize("policy", [UtilizationPID(), MemoryPID()])
def test_nothing_measured_means_nothing_asked(policy):
    policy.reset(2)
    for _ in range(3):
        assert all(np.isnan(values).all() for _, values in policy.act(Telemetry.of(2)).items())


@pytest.mark.parametrize("policy", [UtilizationPID(), MemoryPID()])
def test_sensors_that_fail_hold_the_micro_batch(policy):
    missing = ("gpu_utilization", "memory_peak_fraction")
    budget = np.array([t.token_budget for t in drive(policy, Device(512.0, missing=missing), 10)])
    assert (budget == 512.0).all()


@pytest.mark.parametrize("make", [UtilizationPID, MemoryPID])
def test_a_saved_policy_continues_where_it_was(make):
    rng = np.random.default_rng(0)
    rows = [Telemetry.of(1, **dict.fromkeys(TELEMETRY_FIELDS, 0.0)).replace(
        gpu_utilization=rng.uniform(), memory_peak_fraction=rng.uniform(0, 0.8), token_budget=500.0,
        micro_batch_cap=4.0) for _ in range(8)]  # fmt: skip
    original, copy = make(), make()
    for row in rows[:5]:
        original.act(row)
    copy.load_state_dict(json.loads(json.dumps(original.state_dict())))
    for row in rows[5:]:
        assert copy.act(row).token_budget == original.act(row).token_budget


@pytest.mark.parametrize("name", ["pid", "pid-memory"])
@pytest.mark.parametrize("setpoint", [0.0, 1.0, 70, np.nan])
def test_a_setpoint_is_a_fraction(name, setpoint):
    with pytest.raises(ConfigError, match="setpoint="):
        make_policy(name, setpoint=setpoint)


@pytest.mark.parametrize("bad", [{"filter": "none"}, {"max_step_octaves": 0}, {"max_octaves": -1}, {"kp": np.inf}])
def test_bad_options_are_refused_by_name(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        make_policy("pid", **bad)


measured = st.sampled_from([np.nan, 0.0, 0.3, 1.0, 2.0, 700.0, 1e12, np.inf])
intervals = st.lists(
    st.lists(measured, min_size=len(TELEMETRY_FIELDS), max_size=len(TELEMETRY_FIELDS)), min_size=1, max_size=6
)


@given(intervals, st.sampled_from(["pid", "pid-memory", "cruise"]))
@settings(max_examples=60)
def test_whatever_is_measured_a_proposal_is_a_number_or_unset(rows, name):
    loop = ControlLoop(make_policy(name), SafetyGuard())
    loop.reset(1)
    for row in rows:
        proposed = loop.decide(Telemetry.of(1, **dict(zip(TELEMETRY_FIELDS, row, strict=True)))).proposed
        for control, values in proposed.items():
            assert np.isnan(values[0]) or 0 <= values[0] < np.inf, control
    assert not loop._warned  # nothing failed or had to be replaced on the way
