"""When a control interval is over."""

from __future__ import annotations

import math

import pytest

from swiftcruise.runtime.errors import ConfigError
from swiftcruise.runtime.timer import IntervalTimer


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def steps_until_due(timer: IntervalTimer, clock: Clock, seconds: float, first: int = 1) -> int:
    """The optimizer step, `seconds` each, at which the timer is due."""
    for step in range(first, first + 1000):
        clock.now += seconds
        if timer.due(step):
            return step
    raise AssertionError("never due")


def test_it_is_due_after_the_interval_and_says_how_long_it_was(clock):
    timer = IntervalTimer(30.0, clock=clock)
    assert steps_until_due(timer, clock, 7.0) == 5
    assert timer.elapsed_s == 35.0


def test_it_counts_optimizer_steps_when_asked_to(clock):
    timer = IntervalTimer(30.0, interval_steps=4, clock=clock)
    timer.restart(100)
    assert [timer.due(step) for step in range(101, 110)] == [False, False, False, True] * 2 + [False]


def test_a_late_answer_is_one_interval_and_no_burst(clock):
    timer = IntervalTimer(30.0, clock=clock)
    clock.now += 200.0
    assert timer.due(1)
    clock.now += 1.0
    assert not timer.due(2)


@pytest.mark.parametrize("jump", [-500.0, 86400.0])
def test_a_clock_that_jumps_restarts_the_interval(clock, jump):
    timer = IntervalTimer(30.0, clock=clock)
    clock.now += 20.0
    assert not timer.due(1)
    clock.now += jump
    assert not timer.due(2)
    assert steps_until_due(timer, clock, 10.0, first=3) == 5
    assert timer.elapsed_s == 30.0


def test_steps_go_on_through_a_jump_but_its_length_is_unknown(clock):
    timer = IntervalTimer(30.0, interval_steps=3, clock=clock)
    for step, jump in ((1, 5.0), (2, -500.0)):
        clock.now += jump
        assert not timer.due(step)
    clock.now += 5.0
    assert timer.due(3)
    assert math.isnan(timer.elapsed_s)


def test_a_training_with_very_long_steps_still_gets_its_decisions(clock):
    timer = IntervalTimer(30.0, clock=clock)
    due = []
    for step in range(1, 6):
        clock.now += 600.0
        due.append(timer.due(step))
    assert due == [False, True, True, True, True]


@pytest.mark.parametrize("bad", [{"interval_s": 0.0}, {"interval_s": math.nan}, {"interval_steps": 0}])
def test_an_interval_must_be_positive(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        IntervalTimer(**bad)
