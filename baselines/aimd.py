"""Additive increase, multiplicative decrease: the congestion control of networks, on memory.

D.-M. Chiu, R. Jain, "Analysis of the increase and decrease algorithms for congestion avoidance in computer networks",
Computer Networks and ISDN Systems 17 (1989).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..runtime.controls import Controls
from ..runtime.errors import ConfigError
from ..runtime.filters import ArrayState
from ..runtime.telemetry import Telemetry
from .budget import present_budget

Array = NDArray[np.float64]

#: Octaves between what was asked and what is in force, above which the guard refused and did not just wait for more.
_REFUSED = 0.2


class AIMDPolicy(ArrayState):
    """Grow the token budget by a constant, halve it when memory ran out.

    - No out-of-memory error and a peak below ``grow_below``: the budget rises by ``increase`` tokens.
    - An out-of-memory error: it is halved, and rests for ``rest`` intervals.
    - A peak above ``shrink_above``: it falls by a quarter, once; the next interval tells whether that was enough.
    - Between the two: it stays. This hysteresis keeps the noise of peaks out of the budget.

    The peak is that of all processes on the device, so that a neighbour counts. Where memory is not measured, only
    errors tell. What happens to speed is not looked at: a budget that fits may well be larger than is good.

    Args:
        increase: tokens added in an interval.
        decrease: factor of the budget after an out-of-memory error, 0..1.
        grow_below: peak below which the budget grows, fraction of capacity.
        shrink_above: peak above which it shrinks at once; at least ``grow_below``.
        rest: intervals without growth after an out-of-memory error.

    Raises:
        ConfigError: a value that cannot be used.
    """

    _state = ("_goal", "_rest")

    def __init__(
        self,
        increase: float = 64,
        decrease: float = 0.5,
        grow_below: float = 0.75,
        shrink_above: float = 0.90,
        *,
        rest: int = 4,
    ) -> None:
        if not 0 < increase < np.inf:
            raise ConfigError(f"increase={increase} must be a finite number of tokens > 0")
        if not 0 < decrease < 1:
            raise ConfigError(f"decrease={decrease} must lie between 0 and 1: 0.5 halves the budget")
        if not 0 < grow_below < 1:
            raise ConfigError(f"grow_below={grow_below} must lie between 0 and 1, such as 0.75")
        if not grow_below <= shrink_above <= 1:
            raise ConfigError(f"shrink_above={shrink_above} must lie between grow_below={grow_below} and 1")
        if not 0 <= rest < np.inf:
            raise ConfigError(f"rest={rest} must be a number of intervals >= 0")
        self.increase, self.decrease = float(increase), float(decrease)
        self.grow_below, self.shrink_above = grow_below, shrink_above
        self.rest = float(rest)
        self.reset(1)

    def reset(self, n: int, seed: int | None = None) -> None:
        """Forget everything and prepare for ``n`` plants; ``seed`` has no use, nothing here is random."""
        self._goal: Array = np.full(n, np.nan)  # budget asked for, tokens
        self._rest: Array = np.zeros(n)  # intervals until the budget may grow again

    def act(self, telemetry: Telemetry) -> Controls:
        """Token budget for the next interval."""
        budget = present_budget(telemetry)
        peak = np.fmax(telemetry.memory_peak_fraction, telemetry.memory_device_fraction)
        failed = telemetry.oom_count > 0
        full = ~failed & (peak > self.shrink_above)
        self._rest = np.where(failed, self.rest, np.fmax(self._rest - 1.0, 0.0))
        # What the guard holds up as too small a change adds up in the goal; what it refused is given up.
        held = np.abs(np.log2(self._goal / budget)) < _REFUSED
        self._goal = np.where(held, self._goal, budget)
        grows = ~failed & ~(peak >= self.grow_below) & (self._rest == 0) & (telemetry.tokens_per_s > 0)
        self._goal = np.where(grows, self._goal + self.increase, self._goal)
        self._goal = np.where(full, 0.75 * budget, np.where(failed, self.decrease * budget, self._goal))
        return Controls.of(telemetry.n, token_budget=self._goal)

    def diagnostics(self) -> Mapping[str, Any]:
        """The budget asked for (tokens), and the intervals until it may grow again."""
        return {"budget_goal": self._goal, "rest": self._rest}
