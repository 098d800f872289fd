"""Filters and detectors for noisy measurements of n plants; a NaN measurement leaves every one of them as it is."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import ConfigError
from .policy import State

Array = NDArray[np.float64]


class ArrayState:
    """Mixin: what an object remembers is the float64 arrays named in `_state`, and nothing else."""

    _state: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> State:
        """The arrays as (nested) lists of floats."""
        return {name.lstrip("_"): getattr(self, name).tolist() for name in self._state}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`'s state.

        Raises:
            ConfigError: an entry is missing, so the state belongs to something else; nothing has been loaded.
        """
        missing = {name.lstrip("_") for name in self._state} - state.keys()
        if missing:
            raise ConfigError(f"state of {type(self).__name__} lacks {sorted(missing)}: start without the saved state")
        for name in self._state:
            setattr(self, name, np.asarray(state[name.lstrip("_")], dtype=np.float64))


def signed_log(u: ArrayLike) -> Array:
    """``sign(u) log(1 + |u|)``: about u near zero, logarithmic far out, odd and increasing."""
    u = np.asarray(u, dtype=np.float64)
    return np.sign(u) * np.log1p(np.abs(u))


def signed_exp(y: ArrayLike) -> Array:
    """``sign(y) (exp|y| - 1)``, the inverse of `signed_log`."""
    y = np.asarray(y, dtype=np.float64)
    return np.sign(y) * np.expm1(np.abs(y))


class ExponentialFilter(ArrayState):
    """First-order low-pass ``value += a (measurement - value)``; the first measurement is taken as it is.

    Args:
        time_constant: time after which a step is seen to 63 %, in the unit of `update`'s ``dt``. The weight is
            ``a = 1 - exp(-dt / time_constant)``, so that the response does not depend on the interval's length.
        alpha: fixed weight a of a measurement instead, 0 < alpha <= 1.
        n: number of plants.

    Raises:
        ConfigError: not exactly one of the two is given, or it is out of range.
    """

    _state = ("value",)

    def __init__(self, *, time_constant: float | None = None, alpha: float | None = None, n: int = 1) -> None:
        if (time_constant is None) == (alpha is None):
            raise ConfigError(f"give either time_constant or alpha, got time_constant={time_constant}, alpha={alpha}")
        if time_constant is not None and not time_constant >= 0:
            raise ConfigError(f"time_constant={time_constant} must be >= 0: use 0 for no filtering")
        if alpha is not None and not 0 < alpha <= 1:
            raise ConfigError(f"alpha={alpha} must lie in (0, 1]: use 1 for no filtering")
        self.time_constant = time_constant
        self.alpha = alpha
        self.reset(n)

    def reset(self, n: int) -> None:
        """Forget everything and prepare for ``n`` plants."""
        self.value: Array = np.full(n, np.nan)  #: filtered value, NaN before the first measurement

    def update(self, measurement: ArrayLike, dt: ArrayLike = 1.0) -> Array:
        """Take one measurement, ``dt`` after the last one, and return the filtered value."""
        measurement = np.asarray(measurement, dtype=np.float64)
        if self.alpha is not None:
            weight = self.alpha
        elif not self.time_constant:
            weight = 1.0
        else:
            # A clock that stood still or ran backwards gives no weight.
            weight = -np.expm1(-np.fmax(np.asarray(dt, dtype=np.float64), 0.0) / self.time_constant)
        moved = self.value + weight * (measurement - self.value)
        moved = np.where(np.isnan(self.value), measurement, moved)
        self.value = np.where(np.isfinite(measurement), moved, self.value)
        return self.value


