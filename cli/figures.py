"""The picture of a run: speed, controls and memory over time, several traces side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..runtime.errors import SwiftcruiseError
from ..runtime.telemetry import Telemetry
from ..runtime.trace import Trace, read_trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]

# Okabe and Ito's colours, told apart by colour-blind readers too. The first run is the reference: grey.
_RUN_COLOURS = ("#7a7a7a", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
_UPCOMING = "#e69f00"
_EVENT_MARKS = {"oom": ("out of memory", "#c1272d", "v"), "fault": ("fault", "#7b3294", "X")}
_SPAN = "#f0e442"
_INK = "#333333"


class FigureError(SwiftcruiseError):
    """A figure that cannot be drawn from what was given."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of the run worth naming ("neighbour", "long sequences"), in seconds or optimizer steps of the axis."""

    label: str
    start: float
    end: float


@dataclass(frozen=True)
class _Run:
    label: str
    colour: str
    end: Array  #: end of each interval on the axis: seconds, restarts laid end to end, or optimizer steps
    width: Array  #: its length on the axis
    telemetry: Telemetry
    events: list[tuple[float, str]]  #: place on the axis and name of each event
    memory_cap: float

    def values(self, name: str) -> Array:
        """A telemetry field over the intervals."""
        return getattr(self.telemetry, name)


@dataclass(frozen=True)
class _Panel:
    title: str
    height: float
    fields: tuple[str, ...]  #: the panel is left out where all of these are NaN in every run
    draw: Callable[[Axes, _Run], None]
    finish: Callable[[Axes, Sequence[_Run]], str]  #: sets limits and ticks; returns what the title should add


