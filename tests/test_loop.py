"""The control loop survives its policy."""

from __future__ import annotations

import json
import logging
import threading

import numpy as np
import pytest

from swiftcruise.baselines.pid_policies import MemoryPID
from swiftcruise.baselines.static import StaticPolicy
from swiftcruise.runtime.controls import ControlLimits, Controls
from swiftcruise.runtime.guard import SafetyGuard
from swiftcruise.runtime.loop import ControlLoop
from swiftcruise.runtime.telemetry import Telemetry


class Scripted(StaticPolicy):
    """Proposes what the script says, one entry a call; an exception in it is raised."""

    def __init__(self, *script) -> None:
        super().__init__()
        self.script, self.calls = script, 0

    def act(self, telemetry):
        entry = self.script[min(self.calls, len(self.script) - 1)]
        self.calls += 1
        if isinstance(entry, Exception):
            raise entry
        return Controls.of(telemetry.n, token_budget=entry) if isinstance(entry, (int, float, list)) else entry


class Memory:
    """A plant whose memory is proportional to the token budget."""

    def __init__(self, n: int = 1) -> None:
        self.n, self.steps = n, 0

    def reset(self, seed=None) -> Telemetry:
        self.budget, self.time = np.full(self.n, 1000.0), 0.0
        return self.measure()

    def step(self, controls: Controls) -> Telemetry:
        self.steps += 1
        self.budget = np.where(np.isnan(controls.token_budget), self.budget, controls.token_budget)
        return self.measure()

    def close(self) -> None: ...

    def measure(self) -> Telemetry:
        self.time += 30.0
        return Telemetry.of(
            self.n,
            time_s=self.time,
            token_budget=self.budget,
            memory_peak_fraction=np.fmin(self.budget / 10000.0, 1.0),
            oom_count=(self.budget > 10000.0).astype(float),
        )


def telemetry(n: int = 1, budget: float = 1000.0, time_s: float = 30.0, **values) -> Telemetry:
    return Telemetry.of(n, time_s=time_s, token_budget=budget, **values)


def loop_of(*script, n: int = 1, **options) -> ControlLoop:
    loop = ControlLoop(Scripted(*script), SafetyGuard(), **options)
    loop.reset(n)
    return loop


def budgets(loop: ControlLoop, plant: Memory, intervals: int) -> list[float]:
    return [decision.controls.token_budget[0] for _, decision in loop.run(plant, intervals)]


@pytest.mark.parametrize("failure", [RuntimeError("boom"), "no controls", Controls.of(3), float("inf"), -5.0])
def test_a_failing_policy_leaves_the_last_controls_and_is_reported_once(caplog, failure):
    loop = loop_of(2000.0, failure)
    with caplog.at_level(logging.WARNING):
        decided = [loop.decide(telemetry(budget=b)).controls.token_budget[0] for b in (1000.0, 2000.0, 2000.0)]
    assert decided == [2000.0, 2000.0, 2000.0]
    assert len(caplog.records) == 1


def test_after_repeated_failures_the_policy_is_not_asked_again(caplog):
    loop = loop_of(RuntimeError("boom"), max_failures=3)
    for _ in range(10):
        loop.decide(telemetry())
    assert loop.retired
    assert loop.policy.calls == 3  # pyright: ignore[reportAttributeAccessIssue]


def test_a_success_in_between_clears_the_count():
    loop = loop_of(*[RuntimeError("boom"), RuntimeError("boom"), 1000.0] * 4, max_failures=3)
    for _ in range(12):
        loop.decide(telemetry())
    assert not loop.retired


def test_an_out_of_memory_error_is_answered_even_without_the_policy():
    loop = loop_of(RuntimeError("boom"), max_failures=1)
    loop.decide(telemetry())
    assert loop.decide(telemetry(budget=4000.0, time_s=60.0, oom_count=1.0)).controls.token_budget[0] <= 2000.0


