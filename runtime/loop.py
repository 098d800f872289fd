"""The control loop: the one place where a policy and its guard decide, in a live run, in the lab and in replay."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .controls import CONTROL_FIELDS, Controls
from .deadline import Deadline
from .errors import ConfigError
from .policy import Policy, State
from .telemetry import TELEMETRY_FIELDS, Telemetry

if TYPE_CHECKING:
    from .guard import SafetyGuard
    from .plant import Plant

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision of the loop."""

    controls: Controls  #: what the plant shall apply
    proposed: Controls  #: what the policy asked for (what was held, when it failed)
    reasons: list[str] = field(default_factory=list)  #: the policy's words for it, then why the two differ


class ControlLoop:
    """A policy behind a guard; `decide` never raises because of either.

    A policy *fails* when it raises, takes longer than ``timeout_s``, returns no `Controls` for n plants, or returns an
    impossible value (infinite or negative) on every plant. Then the last controls are proposed again and the guard
    still acts on them, so that a failing policy cannot keep a run near its memory limit. An impossible value on some
    plants only is replaced on those plants in the same way. NaN is no failure: it leaves a control as it is. After
    ``max_failures`` failures in a row the policy is not asked again. A failing guard leaves the last controls in
    force. The first failure of the policy and that of the guard are logged, each once, as a warning.

    Args:
        policy: proposes controls.
        guard: makes them safe.
        max_failures: consecutive failures after which the policy is retired.
        timeout_s: seconds that a decision may take; None = no limit, and no thread of its own.

    Raises:
        ConfigError: ``max_failures`` below 1.
    """

    def __init__(
        self, policy: Policy, guard: SafetyGuard, *, max_failures: int = 5, timeout_s: float | None = None
    ) -> None:
        if max_failures < 1:
            raise ConfigError(f"max_failures={max_failures} must be >= 1")
        self._deadline = None if timeout_s is None else Deadline(timeout_s)
        self.policy = policy
        self.guard = guard
        self.max_failures = max_failures
        self._failures = 0
        self._last = Controls.of(1)
        self._warned: set[str] = set()

    def reset(self, n: int, seed: int | None = None) -> None:
        """Forget everything and prepare for ``n`` plants; a policy that cannot be reset raises here."""
        self.policy.reset(n, seed)
        self.guard.reset(n)
        self._failures = 0
        self._last = Controls.of(n)
        self._warned.clear()

    @property
    def retired(self) -> bool:
        """Whether the policy failed so often that it is not asked any more."""
        return self._failures >= self.max_failures

    def decide(self, telemetry: Telemetry) -> Decision:
        """Controls for the next interval from the last one's telemetry (infinite measurements count as missing)."""
        telemetry = _finite(telemetry)
        proposed, reasons = self._propose(telemetry)
        try:
            guarded = self.guard.apply(proposed, telemetry)
            controls, reasons = guarded.controls, reasons + list(guarded.reasons)
        except Exception as error:
            self._warn("guard", f"the guard failed, the last controls stay in force: {error!r}", error)
            controls, reasons = self._last, [*reasons, "the guard failed: controls held"]
        self._last = controls
        return Decision(controls, proposed, reasons)

    def run(self, plant: Plant, intervals: int, seed: int | None = None) -> Iterator[tuple[Telemetry, Decision]]:
        """Control ``plant`` from its reset on; yields each interval's telemetry with the decision taken on it.

        The decision is applied when the next pair is asked for. The plant stays open: its owner closes it.
        """
        telemetry = plant.reset(seed)
        self.reset(telemetry.n, seed)
        for interval in range(intervals):
            decision = self.decide(telemetry)
            yield telemetry, decision
            if interval + 1 < intervals:
                telemetry = plant.step(decision.controls)

    def close(self) -> None:
        """End the thread that decides, if there is one."""
        if self._deadline is not None:
            self._deadline.close()

    def state_dict(self) -> State:
        """Policy, guard and last controls, JSON-serialisable."""
        return {
            "policy": self.policy.state_dict(),
            "guard": self.guard.state_dict(),
            "controls": {name: values.tolist() for name, values in self._last.items()},
            "failures": self._failures,
        }

    def load_state_dict(self, state: State, *, policy: bool = True) -> None:
        """Continue from `state_dict()`'s state; without `policy`, all but the policy does (it was another one)."""
        if policy:
            self.policy.load_state_dict(state["policy"])
        self.guard.load_state_dict(state["guard"])
        self._last = Controls.of(len(state["controls"]["token_budget"]), **state["controls"])
        self._failures = int(state["failures"]) if policy else 0

    def _propose(self, telemetry: Telemetry) -> tuple[Controls, list[str]]:
        """What the policy proposes, with everything impossible replaced by the last controls."""
        if self.retired:
            return self._last, ["the policy is retired after repeated failures: controls held"]
        try:
            act = self.policy.act
            proposed = act(telemetry) if self._deadline is None else self._deadline.call(act, telemetry)
            if not isinstance(proposed, Controls) or any(v.shape != (telemetry.n,) for _, v in proposed.items()):
                raise TypeError(f"expected Controls of {telemetry.n} plants, got {proposed!r:.200}")
        except Exception as error:
            self._fail(f"the policy failed, the last controls are held: {error!r}", error)
            return self._last, ["the policy failed: controls held"]

        columns = {name: np.isinf(v) | (v < 0) for name, v in proposed.items()}
        impossible = [name for name in CONTROL_FIELDS if columns[name].any()]
        if not impossible:
            self._failures = 0
            return proposed, self._explanation()
        held = {
            name: np.where(columns[name], getattr(self._last, name), getattr(proposed, name)) for name in impossible
        }
        message = f"the policy proposed impossible values of {', '.join(impossible)}: held"
        if np.logical_or.reduce([columns[name] for name in impossible]).all():
            self._fail(message)
        else:
            self._failures = 0
            self._warn("values", message)
        return proposed.replace(**held), [message]

    def _explanation(self) -> list[str]:
        """The policy's own words for its decision, where it offers `explain`."""
        try:
            text = self.policy.explain()  # type: ignore[attr-defined]
        except Exception:
            return []
        return [text] if text else []

    def _fail(self, message: str, error: BaseException | None = None) -> None:
        self._failures += 1
        self._warn("policy", message, error)
        if self.retired:
            self._warn("retired", f"the policy failed {self._failures} times in a row and is not asked again")

    def _warn(self, kind: str, message: str, error: BaseException | None = None) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("swiftcruise: %s", message, exc_info=error)


def _finite(telemetry: Telemetry) -> Telemetry:
    """The telemetry with NaN for infinite values: a filter that took one in would never be rid of it."""
    columns = np.stack([getattr(telemetry, name) for name in TELEMETRY_FIELDS])
    if not np.isinf(columns).any():
        return telemetry
    columns[np.isinf(columns)] = np.nan
    return Telemetry(**dict(zip(TELEMETRY_FIELDS, columns, strict=True)))
