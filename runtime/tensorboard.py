"""TensorBoard: the run as charts, in the directory where ms-swift's own events lie."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from .controls import CONTROL_FIELDS, Controls
from .telemetry import TELEMETRY_FIELDS, Telemetry
from .trace import first_plant

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

logger = logging.getLogger(__name__)

ROOT = "swiftcruise"

#: Telemetry fields by group: the field `fill` is charted as ``swiftcruise/telemetry/device/fill``.
GROUPS: dict[str, tuple[str, ...]] = {
    "throughput": (
        "tokens_per_s",
        "real_tokens",
        "padded_tokens",
        "samples",
        "optimizer_steps",
        "micro_batches_per_step",
        "largest_micro_batch",
        "step_time_s",
        "time_s",
        "interval_s",
    ),
    "memory": (
        "memory_peak_fraction",
        "memory_device_fraction",
        "memory_creep",
        "allocation_retries",
        "oom_count",
        "fit_tokens_uncheckpointed",
        "fit_tokens_checkpointed",
    ),
    "device": (
        "gpu_utilization",
        "fill",
        "power_w",
        "energy_j",
        "energy_budget_used",
        "temperature_c",
        "temperature_limit_c",
        "clock_fraction",
        "throttled",
        "neighbours",
    ),
    "host": ("host_cpu_fraction", "neighbour_cpu_fraction", "host_memory_fraction"),
    "data": ("data_wait_fraction", "upcoming_mean", "upcoming_p95", "upcoming_max"),
    "training": ("loss", "job_progress"),
    "in_force": CONTROL_FIELDS,
}

_TAGS = {name: f"{ROOT}/telemetry/{group}/{name}" for group, names in GROUPS.items() for name in names}
_PADDING = f"{ROOT}/telemetry/throughput/padding_share"


@dataclass(frozen=True, slots=True)
class Band:
    """Where one telemetry field should lie (setpoint) and where it must lie (alarm), in the field's unit."""

    field: str
    setpoint: tuple[float, float]
    alarm: tuple[float, float]

    def __post_init__(self) -> None:
        if self.field not in TELEMETRY_FIELDS:
            raise ValueError(f"band field={self.field!r} is no telemetry field")


#: Utilisation and fill around 0.70; memory up to a target of 0.85 and a cap of 0.90.
DEFAULT_BANDS = (
    Band("gpu_utilization", setpoint=(0.65, 0.75), alarm=(0.40, 1.0)),
    Band("fill", setpoint=(0.65, 0.75), alarm=(0.40, 1.0)),
    Band("memory_peak_fraction", setpoint=(0.0, 0.85), alarm=(0.0, 0.90)),
)