class MovingAverage(ArrayState):
    """Mean of the last ``window`` measurements (of fewer at the start).

    Args:
        window: number of measurements, at least 1.
        n: number of plants.

    Raises:
        ConfigError: the window is no positive whole number.
    """

    _state = ("_samples", "_count")

    def __init__(self, window: int, n: int = 1) -> None:
        if window < 1 or window != int(window):
            raise ConfigError(f"window={window} must be a whole number >= 1: use 1 for no filtering")
        self.window = int(window)
        self.reset(n)

    def reset(self, n: int) -> None:
        """Forget everything and prepare for ``n`` plants."""
        self._samples: Array = np.full((n, self.window), np.nan)
        self._count: Array = np.zeros(n)

    @property
    def value(self) -> Array:
        """The mean, NaN before the first measurement."""
        held = np.minimum(self._count, self.window)
        return np.nansum(self._samples, axis=1) / np.where(held > 0, held, np.nan)

    def update(self, measurement: ArrayLike, dt: ArrayLike = 1.0) -> Array:
        """Take one measurement and return the mean; every measurement counts alike, whatever ``dt``."""
        measurement = np.broadcast_to(np.asarray(measurement, dtype=np.float64), self._count.shape)
        rows = np.flatnonzero(np.isfinite(measurement))
        self._samples[rows, self._count[rows].astype(int) % self.window] = measurement[rows]
        self._count[rows] += 1
        return self.value


class ChangeDetector(ArrayState):
    """Two-sided CUSUM: tells when the mean of a noisy signal has moved.

    The signal is compared with the running mean of what it was; deviations beyond half a standard deviation are
    summed on either side and a sum beyond ``threshold`` is a change (E. S. Page, Biometrika 1954). One deviation
    counts at most 3 standard deviations, so that a single outlier, however wild, is never a change.

    Args:
        noise: standard deviation of the signal to begin with; it is then learnt within a factor 3 of this.
        threshold: decision level in standard deviations; 5 gives a false alarm about every 470 measurements.
        n: number of plants.
    """

    _state = ("mean", "_count", "_variance", "_above", "_below")
    _SLACK = 0.5
    _CLIP = 3.0

    def __init__(self, noise: float, threshold: float = 5.0, n: int = 1) -> None:
        if not noise > 0 or not threshold > 0:
            raise ConfigError(f"noise={noise} and threshold={threshold} must be > 0")
        self.noise = noise
        self.threshold = threshold
        self.reset(n)

    def reset(self, n: int) -> None:
        """Forget everything and prepare for ``n`` plants."""
        self.mean: Array = np.full(n, np.nan)  #: the signal's mean since the last change
        self._count: Array = np.zeros(n)
        self._variance: Array = np.full(n, self.noise**2)
        self._above: Array = np.zeros(n)
        self._below: Array = np.zeros(n)

    @property
    def deviation(self) -> Array:
        """Standard deviation of the signal as learnt so far."""
        return np.sqrt(self._variance)

    def forget(self, where: NDArray[np.bool_]) -> None:
        """Begin anew on the plants in ``where``; what was learnt about the noise stays."""
        self.mean = np.where(where, np.nan, self.mean)
        self._count = np.where(where, 0.0, self._count)
        self._above = np.where(where, 0.0, self._above)
        self._below = np.where(where, 0.0, self._below)

    def update(self, signal: ArrayLike) -> NDArray[np.bool_]:
        """Take one value and return where the mean has moved; there the detector begins anew from this value."""
        signal = np.broadcast_to(np.asarray(signal, dtype=np.float64), self.mean.shape)
        known = np.isfinite(signal) & np.isfinite(self.mean)
        # The mean of m values is itself uncertain: a residual against it has variance (1 + 1/m) times the noise's.
        spread = np.sqrt(self._variance * (1.0 + 1.0 / np.fmax(self._count, 1.0)))
        z = np.where(known, np.clip((signal - self.mean) / spread, -self._CLIP, self._CLIP), 0.0)
        self._above = np.where(known, np.fmax(0.0, self._above + z - self._SLACK), self._above)
        self._below = np.where(known, np.fmax(0.0, self._below - z - self._SLACK), self._below)
        changed = known & (np.fmax(self._above, self._below) > self.threshold)

        learnt = np.clip(self._variance * (1 + 0.1 * (z**2 - 1)), (self.noise / 3) ** 2, (self.noise * 3) ** 2)
        self._variance = np.where(known & ~changed, learnt, self._variance)
        self.forget(changed)
        first = np.isfinite(signal) & np.isnan(self.mean)
        self._count = np.where(known | first, np.fmin(self._count + 1, 30), self._count)
        step = np.where(known, z * spread, 0.0) / np.fmax(self._count, 1.0)
        self.mean = np.where(first, signal, self.mean + step)
        return changed
