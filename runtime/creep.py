"""Says when memory grows although the micro-batches do not."""

from __future__ import annotations

import math


class CreepAlarm:
    """Decides when the growth of peak memory at equal micro-batches is worth a line, and says it once.

    Args:
        least: Growth that matters, fraction of capacity per 1000 micro-batches.
        errors: Standard errors that it must be above zero.
        confirmations: Intervals in a row that must agree.
    """

    def __init__(self, least: float = 0.005, errors: float = 4.0, confirmations: int = 3) -> None:
        self._least = least
        self._errors = errors
        self._confirmations = confirmations
        self._agreed = 0

    def check(self, creep: float, error: float, room: float, micro_batches_per_step: float) -> str | None:
        """A line for the user when the growth is beyond doubt, the first time; else None.

        Args:
            creep: Growth, fraction of capacity per 1000 micro-batches; NaN = not known.
            error: Its standard error.
            room: Fraction of capacity between the present peak and the cap.
            micro_batches_per_step: What turns micro-batches into optimizer steps.
        """
        if self._agreed >= self._confirmations:
            return None
        self._agreed = self._agreed + 1 if creep >= self._least and creep > self._errors * error else 0
        if self._agreed < self._confirmations:
            return None
        line = f"memory grows by {creep:.1%} of capacity per 1000 micro-batches of equal size: a leak or fragmentation"
        if math.isfinite(room) and micro_batches_per_step > 0:
            steps = max(0.0, room) / creep * 1000.0 / micro_batches_per_step
            line += f"; in about {steps:,.0f} optimizer steps the cap is reached, and micro-batches get smaller"
        return line
