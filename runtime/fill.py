"""Fill: which share of wall time went into useful computation, from timings alone."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import ConfigError
from .policy import State

Array = NDArray[np.float64]

_LEAST_WEIGHT = 0.01  # of a slow observation: lets a lasting slowdown be learned in the end
_LEAST_OBSERVATIONS = 8
_BLOCK = 64  # timings that `collect` learns from at once
_LEAST_DISTINCTION = 1e-3  # 1 - squared cosine of the two columns; below it a and k cannot be told apart


class FillEstimator:
    """Learns ``t = a x micro_batches + k x padded_tokens`` and from it ``fill = k x padded_tokens / wall time``.

    `k` is the time a token needs once the device is busy, `a` the cost of a forward and backward pass however small
    (launches, Python). Fill is the share of wall time that large micro-batches would have needed for the same tokens:
    launch cost, data wait and contention all lower it, padding does not. It stands beside NVML's utilisation, which
    says only that some kernel was running, and stands in for it on a CPU. Attention's quadratic term is left out: it is
    small against the rest at fine-tuning lengths, and with it `k` would no longer be one number to divide by.

    `k` must follow the device's *fast* conditions, or a neighbour that halves the speed would double `k` and leave fill
    where it was. Three measures see to that: the fit is of relative errors (rows divided by the time measured, so that
    a hiccup of 10 x weighs a hundredth); an observation slower than predicted by more than `tolerance` gets the weight
    ``(tolerance / excess)^2``, at least 0.01; and the past fades by the weight of what replaces it, so slow times
    hardly displace fast ones. A lasting change (a lower power limit, other kernels) is learned within some 100 times
    the memory of the estimator.

    One estimator serves one rank. `k` and `a` are NaN until the data tell them apart: at least 8 observations with
    different tokens per micro-batch.

    Args:
        forgetting: Weight that an observation keeps after the next one of full weight; 0.999 remembers about 1000.
        tolerance: Relative excess over the predicted time that still counts as noise.

    Raises:
        ConfigError: a value out of range.
    """

    def __init__(self, *, forgetting: float = 0.999, tolerance: float = 0.05) -> None:
        if not 0.5 <= forgetting <= 1:
            raise ConfigError(f"forgetting={forgetting!r} is out of range: use 0.5 to 1, such as 0.999")
        if not 0 < tolerance < 1:
            raise ConfigError(f"tolerance={tolerance!r} is out of range: use 0 to 1, such as 0.05")
        self._forgetting = forgetting
        self._tolerance = tolerance
        self._gram = np.zeros((3, 3))  # of (micro-batches, tokens, time), each divided by the time measured
        self._observations = 0
        self._coefficients = (np.nan, np.nan)
        self._collected: list[tuple[int, float]] = []  # tokens and seconds of micro-batches not learned from yet

    def collect(self, timings: Iterable[tuple[int, float]]) -> None:
        """Learn from micro-batches, soon: at once while `k` is unknown, later in blocks of 64 (or at `catch_up`).

        Learning from a block takes hardly longer than learning from a step.

        Args:
            timings: Padded tokens and seconds of each micro-batch.
        """
        self._collected += timings
        if len(self._collected) >= _BLOCK or math.isnan(self.k):
            self.catch_up()

    def catch_up(self) -> None:
        """Learn from all that was collected."""
        if self._collected:
            rows = np.array(self._collected)
            self._collected.clear()
            self.observe(1, rows[:, 0], rows[:, 1])

    def observe(self, micro_batches: ArrayLike, padded_tokens: ArrayLike, seconds: ArrayLike) -> None:
        """Learn from a block of timings, each of one micro-batch or of one step.

        Args:
            micro_batches: Forward/backward passes in each timing, scalar or shape ``(m,)``.
            padded_tokens: Their padded tokens, shape ``(m,)``.
            seconds: Their wall time, data wait left out, shape ``(m,)``. What is not positive and finite is skipped.
        """
        tokens = np.atleast_1d(np.asarray(padded_tokens, dtype=np.float64))
        rows = np.empty((*tokens.shape, 3))
        rows[:, 0] = micro_batches
        rows[:, 1] = tokens
        rows[:, 2] = seconds
        rows = rows[np.isfinite(rows).all(axis=1) & (rows > 0).all(axis=1)]
        if not rows.shape[0]:
            return
        weights = np.ones(rows.shape[0])
        a, k = self._coefficients
        if not np.isnan(k):
            excess = rows[:, 2] / (a * rows[:, 0] + k * rows[:, 1]) - 1.0
            slow = excess > self._tolerance
            weights[slow] = np.maximum((self._tolerance / excess[slow]) ** 2, _LEAST_WEIGHT)
        rows /= rows[:, 2:]
        self._gram *= self._forgetting ** weights.sum()
        self._gram += (rows * weights[:, None]).T @ rows
        self._observations += rows.shape[0]
        self._coefficients = self._solve()

    @property
    def k(self) -> float:
        """Seconds a padded token on a busy device; NaN until known."""
        return self._coefficients[1]

    @property
    def a(self) -> float:
        """Seconds a micro-batch costs whatever its size; NaN until known."""
        return self._coefficients[0]

    @property
    def launch_tokens(self) -> float:
        """Cost of a micro-batch's launch in tokens, a / k; infinite until known."""
        a, k = self._coefficients
        return np.inf if np.isnan(k) else a / k

    def fill(self, padded_tokens: float, wall_s: float) -> float:
        """Useful share of `wall_s`, about 0..1; NaN until `k` is known or for an empty interval."""
        return self.k * padded_tokens / wall_s if wall_s > 0 else np.nan

    def state_dict(self) -> State:
        """All that was learned, as numbers."""
        self.catch_up()
        return {"gram": self._gram.tolist(), "observations": self._observations}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`'s state."""
        self._collected.clear()
        self._gram = np.array(state["gram"], dtype=np.float64).reshape(3, 3)
        self._observations = int(state["observations"])
        self._coefficients = self._solve()

    def _solve(self) -> tuple[float, float]:
        (mm, mt, m1), (_, tt, t1), _ = self._gram.tolist()
        determinant = mm * tt - mt * mt
        if self._observations < _LEAST_OBSERVATIONS or determinant < _LEAST_DISTINCTION * mm * tt:
            return np.nan, np.nan
        a = (tt * m1 - mt * t1) / determinant
        k = (mm * t1 - mt * m1) / determinant
        if a < 0:  # the constrained optimum is then on the boundary
            return 0.0, t1 / tt
        if k <= 0:  # time does not depend on tokens: all of it is launch cost
            return np.nan, np.nan
        return a, k
