"""What a power limit does to speed, watts, heat and energy: a generic curve fitted while the training runs.

Power is in units of the highest limit seen, ``s`` the static share, ``d`` the dynamic power, ``u`` its share of what is
drawn under the highest limit:

    d^-e = w^-e + (limit - s)^-e          power fluctuates: a limit cuts peaks before it reaches the mean; w is fitted
    speed = min(steep u, 1 - slope (1 - u))      voltage at its floor, above it both fall; slope is fitted
    T -> T_settled = ambient + R power           first order with time constant `_SINK_S`; ambient and R are fitted

The form was fitted to public traces of power-limited training (J. You et al., "Zeus: Understanding and Optimizing GPU
Energy Consumption of DNN Training", NSDI 2023).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..runtime.filters import ArrayState
from ..runtime.telemetry import Telemetry
from .budget import positive

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

_STATIC, _EVENNESS, _STEEP = 0.2, 3.0, 1.47
_SLOPE = 0.15  # until it is measured: optimistic, so that it is tried where that may pay
_CLOCK_BOUND = 0.95  # share of a step's time that the clock decides
_LEAST = 0.3  # smallest limit that is considered
_LEAST_SAVING = 0.78  # ... to save energy: where speed collapses below is known only once it has happened
_LIMITS = np.linspace(1.0, _LEAST, 36)
_SINK_S = 60.0
_AMBIENT_C = 27.0  # around the device, to begin with
_HOT_C = 70.0  # below this it is not heat that takes the clock down
_BELOW_LIMIT, _BELOW_THROTTLING = 1.5, 1.0  # degrees C of margin
_AHEAD = 0.01  # share of an energy budget that may be used ahead of the job's progress
_HORIZON = 4  # intervals that heat is planned over ...
_PACE_HORIZON = 10  # ... and energy
_LOADER_BOUND = 0.05  # data_wait_fraction above which it is the loader that decides
_WORTH = 0.008  # of the objective: below it the limit stays


class PowerPlanner(ArrayState):
    """Plans the power limit.

    Args:
        throughput: weight of log speed.
        energy: weight of log energy a token.
        n: number of plants.
    """

    _state = ("_full", "_limit", "_uncut", "_slope", "_full_clock", "_temperature", "_settled", "_throttles", "_used",
              "_progress", "allowed")  # fmt: skip

    def __init__(self, throughput: float, energy: float, n: int = 1) -> None:
        self.throughput, self.energy = throughput, energy
        self.reset(n)

    def reset(self, n: int) -> None:
        """Forget everything and prepare for ``n`` plants."""
        self._full: Array = np.full(n, np.nan)  # highest limit seen, W
        self._limit: Array = np.full(n, np.nan)  # in the interval before, W
        self._uncut: Array = np.full(n, np.nan)  # w^-e
        self._slope: Array = np.full(n, _SLOPE)
        self._full_clock: Array = np.full(n, np.nan)  # clock_fraction under the highest limit
        self._temperature: Array = np.full(n, np.nan)  # in the interval before, degrees C
        self._settled: Array = np.full(n, np.nan)  # temperature that the present power leads to
        self._throttles: Array = np.full(n, np.inf)  # temperature at which heat was seen to take the clock down
        self._used: Array = np.full(n, np.nan)  # of the energy budget, in the interval before
        self._progress: Array = np.full(n, np.nan)
        self.allowed: Array = np.full(n, np.inf)  #: mean watts that heat and energy budget allow

    def plan(self, telemetry: Telemetry) -> Array:
        """Power limit for the next interval, W; NaN = leave (no such control, or power is not measured)."""
        limit, watts = positive(telemetry.power_limit_w), positive(telemetry.power_w)
        self._full = np.fmax(self._full, limit)
        share, drawn = limit / self._full, watts / self._full
        held = np.abs(limit - self._limit) < 1e-3 * limit
        self._limit = limit
        throttled = np.where(np.isnan(telemetry.throttled), 0.0, telemetry.throttled)
        self._learn_curve(share, drawn, telemetry.clock_fraction, (held | np.isnan(self._uncut)) & (throttled < 0.02))
        self.allowed = np.fmin(self._heat(telemetry, watts, throttled), self._energy(telemetry, watts))

        limits = np.broadcast_to(_LIMITS, (len(limit), len(_LIMITS)))
        value, power = self._value(limits, telemetry.data_wait_fraction)
        feasible = power <= (self.allowed / self._full)[:, None] * (1.0 + 1e-9)
        saving = feasible & (limits >= _LEAST_SAVING)
        choice = np.where(saving, value, -np.inf).argmax(axis=1)
        most = np.where(feasible.any(axis=1), feasible.argmax(axis=1), len(_LIMITS) - 1)  # limits descend
        choice = np.where(saving.any(axis=1), choice, most)
        now, now_power = self._value(share[:, None], telemetry.data_wait_fraction)
        rows = np.arange(len(limit))
        stays = (now_power[:, 0] <= self.allowed / self._full) & (value[rows, choice] < now[:, 0] + _WORTH)
        return np.where(np.isnan(self._uncut) | stays, np.nan, _LIMITS[choice] * self._full)

    def _learn_curve(self, share: Array, drawn: Array, clock: Array, settled: Mask) -> None:
        """Fit w and the slope to an interval throughout which the limit was held."""
        dynamic, room = np.fmax(drawn - _STATIC, 0.02), np.fmax(share - _STATIC, 0.05)
        uncut = np.clip(dynamic**-_EVENNESS - room**-_EVENNESS, 1.5**-_EVENNESS, 0.02**-_EVENNESS)
        known = settled & np.isfinite(uncut)
        self._uncut = np.where(known & np.isnan(self._uncut), uncut, self._uncut)
        self._uncut = np.where(known, self._uncut + 0.3 * (uncut - self._uncut), self._uncut)

        clock = positive(clock)
        full = settled & np.isfinite(clock) & (share > 0.99)
        self._full_clock = np.where(full & np.isnan(self._full_clock), clock, self._full_clock)
        self._full_clock = np.where(full, self._full_clock + 0.3 * (clock - self._full_clock), self._full_clock)
        reached = self._dynamic(share[:, None])[:, 0] / self._dynamic(np.ones((len(share), 1)))[:, 0]
        slope = np.clip((1.0 - clock / self._full_clock) / np.fmax(1.0 - reached, 0.02), 0.02, 1.0)
        cut = settled & np.isfinite(slope) & (reached < 0.95) & (reached > 0.7)
        self._slope = np.where(cut, self._slope + 0.3 * (slope - self._slope), self._slope)

    def _dynamic(self, limits: Array) -> Array:
        """Dynamic power under limits, shape ``(n, limits)``."""
        room = np.fmax(limits - _STATIC, 0.02)
        return (self._uncut[:, None] + room**-_EVENNESS) ** (-1.0 / _EVENNESS)

    def _value(self, limits: Array, data_wait: Array) -> tuple[Array, Array]:
        """Objective and mean power under limits, each of shape ``(n, limits)``."""
        dynamic = self._dynamic(limits)
        reached = dynamic / self._dynamic(np.ones((len(limits), 1)))
        speed = np.minimum(_STEEP * reached, 1.0 - self._slope[:, None] * (1.0 - reached))
        time = 1.0 - _CLOCK_BOUND + _CLOCK_BOUND / speed
        # Where loading decides, a slower device costs nothing until it becomes the bottleneck.
        wait = np.where(np.isnan(data_wait), 0.0, data_wait)[:, None]
        time = np.where(wait > _LOADER_BOUND, np.fmax((1.0 - wait) * time, 1.0), time)
        power = _STATIC + dynamic
        return -(self.throughput + self.energy) * np.log(time) - self.energy * np.log(power), power

    def _heat(self, telemetry: Telemetry, watts: Array, throttled: Array) -> Array:
        """Mean watts that keep the temperature below its limit over the horizon; infinite where nothing is known."""
        temperature = telemetry.temperature_c
        remains = np.exp(-positive(telemetry.interval_s) / _SINK_S)
        remains = np.where(remains < 0.999, remains, np.nan)  # an interval too short to tell anything
        settled = (temperature - remains * self._temperature) / (1.0 - remains)
        self._temperature = np.where(np.isnan(temperature), self._temperature, temperature)
        self._settled = np.where(np.isnan(self._settled), settled, self._settled)
        self._settled = np.where(np.isnan(settled), self._settled, self._settled + 0.3 * (settled - self._settled))
        hot = (throttled > 0.02) & (temperature > _HOT_C)
        self._throttles = np.where(hot, np.fmin(self._throttles, temperature), self._throttles)

        limit = np.fmin(telemetry.temperature_limit_c - _BELOW_LIMIT, self._throttles - _BELOW_THROTTLING)
        left = remains**_HORIZON
        bearable = (limit - self._temperature * left) / (1.0 - left)
        resistance = np.clip((self._settled - _AMBIENT_C) / watts, 0.02, 5.0)
        # Rising is believed at once, falling only in the mean.
        allowed = watts + (bearable - np.fmax(self._settled, settled)) / resistance
        return np.where(np.isnan(allowed), np.inf, np.fmax(allowed, 0.0))

    def _energy(self, telemetry: Telemetry, watts: Array) -> Array:
        """Mean watts that keep the energy used at the pace of the job; infinite where there is no such budget."""
        used, progress = telemetry.energy_budget_used, telemetry.job_progress
        per_interval, advance = used - self._used, progress - self._progress
        self._used = np.where(np.isnan(used), self._used, used)
        self._progress = np.where(np.isnan(progress), self._progress, progress)
        ahead = used - progress
        room = (_AHEAD - ahead) / _PACE_HORIZON + advance
        allowed = watts * np.fmax(room, 0.0) / np.where(per_interval > 0, per_interval, np.nan)
        return np.where(np.isnan(allowed), np.inf, allowed)
