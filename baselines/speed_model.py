"""How fast a training would run at another token budget: a model identified while it runs, for n plants at once.

An optimizer step of m micro-batches with T padded tokens, of which C are recomputed (checkpointed), takes

    t = a m + k T + r C                                              recursive least squares (L. Ljung, "System
                                                                     Identification", 2nd ed., 1999, ch. 11)

What m, T and C would be at another budget follows from the lengths to come (`expected_packing`). What that leaves
unexplained is remembered by budget and smoothed over the neighbouring ones, as model-predictive control does that
learns (L. Hewing et al., "Learning-Based Model Predictive Control", Annual Review of Control 3, 2020).
"""

from __future__ import annotations

from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..runtime.filters import ArrayState
from ..runtime.policy import State
from .budget import positive

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

# Packing
_RANKS = 16  # samples of a step that stand for all of them
_TAIL = (np.arange(257) + 0.5) / 257  # shares of the samples, from the longest ...
_NORMAL = np.array([NormalDist().inv_cdf(1.0 - share) for share in _TAIL])  # ... and their normal deviates
_RANK = (np.arange(_RANKS) + 0.5) / _RANKS
_DEVIATE = np.interp(_RANK, _TAIL, _NORMAL)
_DENSITY = np.exp(-0.5 * _DEVIATE**2) / np.sqrt(2.0 * np.pi)
_P95 = 1.645

# Least squares
_FADE = 0.97  # what an interval's equation keeps of its weight in the next one
_RECOMPUTED = 0.4  # time that recomputing a token takes over computing it: a third (full tuning) to a half (adapters)
_PRIOR = 0.6  # relative standard deviation of a, k and r before anything is known
_NOISE = 0.03  # relative standard deviation of a step's time, once modelled
_USUAL_FILL = 0.8
_DISTURBED, _LEAST_WEIGHT = 0.05, 0.02  # log time off the prediction, from which on an equation weighs less; at least

# The remainder
_LOWEST, _CELLS = 4.0, 37  # log2 tokens of the first cell; 37 half octaves
_REMEMBERS = 0.985  # what a cell's weight keeps per interval
_WIDTH = 0.5  # octaves within which remainders are alike
_UNKNOWN = 0.25  # measurements that the belief in a remainder of 0 is worth
_MOST = 0.4  # log speed that a remainder may be


class Packing(NamedTuple):
    """An optimizer step, by candidate budget, each of shape ``(n, candidates)``."""

    micro_batches: Array
    padded_tokens: Array
    recomputed_tokens: Array


class Lengths(NamedTuple):
    """The samples of an optimizer step, each of shape ``(n,)``."""

    samples: Array  #: NaN = unknown, here and below
    mean: Array  #: tokens
    p95_ratio: Array  #: 95th percentile over mean
    longest: Array


