"""The mapping between telemetry and observations, actions and controls: the only place that knows it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .codec_rows import (
    BOUND_CENTRE,
    BOUND_LOG2,
    COUNT,
    DIFFERENCE,
    HALF_RANGE,
    PLAIN,
    RATIO,
    decode_action,
    encode_frame,
)
from .controls import CONTROL_FIELDS, ControlLimits, Controls
from .errors import ConfigError
from .telemetry import TELEMETRY_FIELDS, Telemetry

Array = NDArray[np.float64]
Observation = NDArray[np.float32]

#: Raised with every change of an index, range or meaning below; a policy artefact names the version it was trained on.
VERSION = 2


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
_CELSIUS = {"unit": "deg C", "low": 20.0, "high": 100.0}

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
    _Entry("temperature_c", "temperature", **_CELSIUS, flag=True),
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
    # The job
    _Entry("job_progress", "share of the training that is done", **_SHARE, flag=True),
    _Entry("energy_budget_used", "energy drawn / energy that the job may draw", "1", 0.0, 2.0, flag=True),
    _Entry("temperature_limit_c", "temperature that the job must not exceed", **_CELSIUS, flag=True),
)

#: Entries that are no plain telemetry field: field, operation, other field.
_DERIVED = {
    "padding_efficiency": ("real_tokens", RATIO, "padded_tokens"),
    "others_memory_fraction": ("memory_device_fraction", DIFFERENCE, "memory_peak_fraction"),
    "energy_per_token": ("energy_j", RATIO, "real_tokens"),
    "allocation_retries": ("allocation_retries", COUNT, "allocation_retries"),
    "oom_count": ("oom_count", COUNT, "oom_count"),
}


def _frame_table() -> Array:
    """`_ENTRIES` as `encode_frame` takes them."""
    rows: list[tuple[float, ...]] = []
    flag = len(_ENTRIES)  # flags follow the entries
    for entry in _ENTRIES:
        field, operation, operand = _DERIVED.get(entry.name, (entry.name, PLAIN, entry.name))
        low, high = (np.log2(end) if entry.log2 else end for end in (entry.low, entry.high))
        indices = TELEMETRY_FIELDS.index(field), operation, TELEMETRY_FIELDS.index(operand)
        rows.append((*indices, entry.log2, (low + high) / 2.0, 2.0 / (high - low), flag if entry.flag else 0))
        flag += entry.flag
    return np.ascontiguousarray(np.array(rows, dtype=np.float64).T)


class ObservationCodec:
    """Telemetry to observation: float32, about [-1, 1], never NaN.

    A frame holds the entries of `table()` in order, then the flags, then the objective weights. A quantity maps
    linearly or by log2 from ``[low, high]`` to [-1, 1] and is clipped there; one that is not measured becomes 0, and
    where absence is informative a flag tells it (1 measured, 0 not). An observation is the last `history` frames,
    oldest first. The codec keeps no state: `stack` turns the previous observation and a new frame into the next one.
    `codec_rows.encode_frame` does the work, plant by plant; who simulates thousands compiles it.

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
        self.frame_table = _frame_table()  #: for `codec_rows.encode_frame`
        self._flagged = [i for i, entry in enumerate(_ENTRIES) if entry.flag]
        self._rows: list[list[float]] = self.frame_table.tolist()

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
        given = np.zeros(0) if weights is None else np.asarray(weights, dtype=np.float64)
        if given.shape[-1] != self.weights:
            raise ConfigError(f"weights has {given.shape[-1]} values, the codec expects {self.weights}")
        weights_of = np.broadcast_to(given, (telemetry.n, self.weights)).tolist()
        frames: list[list[float]] = []
        raw = [0.0] * len(_ENTRIES)
        for row, weights_row in zip(telemetry.rows().tolist(), weights_of, strict=True):
            frame = [0.0] * self.frame_size
            encode_frame(row, self._rows, weights_row, raw, frame)
            frames.append(frame)
        return np.array(frames, dtype=np.float32).reshape(telemetry.n, self.frame_size)

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
        log2 = np.array([limit.multiplicative for limit in chosen], dtype=bool)
        ends = np.array([(limit.low, limit.high) for limit in chosen], dtype=np.float64).reshape(-1, 2)
        ends[log2] = np.log2(ends[log2])
        low, high = ends.T
        self.present = np.isfinite(ends).all(axis=1) & (high > low)
        centre = np.where(self.present, (low + high) / 2.0, 0.0)
        half_range = np.where(self.present, (high - low) / 2.0, np.nan)
        indices = np.array([CONTROL_FIELDS.index(name) for name in controls], dtype=np.float64)
        self.bounds = np.stack([indices, log2, centre, half_range], axis=1)  #: for `codec_rows.decode_action`
        self._rows: list[list[float]] = self.bounds.tolist()

    @property
    def size(self) -> int:
        """Entries of an action."""
        return len(self.controls)

    def decode(self, action: ArrayLike) -> Controls:
        """The controls that an action of shape ``(n, size)`` asks for; what lies outside [-1, 1] is clipped.

        Raises:
            ValueError: another shape.
        """
        actions = np.asarray(action, dtype=np.float64)
        if actions.ndim != 2 or actions.shape[1] != self.size:
            raise ValueError(f"expected actions of shape (n, {self.size}), got {actions.shape}")
        rows = [[0.0] * len(CONTROL_FIELDS) for _ in actions]
        for action_row, row in zip(actions.tolist(), rows, strict=True):
            decode_action(action_row, self._rows, row)
        return Controls.from_rows(np.array(rows).reshape(len(actions), len(CONTROL_FIELDS)))

    def encode(self, controls: Controls) -> NDArray[np.float32]:
        """The action of shape ``(n, size)`` that asks for these controls, clipped to [-1, 1]."""
        value = np.stack([getattr(controls, name) for name in self.controls], axis=1)
        log2, centre, half_range = self.bounds[:, [BOUND_LOG2, BOUND_CENTRE, HALF_RANGE]].T
        with np.errstate(divide="ignore", invalid="ignore"):
            value = np.where(log2 > 0, np.log2(value), value)
            action = np.clip((value - centre) / half_range, -1.0, 1.0)
        return np.where(self.present, action, 0.0).astype(np.float32)
