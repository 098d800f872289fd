"""A PID controller for n loops at once.

Parallel form, discretised with backward differences (K. J. Astroem, T. Haegglund, "Advanced PID Control", 2006, ch. 3
and 13): ``output = bias + kp e + I + D`` with ``I += ki e dt`` and ``D = -kd dy/dt`` through a first-order filter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..runtime.errors import ConfigError
from ..runtime.filters import ArrayState

Array = NDArray[np.float64]

AntiWindup = Literal["back-calculation", "clamping", "none"]

#: Terms are kept within this, so that no finite measurement makes infinity minus infinity out of them.
_HUGE = 1e300


class Terms(NamedTuple):
    """The three parts of the last output, each of shape ``(n,)``, in the output's unit."""

    proportional: Array
    integral: Array
    derivative: Array


class PIDController(ArrayState):
    """PID with filtered derivative, anti-windup, rate limit and bumpless transfer, vectorised over n loops.

    The error is ``setpoint - measurement``: with positive gains a measurement below the setpoint raises the output.
    A measurement that is not finite, or a ``dt`` that is not positive, holds the loop's output and state. On the
    features that both have, outputs equal those of the package ``simple-pid`` bit for bit
    (``anti_windup="clamping"``, no filter, no rate limit).

    Gains, setpoint and limits are scalars or arrays of shape ``(n,)``.

    Args:
        kp: proportional gain, output unit per measurement unit.
        ki: integral gain, per time unit of ``dt``.
        kd: derivative gain, times the time unit of ``dt``.
        setpoint: what the measurement shall be; may be changed at any time.
        output_limits: lower and upper bound of the output; infinite = none.
        bias: output at zero error and empty integral, also the output before the first measurement.
        derivative_time: time constant of the derivative's filter, 0 = none.
        derivative_on_measurement: take the derivative of the measurement, so that a step of the setpoint gives no
            kick; otherwise of the error.
        anti_windup: what keeps the integral from growing while the output is limited. ``"back-calculation"`` feeds
            ``applied - wanted`` back into the integral with time constant ``tracking_time``; ``"clamping"`` keeps
            ``bias + I`` within the output limits; ``"none"`` lets it grow.
        tracking_time: time constant of the feedback from the applied output. Default: ``sqrt(Ti Td)``, or ``Ti``
            without derivative (``Ti = kp / ki``, ``Td = kd / kp``); 0, which corrects at once, where kp is 0.
        rate_limit: largest change of the output per time unit; infinite = none.
        clock: tells the time where `update` is not told how much has passed; seconds by default.
        n: number of loops.

    Raises:
        ConfigError: a value that cannot be used.
    """

    _state = ("_proportional", "_integral", "_derivative", "_output", "_measurement", "_error", "_gap")

    def __init__(
        self,
        kp: ArrayLike = 1.0,
        ki: ArrayLike = 0.0,
        kd: ArrayLike = 0.0,
        setpoint: ArrayLike = 0.0,
        *,
        output_limits: tuple[ArrayLike, ArrayLike] = (-np.inf, np.inf),
        bias: ArrayLike = 0.0,
        derivative_time: ArrayLike = 0.0,
        derivative_on_measurement: bool = True,
        anti_windup: AntiWindup = "back-calculation",
        tracking_time: ArrayLike | None = None,
        rate_limit: ArrayLike = np.inf,
        clock: Callable[[], float] = time.monotonic,
        n: int = 1,
    ) -> None:
        self.kp, self.ki, self.kd = (_finite(name, gain) for name, gain in (("kp", kp), ("ki", ki), ("kd", kd)))
        self.setpoint: Array = _finite("setpoint", setpoint)
        self.bias = _finite("bias", bias)
        self.low, self.high = (np.asarray(bound, dtype=np.float64) for bound in output_limits)
        if not np.all(self.low <= self.high):
            raise ConfigError(f"output_limits={output_limits} must be (lower, upper) with lower <= upper")
        if anti_windup not in ("back-calculation", "clamping", "none"):
            raise ConfigError(f"anti_windup={anti_windup!r} must be 'back-calculation', 'clamping' or 'none'")
        self.derivative_time = _non_negative("derivative_time", derivative_time)
        self.rate_limit = _non_negative("rate_limit", rate_limit)
        self.tracking_time = None if tracking_time is None else _non_negative("tracking_time", tracking_time)
        self.derivative_on_measurement = derivative_on_measurement
        self.anti_windup: AntiWindup = anti_windup
        self.clock = clock
        self.reset(n)

    def reset(self, n: int) -> None:
        """Forget everything and prepare for ``n`` loops."""
        self._proportional: Array = np.zeros(n)
        self._integral: Array = np.zeros(n)
        self._derivative: Array = np.zeros(n)
        self._output: Array = np.clip(np.broadcast_to(self.bias, (n,)), self.low, self.high)
        self._measurement: Array = np.full(n, np.nan)
        self._error: Array = np.full(n, np.nan)
        self._gap: Array = np.zeros(n)  # time without a measurement, which the next derivative spans
        self._time = self.clock()  # of the last update; no state, since no clock survives a resume

    @property
    def output(self) -> Array:
        """The last output, shape ``(n,)``."""
        return self._output

    @property
    def error(self) -> Array:
        """The last error, shape ``(n,)``; NaN before the first measurement."""
        return self._error

    @property
    def terms(self) -> Terms:
        """The last output's P, I and D terms; with the bias they sum to it where nothing limits it."""
        return Terms(self._proportional, self._integral, self._derivative)

    def update(self, measurement: ArrayLike, dt: ArrayLike | None = None) -> Array:
        """Outputs for new measurements.

        Args:
            measurement: shape ``(n,)`` or scalar; NaN holds the loop.
            dt: time since the last update, shape ``(n,)`` or scalar; by default what the clock says.
        """
        if dt is None:
            now = self.clock()
            dt, self._time = now - self._time, now
        measurement = self._column(measurement)
        dt = np.asarray(dt, dtype=np.float64)
        ticking = np.isfinite(dt) & (dt > 0)
        live = np.isfinite(measurement) & ticking
        with np.errstate(all="ignore"):  # dead loops compute nonsense that is dropped; overflow is bounded
            error = _bounded(self.setpoint - measurement)
            proportional = _bounded(self.kp * error)
            integral = _bounded(self._integral + self.ki * error * dt)
            if self.anti_windup == "clamping":
                integral = _between(integral, self.low - self.bias, self.high - self.bias)
            change = measurement - self._measurement if self.derivative_on_measurement else self._error - error
            change = np.where(np.isnan(self._measurement), 0.0, _bounded(change))
            span = dt + self._gap
            weight = span / (self.derivative_time + span)
            derivative = (1 - weight) * self._derivative + weight * _bounded(-self.kd * change / span)
            wanted = proportional + integral + derivative + self.bias
            reach = self.rate_limit * dt
            output = _between(_between(wanted, self._output - reach, self._output + reach), self.low, self.high)
            cut = output - wanted
            if self.anti_windup == "back-calculation" and cut.any():
                integral = _bounded(integral + self._tracking_weight(dt) * cut)

        values = (proportional, integral, derivative, measurement.copy(), error, output)
        if not live.all():
            values = tuple(np.where(live, new, old) for new, old in zip(values, self._values(), strict=True))
        self._proportional, self._integral, self._derivative, self._measurement, self._error, self._output = values
        self._gap = np.where(live, 0.0, self._gap + np.where(ticking, dt, 0.0))
        return self._output

    def track(self, applied: ArrayLike, dt: ArrayLike | None = None) -> None:
        """Tell the controller what was applied instead of its last output (saturation outside, an override).

        The integral takes up the difference: all of it, or with ``dt`` the part that `tracking_time` allows, which
        leaves an overridden controller ``ki tracking_time e`` away from the applied output, ready to take over.

        Args:
            applied: the output in force, shape ``(n,)`` or scalar; NaN leaves a loop alone.
            dt: time over which it was in force.
        """
        applied = np.asarray(applied, dtype=np.float64)
        known = np.isfinite(applied)
        if not known.any():
            return
        weight = 1.0 if dt is None else self._tracking_weight(np.asarray(dt, dtype=np.float64))
        self._integral = np.where(known, _bounded(self._integral + weight * (applied - self._output)), self._integral)
        self._output = np.where(known, applied, self._output)

    def manual(self, output: ArrayLike, measurement: ArrayLike = np.nan) -> None:
        """Set the output by hand; the next `update` continues from it without a bump.

        Args:
            output: the output in force, shape ``(n,)`` or scalar; NaN leaves a loop alone.
            measurement: measured meanwhile, so that the next derivative does not span the manual phase; NaN = none.
        """
        output, measurement = self._column(output), self._column(measurement)
        by_hand = np.isfinite(output)
        if not by_hand.any():
            return
        seen = by_hand & np.isfinite(measurement)
        self._measurement = np.where(seen, measurement, self._measurement)
        self._error = np.where(seen, self.setpoint - measurement, self._error)
        self._gap = np.where(seen, 0.0, self._gap)
        proportional = np.where(np.isnan(self._error), 0.0, self.kp * self._error)
        self._proportional = np.where(by_hand, proportional, self._proportional)
        self._derivative = np.where(by_hand, 0.0, self._derivative)
        self._integral = np.where(by_hand, output - self.bias - self._proportional, self._integral)
        self._output = np.where(by_hand, output, self._output)

    def set_gains(self, kp: ArrayLike, ki: ArrayLike, kd: ArrayLike) -> None:
        """Change the gains without a bump: the integral takes up what the proportional term changes by."""
        kp, ki, kd = _finite("kp", kp), _finite("ki", ki), _finite("kd", kd)
        error = np.where(np.isnan(self._error), 0.0, self._error)
        proportional = np.broadcast_to(kp * error, self._output.shape)
        self._integral = self._integral + self._proportional - proportional
        self._proportional = proportional
        self.kp, self.ki, self.kd = kp, ki, kd

    def _values(self) -> tuple[Array, ...]:
        return (
            self._proportional, self._integral, self._derivative, self._measurement, self._error, self._output,
        )  # fmt: skip

    def _column(self, values: ArrayLike) -> Array:
        """``values`` as float64 of shape ``(n,)``; `np.broadcast_to` is slow, and seldom needed."""
        values = np.asarray(values, dtype=np.float64)
        return values if values.shape == self._output.shape else np.broadcast_to(values, self._output.shape)

    def _tracking_weight(self, dt: ArrayLike) -> Array:
        """Share of ``applied - wanted`` that the integral takes up within ``dt``."""
        if self.tracking_time is not None:
            time = self.tracking_time
        else:
            with np.errstate(all="ignore"):
                kp, ki, kd = np.abs(self.kp), np.abs(self.ki), np.abs(self.kd)
                time = np.where(kd > 0, np.sqrt(kd / ki), kp / ki)
            # Without integral action there is nothing to wind up, and a P controller must not become one with memory.
            time = np.where(ki == 0, np.inf, np.where(kp == 0, 0.0, time))
        with np.errstate(divide="ignore"):
            return -np.expm1(-np.asarray(dt, dtype=np.float64) / time)


def _between(values: Array, low: ArrayLike, high: ArrayLike) -> Array:
    """As `np.clip`, which takes twice as long on short arrays."""
    return np.minimum(np.maximum(values, low), high)


def _bounded(values: Array) -> Array:
    return _between(values, -_HUGE, _HUGE)


def _finite(name: str, value: ArrayLike) -> Array:
    array = np.asarray(value, dtype=np.float64)
    if not np.isfinite(array).all():
        raise ConfigError(f"{name}={value!r} must be finite")
    return array


def _non_negative(name: str, value: ArrayLike) -> Array:
    array = np.asarray(value, dtype=np.float64)
    if not (array >= 0).all():
        raise ConfigError(f"{name}={value!r} must be >= 0")
    return array
