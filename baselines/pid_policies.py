"""PID policies: the textbook loop on utilisation and the loop on memory, both moving the micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..runtime.controls import Controls
from ..runtime.errors import ConfigError
from ..runtime.filters import ArrayState, ExponentialFilter, MovingAverage, signed_exp, signed_log
from ..runtime.policy import State
from ..runtime.telemetry import Telemetry
from .budget import positive, present_budget
from .pid import PIDController

Array = NDArray[np.float64]

#: A setting in force further than this from the one proposed was limited by the guard, and the integral must know.
#: Below it lie rounding and the guard's hysteresis, which must not eat a slow integral's small steps.
_LIMITED_OCTAVES = np.log2(1.1)


def computing_fill(telemetry: Telemetry) -> Array:
    """``fill`` of the time that was not spent waiting for data, shape ``(n,)``; NaN where either is not measured.

    A larger micro-batch fills the device better while it computes, and does nothing for a slow loader.
    """
    return telemetry.fill / positive(1.0 - telemetry.data_wait_fraction)


class MicroBatchPID(ArrayState):
    """A PID loop whose output sets the micro-batch relative to the one in force at the start.

    The token budget and the sample cap move in proportion, since either may be the one that binds. A cap that is not
    in force stays unset; a budget that is not is begun at the size of the training's own micro-batches.

    Time is counted in control intervals: the actuator moves once an interval and the plant answers within it, so that
    gains suit intervals of any length. An out-of-memory error halves the micro-batch. Whatever the guard or a clip
    below applied instead of the output is fed back into the integral.
    """

    _state = ("_budget", "_cap", "_measured")

    def __init__(
        self,
        controller: PIDController,
        *,
        filter: Literal["exponential", "moving-average"],
        filter_intervals: float,
        max_step_octaves: float,
    ) -> None:
        if not max_step_octaves > 0:
            raise ConfigError(f"max_step_octaves={max_step_octaves} must be > 0: 1 lets a micro-batch double at most")
        if filter == "exponential":
            self._filter = ExponentialFilter(time_constant=filter_intervals)
        elif filter == "moving-average":
            if filter_intervals < 1 or filter_intervals != int(filter_intervals):
                raise ConfigError(f"filter_intervals={filter_intervals} must be a whole number for a moving average")
            self._filter = MovingAverage(int(filter_intervals))
        else:
            raise ConfigError(f"filter={filter!r} must be 'exponential' or 'moving-average'")
        self._pid = controller
        self.max_step_octaves = max_step_octaves
        self.reset(1)

    def reset(self, n: int, seed: int | None = None) -> None:
        """Forget everything and prepare for ``n`` plants; ``seed`` has no use here."""
        self._pid.reset(n)
        self._filter.reset(n)
        self._budget: Array = np.full(n, np.nan)  # token budget in force at the start
        self._cap: Array = np.full(n, np.nan)  # sample cap in force at the start
        self._measured: Array = np.full(n, np.nan)  # filtered measurement

    def act(self, telemetry: Telemetry) -> Controls:
        """Micro-batch for the next interval."""
        raw = self._measure(telemetry)
        self._measured = self._filter.update(raw)
        measurement = self._scaled(np.where(np.isnan(raw), np.nan, self._measured))

        if np.isnan(self._budget).any():
            self._budget = np.where(np.isnan(self._budget), present_budget(telemetry), self._budget)
        if np.isnan(self._cap).any():
            self._cap = np.where(np.isnan(self._cap), positive(telemetry.micro_batch_cap), self._cap)
        by_budget = np.log2(positive(telemetry.token_budget) / self._budget)
        by_cap = np.log2(positive(telemetry.micro_batch_cap) / self._cap)
        in_force = np.where(np.isfinite(by_budget), by_budget, np.where(np.isfinite(by_cap), by_cap, 0.0))

        limited = np.abs(in_force - self._octaves(self._pid.output)) > _LIMITED_OCTAVES
        if limited.any():
            self._pid.track(np.where(limited, self._output(in_force), np.nan))
        self._adapt(measurement)
        octaves = self._octaves(self._pid.update(measurement, 1.0))
        octaves = np.fmin(np.fmax(octaves, in_force - self.max_step_octaves), in_force + self.max_step_octaves)

        halved = np.where(telemetry.oom_count > 0, in_force - 1.0, np.inf)
        cut = np.fmin(self._safe_octaves(telemetry, raw, in_force), halved)
        forced = cut < octaves
        if forced.any():
            self._pid.manual(np.where(forced, self._output(cut), np.nan), measurement)
            octaves = np.where(forced, cut, octaves)
        factor = np.exp2(octaves)
        return Controls.of(telemetry.n, token_budget=self._budget * factor, micro_batch_cap=self._cap * factor)

    def state_dict(self) -> State:
        """References, filter and controller."""
        own = super().state_dict()
        return {**own, "filter": self._filter.state_dict(), "pid": self._pid.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`'s state."""
        super().load_state_dict(state)
        self._filter.load_state_dict(state["filter"])
        self._pid.load_state_dict(state["pid"])

    def diagnostics(self) -> Mapping[str, Any]:
        """P, I and D terms (controller units), and setpoint, filtered measurement and error (measurement units)."""
        terms, scale = self._pid.terms, self._scaled(np.ones(()))
        return {
            "p": terms.proportional,
            "i": terms.integral,
            "d": terms.derivative,
            "setpoint": np.broadcast_to(self._pid.setpoint / scale, self._measured.shape),
            "measurement": self._measured,
            "error": self._pid.error / scale,
        }

    def explain(self) -> str:
        """Why the first plant's micro-batch is as it is, for the console."""
        measured, setpoint = float(self._measured[0]), float(self.diagnostics()["setpoint"].flat[0])
        side = "below" if measured < setpoint else "above"
        return f"{self._name} {measured:.2f} {side} {setpoint:.2f}" if np.isfinite(measured) else ""

    _name = "measurement"

    def _measure(self, telemetry: Telemetry) -> Array:
        """The controlled variable, 0..1, NaN where not measured."""
        raise NotImplementedError

    def _scaled(self, measurement: Array) -> Array:
        """The measurement in the controller's unit."""
        return measurement

    def _octaves(self, output: Array) -> Array:
        """Controller output -> octaves relative to the micro-batch at the start."""
        return output

    def _output(self, octaves: Array) -> Array:
        """The inverse of `_octaves`."""
        return octaves

    def _adapt(self, measurement: Array) -> None:
        """Change the controller's gains before it is given ``measurement`` (its unit, NaN = not measured)."""

    def _safe_octaves(self, telemetry: Telemetry, raw: Array, in_force: Array) -> ArrayLike:
        """Most octaves that the latest measurement allows, whatever the controller says."""
        return np.inf


