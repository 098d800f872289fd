"""Additive increase, multiplicative decrease."""

from __future__ import annotations

import numpy as np
import pytest

from swiftcruise.runtime.controls import Controls
from swiftcruise.runtime.errors import ConfigError
from swiftcruise.runtime.guard import SafetyGuard
from swiftcruise.runtime.loop import ControlLoop
from swiftcruise.runtime.policy import make_policy
from swiftcruise.runtime.telemetry import Telemetry


class Memory:
    """Peak 0.2 + T / capacity at a budget of T tokens; an error where that exceeds 1."""

    def __init__(self, capacity: float, start: float = 512.0, sensor: bool = True) -> None:
        self.capacity, self.start, self.sensor = capacity, start, sensor

    def reset(self, seed=None) -> Telemetry:
        self.budget, self.time = self.start, 0.0
        return self.measure()

    def step(self, controls: Controls) -> Telemetry:
        self.budget = float(controls.token_budget[0])
        return self.measure()

    def close(self) -> None: ...

    def measure(self) -> Telemetry:
        self.time += 30.0
        peak = 0.2 + self.budget / self.capacity
        return Telemetry.of(
            1,
            time_s=self.time,
            tokens_per_s=1000.0,
            memory_peak_fraction=min(peak, 1.0) if self.sensor else np.nan,
            oom_count=float(peak > 1.0),
            token_budget=self.budget,
        )


def budgets(plant: Memory, intervals: int, **options) -> np.ndarray:
    loop = ControlLoop(make_policy("aimd", **options), SafetyGuard())
    return np.array([t.token_budget[0] for t, _ in loop.run(plant, intervals)])


def test_it_grows_by_a_constant_although_the_guard_drops_small_changes():
    rising = budgets(Memory(1e9, start=8192.0), 60, increase=64)
    assert rising[-1] == pytest.approx(8192 + 59 * 64, rel=0.05)


def test_it_stops_at_its_share_of_memory_and_holds():
    held = budgets(Memory(10000.0), 200)[150:]
    assert np.unique(held).size == 1
    assert 0.70 < 0.2 + held[0] / 10000.0 < 0.85


def test_without_a_memory_sensor_it_saws_between_an_error_and_half_of_it():
    plant = Memory(5000.0, sensor=False)
    sawing = budgets(plant, 300)
    failed = sawing > 4000.0
    assert 1 <= failed.sum() < 30
    assert sawing[100:].min() > 0.4 * 4000.0


def test_an_error_halves_the_budget_and_growth_rests():
    policy = make_policy("aimd", rest=3)
    seen = {"tokens_per_s": 1000.0, "memory_peak_fraction": 0.5}
    policy.act(Telemetry.of(1, token_budget=4096.0, **seen))
    asked = policy.act(Telemetry.of(1, token_budget=4096.0, oom_count=1.0, **seen)).token_budget[0]
    assert asked == pytest.approx(2048.0)
    for expected in (2048.0, 2048.0, 2048.0 + 64.0):
        asked = policy.act(Telemetry.of(1, token_budget=asked, oom_count=0.0, **seen)).token_budget[0]
        assert asked == pytest.approx(expected)


def test_a_neighbour_that_takes_memory_shrinks_the_budget_at_once():
    seen = {"tokens_per_s": 1000.0, "memory_peak_fraction": 0.5, "memory_device_fraction": 0.95}
    asked = make_policy("aimd").act(Telemetry.of(1, token_budget=4096.0, **seen)).token_budget[0]
    assert asked == pytest.approx(3072.0)


def test_a_guard_that_refuses_leaves_no_windup():
    policy = make_policy("aimd")
    seen = {"tokens_per_s": 1000.0, "memory_peak_fraction": 0.3, "token_budget": 1000.0}
    asked = [policy.act(Telemetry.of(1, **seen)).token_budget[0] for _ in range(200)]
    assert max(asked) < 1300.0


@pytest.mark.parametrize(
    "bad",
    [{"increase": 0}, {"decrease": 1.0}, {"grow_below": 75}, {"shrink_above": 0.5}, {"rest": -1}],
)
def test_bad_options_are_refused_by_name(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        make_policy("aimd", **bad)