class CruiseBoard:
    """Writes a live run's charts as TensorBoard event files.

    Tags, all stable:

    - ``swiftcruise/telemetry/<group>/<field>``: every telemetry field, grouped as in `GROUPS` (``in_force`` holds the
      controls during the interval), and ``swiftcruise/telemetry/throughput/padding_share``;
    - ``swiftcruise/controls/<control>``: the controls chosen for the next interval;
    - ``swiftcruise/controller/<name>``: the policy's diagnostics (P, I, D terms, setpoints, errors);
    - ``swiftcruise_bands/<field>/{setpoint,alarm}_{low,high}``: the edges that the margin charts draw;
    - ``swiftcruise/events``: text, one entry an event.

    What was not measured gets no point. The *Custom Scalars* tab holds margin charts and overviews, ready-made.

    Nothing here raises into the training: the first failure (a full disk, a removed directory, TensorBoard missing)
    is logged once as a warning and the board goes quiet.

    Args:
        log_dir: Directory of the event file; missing ones are made. In ms-swift's own directory both show as one run.
            (TensorBoard's old reader, ``--load_fast=false``, follows only the newest file of a directory while a run
            is live, unless ``--reload_multifile true`` is given too.)
        bands: Setpoint and alarm bands of the margin charts.
    """

    def __init__(self, log_dir: str | os.PathLike[str], bands: Sequence[Band] = DEFAULT_BANDS) -> None:
        self.log_dir = os.fspath(log_dir)
        self._bands = tuple(bands)
        self._writer: SummaryWriter | None = None
        try:
            from torch.utils.tensorboard.writer import SummaryWriter

            # An interval is some 60 points; the queue takes them at once and a thread writes them.
            self._writer = SummaryWriter(self.log_dir, max_queue=256, flush_secs=15, filename_suffix=f".{ROOT}")
            self._writer.add_custom_scalars(custom_scalars_layout(self._bands))
        except Exception as error:
            self._give_up(error)

    @property
    def ok(self) -> bool:
        """Whether charts are still written; False after a failure or `close`."""
        return self._writer is not None

    def interval(
        self, step: int, telemetry: Telemetry, controls: Controls, diagnostics: Mapping[str, Any] | None = None
    ) -> None:
        """Chart one control interval of a single plant (``n = 1``) at the optimizer step where it ended."""
        self._guarded(lambda writer: self._chart(writer, step, telemetry, controls, diagnostics or {}))

    def event(self, step: int, event: str, /, **details: Any) -> None:
        """Add a text entry, for example ``event(120, "oom", micro_batch_tokens=8192)``."""
        text = f"**{event}** " + ", ".join(f"{name} = {value}" for name, value in details.items())
        self._guarded(lambda writer: writer.add_text(f"{ROOT}/events", text.strip(), step))

    def flush(self) -> None:
        """Wait until everything so far is on disk."""
        self._guarded(lambda writer: writer.flush())

    def close(self) -> None:
        """Flush and close; may be called twice."""
        self._guarded(lambda writer: writer.close())
        self._writer = None

    def __enter__(self) -> CruiseBoard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _chart(
        self,
        writer: SummaryWriter,
        step: int,
        telemetry: Telemetry,
        controls: Controls,
        diagnostics: Mapping[str, Any],
    ) -> None:
        measured = telemetry.plant(0)
        points = {_TAGS[name]: value for name, value in measured.items()}
        if measured["padded_tokens"] > 0:
            points[_PADDING] = 1.0 - measured["real_tokens"] / measured["padded_tokens"]
        points |= {f"{ROOT}/controls/{name}": value for name, value in controls.plant(0).items()}
        points |= {f"{ROOT}/controller/{name}": value for name, value in first_plant(diagnostics).items()}
        for band in self._bands:
            # A margin chart fails unless value and edges have the very same steps: no value, no edges.
            if np.isfinite(measured[band.field]):
                for kind, edges in (("setpoint", band.setpoint), ("alarm", band.alarm)):
                    points |= zip(_edge_tags(band.field, kind), edges, strict=True)
        for tag, value in points.items():
            if np.isfinite(value):
                writer.add_scalar(tag, value, step)

    def _guarded(self, write: Callable[[SummaryWriter], None]) -> None:
        if self._writer is None:
            return
        try:
            write(self._writer)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        logger.warning("swiftcruise: no more charts are written to %s (the training goes on): %s", self.log_dir, error)
        self._writer = None


def custom_scalars_layout(bands: Sequence[Band] = DEFAULT_BANDS) -> dict[str, dict[str, list[Any]]]:
    """Charts of the Custom Scalars tab, as `SummaryWriter.add_custom_scalars` takes them.

    A margin chart tells its series apart by the measured tag alone, so each band of a field is a chart of its own.
    Multiline tags are regular expressions that TensorBoard matches from the start, hence the ``$``.
    """
    margins = {
        f"{band.field}: {kind} band": ["Margin", [_TAGS[band.field], *_edge_tags(band.field, kind)]]
        for band in bands
        for kind in ("setpoint", "alarm")
    }
    return {
        "swiftcruise: margins": margins,
        "swiftcruise: controls": {
            "tokens": _lines(f"{ROOT}/controls/token_budget", _TAGS["upcoming_max"]),
            "samples in a micro-batch": _lines(f"{ROOT}/controls/micro_batch_cap"),
            "memory": _lines(f"{ROOT}/controls/memory_target", _TAGS["memory_peak_fraction"]),
            "checkpointed layers": _lines(_TAGS["checkpoint_fraction"]),
            "workers and threads": _lines(f"{ROOT}/controls/num_workers", f"{ROOT}/controls/cpu_threads"),
            "power": _lines(f"{ROOT}/controls/power_limit_w", _TAGS["power_w"]),
        },
        "swiftcruise: where time goes": {
            "real tokens per second": _lines(_TAGS["tokens_per_s"]),
            "wasted share": _lines(_PADDING, _TAGS["data_wait_fraction"]),
        },
        "swiftcruise: controller": {"terms": ["Multiline", [f"{ROOT}/controller/.*"]]},
    }


def _edge_tags(field: str, kind: str) -> tuple[str, str]:
    return f"{ROOT}_bands/{field}/{kind}_low", f"{ROOT}_bands/{field}/{kind}_high"


def _lines(*tags: str) -> list[Any]:
    return ["Multiline", [f"{tag}$" for tag in tags]]