def draw_run(
    trace_paths: Mapping[str, str | os.PathLike[str]],
    out_png: str | os.PathLike[str],
    *,
    annotations: Sequence[Span] = (),
    title: str = "",
    against: Literal["time", "step"] = "time",
) -> Path:
    """Draw one or more traces, one panel a quantity, and save a PNG of 1500 x 1050 pixels.

    Real tokens/s stand on top (bold: mean over a sliding window; faint: each interval), then the token budget with the
    longest upcoming sample, memory, fill and utilisation, checkpointed layers, micro-batches and CPU threads. A panel
    that no run measured is left out. Events "oom" and "fault" that give a `time_s` are marked, and the memory cap is
    shown where the trace's header gives a `memory_cap`.

    Args:
        trace_paths: Trace files by the label to show. The first is the reference that speed-ups are counted from.
        out_png: File to write; missing directories are made.
        annotations: Stretches of time to shade and name.
        title: Heading of the figure.
        against: The axis: seconds since the start, or optimizer steps (the same samples stand above each other).

    Raises:
        TraceError: a trace that cannot be read.
        FigureError: no trace, or one without a usable interval.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not trace_paths:
        raise FigureError("trace_paths is empty: name at least one trace")
    runs = [
        _load(label, path, _RUN_COLOURS[i % len(_RUN_COLOURS)] if len(trace_paths) > 1 else _RUN_COLOURS[1], against)
        for i, (label, path) in enumerate(trace_paths.items())
    ]
    panels = [p for p in _PANELS if any(_measured(run, name) for run in runs for name in p.fields)]
    if not panels:
        raise FigureError(f"traces {list(trace_paths)} hold nothing to draw: was any telemetry measured?")
    figure = Figure(figsize=(10, 7), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(
        len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": [p.height for p in panels]}
    )[:, 0]
    figure.subplots_adjust(left=0.075, right=0.98, top=0.865, bottom=0.065, hspace=0.42)
    last = max(float(run.end[-1]) for run in runs)
    for panel, axis in zip(panels, axes, strict=True):
        for run in runs:
            panel.draw(axis, run)
        _dress(axis, panel.title + panel.finish(axis, runs))
        _shade(axis, annotations, named=axis is axes[0])
    axes[0].set_xlim(0, last * 1.01)
    _mark_events(list(axes), runs)
    if against == "time":
        unit, scale = ("s", 1.0) if last < 600 else ("min", 60.0) if last < 3 * 3600 else ("h", 3600.0)
        _name_ends(axes[0], runs, unit, scale)
        _time_axis(axes[-1], unit, scale)
    else:
        axes[-1].set_xlabel("optimizer step", fontsize=8.5, color=_INK)
    _heading(figure, runs, title)
    out = Path(out_png)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    return out


def windowed_rate(end: Array, width: Array, seconds: Array, amount: Array, window: float) -> Array:
    """Amount per second over a window centred on each interval's end, exact for uneven intervals; NaN where unmeasured.

    The window is cut at the ends of the run. Intervals whose amount is NaN count neither amount nor time.

    Args:
        end: End of each interval on the axis.
        width: Its length on the axis.
        seconds: Its length in seconds.
        amount: What was done in it.
        window: Length of the window on the axis.
    """
    known = np.isfinite(amount) & np.isfinite(seconds)
    edges = np.concatenate([[end[0] - np.nan_to_num(width[0])], end])
    total = np.concatenate([[0.0], np.cumsum(np.where(known, amount, 0.0))])
    elapsed = np.concatenate([[0.0], np.cumsum(np.where(known, seconds, 0.0))])
    low, high = end - window / 2, end + window / 2
    gained = np.interp(high, edges, total) - np.interp(low, edges, total)
    spent = np.interp(high, edges, elapsed) - np.interp(low, edges, elapsed)
    return np.divide(gained, spent, out=np.full_like(gained, np.nan), where=known & (spent > 0))


def _load(label: str, path: str | os.PathLike[str], colour: str, against: str) -> _Run:
    trace = read_trace(path)
    telemetry = trace.telemetry()
    if not telemetry.n or not np.isfinite(telemetry.time_s).all():
        raise FigureError(
            f"trace={str(path)!r} has {telemetry.n} intervals{' and some without time_s' if telemetry.n else ''}: "
            "record at least one control interval before drawing"
        )
    if against == "step":
        end = np.array([line["step"] for line in trace.intervals], dtype=np.float64)
        width, key, offsets = telemetry.optimizer_steps, "step", np.zeros(len(trace.headers))
    else:
        offsets = _run_offsets(trace, telemetry.time_s)
        end = telemetry.time_s + [offsets[line["run"]] for line in trace.intervals]
        width, key = telemetry.interval_s, "time_s"
    events = [
        (line[key] + offsets[line["run"]], line["event"])
        for line in trace.events
        if line.get("event") in _EVENT_MARKS and isinstance(line.get(key), (int, float))
    ]
    cap = trace.headers[0].get("memory_cap")
    return _Run(label, colour, end, width, telemetry, events, float(cap) if isinstance(cap, (int, float)) else np.nan)


def _run_offsets(trace: Trace, time_s: Array) -> Array:
    """Seconds to add to each process's clock, which starts at zero again after a resume."""
    lengths = np.zeros(len(trace.headers))
    np.maximum.at(lengths, [line["run"] for line in trace.intervals], time_s)
    return np.concatenate([[0.0], np.cumsum(lengths)[:-1]])


def _mean_rate(run: _Run) -> float:
    tokens, seconds = run.values("real_tokens"), run.values("interval_s")
    known = np.isfinite(tokens) & np.isfinite(seconds)
    return float(tokens[known].sum() / seconds[known].sum()) if seconds[known].sum() > 0 else np.nan


# Panels ---------------------------------------------------------------------------------------------------------------


def _draw_rate(axis: Axes, run: _Run) -> None:
    window = 0.03 * float(run.end[-1])
    smooth = windowed_rate(run.end, run.width, run.values("interval_s"), run.values("real_tokens"), window)
    axis.plot(run.end, run.values("tokens_per_s"), color=run.colour, alpha=0.3, linewidth=0.7)
    axis.plot(run.end, smooth, color=run.colour, linewidth=2.0)
    axis.plot(run.end[-1:], smooth[-1:], color=run.colour, marker="o", markersize=4.5)


def _finish_rate(axis: Axes, runs: Sequence[_Run]) -> str:
    axis.set_ylim(0, axis.get_ylim()[1] * 1.15)  # room for the names of the shaded spans
    axis.yaxis.set_major_formatter(_thousands)
    return ""