def expected_packing(
    lengths: Lengths, budget: Array, launch_tokens: Array, fit_uncheckpointed: Array, fit_checkpointed: Array
) -> Packing:
    """What a step is cut into under a token budget, sorted by length, longest samples first.

    Lengths are log-normal, cut off at the longest. A micro-batch takes as many samples of length l as the budget
    allows, but no more than pay: with ``s`` tokens from a sample to the next shorter one, c of them cost
    ``launch_tokens / c + s (c - 1) / 2`` each beside their own tokens, which is least at ``sqrt(2 launch_tokens / s)``.
    Each sample pays for the length of the one that began its micro-batch.

    Args:
        lengths: of the step's samples.
        budget: padded tokens, shape ``(n, candidates)``.
        launch_tokens: what starting a micro-batch costs, in tokens, shape ``(n,)``.
        fit_uncheckpointed: tokens of a micro-batch that fit with no layer checkpointed, shape ``(n,)``, NaN = any.
        fit_checkpointed: with every layer checkpointed.
    """
    sigma = _P95 - np.sqrt(np.fmax(_P95**2 - 2.0 * np.log(np.clip(lengths.p95_ratio, 1.05, 3.8)), 0.0))
    longest = np.where(np.isnan(lengths.longest), np.inf, lengths.longest)[:, None, None]
    mean, sigma, samples = lengths.mean[:, None, None], sigma[:, None, None], lengths.samples[:, None, None]

    def length(deviate: Array) -> Array:
        return np.clip(mean * np.exp(sigma * deviate - 0.5 * sigma**2), 1.0, longest)

    room = budget[:, :, None]
    own = length(_DEVIATE)
    step = np.fmax(own * sigma / (_DENSITY * samples), 1e-6)
    together = np.sqrt(2.0 * launch_tokens[:, None, None] / step)
    # Samples are whole: half of one is left out on average.
    together = np.clip(np.fmin(room / own - 0.5, together), 1.0, np.fmax(samples, 1.0))
    passed = np.cumsum(samples / together / _RANKS, axis=2)  # micro-batches up to here
    begun = _RANK - (passed % 1.0) * (together - 1.0) / samples  # where the micro-batch begins that a sample is in
    padded = np.fmax(length(np.interp(np.fmax(begun, 0.5 / samples), _TAIL, _NORMAL)), own)

    tokens = np.clip(together * padded, padded, np.fmax(room, padded))
    free = np.where(np.isnan(fit_uncheckpointed), np.inf, np.fmax(fit_uncheckpointed, 1.0))[:, None, None]
    full = np.where(np.isnan(fit_checkpointed), np.inf, np.fmax(fit_checkpointed, 1.0))[:, None, None]
    share = np.clip((1.0 / free - 1.0 / tokens) / np.fmax(1.0 / free - 1.0 / full, 1e-12), 0.0, 1.0)
    # Where nothing is known of memory, nothing is recomputed.
    share = np.where(tokens > free, share, 0.0)
    return Packing(
        np.fmax(passed[:, :, -1], 1.0),
        lengths.samples[:, None] * padded.mean(axis=2),
        lengths.samples[:, None] * (padded * share).mean(axis=2),
    )