class UtilizationPID(MicroBatchPID):
    """The textbook loop: hold GPU utilisation at a setpoint by the micro-batch's size.

    Measured is ``gpu_utilization``; where there is none, ``fill`` stands in. Or, with ``signal="fill"``, the fill of
    the time that was not spent waiting for data, which unlike NVML's figure does not saturate. The error is in percent
    points. The output u passes through ``signed_log``, which compresses large corrections, and is the logarithm of the
    micro-batch's change since the start: ``micro-batch = start x (1 + u)`` for u > 0 and ``start / (1 + |u|)`` for
    u < 0. So u = 1 doubles and u = -1 halves, and an empty controller leaves everything as it is.

    Args:
        setpoint: utilisation to hold, 0..1.
        kp: change u per percent point of error.
        ki: the same per interval.
        kd: the same times one interval.
        signal: ``"utilization"`` or ``"fill"``, see above.
        compress: whether u passes through ``signed_log``; otherwise u is octaves, and the loop equally fast however far
            it has come.
        recompute: whether the budget may grow beyond what fits with no layer checkpointed; if not,
            ``fit_tokens_uncheckpointed`` bounds it, or the longest sample to come, which has to fit in any case.
        derivative_time: time constant of the derivative's filter, intervals.
        filter: ``"exponential"`` or ``"moving-average"``.
        filter_intervals: the filter's time constant, or its window, in intervals.
        max_octaves: most octaves away from the micro-batch at the start.
        max_step_octaves: most octaves in one interval.

    Raises:
        ConfigError: a value that cannot be used.
    """

    def __init__(
        self,
        setpoint: float = 0.70,
        kp: float = 0.02,
        ki: float = 0.03,
        kd: float = 0.01,
        *,
        signal: Literal["utilization", "fill"] = "utilization",
        compress: bool = True,
        recompute: bool = True,
        derivative_time: float = 1.0,
        filter: Literal["exponential", "moving-average"] = "exponential",
        filter_intervals: float = 1.0,
        max_octaves: float = 8.0,
        max_step_octaves: float = 1.0,
    ) -> None:
        if not max_octaves > 0:
            raise ConfigError(f"max_octaves={max_octaves} must be > 0")
        if signal not in ("utilization", "fill"):
            raise ConfigError(f"signal={signal!r} must be 'utilization' or 'fill'")
        for name, value in (("compress", compress), ("recompute", recompute)):
            if not isinstance(value, bool):
                raise ConfigError(f"{name}={value!r} must be true or false")
        self.signal, self.compress, self.recompute = signal, compress, recompute
        reach = float(self._output(np.asarray(max_octaves)))
        controller = PIDController(
            kp,
            ki,
            kd,
            100.0 * _fraction("setpoint", setpoint),
            output_limits=(-reach, reach),
            derivative_time=derivative_time,
        )
        super().__init__(
            controller, filter=filter, filter_intervals=filter_intervals, max_step_octaves=max_step_octaves
        )

    _name = "utilisation"

    def _measure(self, telemetry: Telemetry) -> Array:
        if self.signal == "fill":
            return computing_fill(telemetry)
        return np.where(np.isnan(telemetry.gpu_utilization), telemetry.fill, telemetry.gpu_utilization)

    def _safe_octaves(self, telemetry: Telemetry, raw: Array, in_force: Array) -> ArrayLike:
        if self.recompute:
            return np.inf
        fits = positive(telemetry.fit_tokens_uncheckpointed)
        return np.log2(np.where(np.isnan(fits), np.inf, np.fmax(fits, positive(telemetry.upcoming_max))) / self._budget)

    def _scaled(self, measurement: Array) -> Array:
        return 100.0 * measurement

    def _octaves(self, output: Array) -> Array:
        return signed_log(output) / np.log(2.0) if self.compress else output

    def _output(self, octaves: Array) -> Array:
        return signed_exp(octaves * np.log(2.0)) if self.compress else octaves


