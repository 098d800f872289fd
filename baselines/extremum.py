"""Extremum seeking: climb tokens/s by wobbling the token budget and watching what speed does.

K. B. Ariyur, M. Krstic, "Real-Time Optimization by Extremum-Seeking Control", Wiley 2003, ch. 1. With ``x`` the log2
budget in force, ``y`` the logarithm of tokens/s, a dither ``a s(k)`` of period ``P``, and ``HP``, ``LP`` first-order
filters:

    y~ = HP y,  x~ = HP x                 wash out what does not move with the dither
    c += w (x~ y~ - c),  v += w (x~^2 - v)     synchronous demodulation through a low pass (LP)
    theta += clip(gain c / v, -step, step)      integrate the slope, in octaves
    budget = 2^(theta + a s(k))

The textbook demodulates with the dither itself, which assumes that the plant shows it one sample later. Here the budget
that is in force takes its place, so that what a guard cut off, or what comes later, is not taken for a slope.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..runtime.controls import Controls
from ..runtime.errors import ConfigError
from ..runtime.filters import ArrayState, ExponentialFilter
from ..runtime.policy import State
from ..runtime.telemetry import Telemetry
from .budget import positive, present_budget

Array = NDArray[np.float64]

_CHANGE = 0.3  # log speed that no dither explains within an interval: a neighbour, other lengths, a redone step
_LEAST_VARIANCE = 1e-3  # octaves^2 of dither seen, below which no slope can be told
_SLOPE_BELIEVED = 0.05  # octaves^2 of prior around slope 0: what one interval says is not yet believed in full


class ExtremumSeekingPolicy(ArrayState):
    """Climbs real tokens/s over the token budget without a model: a dither, a demodulator and an integrator.

    Speed is taken in logarithms, so that the gain is the same on every device, and per interval without what an
    out-of-memory error cost. A change that no dither explains starts the filters anew. An out-of-memory error halves
    the budget around which it wobbles, and ``ceiling`` intervals long nothing above that is tried.

    Args:
        amplitude: of the dither, octaves; above 0.07, or the guard's hysteresis swallows it.
        period: of the dither, intervals, even.
        gain: octaves that the budget moves per unit of slope (log speed an octave) in an interval.
        max_step_octaves: most of them in an interval.
        shape: of the dither. A square one changes the budget only twice a period; every change costs the device a
            little time.
        ceiling: intervals after an out-of-memory error without a way up.

    Raises:
        ConfigError: a value that cannot be used.
    """

    _state = ("_theta", "_time", "_covariance", "_variance", "_ceiling", "_patience")

    def __init__(
        self,
        amplitude: float = 0.25,
        period: int = 6,
        gain: float = 0.5,
        *,
        max_step_octaves: float = 0.3,
        shape: Literal["square", "sine"] = "square",
        ceiling: int = 10,
    ) -> None:
        for name, value in (("amplitude", amplitude), ("gain", gain), ("max_step_octaves", max_step_octaves)):
            if not 0 < value < np.inf:
                raise ConfigError(f"{name}={value} must be a finite number > 0")
        if not period >= 2 or period % 2:
            raise ConfigError(f"period={period} must be an even number of intervals >= 2")
        if shape not in ("square", "sine"):
            raise ConfigError(f"shape={shape!r} must be 'square' or 'sine'")
        if not 0 <= ceiling < np.inf:
            raise ConfigError(f"ceiling={ceiling} must be a number of intervals >= 0")
        self.amplitude, self.period, self.gain = float(amplitude), int(period), float(gain)
        self.max_step_octaves, self.shape, self.ceiling = float(max_step_octaves), shape, float(ceiling)
        # The wash-out forgets within a period, the demodulator averages over one.
        self._speed = ExponentialFilter(time_constant=self.period)
        self._budget = ExponentialFilter(time_constant=self.period)
        self._weight = -np.expm1(-1.0 / self.period)
        self.reset(1)

    def reset(self, n: int, seed: int | None = None) -> None:
        """Forget everything and prepare for ``n`` plants; ``seed`` has no use, the dither is periodic."""
        self._speed.reset(n)
        self._budget.reset(n)
        self._theta: Array = np.full(n, np.nan)  # log2 budget around which it wobbles
        self._time: Array = np.zeros(n)  # intervals, the dither's phase
        self._covariance: Array = np.zeros(n)  # of budget and log speed, octaves
        self._variance: Array = np.zeros(n)  # of the budget, octaves^2
        self._ceiling: Array = np.full(n, np.inf)  # log2 budget, after an out-of-memory error
        self._patience: Array = np.zeros(n)  # intervals until the ceiling is lifted

    @property
    def slope(self) -> Array:
        """Estimated d(log speed) / d(octave), shape ``(n,)``."""
        return self._covariance / (self._variance + _LEAST_VARIANCE + _SLOPE_BELIEVED * self.amplitude**2)

    def act(self, telemetry: Telemetry) -> Controls:
        """Token budget for the next interval."""
        octave = np.log2(present_budget(telemetry))
        failed = telemetry.oom_count > 0
        speed = np.where(failed, np.nan, np.log(positive(telemetry.tokens_per_s)))

        jump = np.abs(speed - self._speed.value) > _CHANGE + np.abs(octave - self._budget.value)
        for each, now in ((self._speed, speed), (self._budget, octave)):
            each.value = np.where(jump, now, each.value)
        before = self._speed.value, self._budget.value
        known = np.isfinite(speed) & np.isfinite(octave) & np.isfinite(before[0]) & np.isfinite(before[1])
        y, x = np.where(known, speed - before[0], 0.0), np.where(known, octave - before[1], 0.0)
        self._speed.update(np.where(np.isfinite(octave), speed, np.nan))
        self._budget.update(np.where(np.isfinite(speed), octave, np.nan))
        weight = np.where(known & ~jump, self._weight, 0.0)
        self._covariance = self._covariance + weight * (x * y - self._covariance)
        self._variance = self._variance + weight * (x * x - self._variance)

        # Where the guard keeps the budget elsewhere, it is from there that the way goes on.
        refused = np.abs(octave - self._theta) > self.amplitude + self.max_step_octaves
        self._theta = np.where(np.isnan(self._theta) | refused, octave, self._theta)
        step = np.clip(self.gain * self.slope, -self.max_step_octaves, self.max_step_octaves)
        self._theta = self._theta + np.where(known, step, 0.0)

        self._patience = np.where(failed, self.ceiling, self._patience - 1.0)
        held = np.where(self._patience > 0, self._ceiling, np.inf)
        self._ceiling = np.where(failed & np.isfinite(octave), octave - 1.0, held)
        self._theta = np.minimum(self._theta, self._ceiling - self.amplitude)  # NaN, an unknown budget, stays NaN
        self._time = self._time + 1.0
        return Controls.of(telemetry.n, token_budget=np.exp2(self._theta + self.amplitude * self._dither()))

    def state_dict(self) -> State:
        """Integrator, demodulator, phase and filters."""
        own = super().state_dict()
        return {**own, "speed": self._speed.state_dict(), "budget": self._budget.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`'s state."""
        super().load_state_dict(state)
        self._speed.load_state_dict(state["speed"])
        self._budget.load_state_dict(state["budget"])

    def diagnostics(self) -> Mapping[str, Any]:
        """The budget around which it wobbles (tokens) and the slope there (log speed an octave)."""
        return {"budget_goal": np.exp2(self._theta), "slope": self.slope}

    def explain(self) -> str:
        """Which way the first plant's slope points, for the console."""
        slope = float(self.slope[0])
        return f"speed {'rises' if slope > 0 else 'falls'} by {abs(slope):.1%} an octave" if slope else ""

    def _dither(self) -> Array:
        """s(k), between -1 and 1."""
        phase = self._time % self.period / self.period
        if self.shape == "square":
            return np.where(phase < 0.5, 1.0, -1.0)
        return np.sin(2.0 * np.pi * phase)
