"""Climb a noisy, smooth, single-peaked response over log2(token budget), for n plants at once.

A table of half-octave cells keeps what each budget gave. A quadratic is fitted to the table around the budget in
force by Bayesian least squares; its slope has a prior from `fill`. The climb moves to where the fit's upper confidence
bound gains most and rests when no neighbour can gain anything worth the way. At rest it looks aside now and then.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..runtime.filters import ArrayState, ChangeDetector
from ..runtime.policy import State

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

_LOWEST = 4.0  # log2 tokens of the first cell
_CELLS = 37  # ... up to 2^22 in half octaves
_MEMORY = 10.0  # intervals that a cell's mean remembers
_FADE = 0.995  # what every cell's weight keeps per interval, so that old knowledge is questioned in the end
_REACH = 1.5  # octaves around the present budget within which a quadratic is trusted
_STEPS = np.array([1.0, -1.0, 0.5, -0.5])  # octaves tried from the present budget; the first wins a tie
_CONFIDENCE = 1.0  # standard deviations of optimism about a budget not well known
_WORTH = 0.015  # log speed that a move must promise
_CURVATURE = -0.04, 0.05  # prior of log speed per octave^2, mean and standard deviation: flat within an octave
_FIRST_PROBE, _LAST_PROBE = 6.0, 64.0  # intervals between two looks aside at rest


class BudgetClimber(ArrayState):
    """Finds the token budget of highest speed.

    Args:
        noise: relative standard deviation of a speed measurement to begin with; it is then learnt.
        n: number of plants.
    """

    _state = ("_weight", "_octave", "_speed", "home", "resting", "_wait", "_patience", "_probing", "_capped")

    def __init__(self, noise: float = 0.07, n: int = 1) -> None:
        self._level = ChangeDetector(noise)
        self.reset(n)

    def reset(self, n: int) -> None:
        """Forget everything and prepare for ``n`` plants."""
        self._level.reset(n)
        self._weight: Array = np.zeros((n, _CELLS))  # measurements in a cell, faded
        self._octave: Array = np.zeros((n, _CELLS))  # their mean log2 budget
        self._speed: Array = np.zeros((n, _CELLS))  # their mean log speed
        self.home: Array = np.full(n, np.nan)  #: log2 budget that the climb has reached
        self.resting: Array = np.zeros(n)  #: 1 where the climb has found nothing better around `home`
        self._wait: Array = np.zeros(n)  # intervals until the next look aside
        self._patience: Array = np.full(n, _FIRST_PROBE)
        self._probing: Array = np.zeros(n)  # 1 while a look aside is under way
        self._capped: Array = np.zeros(n)  # 1 where the climb came to rest for want of room above

    def forget(self, where: Mask) -> None:
        """Start the climb anew on the plants in ``where``, from the budget in force."""
        self._weight = np.where(where[:, None], 0.0, self._weight)
        self._level.forget(where)
        self.resting = np.where(where, 0.0, self.resting)
        self._probing = np.where(where, 0.0, self._probing)
        self._capped = np.where(where, 0.0, self._capped)
        self._patience = np.where(where, _FIRST_PROBE, self._patience)

    def expected(self, octave: Array) -> Array:
        """Mean log speed seen so far at a log2 budget, NaN where its cell was never visited."""
        row, cell = np.arange(len(octave)), self._cell(octave)
        return np.where((self._weight[row, cell] > 0) & np.isfinite(octave), self._speed[row, cell], np.nan)

    @property
    def best(self) -> Array:
        """Highest mean log speed in the table, NaN while it is empty."""
        seen = np.where(self._weight > 0, self._speed, -np.inf).max(axis=1)
        return np.where(np.isfinite(seen), seen, np.nan)

    def observe(self, octave: Array, speed: Array) -> Mask:
        """Take one interval's log speed at a log2 budget (NaN = not measured).

        Returns:
            Where the response has changed: there the table was cleared and the climb begins anew.
        """
        row, cell = np.arange(len(octave)), self._cell(octave)
        known = np.isfinite(octave) & np.isfinite(speed)
        residual = np.where(known, speed - self.expected(octave), np.nan)
        # A mean of w measurements is uncertain itself: bring residuals to one measurement's standard deviation.
        spread = np.sqrt(1.0 + 1.0 / np.fmax(self._weight[row, cell], 1.0))
        changed = self._level.update(residual / spread)
        self.forget(changed)

        limit = 3.0 * self._level.deviation * spread  # an outlier moves the table no more than this
        value = np.where(changed | np.isnan(residual), speed, speed - residual + np.clip(residual, -limit, limit))
        self._weight = self._weight * _FADE
        weight = np.where(known, np.fmin(self._weight[row, cell], _MEMORY - 1) + 1, self._weight[row, cell])
        share = np.where(known, 1.0 / np.fmax(weight, 1.0), 0.0)
        self._weight[row, cell] = weight
        for table, new in ((self._octave, octave), (self._speed, value)):
            table[row, cell] += share * (np.where(known, new, 0.0) - table[row, cell])
        return changed

    def propose(self, octave: Array, fill: Array, low: Array, high: Array) -> Array:
        """Log2 budget for the next interval.

        Args:
            octave: log2 budget in force, NaN where unknown (the proposal is NaN there, too).
            fill: useful share of wall time, or NaN. Work ``k T`` beside a fixed cost gives d(log speed)/d(octave) =
                ln 2 (1 - fill) less what padding costs: the prior of the slope, so that a low fill means up.
            low: lowest log2 budget allowed.
            high: highest.
        """
        climbing = self.resting == 0
        seen = (self._weight > 0).any(axis=1)  # before the first measurement nothing moves
        self.home = np.where(climbing | np.isnan(self.home), octave, self.home)
        self._wait = self._wait - 1

        slope, curvature, covariance = self._fit(self.home, fill)
        target = np.clip(self.home[:, None] + _STEPS, low[:, None], high[:, None])
        step = target - self.home[:, None]
        features = np.stack([step, step**2], axis=-1)
        gain = slope[:, None] * step + curvature[:, None] * step**2
        doubt = np.sqrt(np.einsum("nsi,nij,nsj->ns", features, covariance, features))
        promise = np.where(np.abs(step) > 0.1, gain + _CONFIDENCE * doubt, -np.inf)
        choice = promise.argmax(axis=1)
        rows = np.arange(len(octave))
        goal = target[rows, choice]
        worth = (promise[rows, choice] > _WORTH) & seen

        # The fit is asked while climbing, after a look aside, and where more room above may have opened; otherwise
        # the table only gets sharper at home.
        asked = climbing | (self._probing == 1) | (self._capped == 1)
        move = asked & worth
        settle = climbing & ~worth & seen
        peak = np.where(curvature < -0.01, -slope / (2 * np.fmin(curvature, -0.01)), 0.0)
        self.home = np.where(settle, np.clip(self.home + np.clip(peak, -0.4, 0.4), low, high), self.home)
        gained_nothing = (self._probing == 1) & ~worth
        self._patience = np.where(move, _FIRST_PROBE, self._patience)
        self._patience = np.where(gained_nothing, np.fmin(2 * self._patience, _LAST_PROBE), self._patience)
        self._wait = np.where(settle | gained_nothing, self._patience, self._wait)
        self.resting = np.where(move, 0.0, np.where(settle, 1.0, self.resting))
        self._capped = np.where(settle, high < self.home + 1.0, (self._capped == 1) & ~move).astype(np.float64)

        # A look aside is half an octave towards the more promising side, for one interval, unless it is known to lose.
        aside = np.where(np.abs(_STEPS) < 1, promise, -np.inf)
        side = aside.argmax(axis=1)
        probe = (self.resting == 1) & (self._wait <= 0) & (aside[rows, side] > -_WORTH)
        self._probing = probe.astype(np.float64)
        return np.where(np.isnan(octave), np.nan, np.where(move, goal, np.where(probe, target[rows, side], self.home)))

    def state_dict(self) -> State:
        """The table, the climb's stage and the change detector."""
        return {**super().state_dict(), "level": self._level.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`'s state."""
        super().load_state_dict(state)
        self._level.load_state_dict(state["level"])

    @staticmethod
    def _cell(octave: Array) -> NDArray[np.intp]:
        cell = np.rint(2 * (np.where(np.isfinite(octave), octave, _LOWEST) - _LOWEST))
        return np.clip(cell, 0, _CELLS - 1).astype(np.intp)

    def _fit(self, centre: Array, fill: Array) -> tuple[Array, Array, Array]:
        """Slope and curvature of log speed at ``centre``, shape ``(n,)``, and their covariance, ``(n, 2, 2)``.

        Bayesian linear regression on ``[1, d, d^2]`` with weights that fall off with the distance d; the level has
        a flat prior.
        """
        distance = self._octave - np.where(np.isnan(centre), 0.0, centre)[:, None]
        weight = self._weight * np.exp(-0.5 * (distance / _REACH) ** 2) / (self._level.deviation**2)[:, None]
        total = weight.sum(axis=1)
        # Centring the speeds keeps the flat prior of the level harmless.
        speed = self._speed - ((weight * self._speed).sum(axis=1) / np.fmax(total, 1e-12))[:, None]
        moments, response, power = [], [], np.ones_like(distance)
        for exponent in range(5):
            moments.append((weight * power).sum(axis=1))
            if exponent < 3:
                response.append((weight * power * speed).sum(axis=1))
            power = power * distance
        moments, response = np.stack(moments, axis=1), np.stack(response, axis=1)

        filled = np.isfinite(fill)
        slope_mean = np.where(filled, np.log(2.0) * (1.0 - np.where(filled, fill, 0.0)) - 0.08, 0.0)
        slope_precision = np.where(filled, 1 / 0.12**2, 1 / 0.3**2)
        precision = moments[:, np.array([[0, 1, 2], [1, 2, 3], [2, 3, 4]])]
        prior = np.zeros_like(precision)
        prior[:, 0, 0] = 1e-6
        prior[:, 1, 1] = slope_precision
        prior[:, 2, 2] = 1 / _CURVATURE[1] ** 2
        response[:, 1] += slope_precision * slope_mean
        response[:, 2] += _CURVATURE[0] / _CURVATURE[1] ** 2
        covariance = np.linalg.inv(precision + prior)
        estimate = np.einsum("nij,nj->ni", covariance, response)
        return estimate[:, 1], estimate[:, 2], covariance[:, 1:, 1:]
