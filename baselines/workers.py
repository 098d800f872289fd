"""How many loader workers hide loading, for n plants at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..runtime.errors import ConfigError
from ..runtime.filters import ArrayState, ExponentialFilter
from ..runtime.policy import State

Array = NDArray[np.float64]

_WAITS = 0.06  # data_wait_fraction that is worth a trial
_NO_WAIT = 0.02  # ... below which one worker may be too many
_TRIAL = 5.0  # intervals after which added workers are judged: they start up, and the filter must have followed
_HELPED, _FASTER = 0.8, 1.25  # share of the wait that may be left if they helped, or else speed gained
_CALM = 12.0  # intervals without waiting before one is taken back
_LONGEST = 96.0  # intervals that a move which proved wrong stays forbidden, at most


class WorkerRule(ArrayState):
    """Adds the workers that are missing, and takes back what proved useless.

    Loading that w workers share takes ``1 / w`` of the time: where a share ``f`` of the time is spent waiting, loading
    is the bottleneck and ``w / (1 - f)`` workers would keep up. They are kept if the wait fell. If it did not (the
    disk or the cores are what is short) the count goes back. After a calm while one worker is taken back; where the
    wait returns, so does the worker. Each move that proved wrong is tried again twice as late.

    Args:
        most: highest number of workers.
        n: number of plants.

    Raises:
        ConfigError: ``most`` is below 0.
    """

    _state = ("_before", "_from", "_age", "_calm", "_blocked", "_patience", "_calm_needed", "_reduced")

    def __init__(self, most: int = 8, n: int = 1) -> None:
        if not most >= 0:
            raise ConfigError(f"max_workers={most} must be >= 0")
        self.most = most
        self._wait = ExponentialFilter(alpha=0.5)
        self.reset(n)

    def reset(self, n: int) -> None:
        """Forget everything and prepare for ``n`` plants."""
        self._wait.reset(n)
        self._before: Array = np.full(n, np.nan)  # wait when the trial began, NaN = no trial
        self._from: Array = np.full(n, np.nan)  # workers before it
        self._age: Array = np.zeros(n)
        self._calm: Array = np.zeros(n)  # intervals in a row without waiting
        self._blocked: Array = np.zeros(n)  # intervals until more workers may be tried
        self._patience: Array = np.full(n, _CALM)
        self._calm_needed: Array = np.full(n, _CALM)
        self._reduced: Array = np.zeros(n)  # 1 while the last move was one worker less

    def update(self, workers: Array, wait: Array) -> Array:
        """Workers for the next interval, NaN = leave.

        Args:
            workers: in force, NaN where there is no such control.
            wait: ``data_wait_fraction``, NaN where not measured.
        """
        known = np.isfinite(workers) & np.isfinite(wait)
        wait = np.clip(self._wait.update(wait), 0.0, 0.99)
        self._age = self._age + 1.0
        self._blocked = self._blocked - 1.0
        self._calm = np.where(known & (wait < _NO_WAIT), self._calm + 1.0, 0.0)

        judged = np.isfinite(self._before) & (self._age >= _TRIAL)
        helped = (wait <= _HELPED * self._before) | (1.0 - wait >= _FASTER * (1.0 - self._before))
        useless = known & judged & ~helped & (workers > self._from)
        self._before = np.where(judged, np.nan, self._before)
        self._blocked = np.where(useless, self._patience, self._blocked)
        self._patience = np.where(useless, np.fmin(2.0 * self._patience, _LONGEST), self._patience)

        idle = known & np.isnan(self._before) & ~useless & (self._age >= _TRIAL)
        missed = idle & (wait > _WAITS) & (self._reduced == 1)
        more = idle & (wait > _WAITS) & (workers < self.most) & ((self._blocked <= 0) | missed)
        fewer = idle & ~more & (self._calm >= self._calm_needed) & (workers > 1)
        self._calm_needed = np.where(missed, np.fmin(2.0 * self._calm_needed, _LONGEST), self._calm_needed)
        self._before = np.where(more, wait, self._before)
        self._from = np.where(more, workers, self._from)
        self._age = np.where(more | fewer | useless, 0.0, self._age)
        self._calm = np.where(fewer, 0.0, self._calm)
        self._reduced = np.where(fewer, 1.0, np.where(more, 0.0, self._reduced))

        needed = np.fmax(np.ceil(workers / (1.0 - wait)), workers + 1.0)
        asked = np.where(more, np.fmin(needed, self.most), np.where(fewer, workers - 1.0, np.nan))
        return np.where(useless, self._from, asked)

    def state_dict(self) -> State:
        """The trial under way, what is forbidden for how long, and the filter."""
        return {**super().state_dict(), "wait": self._wait.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`'s state."""
        super().load_state_dict(state)
        self._wait.load_state_dict(state["wait"])
