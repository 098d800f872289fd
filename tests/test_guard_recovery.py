"""After an out-of-memory error the speed comes back, and the error does not: every policy behind the guard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftcruise.runtime.controls import Controls
from swiftcruise.runtime.guard import SafetyGuard
from swiftcruise.runtime.loop import ControlLoop
from swiftcruise.runtime.memory_model import PeakMemoryModel
from swiftcruise.runtime.policy import make_policy
from swiftcruise.runtime.telemetry import Telemetry

MEMORY_CAP = 0.90
LENGTH = 100.0  #: tokens of the longest sample
STEPS, MICRO_BATCHES = 2, 16  #: in an interval, in a step
POLICIES: dict[str, dict[str, Any]] = {"static": {"token_budget": 100_000}, "cruise": {}, "pid-memory": {}}
each_policy = pytest.mark.parametrize("policy", POLICIES)


class Training:
    """A training whose micro-batches take ``static + tokens / full`` of the capacity, less what a neighbour takes.

    It runs and reports as a live one does: the memory model sees every micro-batch and bounds the plan, a failed step
    is halved until it fits, and what failed is the budget of the interval. A visible neighbour is seen by the sensors,
    but only after its first step; an invisible one (no NVML, fragmentation) never.
    """

    def __init__(
        self,
        static: float = 0.3,
        full: float = 12_000.0,
        neighbour: Callable[[int], float] = lambda interval: 0.0,
        visible: bool = True,
        seed: int = 0,
    ) -> None:
        self.static, self.full, self.neighbour, self.visible = static, full, neighbour, visible
        self.model = PeakMemoryModel(1)
        self.model.set_static(static)
        self.rng = np.random.default_rng(seed)
        self.budget = 4 * LENGTH
        self.others = 0.0  #: as last seen
        self.tokens: list[float] = []  #: of the mean micro-batch of each interval, after what failed was halved
        self.ooms: list[int] = []

    def reset(self, seed: int | None = None) -> Telemetry:
        return self._interval()

    def step(self, controls: Controls) -> Telemetry:
        if np.isfinite(controls.token_budget[0]):
            self.budget = float(controls.token_budget[0])
        return self._interval()

    def close(self) -> None: ...

    def _interval(self) -> Telemetry:
        taken = self.neighbour(len(self.tokens))
        seen = taken if self.visible else 0.0
        failed, ooms, sizes, in_force = np.nan, 0, [], self.budget
        for _ in range(STEPS):
            while True:
                shares = self.rng.uniform(0.5, 1.0, MICRO_BATCHES)
                shares[0] = 1.0
                fit = self.model.fit_tokens(LENGTH, 1.0, MEMORY_CAP - self.others)
                tokens = np.fmax(LENGTH, np.floor(shares * np.fmin(self.budget, fit)))
                peaks = self.static + tokens / self.full
                if peaks[0] + taken <= 1.0:
                    break
                failed, ooms = tokens[0], ooms + 1
                self.others = seen
                self.model.observe_oom(failed, failed * LENGTH, 1.0, 1.0 - seen)
                self.budget = min(self.budget, max(1.0, failed // 2))
            self.others = seen
            self.model.observe(tokens, tokens * LENGTH, 1.0, peaks)
            sizes += tokens.tolist()
        self.tokens.append(float(np.mean(sizes[-MICRO_BATCHES:])))
        self.ooms.append(ooms)
        mean = np.mean(sizes)
        peak = self.static + max(sizes) / self.full
        return Telemetry.of(
            1,
            time_s=30.0 * len(self.tokens),
            interval_s=30.0,
            optimizer_steps=STEPS,
            micro_batches_per_step=MICRO_BATCHES,
            padded_tokens=sum(sizes),
            largest_micro_batch=max(sizes),
            tokens_per_s=1e4 * mean / (mean + 3000.0) * self.rng.lognormal(0, 0.02),
            fill=mean / (mean + 3000.0),
            memory_peak_fraction=peak,
            memory_device_fraction=peak + seen,
            oom_count=ooms,
            upcoming_mean=LENGTH,
            upcoming_max=LENGTH,
            fit_tokens_checkpointed=self.model.fit_tokens(LENGTH, 1.0, MEMORY_CAP - seen),
            token_budget=in_force if np.isnan(failed) else failed,
            memory_target=0.85,
        )


class Course(NamedTuple):
    tokens: np.ndarray  #: of the mean micro-batch, by interval
    budgets: np.ndarray  #: decided, by interval
    ooms: np.ndarray


def course(
    policy: str,
    training: Training,
    intervals: int,
    options: dict[str, Any] | None = None,
    ceiling_recovery: float = 1.05,
) -> Course:
    guard = SafetyGuard(memory_cap=MEMORY_CAP, ceiling_recovery=ceiling_recovery, model=training.model)
    loop = ControlLoop(make_policy(policy, **(POLICIES[policy] | (options or {}))), guard)
    budgets = [decision.controls.token_budget[0] for _, decision in loop.run(training, intervals)]
    return Course(np.array(training.tokens), np.array(budgets), np.array(training.ooms))


def turns(budgets: np.ndarray) -> int:
    """How often the budget turned round after a change of a quarter or more."""
    count, direction, extreme = 0, 0, budgets[0]
    for budget in budgets:
        if direction * (budget - extreme) >= 0:
            direction, extreme = direction or int(np.sign(budget - extreme)), budget
        elif max(budget, extreme) >= 1.25 * min(budget, extreme):
            count, direction, extreme = count + 1, -direction, budget
    return count


@each_policy
@pytest.mark.parametrize(("taken", "visible", "within"), [(0.3, False, 60), (0.5, False, 120), (0.5, True, 80)])
def test_speed_comes_back_when_the_neighbour_has_left(policy: str, taken: float, visible: bool, within: int):
    arrives, leaves = 50, 90
    training = Training(neighbour=lambda t: taken if arrives <= t < leaves else 0.0, visible=visible)
    run = course(policy, training, leaves + within + 20)
    before = run.tokens[arrives - 20 : arrives].mean()
    assert run.tokens[arrives + 20 : leaves].mean() < 0.8 * before  # it did bind
    assert run.tokens[-20:].mean() >= 0.9 * before
    assert 1 <= run.ooms.sum() <= 5
    assert not run.ooms[leaves:].any()


@each_policy
def test_memory_that_is_less_than_the_model_believes_is_tried_ever_more_rarely(policy: str):
    run = course(policy, Training(neighbour=lambda t: 0.3, visible=False), 500)
    failures = np.flatnonzero(run.ooms)
    assert 1 <= run.ooms.sum() <= 5
    assert np.diff(failures).argmax() == len(failures) - 2  # the longest pause is the last one
    assert turns(run.budgets) <= 2 * run.ooms.sum() + 2
    assert run.tokens.mean() >= 0.75 * 0.75 * 0.4 * 12_000  # of what fits, at the mean share


@settings(max_examples=10, deadline=None)
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    static=st.floats(0.05, 0.5),
    full=st.floats(2_000, 40_000),
    taken=st.floats(0.0, 0.35),
    recovery=st.floats(1.02, 1.5),
    gains=st.tuples(st.floats(0.1, 0.8), st.floats(0.2, 1.0), st.floats(0.0, 0.2)),
)
def test_whatever_the_capacity_and_the_gains_failures_stay_few(policy, static, full, taken, recovery, gains):
    options = dict(zip(("kp", "ki", "kd"), gains, strict=True)) if policy == "pid-memory" else {}
    training = Training(static, full, neighbour=lambda t: taken, visible=False)
    run = course(policy, training, 200, options, recovery)
    assert run.ooms.sum() <= 6
    assert run.ooms[120:].sum() <= 2
    assert turns(run.budgets) <= 2 * run.ooms.sum() + 4


@each_policy
def test_a_lower_wall_that_passes_is_left_behind_whatever_a_higher_one_had_taught(policy: str):
    def taken(interval: int) -> float:
        return 0.55 if 250 <= interval < 265 else 0.3

    run = course(policy, Training(neighbour=taken, visible=False), 500)
    before, after = run.tokens[200:250].mean(), run.tokens[400:].mean()
    assert run.ooms[:250].any()
    assert run.ooms[250:265].any()
    assert after >= 0.9 * before
    assert run.ooms[265:].sum() <= 4