def test_one_plants_nonsense_is_held_on_that_plant_only():
    loop = loop_of([1500.0, 1500.0], [np.inf, 1200.0], n=2)
    loop.decide(telemetry(2))
    decision = loop.decide(telemetry(2, budget=1500.0, time_s=60.0))
    assert decision.controls.token_budget.tolist() == [1500.0, 1200.0]
    assert not loop.retired


def test_unset_controls_are_no_failure_and_change_nothing(caplog):
    loop = loop_of(float("nan"), max_failures=1)
    decision = loop.decide(telemetry())
    assert decision.controls.token_budget.tolist() == [1000.0]
    assert not loop.retired
    assert not caplog.records


def test_a_failing_guard_leaves_the_last_controls(caplog):
    loop = ControlLoop(StaticPolicy(token_budget=2000.0), SafetyGuard())
    loop.reset(1)
    loop.decide(telemetry())
    mismatched = telemetry(2)  # the guard was prepared for one plant and refuses two
    assert loop.decide(mismatched).controls.token_budget.tolist() == [2000.0]
    assert "guard" in caplog.text


def test_a_keyboard_interrupt_is_not_swallowed():
    class Interrupted(StaticPolicy):
        def act(self, telemetry):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ControlLoop(Interrupted(), SafetyGuard()).decide(telemetry())


def test_run_yields_every_interval_and_takes_no_step_too_many():
    plant = Memory()
    pairs = list(ControlLoop(StaticPolicy(token_budget=2000.0), SafetyGuard()).run(plant, 4))
    assert [t.token_budget[0] for t, _ in pairs] == [1000.0, 2000.0, 2000.0, 2000.0]
    assert plant.steps == 3


def test_the_guard_limits_what_the_policy_proposes_and_says_so():
    top = ControlLimits().token_budget.rate * 1000.0
    loop = loop_of(1e5)
    decision = loop.decide(telemetry())
    assert decision.controls.token_budget.tolist() == [top]
    assert decision.proposed.token_budget.tolist() == [1e5]
    assert any("token_budget" in reason for reason in decision.reasons)


def test_a_restored_loop_decides_as_if_never_interrupted():
    straight = ControlLoop(MemoryPID(), SafetyGuard())
    expected = budgets(straight, Memory(), 12)

    first, plant = ControlLoop(MemoryPID(), SafetyGuard()), Memory()
    assert budgets(first, plant, 6) == expected[:6]
    second = ControlLoop(MemoryPID(), SafetyGuard())
    second.reset(1)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    controls = Controls.of(1, token_budget=expected[5])
    resumed = []
    for _ in range(6):
        controls = second.decide(plant.step(controls)).controls
        resumed.append(controls.token_budget[0])
    assert resumed == expected[6:]


def test_many_plants_decide_as_each_would_alone():
    together = ControlLoop(MemoryPID(), SafetyGuard())
    alone = budgets(ControlLoop(MemoryPID(), SafetyGuard()), Memory(), 8)
    for (_, decision), expected in zip(together.run(Memory(3), 8), alone, strict=True):
        assert decision.controls.token_budget.tolist() == [expected] * 3


def test_a_policy_that_hangs_holds_the_controls_and_is_asked_again_when_it_is_back():
    class Hanging(Scripted):
        def act(self, telemetry):
            hang = self.calls == 1
            proposed = super().act(telemetry)
            if hang:
                released.wait(10)
            return proposed

    released = threading.Event()
    loop = ControlLoop(Hanging(500.0, 600.0, 700.0), SafetyGuard(), timeout_s=1.0)
    loop.reset(1)
    assert loop.decide(telemetry(time_s=30.0)).controls.token_budget[0] == 500.0
    for time_s in (60.0, 90.0):  # the second finds it still busy
        held = loop.decide(telemetry(budget=500.0, time_s=time_s))
        assert held.controls.token_budget[0] == 500.0
        assert "the policy failed: controls held" in held.reasons
    released.set()
    loop._deadline._running.done.wait(10)
    assert loop.decide(telemetry(budget=500.0, time_s=120.0)).controls.token_budget[0] == 700.0