def _draw_budget(axis: Axes, run: _Run) -> None:
    _stairs(axis, run, "token_budget", linewidth=1.6)


def _finish_budget(axis: Axes, runs: Sequence[_Run]) -> str:
    axis.set_yscale("log", base=2)
    low, high = np.log2(axis.get_ylim())  # whole octaves, so that two ticks or more are labelled
    axis.set_ylim(2 ** np.floor(low), 2 ** np.ceil(high))
    axis.yaxis.set_major_formatter(_thousands)
    # The samples are the same for every run that is compared: one line says it for all.
    seen = [run for run in runs if _measured(run, "upcoming_max")]
    if not seen:
        return ""
    _stairs(axis, seen[-1], "upcoming_max", color=_UPCOMING, linewidth=0.8, zorder=1.5)
    return " (orange: longest sample ahead)"


def _draw_memory(axis: Axes, run: _Run) -> None:
    _stairs(axis, run, "memory_target", linewidth=1.0, linestyle=":")
    _stairs(axis, run, "memory_peak_fraction")


def _finish_memory(axis: Axes, runs: Sequence[_Run]) -> str:
    top = max(1.05, axis.get_ylim()[1])
    axis.set_ylim(0, top)
    axis.yaxis.set_major_formatter(_percent)
    notes = ["dotted: target"] if any(_measured(run, "memory_target") for run in runs) else []
    caps = [run.memory_cap for run in runs if np.isfinite(run.memory_cap)]
    if caps:
        axis.axhspan(max(caps), top, color="#c1272d", alpha=0.12, linewidth=0)
        notes.append(f"red: above the cap of {max(caps):.0%}")
    return f" ({', '.join(notes)})" if notes else ""


def _draw_fill(axis: Axes, run: _Run) -> None:
    _stairs(axis, run, "gpu_utilization", linewidth=1.0, linestyle=":")
    _stairs(axis, run, "fill")


def _finish_fill(axis: Axes, runs: Sequence[_Run]) -> str:
    _finish_share(axis, runs)
    return " (dotted: NVML utilisation)" if any(_measured(run, "gpu_utilization") for run in runs) else ""


def _line(name: str) -> Callable[[Axes, _Run], None]:
    return lambda axis, run: _stairs(axis, run, name)


def _finish_share(axis: Axes, runs: Sequence[_Run]) -> str:
    axis.set_ylim(-0.05, max(1.05, axis.get_ylim()[1]))
    axis.yaxis.set_major_formatter(_percent)
    return ""


def _finish_count(axis: Axes, runs: Sequence[_Run]) -> str:
    from matplotlib.ticker import MaxNLocator

    axis.set_ylim(0, axis.get_ylim()[1] * 1.1)
    axis.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    return ""


def _stairs(axis: Axes, run: _Run, name: str, **style: Any) -> None:
    """A field as a step line: each value holds for the whole of its interval."""
    end, values = run.end, run.values(name)
    start = end[:1] - np.nan_to_num(run.width[:1])
    style = {"color": run.colour, "linewidth": 1.4} | style
    axis.plot(np.append(start, end), np.append(values[:1], values), drawstyle="steps-pre", **style)


def _measured(run: _Run, name: str) -> bool:
    return bool(np.isfinite(run.values(name)).any())


_PANELS = (
    _Panel("real tokens per second", 2.6, ("tokens_per_s", "real_tokens"), _draw_rate, _finish_rate),
    _Panel("token budget of a micro-batch", 1.2, ("token_budget",), _draw_budget, _finish_budget),
    _Panel("peak memory", 1.1, ("memory_peak_fraction",), _draw_memory, _finish_memory),
    _Panel("fill: useful share of the time", 1.0, ("fill", "gpu_utilization"), _draw_fill, _finish_fill),
    _Panel("checkpointed layers", 0.8, ("checkpoint_fraction",), _line("checkpoint_fraction"), _finish_share),
    _Panel(
        "micro-batches an optimizer step",
        0.8,
        ("micro_batches_per_step",),
        _line("micro_batches_per_step"),
        _finish_count,
    ),
    _Panel("CPU threads", 0.7, ("cpu_threads",), _line("cpu_threads"), _finish_count),
)