class MemoryPID(MicroBatchPID):
    """Hold the memory peak at a setpoint by the token budget's logarithm.

    Measured is ``memory_peak_fraction``, or ``memory_device_fraction`` (all processes) where that is higher. The
    output is octaves relative to the micro-batch at the start. A peak above the cap cuts the budget at once, by the
    ratio of setpoint to peak, without waiting for filter and integral.

    Args:
        setpoint: memory peak to hold, fraction of capacity.
        memory_cap: peak above which the budget is cut at once, at least the setpoint.
        kp: octaves per unit of memory fraction.
        ki: the same per interval.
        kd: the same times one interval.
        derivative_time: time constant of the derivative's filter, intervals.
        filter: ``"exponential"`` or ``"moving-average"``.
        filter_intervals: the filter's time constant, or its window, in intervals.
        max_octaves: most octaves away from the micro-batch at the start.
        max_step_octaves: most octaves in one interval.

    Raises:
        ConfigError: a value that cannot be used.
    """

    def __init__(
        self,
        setpoint: float = 0.80,
        memory_cap: float = 0.90,
        kp: float = 0.4,
        ki: float = 0.8,
        kd: float = 0.1,
        *,
        derivative_time: float = 1.0,
        filter: Literal["exponential", "moving-average"] = "exponential",
        filter_intervals: float = 0.5,
        max_octaves: float = 8.0,
        max_step_octaves: float = 1.0,
    ) -> None:
        self.setpoint = _fraction("setpoint", setpoint)
        self.memory_cap = _fraction("memory_cap", memory_cap)
        if self.memory_cap < self.setpoint:
            raise ConfigError(f"memory_cap={memory_cap} must not be below setpoint={setpoint}")
        if not max_octaves > 0:
            raise ConfigError(f"max_octaves={max_octaves} must be > 0")
        controller = PIDController(
            kp, ki, kd, self.setpoint, output_limits=(-max_octaves, max_octaves), derivative_time=derivative_time
        )
        super().__init__(
            controller, filter=filter, filter_intervals=filter_intervals, max_step_octaves=max_step_octaves
        )

    _name = "peak memory"

    def _measure(self, telemetry: Telemetry) -> Array:
        return np.fmax(telemetry.memory_peak_fraction, telemetry.memory_device_fraction)

    def _safe_octaves(self, telemetry: Telemetry, raw: Array, in_force: Array) -> ArrayLike:
        return np.where(raw > self.memory_cap, in_force + np.log2(self.setpoint / np.fmax(raw, self.setpoint)), np.inf)


def _fraction(name: str, value: float) -> float:
    """``value`` if it lies between 0 and 1, both excluded."""
    if not 0.0 < value < 1.0:
        raise ConfigError(f"{name}={value} must lie between 0 and 1 (a fraction, not percent), such as 0.8")
    return float(value)
