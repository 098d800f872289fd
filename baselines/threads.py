"""How many intra-op threads a CPU run should use, for n plants at once.

OpenMP threads that wait for a slower one spin: with two threads on two cores, one of which a neighbour uses, training
falls to a twentieth of its speed, and one thread restores it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..runtime.errors import ConfigError
from ..runtime.filters import ArrayState

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

_UP, _FEWER, _RESCUE = 1.0, 2.0, 3.0  # kinds of trial; 0 = none
_TRIAL = 3  # intervals that a trial is measured
_FIRST_PATIENCE, _LAST_PATIENCE = 3.0, 64.0  # calm intervals before the higher count is tried again
_COLLAPSE = np.log(3.0)  # log speed lost that no batch composition explains
_FAILED = 0.3  # log speed lost that ends a trial at once
_NO_WORSE, _BETTER = -0.04, 0.08  # log speed that a trial up, and one with fewer threads, must give to be kept
_STRAY = 0.25  # of a core: neighbours below this are background noise


class ThreadGovernor(ArrayState):
    """Gives way to neighbours at once, comes back by trial, and tries once whether fewer threads are faster.

    Args:
        cores: host cores that ``neighbour_cpu_fraction`` is a share of; unset = the highest thread count seen.
        n: number of plants.

    Raises:
        ConfigError: fewer than one core.
    """

    _state = ("_most", "_preferred", "_trial", "_target", "_origin", "_base", "_age", "_sum", "_calm", "_patience",
              "_tried_fewer")  # fmt: skip

    def __init__(self, cores: float | None = None, n: int = 1) -> None:
        if cores is not None and not cores >= 1:
            raise ConfigError(f"cores={cores} must be >= 1, or unset")
        self.cores = cores
        self.reset(n)

    def reset(self, n: int) -> None:
        """Forget everything and prepare for ``n`` plants."""
        self._most: Array = np.full(n, np.nan)  # highest count seen in force
        self._preferred: Array = np.full(n, np.nan)  # best count without neighbours
        self._trial: Array = np.zeros(n)
        self._target: Array = np.full(n, np.nan)  # count on trial
        self._origin: Array = np.full(n, np.nan)  # count before the trial
        self._base: Array = np.zeros(n)  # log speed to compare with
        self._age: Array = np.zeros(n)
        self._sum: Array = np.zeros(n)
        self._calm: Array = np.zeros(n)  # intervals in a row with cores to spare
        self._patience: Array = np.full(n, _FIRST_PATIENCE)
        self._tried_fewer: Array = np.zeros(n)

    @property
    def busy(self) -> Mask:
        """Where a trial is under way: its speeds say nothing about the budget, which should stay."""
        return self._trial != 0

    def update(
        self, threads: Array, speed: Array, expected: Array, neighbour: Array, settled: Mask
    ) -> tuple[Array, Mask, Mask]:
        """One interval's decision.

        Args:
            threads: count in force, NaN where the plant has no such control (nothing is proposed there).
            speed: log tokens/s of the interval, NaN where not measured.
            expected: log tokens/s known for these settings, NaN where unknown.
            neighbour: ``neighbour_cpu_fraction``, NaN where not measured.
            settled: where the token budget rests, so that a trial compares like with like.

        Returns:
            The count for the next interval (NaN = leave); where this interval belongs to a trial or a collapse, so
            that its speed must not be learnt; and where a new count is there to stay, so that what was learnt about
            speed no longer holds.
        """
        known = np.isfinite(threads)
        self._most = np.fmax(self._most, threads)
        self._preferred = np.where(np.isnan(self._preferred), threads, self._preferred)
        cores = self._most if self.cores is None else np.full_like(threads, self.cores)
        free = np.floor(cores * (1.0 - np.where(np.isnan(neighbour), 0.0, neighbour)) + _STRAY)
        free = np.fmax(free, 1.0)
        proposal, moved = threads.copy(), np.zeros(len(threads), dtype=bool)
        # A count that somebody else changed ends the trial.
        self._trial = np.where(self.busy & (threads != self._target), 0.0, self._trial)
        learning_stops = self.busy

        # 1. A neighbour: give way at once.
        give_way = known & (threads > free)
        proposal = np.where(give_way, free, proposal)
        moved |= give_way
        self._trial = np.where(give_way, 0.0, self._trial)
        learning_stops = learning_stops | give_way

        # 2. Judge the trial under way.
        measured = self.busy & np.isfinite(speed)
        self._age = self._age + measured
        self._sum = self._sum + np.where(measured, speed, 0.0)
        mean = self._sum / np.fmax(self._age, 1.0)
        hopeless = measured & (speed < self._base - _FAILED)
        over = (self.busy & (self._age >= _TRIAL)) | hopeless
        kept = over & ~hopeless & (mean >= self._base + np.where(self._trial == _UP, _NO_WORSE, _BETTER))
        lost = over & ~kept
        moved |= kept
        proposal = np.where(lost, np.fmin(self._origin, free), proposal)
        fewer, up = self._trial == _FEWER, self._trial == _UP
        self._preferred = np.where(kept & fewer, threads, self._preferred)
        self._tried_fewer = np.where(lost & fewer, 1.0, self._tried_fewer)
        self._patience = np.where(kept & up, _FIRST_PATIENCE, self._patience)
        self._patience = np.where(lost & up, np.fmin(2 * self._patience, _LAST_PATIENCE), self._patience)
        self._calm = np.where(give_way | over, 0.0, self._calm)
        self._trial = np.where(over, 0.0, self._trial)

        # 3. Start a trial: a rescue after a collapse, the way back when the neighbour has gone, fewer threads once.
        idle = known & ~give_way & ~over & ~self.busy
        collapsed = idle & (threads > 1) & (speed < expected - _COLLAPSE)
        learning_stops = learning_stops | collapsed
        below = idle & (threads < self._preferred) & (free > threads)
        self._calm = np.where(below, self._calm + 1, np.where(idle, 0.0, self._calm))
        reference = np.where(np.isnan(expected), speed, expected)
        back = below & ~collapsed & (self._calm >= self._patience) & np.isfinite(reference)
        half = idle & ~collapsed & settled & (self._tried_fewer == 0) & (threads == self._preferred) & (threads > 1)
        half &= np.isfinite(expected)
        for start, kind, target, base in (
            (collapsed, _RESCUE, np.floor(threads / 2), speed),
            (back, _UP, np.fmin(self._preferred, free), reference),
            (half, _FEWER, np.floor(threads / 2), expected),
        ):
            self._trial = np.where(start, kind, self._trial)
            self._target = np.where(start, target, self._target)
            self._origin = np.where(start, threads, self._origin)
            self._base = np.where(start, base, self._base)
            self._age, self._sum = np.where(start, 0.0, self._age), np.where(start, 0.0, self._sum)
            proposal = np.where(start, target, proposal)
        return proposal, learning_stops, moved