# What all panels share ------------------------------------------------------------------------------------------------


def _dress(axis: Axes, title: str) -> None:
    axis.set_title(title, loc="left", fontsize=8.5, color=_INK, pad=3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color("#999999")
    axis.tick_params(labelsize=7.5, colors=_INK, color="#999999", length=2.5)
    axis.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.margins(x=0)


def _shade(axis: Axes, annotations: Sequence[Span], *, named: bool) -> None:
    for span in annotations:
        axis.axvspan(span.start, span.end, color=_SPAN, alpha=0.25, linewidth=0, zorder=0)
        if named:
            axis.text(
                (span.start + span.end) / 2,
                0.97,
                span.label,
                transform=axis.get_xaxis_transform(),
                ha="center",
                va="top",
                fontsize=8,
                color=_INK,
                clip_on=True,
            )


def _mark_events(axes: Sequence[Axes], runs: Sequence[_Run]) -> None:
    """A mark on the lower edge of the first panel for every event, and a hair line through all panels."""
    for run in runs:
        for place, event in run.events:
            _, colour, marker = _EVENT_MARKS[event]
            for axis in axes:
                axis.axvline(place, ymax=0.85 if axis is axes[0] else 1.0, color=colour, linewidth=0.6, alpha=0.6)
            axes[0].plot(
                place,
                0.06,
                marker=marker,
                color=colour,
                markersize=6,
                linestyle="",
                transform=axes[0].get_xaxis_transform(),
                clip_on=False,
            )


def _heading(figure: Any, runs: Sequence[_Run], title: str) -> None:
    from matplotlib.lines import Line2D

    rates = [_mean_rate(run) for run in runs]
    handles = []
    for run, rate in zip(runs, rates, strict=True):
        text = f"{run.label}: {rate:,.0f} tokens/s" if np.isfinite(rate) else run.label
        if run is not runs[0] and np.isfinite(rate) and rates[0] > 0:
            text += f" (×{rate / rates[0]:.2f})"
        handles.append(Line2D([], [], color=run.colour, linewidth=2.5, label=text))
    for event, (name, colour, marker) in _EVENT_MARKS.items():
        count = sum(e == event for run in runs for _, e in run.events)
        if count:
            label = name if count == 1 else f"{name} (×{count})"
            handles.append(Line2D([], [], color=colour, marker=marker, linestyle="", markersize=6, label=label))
    if title:
        figure.text(0.075, 0.975, title, ha="left", va="top", fontsize=12, fontweight="bold", color=_INK)
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.07, 0.945),
        ncols=4,
        frameon=False,
        fontsize=9.5,
        handlelength=1.6,
        columnspacing=2.0,
        borderpad=0,
        labelcolor=_INK,
    )


def _name_ends(axis: Axes, runs: Sequence[_Run], unit: str, scale: float) -> None:
    """Say when the runs end that end before the last one."""
    last = max(run.end[-1] for run in runs)
    for run in runs:
        if run.end[-1] < 0.9 * last:
            axis.text(
                run.end[-1] + 0.008 * last,
                0.86,
                f"{run.label} ends at {run.end[-1] / scale:.3g} {unit}",
                transform=axis.get_xaxis_transform(),
                fontsize=8,
                color=run.colour,
            )
            axis.axvline(run.end[-1], ymax=0.92, color=run.colour, linewidth=0.8, linestyle=(0, (4, 3)))


def _time_axis(axis: Axes, unit: str, scale: float) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    steps = [1, 2, 5, 10] if unit == "s" else [1, 1.5, 2, 3, 6, 10]
    axis.xaxis.set_major_locator(MaxNLocator(nbins=10, steps=steps))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / scale:g}"))
    axis.set_xlabel(f"time since the start of the run, {unit}", fontsize=8.5, color=_INK)


def _thousands(value: float, _position: float | None = None) -> str:
    return f"{value:,.0f}"


def _percent(value: float, _position: float | None = None) -> str:
    return f"{value:.0%}"
