"""The mapping between telemetry and observations, actions and controls: the only place that knows it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .controls import CONTROL_FIELDS, ControlLimits, Controls
from .errors import ConfigError
from .telemetry import Telemetry

Observation = NDArray[np.float32]

#: Raised with every change of an index, range or meaning below; a policy artefact names the version it was trained on.
VERSION = 1


@dataclass(frozen=True, slots=True)
class ObservationEntry:
    """One row of the documented observation."""

    index: int
    name: str
    meaning: str
    unit: str
    low: float  #: the value that is encoded as -1 (0 for flags and weights)
    high: float  #: the value that is encoded as 1
    scale: str  #: "linear", "log2", "flag" or "weight"


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    meaning: str
    unit: str
    low: float
    high: float
    log2: bool = False
    flag: bool = False  # a further entry says whether it was measured


_TOKENS = {"unit": "tokens", "low": 2.0**4, "high": 2.0**20, "log2": True}
_SHARE = {"unit": "1", "low": 0.0, "high": 1.0}

# The loss is left out on purpose: the controller decides how fast a model trains, not what it learns.
_ENTRIES: tuple[_Entry, ...] = (
    # Controls in force
    _Entry("token_budget", "token budget in force", **_TOKENS),
    _Entry("micro_batch_cap", "micro-batch cap in force", "samples", 1.0, 2.0**12, log2=True, flag=True),
    _Entry("memory_target", "memory target in force", **_SHARE, flag=True),
    _Entry("checkpoint_fraction", "share of layers checkpointed", **_SHARE),
    _Entry("num_workers", "loader workers in force", "processes", 0.0, 16.0),
    _Entry("power_limit_w", "power limit in force", "W", 2.0**5, 2.0**11, log2=True, flag=True),
    _Entry("cpu_threads", "intra-op threads in force", "threads", 1.0, 2.0**8, log2=True, flag=True),
    # Progress
    _Entry("tokens_per_s", "real tokens per second", "tokens/s", 2.0**4, 2.0**20, log2=True),
    _Entry("step_time_s", "seconds an optimizer step", "s", 2.0**-6, 2.0**10, log2=True),
    _Entry("micro_batches_per_step", "micro-batches an optimizer step", "1", 1.0, 2.0**10, log2=True),
    _Entry("data_wait_fraction", "share of time waiting for data", **_SHARE, flag=True),
    _Entry("padding_efficiency", "real tokens / padded tokens", **_SHARE),
    # The device
    _Entry("gpu_utilization", "NVML utilisation", **_SHARE, flag=True),
    _Entry("fill", "useful share of wall time", **_SHARE, flag=True),
    _Entry("memory_peak_fraction", "peak memory of this process / capacity", **_SHARE, flag=True),
    _Entry("others_memory_fraction", "memory of other processes / capacity", **_SHARE),
    _Entry("allocation_retries", "1 + allocator retries", "1", 1.0, 2.0**8, log2=True),
    _Entry("oom_count", "1 + out-of-memory events", "1", 1.0, 2.0**4, log2=True),
    _Entry("power_w", "power draw", "W", 2.0**5, 2.0**11, log2=True, flag=True),
    _Entry("energy_per_token", "energy a real token", "J", 2.0**-12, 2.0**6, log2=True),
    _Entry("temperature_c", "temperature", "deg C", 20.0, 100.0, flag=True),
    _Entry("clock_fraction", "SM clock / maximum", **_SHARE),
    _Entry("throttled", "share of time throttled", **_SHARE),
    _Entry("neighbours", "other processes on the device", "processes", 0.0, 8.0),
    _Entry("host_cpu_fraction", "busy share of host cores", **_SHARE),
    _Entry("neighbour_cpu_fraction", "share of host cores busy for others", **_SHARE, flag=True),
    _Entry("host_memory_fraction", "used share of host memory", **_SHARE),
    # What comes next
    _Entry("upcoming_mean", "mean upcoming length", **_TOKENS, flag=True),
    _Entry("upcoming_p95", "95th percentile of upcoming lengths", **_TOKENS),
    _Entry("upcoming_max", "maximum upcoming length", **_TOKENS),
    _Entry("fit_tokens_uncheckpointed", "tokens that fit with no layer checkpointed", **_TOKENS, flag=True),
    _Entry("fit_tokens_checkpointed", "tokens that fit with every layer checkpointed", **_TOKENS),
)
_COUNTS = ("allocation_retries", "oom_count")  # encoded as log2(1 + count)


class ObservationCodec:
    """Telemetry to observation: float32, about [-1, 1], never NaN.

    A frame holds the entries of `table()` in order, then the flags, then the objective weights. A quantity maps
    linearly or by log2 from ``[low, high]`` to [-1, 1] and is clipped there; one that is not measured becomes 0, and
    where absence is informative a flag tells it (1 measured, 0 not). An observation is the last `history` frames,
    oldest first. The codec keeps no state: `stack` turns the previous observation and a new frame into the next one.

    Args:
        history: Frames in an observation.
        weights: Number of objective weights at the end of each frame.

    Raises:
        ConfigError: a value out of range.
    """

    def __init__(self, history: int = 1, weights: int = 0) -> None:
        if history < 1 or weights < 0:
            raise ConfigError(f"history={history!r} must be at least 1 and weights={weights!r} at least 0")
        self.history = history
        self.weights = weights
        self._flagged = [i for i, entry in enumerate(_ENTRIES) if entry.flag]
        self._log2 = [i for i, entry in enumerate(_ENTRIES) if entry.log2]
        bounds = np.array([(entry.low, entry.high) for entry in _ENTRIES])
        bounds[self._log2] = np.log2(bounds[self._log2])
        self._centre = bounds.mean(axis=1, keepdims=True)
        self._half_range = (bounds[:, 1:] - bounds[:, :1]) / 2.0

    @property
    def frame_size(self) -> int:
        """Entries of one frame."""
        return len(_ENTRIES) + len(self._flagged) + self.weights

    @property
    def size(self) -> int:
        """Entries of an observation."""
        return self.history * self.frame_size

    def encode(self, telemetry: Telemetry, weights: ArrayLike | None = None) -> Observation:
        """The frame of an interval, shape ``(n, frame_size)``; with ``history == 1`` this is the observation.

        Args:
            telemetry: The interval.
            weights: Objective weights in 0..1, shape ``(k,)`` or ``(n, k)``.

        Raises:
            ConfigError: the weights are missing, unwanted or of the wrong number.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            derived = {
                "padding_efficiency": telemetry.real_tokens / telemetry.padded_tokens,
                "others_memory_fraction": telemetry.memory_device_fraction - telemetry.memory_peak_fraction,
                "energy_per_token": telemetry.energy_j / telemetry.real_tokens,
                **{name: 1.0 + getattr(telemetry, name) for name in _COUNTS},
            }
            raw = np.stack([derived[e.name] if e.name in derived else getattr(telemetry, e.name) for e in _ENTRIES])
            raw[self._log2] = np.log2(raw[self._log2])
        raw -= self._centre
        raw /= self._half_range
        missing = np.isnan(raw)
        raw[missing] = 0.0
        np.clip(raw, -1.0, 1.0, out=raw)
        frame = np.empty((telemetry.n, self.frame_size), dtype=np.float32)
        frame[:, : len(_ENTRIES)] = raw.T
        end = len(_ENTRIES) + len(self._flagged)
        frame[:, len(_ENTRIES) : end] = ~missing[self._flagged].T
        given = np.zeros(0) if weights is None else np.asarray(weights, dtype=np.float64)
        if given.shape[-1] != self.weights:
            raise ConfigError(f"weights has {given.shape[-1]} values, the codec expects {self.weights}")
        frame[:, end:] = np.clip(np.nan_to_num(given), 0.0, 1.0)
        return frame

    def stack(self, previous: Observation | None, frame: Observation) -> Observation:
        """The observation after `frame`: the oldest frame of `previous` leaves, `frame` enters.

        Args:
            previous: Shape ``(n, size)``; None at the start, where the first frame fills the history.
            frame: Shape ``(n, frame_size)``.
        """
        if previous is None:
            return np.tile(frame, (1, self.history))
        return np.concatenate([previous[:, self.frame_size :], frame], axis=1)

    def table(self) -> list[ObservationEntry]:
        """The documentation of a frame, entry by entry."""
        rows = [(e.name, e.meaning, e.unit, e.low, e.high, "log2" if e.log2 else "linear") for e in _ENTRIES]
        for i in self._flagged:
            name = _ENTRIES[i].name
            rows.append((f"{name}_measured", f"whether {name} was measured", "1", 0.0, 1.0, "flag"))
        rows += [(f"weight_{i}", f"objective weight {i}", "1", 0.0, 1.0, "weight") for i in range(self.weights)]
        return [ObservationEntry(index, *row) for index, row in enumerate(rows)]


