"""When a control interval is over."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from .errors import ConfigError

#: A gap between two optimizer steps this many times longer than an interval (and than the gap before) is no slow
#: step: the machine slept, the process was stopped, or the clock was set.
_JUMP = 10.0


class IntervalTimer:
    """Counts control intervals in seconds, or in optimizer steps.

    `due` is asked after every optimizer step and says whether the interval is over; the next one begins at that
    moment, so that a late answer never makes several intervals due in a burst. In seconds, a clock that jumps
    (backwards, or forwards by more than ten intervals at once) restarts the interval, since what was measured
    across the jump means nothing. Steps are counted whatever the clock does.

    Args:
        interval_s: length of an interval, seconds.
        interval_steps: if given, an interval is this many optimizer steps instead.
        clock: seconds, monotonic.

    Raises:
        ConfigError: an interval that is not positive.
    """

    def __init__(
        self,
        interval_s: float = 30.0,
        interval_steps: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < interval_s < math.inf:
            raise ConfigError(f"interval_s={interval_s} must be a positive number of seconds, such as 30")
        if interval_steps is not None and interval_steps < 1:
            raise ConfigError(f"interval_steps={interval_steps} must be >= 1, or unset to count seconds")
        self.interval_s = interval_s
        self.interval_steps = interval_steps
        self._clock = clock
        #: Length of the last finished interval in seconds; NaN when the clock jumped inside it.
        self.elapsed_s = math.nan
        self.restart()

    def restart(self, step: int = 0) -> None:
        """Begin an interval now, after optimizer step ``step`` (at the start of training, after a resume)."""
        self._started = self._last = self._clock()
        self._started_step = step
        self._gap = 0.0
        self._jumped = False

    def due(self, step: int) -> bool:
        """Whether the interval is over now that optimizer step ``step`` is done; if so, the next one has begun."""
        now = self._clock()
        gap, usual = now - self._last, max(self.interval_s, self._gap)
        # A gap is usual once it was seen: a training whose every step lasts minutes still gets its decisions.
        self._last, self._gap = now, max(gap, 0.0)
        if gap < 0 or gap > _JUMP * usual:
            self._jumped = True
            if self.interval_steps is None:
                self._begin(step, now)
                return False

        if self.interval_steps is not None:
            over = step - self._started_step >= self.interval_steps
        else:
            over = now - self._started >= self.interval_s
        if over:
            self.elapsed_s = math.nan if self._jumped else now - self._started
            self._begin(step, now)
        return over

    def _begin(self, step: int, now: float) -> None:
        self._started, self._started_step, self._jumped = now, step, False