class SpeedModel(ArrayState):
    """Learns the time of a step from what intervals measured, and predicts it for other budgets.

    Args:
        n: number of plants.
    """

    _state = ("_prior", "_gram", "_moment", "_level", "_remainder", "_weight")

    def __init__(self, n: int = 1) -> None:
        self.reset(n)

    def reset(self, n: int) -> None:
        """Forget everything and prepare for ``n`` plants."""
        self._prior: Array = np.full((n, 3), np.nan)  # a, k, r, seconds: before anything is learnt
        self._gram: Array = np.zeros((n, 3, 3))  # of equations in units of the prior, divided by the time measured
        self._moment: Array = np.zeros((n, 3))
        self._level: Array = np.full(n, np.nan)  # log time over what was predicted: neighbours, heat, an idle rank
        self._remainder: Array = np.zeros((n, _CELLS))
        self._weight: Array = np.zeros((n, _CELLS))
        self._solve()

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`'s state."""
        super().load_state_dict(state)
        self._solve()

    def observe(self, micro_batches: Array, padded: Array, recomputed: Array, seconds: Array, fill: Array) -> None:
        """Learn from the mean step of an interval.

        Args:
            micro_batches: of the step.
            padded: its padded tokens.
            recomputed: those among them whose layers were checkpointed.
            seconds: it took, data wait left out.
            fill: useful share of the time, from which the first guess of k follows; NaN = unknown.
        """
        known = np.isfinite(micro_batches * padded * recomputed * seconds)
        known &= (micro_batches > 0) & (padded > 0) & (seconds > 0)
        rows = np.stack([micro_batches, padded, recomputed], axis=1)
        rows, seconds = np.where(known[:, None], rows, 1.0), np.where(known, seconds, 1.0)
        useful = np.clip(np.where(np.isnan(fill), _USUAL_FILL, fill), 0.1, 0.98)
        token = useful * seconds / (rows[:, 1] + _RECOMPUTED * rows[:, 2])
        guess = np.stack([(1.0 - useful) * seconds / rows[:, 0], token, _RECOMPUTED * token], axis=1)
        fresh = known & np.isnan(self._prior[:, 0])
        self._prior = np.where(fresh[:, None], guess, self._prior)
        equation = rows * np.where(known[:, None], self._prior, 0.0) / seconds[:, None]
        equation = np.fmin(equation, 10.0)  # shares of the time, whatever a broken clock makes of them
        # What is slow beyond noise (a neighbour, heat) is not due to a, k or r.
        excess = np.abs(np.log(np.where(known, seconds / (rows * self.coefficients).sum(axis=1), 1.0)))
        weight = np.where(known, np.clip((_DISTURBED / np.fmax(excess, _DISTURBED)) ** 2, _LEAST_WEIGHT, 1.0), 0.0)
        fade = _FADE**weight
        self._gram *= fade[:, None, None]
        self._gram += weight[:, None, None] * equation[:, :, None] * equation[:, None, :]
        self._moment = self._moment * fade[:, None] + weight[:, None] * equation
        self._solve()

    def log_seconds(self, packing: Packing) -> Array:
        """Logarithm of a step's seconds by the equation alone, shape ``(n, candidates)``; NaN before any knowledge."""
        a, k, r = np.moveaxis(self.coefficients[:, :, None], 1, 0)
        return np.log(a * packing.micro_batches + k * packing.padded_tokens + r * packing.recomputed_tokens)

    def compare(self, octave: Array, excess: Array, moved: Mask, settled: Mask) -> None:
        """Learn what the equation leaves unexplained.

        While the budget is held, a change of the excess is a disturbance, which concerns all budgets alike; the first
        measurement at a new budget is about that budget.

        Args:
            octave: log2 budget in force.
            excess: log of the seconds measured over the seconds that were predicted for this budget.
            moved: where the budget is another one than in the measurement before.
            settled: where the measurement counts.
        """
        known = settled & np.isfinite(excess) & np.isfinite(octave)
        fresh = known & np.isnan(self._level)
        self._level = np.where(fresh, excess, self._level)
        row, cell = np.arange(len(octave)), self._cell(octave)
        self._weight = self._weight * _REMEMBERS
        about_budget = known & (moved | fresh)
        value = np.clip(np.where(about_budget, excess - self._level, 0.0), -_MOST, _MOST)
        weight = np.fmin(self._weight[row, cell], 3.0)
        self._remainder[row, cell] = np.where(
            about_budget, (weight * self._remainder[row, cell] + value) / (weight + 1.0), self._remainder[row, cell]
        )
        self._weight[row, cell] = np.where(about_budget, weight + 1.0, self._weight[row, cell])
        held = known & ~about_budget
        expected, _ = self.remainder(octave[:, None])
        self._level = np.where(held, self._level + 0.5 * (excess - expected[:, 0] - self._level), self._level)

    def remainder(self, octave: Array) -> tuple[Array, Array]:
        """Log seconds to add to the equation's at log2 budgets, and what share of it is unknown, 0..1.

        Args:
            octave: shape ``(n, candidates)``.
        """
        centres = _LOWEST + 0.5 * np.arange(_CELLS)
        distance = np.where(np.isfinite(octave), octave, _LOWEST)[:, :, None] - centres
        weight = self._weight[:, None, :] * np.exp(-0.5 * (distance / _WIDTH) ** 2)
        total = weight.sum(axis=2) + _UNKNOWN
        return (weight * self._remainder[:, None, :]).sum(axis=2) / total, _UNKNOWN / total

    def _solve(self) -> None:
        precision = np.eye(3) * (_NOISE / _PRIOR) ** 2
        solution = np.linalg.solve(self._gram + precision, (self._moment + np.diagonal(precision))[:, :, None])
        self.coefficients: Array = self._prior * np.fmax(solution[:, :, 0], 0.05)  #: a, k, r, seconds; NaN = unknown

    @staticmethod
    def _cell(octave: Array) -> NDArray[np.intp]:
        cell = np.rint(2.0 * (np.where(np.isfinite(octave), octave, _LOWEST) - _LOWEST))
        return np.clip(cell, 0, _CELLS - 1).astype(np.intp)


def step_seconds(step_time: Array, data_wait: Array) -> Array:
    """Seconds of a step without waiting for data."""
    return positive(step_time) * (1.0 - np.clip(np.where(np.isnan(data_wait), 0.0, data_wait), 0.0, 0.98))
