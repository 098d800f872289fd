"""An online model of the peak memory that a micro-batch needs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import ConfigError
from .policy import State

Array = NDArray[np.float64]

# Columns of a data row: the five features, then time and the measured peak.
_STATIC, _TOKENS, _QUADRATIC, _TIME, _PEAK = 0, 1, 3, 5, 6
_FEATURES, _COLUMNS = 5, 7

_ASSUMED_NOISE = 0.01  # std of a peak before data tell better; weighs the prior against the data
_ASSUMED_NOISE_WEIGHT = 4.0  # observations that this assumption is worth
_LEAST_NOISE = 0.001  # an allocator rounds; no fit is trusted beyond this
_KNOWN_STATIC_STD, _UNKNOWN_STATIC_STD = 0.01, 0.3
_TOKEN_STD, _QUADRATIC_STD = 1.0, 0.1  # the linear term explains memory first, the mask takes the rest
_RATIO_STD = 0.1  # doubt about the assumed checkpoint ratio, fraction of capacity at the token scale
_CREEP_STD = 0.1
_MOST_DOUBT = 2.0  # factor that one failure puts on predictions
_PIN = 1e9  # precision that holds a coefficient at zero
_CREEP_NEEDS = 30  # observations


class _Fit(NamedTuple):
    coefficients: Array  # (n, 5), scaled features, all >= 0
    variances: Array  # (n, 5), of each coefficient
    noise: Array  # (n,), variance of one observation


class PeakMemoryModel:
    """Peak memory of a micro-batch as a fraction of capacity, learned while the training runs.

    ``peak = a + T (b0 + b1 (1 - c)) + Q (q0 + q1 (1 - c))`` with `T` the padded tokens, `c` the checkpointed share of
    the layers and `Q = B S^2` for a micro-batch of `B > 1` samples of padded length `S`, 0 for a single sample (the
    attention mask that exists only where there is padding). `quadratic` below is `Q`.

    Least squares with forgetting in information form: an observation adds to a Gram matrix (one small product a
    block), and the 5 x 5 system is solved only when a prediction is asked for. All coefficients are >= 0, so that more
    tokens, or fewer checkpointed layers, never lower a prediction. The prior does not fade: without checkpointing,
    activations are assumed `checkpoint_ratio` times as large until micro-batches with `c < 1` tell better, and once
    such data fade the caution returns.

    The upper bound adds `z` standard deviations: noise, plus each coefficient's deviation given the others. This is
    less than the exact predictive deviation where features are collinear, but it grows with every feature, which keeps
    the bound monotone; `margin` covers the difference.

    Shapes: the first axis is the plant, ``(n,)`` or ``(n, m)`` for m micro-batches; with ``n = 1`` it may be left out
    (``(m,)`` or scalars). Arguments have one shape or are scalars; results have that shape. Before the first
    observation nothing is known: `mean` is NaN, `upper` infinite, `least_checkpointing` 1 and `fit_tokens` NaN.

    Args:
        n: Number of plants.
        forgetting: Weight that an observation keeps after the next one; 0.998 remembers about 500.
        checkpoint_ratio: Assumed activations without checkpointing / with every layer checkpointed.
        z: Standard deviations in the upper bound.
        margin: Relative safety margin on the upper bound.
        oom_recovery: Share of the caution after an OOM that remains after each further observation.

    Raises:
        ConfigError: a value out of range.
    """

    def __init__(
        self,
        n: int = 1,
        *,
        forgetting: float = 0.998,
        checkpoint_ratio: float = 8.0,
        z: float = 2.5,
        margin: float = 0.03,
        oom_recovery: float = 0.998,
    ) -> None:
        for name, value, low, high in (
            ("n", n, 1, np.inf),
            ("forgetting", forgetting, 0.5, 1.0),
            ("checkpoint_ratio", checkpoint_ratio, 1.0, np.inf),
            ("z", z, 0.0, np.inf),
            ("margin", margin, 0.0, np.inf),
            ("oom_recovery", oom_recovery, 0.0, 1.0),
        ):
            if not low <= value <= high:
                raise ConfigError(f"PeakMemoryModel {name}={value!r} is out of range: use {low:g} to {high:g}")
        self._forgetting = forgetting
        self._ratio = checkpoint_ratio
        self._z = z
        self._margin = 1.0 + margin
        self._oom_recovery = oom_recovery
        self.reset(n)

    def reset(self, n: int) -> None:
        """Forget everything and prepare for `n` plants."""
        self._gram = np.zeros((n, _COLUMNS, _COLUMNS))
        self._failures = np.zeros((n, _COLUMNS, _COLUMNS))  # the part of it that failures, not measurements, have made
        self._scale = np.zeros((n, 2))  # of tokens and of the quadratic term; 0 = none seen yet
        self._seen = np.zeros(n)
        self._time = np.zeros(n)  # micro-batches, the unmeasured ones included
        self._static = np.full(n, np.nan)
        self._inflation = np.ones(n)  # of all but the static part, above 1 after an OOM
        self._fit: _Fit | None = None

    def forget(self, plants: NDArray[np.bool_]) -> None:
        """Forget some plants, given as a mask of shape ``(n,)``; their static memory is unknown again."""
        self._gram[plants] = self._failures[plants] = 0.0
        self._scale[plants] = self._seen[plants] = self._time[plants] = 0.0
        self._static[plants] = np.nan
        self._inflation[plants] = 1.0
        self._fit = None

    @property
    def n(self) -> int:
        """Number of plants."""
        return self._seen.shape[0]

    @property
    def observations(self) -> Array:
        """Observations taken so far, shape ``(n,)``."""
        return self._seen.copy()

    def set_static(self, fraction: ArrayLike) -> None:
        """Tell the memory in use before any activation (weights, optimizer state), as a fraction of capacity.

        Args:
            fraction: Scalar or ``(n,)``; NaN = unknown.

        Raises:
            ConfigError: a negative fraction.
        """
        static = np.asarray(fraction, dtype=np.float64)
        if (static < 0).any():
            raise ConfigError(f"static memory fraction={fraction!r} is negative: give bytes in use / capacity")
        self._static[:] = static
        self._fit = None

    # ------------------------------------------------------------------ learning

    def observe(
        self, tokens: ArrayLike, quadratic: ArrayLike, checkpoint_fraction: ArrayLike, peak_fraction: ArrayLike
    ) -> None:
        """Learn from finished micro-batches; one with a value that is not finite, or no peak, is skipped."""
        self._observe(tokens, quadratic, checkpoint_fraction, peak_fraction, failed=False)

    def _observe(
        self,
        tokens: ArrayLike,
        quadratic: ArrayLike,
        checkpoint_fraction: ArrayLike,
        peak_fraction: ArrayLike,
        *,
        failed: bool,
    ) -> None:
        _, (tokens, quadratic, checkpointed, peak) = self._rows(tokens, quadratic, checkpoint_fraction, peak_fraction)
        valid = np.isfinite(tokens + quadratic + checkpointed + peak) & (peak > 0) & (tokens > 0)
        if not valid.all():
            tokens, quadratic = np.where(valid, tokens, 0.0), np.where(valid, quadratic, 0.0)
        if not self._scale.all():
            first = np.stack([tokens.max(axis=1, initial=0.0), quadratic.max(axis=1, initial=0.0)], axis=1)
            self._scale = np.where(self._scale > 0, self._scale, first)
        block = np.empty((*tokens.shape, _COLUMNS))
        unchecked = 1.0 - checkpointed
        scale = np.where(self._scale > 0, self._scale, 1.0)
        block[..., _STATIC] = 1.0
        block[..., _TOKENS] = tokens / scale[:, :1]
        block[..., _QUADRATIC] = quadratic / scale[:, 1:]
        block[..., _TOKENS + 1] = block[..., _TOKENS] * unchecked
        block[..., _QUADRATIC + 1] = block[..., _QUADRATIC] * unchecked
        block[..., _TIME] = (self._time[:, None] + np.arange(tokens.shape[1])) / 1000.0
        block[..., _PEAK] = peak
        block[~valid] = 0.0
        count = valid.sum(axis=1)
        for gram in (self._gram, self._failures):
            gram *= (self._forgetting**count)[:, None, None]
        product = block.swapaxes(1, 2) @ block
        self._gram += product
        if failed:
            self._failures += product
        self._seen += count
        self.passed(count)

    def passed(self, count: ArrayLike) -> None:
        """Tell that `count` more micro-batches fitted: time goes on, and the caution after an OOM fades.

        `observe` tells it by itself; this is for micro-batches that were not measured.
        """
        passed = np.asarray(count, dtype=np.float64)
        self._time += passed
        self._inflation = 1.0 + (self._inflation - 1.0) * self._oom_recovery**passed
        self._fit = None

    def observe_oom(
        self,
        tokens: ArrayLike,
        quadratic: ArrayLike,
        checkpoint_fraction: ArrayLike,
        available: ArrayLike = 1.0,
    ) -> None:
        """Learn that a micro-batch ran out of memory: its peak was at least what was `available` of the capacity.

        Counts as one observation of that peak where the model expected less, and raises the prediction for activations
        of every shape by the factor that puts this shape there. The factor fades with later observations
        (`oom_recovery`), so the same shape does not fit until many others have fitted.

        One failure makes predictions at most `_MOST_DOUBT` times larger. Where the model is off by more, somebody else
        has taken the memory, and may have given it back already; if not, the next failures say so again.
        """
        _, rows = self._rows(tokens, quadratic, checkpoint_fraction)
        expected = self.mean(tokens, quadratic, checkpoint_fraction)
        peak = np.fmin(available, _MOST_DOUBT * expected)  # `available` where nothing is expected yet
        self._observe(tokens, quadratic, checkpoint_fraction, np.fmax(expected, peak), failed=True)
        static, rest = self._static_and_rest(*rows)
        needed = np.where(np.isfinite(rest), (np.asarray(available) - static) / rest, 0.0)
        needed = np.minimum(needed.max(axis=1), _MOST_DOUBT * self._inflation)
        self._inflation = np.maximum(self._inflation, needed)

    # ------------------------------------------------------------------ predicting

    def mean(self, tokens: ArrayLike, quadratic: ArrayLike, checkpoint_fraction: ArrayLike) -> Array:
        """Expected peak, as a fraction of capacity."""
        shape, (tokens, quadratic, checkpointed) = self._rows(tokens, quadratic, checkpoint_fraction)
        mean, slope, _, _ = self._parts(tokens, quadratic)
        return np.where(self._known, mean + slope * (1.0 - checkpointed), np.nan).reshape(shape)

    def upper(self, tokens: ArrayLike, quadratic: ArrayLike, checkpoint_fraction: ArrayLike) -> Array:
        """A peak that is hardly ever exceeded, as a fraction of capacity; monotone in all arguments."""
        shape, (tokens, quadratic, checkpointed) = self._rows(tokens, quadratic, checkpoint_fraction)
        static, rest = self._static_and_rest(tokens, quadratic, checkpointed)
        upper = (static + self._inflation[:, None] * rest) * self._margin
        return np.where(self._known, upper, np.inf).reshape(shape)

    def fits(
        self, tokens: ArrayLike, quadratic: ArrayLike, checkpoint_fraction: ArrayLike, target: ArrayLike
    ) -> NDArray[np.bool_]:
        """Whether the upper bound keeps `target`."""
        return self.upper(tokens, quadratic, checkpoint_fraction) <= np.asarray(target)

    def least_checkpointing(self, tokens: ArrayLike, quadratic: ArrayLike, target: ArrayLike, grid: ArrayLike) -> Array:
        """The smallest checkpointed fraction whose upper bound keeps `target`; 1 where none does.

        Args:
            tokens: Padded tokens of each micro-batch.
            quadratic: `B S^2` of each micro-batch, 0 for a single sample.
            target: Fraction of capacity to keep.
            grid: The fractions that can be set, ascending, shape ``(k,)``: ``np.arange(L + 1) / L`` for L layers.
        """
        shape, (tokens, quadratic, target) = self._rows(tokens, quadratic, target)
        mean, slope, variance, spread = self._parts(tokens, quadratic)
        static = self._solved().coefficients[:, :1]
        room = (target / self._margin - static) / self._inflation[:, None] - (mean - static)
        unchecked = np.where(self._known, _most(slope, variance, spread, room, self._z), 0.0)
        grid = np.append(np.asarray(grid, dtype=np.float64), 1.0)
        index = np.searchsorted(grid, 1.0 - np.minimum(unchecked, 1.0) - 1e-9)
        return grid[np.minimum(index, grid.size - 1)].reshape(shape)

    def fit_tokens(self, length: ArrayLike, checkpoint_fraction: ArrayLike, target: ArrayLike) -> Array:
        """Most padded tokens of a micro-batch of samples of `length` tokens whose upper bound keeps `target`.

        Not rounded to whole samples, except that a single sample, which needs no mask, counts where it just fits; 0
        where nothing fits; NaN where nothing is known yet.
        """
        shape, (length, checkpointed, target) = self._rows(length, checkpoint_fraction, target)
        fit = self._solved()
        static = fit.coefficients[:, :1]
        room = (target / self._margin - static) / self._inflation[:, None]
        one = np.ones((self.n, 1))
        unchecked = 1.0 - checkpointed
        alone, padded = (
            _most(
                mean - static + slope * unchecked,
                fit.noise[:, None] + fit.variances[:, :1],
                variance - fit.noise[:, None] - fit.variances[:, :1] + spread * unchecked**2,
                room,
                self._z,
            )
            for mean, slope, variance, spread in (self._parts(one, 0.0 * one), self._parts(one, length))
        )
        return np.where(self._known, np.maximum(padded, np.minimum(alone, length)), np.nan).reshape(shape)

    def creep(self) -> tuple[Array, Array]:
        """Growth of the peak with time at equal shape, and its standard error, each of shape ``(n,)``.

        In fractions of capacity per 1000 micro-batches: the coefficient of time in a regression on shape and time. A
        leak or fragmentation shows, longer sequences do not. NaN until 30 observations carry weight.
        """
        # Time is counted from now, which keeps the system well conditioned in a long run.
        shift = np.broadcast_to(np.eye(_COLUMNS), self._gram.shape).copy()
        shift[:, _STATIC, _TIME] = -self._time / 1000.0
        measured = self._gram - self._failures  # the peak at a failure is a guess, and no sign of growth
        gram = shift.swapaxes(1, 2) @ measured @ shift
        precision = gram[:, :_PEAK, :_PEAK].copy()
        precision[:, :_FEATURES, :_FEATURES] += self._prior(np.full(self.n, np.nan))[0]
        precision[:, _TIME, _TIME] += (_ASSUMED_NOISE / _CREEP_STD) ** 2
        inverse = np.linalg.inv(precision)
        creep = (inverse @ gram[:, :_PEAK, _PEAK:])[:, _TIME, 0]
        # The fit's noise includes what time explains, so the error is rather too large than too small.
        error = np.sqrt(self._solved().noise * inverse[:, _TIME, _TIME])
        known = measured[:, _STATIC, _STATIC] >= _CREEP_NEEDS
        return np.where(known, creep, np.nan), np.where(known, error, np.nan)

    def rescale(self, factor: float) -> None:
        """Take over what was learned with another capacity.

        Args:
            factor: Capacity then / capacity now.
        """
        for gram in (self._gram, self._failures):
            gram[:, _PEAK, :] *= factor
            gram[:, :, _PEAK] *= factor
        self._static *= factor
        self._fit = None

    # ------------------------------------------------------------------ state

    def state_dict(self) -> State:
        """All that was learned, as lists of numbers."""
        return {
            "gram": self._gram.tolist(),
            "failures": self._failures.tolist(),
            "scale": self._scale.tolist(),
            "seen": self._seen.tolist(),
            "time": self._time.tolist(),
            "static": self._static.tolist(),
            "inflation": self._inflation.tolist(),
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`'s state.

        Raises:
            ConfigError: the state is of another number of plants.
        """
        gram = np.array(state["gram"], dtype=np.float64)
        if gram.shape != self._gram.shape:
            raise ConfigError(f"memory model state has shape {gram.shape}, not {self._gram.shape}: reset(n) first")
        self._gram = gram
        self._failures = np.array(state["failures"], dtype=np.float64)
        self._scale = np.array(state["scale"], dtype=np.float64)
        self._seen = np.array(state["seen"], dtype=np.float64)
        self._time = np.array(state["time"], dtype=np.float64)
        self._static = np.array(state["static"], dtype=np.float64)
        self._inflation = np.array(state["inflation"], dtype=np.float64)
        self._fit = None

    # ------------------------------------------------------------------ internals

    @property
    def _known(self) -> NDArray[np.bool_]:
        return (self._seen > 0)[:, None]

    def _rows(self, *values: ArrayLike) -> tuple[tuple[int, ...], list[Array]]:
        """The common shape of the values, and each as ``(n, m)``."""
        arrays = [np.asarray(value, dtype=np.float64) for value in values]
        shape = np.broadcast_shapes(*(array.shape for array in arrays))
        if self.n > 1 and shape[:1] != (self.n,):
            raise ValueError(f"expected the first axis to be the {self.n} plants, got shape {shape}")
        return shape, [
            (array if array.shape == shape else np.broadcast_to(array, shape)).reshape(self.n, -1) for array in arrays
        ]

    def _parts(self, tokens: Array, quadratic: Array) -> tuple[Array, Array, Array, Array]:
        """Mean and variance by the unchecked fraction u: ``mean + u slope`` and ``variance + u^2 spread``."""
        fit = self._solved()
        token_scale = np.where(self._scale[:, :1] > 0, self._scale[:, :1], 1.0)
        tokens = tokens / token_scale
        quadratic = quadratic / np.where(self._scale[:, 1:] > 0, self._scale[:, 1:], token_scale**2)
        a, b0, b1, q0, q1 = fit.coefficients.T[:, :, None]
        va, vb0, vb1, vq0, vq1 = fit.variances.T[:, :, None]
        tokens2, quadratic2 = tokens * tokens, quadratic * quadratic
        return (
            a + tokens * b0 + quadratic * q0,
            tokens * b1 + quadratic * q1,
            fit.noise[:, None] + va + tokens2 * vb0 + quadratic2 * vq0,
            tokens2 * vb1 + quadratic2 * vq1,
        )

    def _static_and_rest(self, tokens: Array, quadratic: Array, checkpointed: Array) -> tuple[Array, Array]:
        """The upper bound's static part ``(n, 1)``, and the rest without inflation and margin ``(n, m)``."""
        mean, slope, variance, spread = self._parts(tokens, quadratic)
        unchecked = 1.0 - checkpointed
        static = self._solved().coefficients[:, :1]
        return static, mean - static + slope * unchecked + self._z * np.sqrt(variance + spread * unchecked**2)

    def _prior(self, static: Array) -> tuple[Array, Array]:
        """Information matrix ``(n, 5, 5)`` and vector ``(n, 5)`` in units of the assumed noise."""
        known = np.isfinite(static)
        matrix = np.zeros((static.shape[0], _FEATURES, _FEATURES))
        matrix[:, _STATIC, _STATIC] = np.where(known, _KNOWN_STATIC_STD, _UNKNOWN_STATIC_STD) ** -2.0
        ratio = self._ratio - 1.0
        for column, std in ((_TOKENS, _TOKEN_STD), (_QUADRATIC, _QUADRATIC_STD)):
            # The pseudo-observation b1 - (ratio - 1) b0 = 0 says nothing about the size of either.
            pair = slice(column, column + 2)
            matrix[:, pair, pair] = np.outer((-ratio, 1.0), (-ratio, 1.0)) / _RATIO_STD**2
            matrix[:, column, column] += std**-2.0
        matrix *= _ASSUMED_NOISE**2
        vector = np.zeros((static.shape[0], _FEATURES))
        vector[:, _STATIC] = matrix[:, _STATIC, _STATIC] * np.where(known, static, 0.0)
        return matrix, vector

    def _solved(self) -> _Fit:
        if self._fit is not None:
            return self._fit
        information, vector = self._gram[:, :_FEATURES, :_FEATURES], self._gram[:, :_FEATURES, _PEAK]
        prior, prior_vector = self._prior(self._static)
        coefficients = _non_negative_solution(information + prior, vector + prior_vector)
        diagonal = np.arange(_FEATURES)
        squares = (
            self._gram[:, _PEAK, _PEAK]
            - 2.0 * (coefficients * vector).sum(axis=1)
            + (coefficients * (information @ coefficients[..., None])[..., 0]).sum(axis=1)
        )
        weight = self._gram[:, _STATIC, _STATIC]
        noise = np.maximum(squares, 0.0) + _ASSUMED_NOISE_WEIGHT * _ASSUMED_NOISE**2
        noise = np.maximum(noise / (weight + _ASSUMED_NOISE_WEIGHT), _LEAST_NOISE**2)
        precision = information[:, diagonal, diagonal] / noise[:, None]
        precision += prior[:, diagonal, diagonal] / _ASSUMED_NOISE**2
        self._fit = _Fit(coefficients, 1.0 / precision, noise)
        return self._fit


def _non_negative_solution(matrix: Array, vector: Array) -> Array:
    """Solve ``matrix x = vector`` for n systems, holding at zero what would be negative (an active set)."""
    solution = np.linalg.solve(matrix, vector[..., None])[..., 0]
    pinned = np.zeros(solution.shape, dtype=bool)
    while (negative := (solution < 0) & ~pinned).any():
        pinned |= negative
        held = matrix + (_PIN * pinned)[..., None] * np.eye(matrix.shape[-1])
        solution = np.linalg.solve(held, vector[..., None])[..., 0]
    return np.maximum(solution, 0.0)


def _most(slope: Array, variance: Array, spread: Array, room: Array, z: float) -> Array:
    """The largest x >= 0 with ``slope x + z sqrt(variance + spread x^2) <= room``; 0 where there is none.

    The root of the squared equation, in the form that does not cancel; slope, variance, spread >= 0.
    """
    surplus = room**2 - z**2 * variance
    surplus = np.where((room > 0) & (surplus > 0), surplus, 0.0)
    divisor = room * slope + z * np.sqrt(np.maximum(slope**2 * variance + spread * surplus, 0.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(surplus > 0, surplus / divisor, 0.0)