class ActionCodec:
    """Actions in [-1, 1] to absolute controls and back.

    Multiplicative controls map by log2, the others linearly, -1 to the lower limit and 1 to the upper. Nothing is
    rounded here: the guard does. A NaN action leaves its control alone, and an unset control encodes as NaN. A control
    whose limits are not finite, or leave no choice, has no actuator: its entry stays, so that the action's shape is the
    same on every plant, but is ignored (and encodes as 0).

    Args:
        limits: Bounds of the controls.
        controls: The controls acted on, in the action's order.

    Raises:
        ConfigError: a control that does not exist.
    """

    def __init__(
        self,
        limits: ControlLimits | None = None,
        controls: tuple[str, ...] = ("token_budget", "memory_target", "power_limit_w", "num_workers"),
    ) -> None:
        unknown = [name for name in controls if name not in CONTROL_FIELDS]
        if unknown:
            raise ConfigError(f"controls={unknown} do not exist: choose from {', '.join(CONTROL_FIELDS)}")
        limits = limits or ControlLimits()
        self.controls = controls
        chosen = [getattr(limits, name) for name in controls]
        self._log2 = np.array([limit.multiplicative for limit in chosen], dtype=bool)
        bounds = np.array([(limit.low, limit.high) for limit in chosen], dtype=np.float64).reshape(-1, 2)
        bounds[self._log2] = np.log2(bounds[self._log2])
        self.present = np.isfinite(bounds).all(axis=1) & (bounds[:, 1] > bounds[:, 0])
        bounds[~self.present] = (-1.0, 1.0)
        self._centre = bounds.mean(axis=1)
        self._half_range = (bounds[:, 1] - bounds[:, 0]) / 2.0

    @property
    def size(self) -> int:
        """Entries of an action."""
        return len(self.controls)

    def decode(self, action: ArrayLike) -> Controls:
        """The controls that an action of shape ``(n, size)`` asks for; what lies outside [-1, 1] is clipped."""
        value = np.clip(np.asarray(action, dtype=np.float64), -1.0, 1.0) * self._half_range + self._centre
        value = np.where(self._log2, np.exp2(value), value)
        value = np.where(self.present, value, np.nan)
        return Controls.of(value.shape[0], **{name: value[:, i] for i, name in enumerate(self.controls)})

    def encode(self, controls: Controls) -> NDArray[np.float32]:
        """The action of shape ``(n, size)`` that asks for these controls, clipped to [-1, 1]."""
        value = np.stack([getattr(controls, name) for name in self.controls], axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            value = np.where(self._log2, np.log2(value), value)
        action = np.clip((value - self._centre) / self._half_range, -1.0, 1.0)
        return np.where(self.present, action, 0.0).astype(np.float32)
