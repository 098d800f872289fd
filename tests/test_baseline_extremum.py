"""Extremum seeking on a response with one summit."""

from __future__ import annotations

import numpy as np
import pytest

from swiftcruise.runtime.controls import Controls
from swiftcruise.runtime.errors import ConfigError
from swiftcruise.runtime.guard import SafetyGuard
from swiftcruise.runtime.loop import ControlLoop
from swiftcruise.runtime.policy import make_policy
from swiftcruise.runtime.telemetry import Telemetry

SUMMIT = 11.0  # log2 tokens


class Hill:
    """Log speed falls by 0.06 d^2, d octaves from the summit, a little noisy; a budget acts `dead_time` later."""

    def __init__(self, start: float, n: int = 16, noise: float = 0.01, dead_time: int = 0) -> None:
        self.start, self.n, self.noise, self.dead_time = start, n, noise, dead_time
        self.slow = 0.0  # log speed that a neighbour takes

    def reset(self, seed=None) -> Telemetry:
        self.rng, self.time = np.random.default_rng(seed), 0.0
        self.asked = [np.full(self.n, 2.0**self.start)] * (1 + self.dead_time)
        return self.measure()

    def step(self, controls: Controls) -> Telemetry:
        self.asked = [*self.asked[1:], controls.token_budget]
        return self.measure()

    def close(self) -> None: ...

    def measure(self) -> Telemetry:
        self.time += 30.0
        distance = np.log2(self.asked[0]) - SUMMIT
        speed = 9.0 - 0.06 * distance**2 - self.slow + self.rng.normal(0, self.noise, self.n)
        return Telemetry.of(
            self.n, time_s=self.time, tokens_per_s=np.exp(speed), oom_count=0.0, token_budget=self.asked[-1]
        )


def octaves(plant: Hill, intervals: int = 120, events=None, **options) -> np.ndarray:
    """Log2 budgets, shape (intervals, n)."""
    rows = []
    loop = ControlLoop(make_policy("extremum-seeking", **options), SafetyGuard())
    for k, (telemetry, _) in enumerate(loop.run(plant, intervals, seed=0)):
        rows.append(np.log2(telemetry.token_budget))
        if events and k in events:
            events[k]()
    return np.array(rows)


@pytest.mark.parametrize("start", [8.5, 11.0, 13.5])
@pytest.mark.parametrize("dead_time", [0, 1])
@pytest.mark.parametrize("shape", ["square", "sine"])
def test_it_finds_the_summit_from_either_side_and_stays(start, dead_time, shape):
    late = octaves(Hill(start, dead_time=dead_time), shape=shape)[60:]
    assert np.abs(late.mean(axis=0) - SUMMIT).max() < 0.6
    assert np.abs(late - SUMMIT).max() < 1.5


def test_without_a_summit_in_sight_it_only_wobbles():
    plant = Hill(11.0, noise=0.0)
    around = octaves(plant, amplitude=0.3)
    assert np.ptp(around[20:]) < 0.8
    assert np.ptp(around[20:]) > 0.5


def test_a_neighbour_that_halves_speed_is_not_taken_for_a_slope():
    plant = Hill(11.0)
    events = {40: lambda: setattr(plant, "slow", 0.7), 60: lambda: setattr(plant, "slow", 0.0)}
    moved = octaves(plant, 80, events)
    assert np.abs(moved[30:] - SUMMIT).max() < 1.0


def test_an_out_of_memory_error_sends_it_down_and_keeps_it_there_for_a_while():
    policy = make_policy("extremum-seeking", ceiling=8)
    seen = {"tokens_per_s": 1000.0}
    policy.act(Telemetry.of(1, token_budget=4096.0, **seen))
    asked = policy.act(Telemetry.of(1, token_budget=4096.0, oom_count=1.0, **seen)).token_budget[0]
    assert asked <= 2048.0
    for _ in range(6):
        asked = policy.act(Telemetry.of(1, token_budget=asked, oom_count=0.0, **seen)).token_budget[0]
        assert asked <= 2048.0 * (1 + 1e-9)


def test_speed_that_is_not_measured_moves_nothing_but_the_wobble():
    policy, asked = make_policy("extremum-seeking", amplitude=0.25), 1024.0
    for _ in range(30):
        asked = policy.act(Telemetry.of(1, token_budget=asked)).token_budget[0]
        assert abs(np.log2(asked) - 10.0) < 0.26


@pytest.mark.parametrize(
    "bad",
    [{"amplitude": 0}, {"period": 5}, {"gain": -1}, {"shape": "saw"}, {"ceiling": -1}, {"max_step_octaves": np.inf}],
)
def test_bad_options_are_refused_by_name(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        make_policy("extremum-seeking", **bad)
