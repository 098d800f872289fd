"""What an environment shows of itself: the telemetry of an episode as a picture, or as one line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..runtime.telemetry import Telemetry
from .objectives import OBJECTIVES
from .plants.interval import MEMORY_ALARM
from .simulation import GUARD, Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[np.float64]
Picture = NDArray[np.uint8]

WIDTH, HEIGHT = 900, 800  #: of a picture, pixels; even, as video codecs want it
_DPI = 100

# Okabe and Ito's colours, told apart by colour-blind readers too.
_BLUE, _ORANGE, _VERMILION, _GREEN, _PURPLE = "#0072b2", "#e69f00", "#d55e00", "#009e73", "#cc79a7"
_ALARM, _INK, _FAINT = "#c1272d", "#333333", "#8a8a8a"
_TERM_COLOURS = (_BLUE, _GREEN, _ALARM, _PURPLE)  # of OBJECTIVES
_LOWEST_TERM = -2.5  # the reward panel ends here; a lost job would flatten everything else


@dataclass(frozen=True, slots=True)
class _Episode:
    """What stays the same during an episode."""

    scenario: str
    device: str
    training: str
    horizon: int
    reference_tokens_per_s: float  #: of one rank, as telemetry counts
    throttle_c: float  #: NaN: no such sensor


class Recorder:
    """Remembers an environment's episode and shows it.

    An interval costs two small copies. Nothing of matplotlib is kept between pictures.
    """

    def __init__(self) -> None:
        self._episode: _Episode | None = None
        self._rows: list[Array] = []  # telemetry of each interval
        self._scores: list[Array] = []  # its reward vector, then the reward
        self._interval = 0
        self._ended = False

    @property
    def started(self) -> bool:
        """Whether there is an episode to show."""
        return self._episode is not None

    def begin(self, simulation: Simulation, plant: int) -> None:
        """Forget the last episode and take the first interval of a new one, which no decision led to.

        Args:
            simulation: Just reset.
            plant: Index of the training to show.
        """
        state = simulation.plant.state[plant]
        constants = simulation.plant.assembly.constants[state["scenario"]]
        scenario = simulation.plant.assembly.scenarios[state["scenario"]]
        work = scenario.workload
        self._episode = _Episode(
            scenario=scenario.name,
            device=f"{work.ranks} x {scenario.hardware}" if work.ranks > 1 else scenario.hardware,
            training=f"{work.model}, {work.tuner}, {work.data}",
            horizon=simulation.horizon,
            reference_tokens_per_s=float(constants["reference_tokens_per_s"] / constants["ranks"]),
            throttle_c=float(constants["throttle_c"]) if constants["accelerator"] else math.nan,
        )
        self._interval = int(state["interval"])
        self._ended = False
        self._rows = [simulation.plant.rows[plant].copy()]
        self._scores = [np.full(len(OBJECTIVES) + 1, np.nan)]

    def add(self, simulation: Simulation, plant: int) -> None:
        """Take the interval that a training has just finished; one that is known already is not taken twice."""
        interval = int(simulation.plant.state["interval"][plant])
        if interval == self._interval:
            return
        self._interval = interval
        self._ended = bool(simulation.terminated[plant])
        self._rows.append(simulation.plant.rows[plant].copy())
        self._scores.append(np.append(simulation.terms[plant], simulation.rewards[plant]))

    def line(self) -> str:
        """The last interval in one line of text; what was not measured is left out."""
        episode, telemetry = self._shown()
        now = telemetry.plant(-1)
        parts = [f"interval {len(self._rows) - 1:>{len(str(episode.horizon))}}/{episode.horizon}", episode.scenario]
        share = now["tokens_per_s"] / episode.reference_tokens_per_s
        parts.append(f"{now['tokens_per_s']:,.0f} tokens/s ({share:.0%} of the reference)")
        others = max(now["memory_device_fraction"] - now["memory_peak_fraction"], 0.0)
        parts.append(f"memory {now['memory_peak_fraction']:.0%}" + (f" + {others:.0%} others" if others > 0 else ""))
        for name, unit in (("temperature_c", "°C"), ("power_w", "W")):
            if math.isfinite(now[name]):
                parts.append(f"{now[name]:.0f} {unit}")
        parts.append(f"{now['oom_count']:.0f} OOM ({telemetry.oom_count.sum():.0f} in all)")
        if math.isfinite(self._scores[-1][-1]):
            parts.append(f"reward {self._scores[-1][-1]:+.3f}")
        return " | ".join(parts) + (" | ended: out of memory" if self._ended else "")

    def picture(self) -> Picture:
        """The episode so far, uint8 of shape ``(HEIGHT, WIDTH, 3)``.

        Panels: real tokens/s against the scenario's reference; peak memory of this process and of the others, the
        memory target as setpoint, and the alarm bands above the guard's cap and above what counts as a violation; the
        token budget with the longest sample that was announced for each interval; power and its limit, temperature
        and its limits; the reward and its terms. Red marks are out-of-memory events.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        episode, telemetry = self._shown()
        figure = Figure(figsize=(WIDTH / _DPI, HEIGHT / _DPI), dpi=_DPI, facecolor="white")
        canvas = FigureCanvasAgg(figure)
        ratios = {"height_ratios": (1.25, 1.25, 1.0, 1.25, 1.25)}
        axes = list(figure.subplots(5, 1, gridspec_kw=ratios))
        figure.subplots_adjust(left=0.085, right=0.925, top=0.895, bottom=0.06, hspace=0.34)
        _draw_speed(axes[0], telemetry, episode)
        _draw_memory(axes[1], telemetry)
        _draw_budget(axes[2], telemetry)
        _draw_heat(axes[3], telemetry, episode)
        _draw_reward(axes[4], np.array(self._scores))
        for axis in axes:
            _dress(axis, episode.horizon, named=axis is axes[-1])
        _mark_ooms(axes, telemetry)
        _heading(figure, episode, telemetry, len(self._rows) - 1, self._ended)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()

    def _shown(self) -> tuple[_Episode, Telemetry]:
        if self._episode is None:
            raise RuntimeError("nothing to show before an episode begins")
        return self._episode, Telemetry.from_rows(np.array(self._rows))


def tiled(pictures: Sequence[Picture]) -> Picture:
    """Pictures of one size in a grid, row by row, as square as may be; empty places are white.

    Raises:
        ValueError: no picture.
    """
    if not len(pictures):
        raise ValueError("there is no picture to tile")
    height, width, channels = pictures[0].shape
    columns = math.ceil(math.sqrt(len(pictures)))
    rows = math.ceil(len(pictures) / columns)
    grid = np.full((rows, columns, height, width, channels), 255, dtype=np.uint8)
    for place, picture in enumerate(pictures):
        grid[divmod(place, columns)] = picture
    return grid.swapaxes(1, 2).reshape(rows * height, columns * width, channels)


# Panels ---------------------------------------------------------------------------------------------------------------


def _draw_speed(axis: Axes, telemetry: Telemetry, episode: _Episode) -> None:
    speed, reference = telemetry.tokens_per_s, episode.reference_tokens_per_s
    _stairs(axis, speed, _BLUE, filled=True)
    axis.axhline(reference, color=_FAINT, linewidth=1.0, linestyle=(0, (5, 3)))
    axis.set_ylim(0, 1.18 * max(reference, _highest(speed)))
    axis.yaxis.set_major_formatter(_count)
    _title(axis, ("real tokens per second", _BLUE), ("reference: the best fixed budget, undisturbed", _FAINT))
    _now(axis, f"{speed[-1]:,.0f}", _BLUE)


def _draw_memory(axis: Axes, telemetry: Telemetry) -> None:
    own, device = telemetry.memory_peak_fraction, telemetry.memory_device_fraction
    axis.axhspan(GUARD.memory_cap, MEMORY_ALARM, color=_ORANGE, alpha=0.22, linewidth=0)
    axis.axhspan(MEMORY_ALARM, 1.05, color=_ALARM, alpha=0.2, linewidth=0)
    _stairs(axis, device, _FAINT, linewidth=0.8)
    axis.fill_between(_edges(own), _held(own), _held(device), step="post", color=_FAINT, alpha=0.35, linewidth=0)
    _stairs(axis, own, _BLUE, filled=True)
    _stairs(axis, telemetry.memory_target, _INK, linewidth=1.0, linestyle=(0, (1, 1.5)))
    axis.set_ylim(0, 1.05)
    axis.set_yticks([0, 0.5, 0.9], labels=["0%", "50%", "90%"])
    _title(axis, ("peak memory", _BLUE), ("other processes", _FAINT), ("target", _INK), ("cap and alarm", _ALARM))
    _now(axis, f"{device[-1]:.0%}", _BLUE if device[-1] <= MEMORY_ALARM else _ALARM)


def _draw_budget(axis: Axes, telemetry: Telemetry) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    budget = telemetry.token_budget
    # What was announced at the end of an interval concerns the next one: this line runs one interval ahead.
    announced = np.append(np.nan, telemetry.upcoming_max)
    _stairs(axis, announced, _ORANGE, linewidth=1.1)
    _stairs(axis, budget, _BLUE)
    axis.set_yscale("log", base=2)
    both = np.append(budget, telemetry.upcoming_max)
    low, high = np.log2(np.nanmin(both)), np.log2(np.nanmax(both))
    axis.set_ylim(2 ** (math.floor(low) - 0.3), 2 ** (math.ceil(high) + 0.3))
    axis.yaxis.set_major_locator(LogLocator(base=2, numticks=5))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(_count)
    preview = [("longest sample ahead", _ORANGE)] if np.isfinite(announced).any() else []
    _title(axis, ("token budget of a micro-batch", _BLUE), *preview)
    _now(axis, _count(float(budget[-1])), _BLUE)


def _draw_heat(axis: Axes, telemetry: Telemetry, episode: _Episode) -> None:
    power, limit, temperature = telemetry.power_w, telemetry.power_limit_w, telemetry.temperature_c
    if not math.isfinite(episode.throttle_c):
        _title(axis, ("power and temperature", _INK))
        axis.text(
            0.5, 0.45, "not measured on this device", transform=axis.transAxes, ha="center", color=_FAINT, fontsize=9
        )
        axis.set_yticks([])
        return
    _stairs(axis, power, _GREEN, filled=True)
    _stairs(axis, limit, _GREEN, linewidth=1.0, linestyle=(0, (1, 1.5)))
    axis.set_ylim(0, 1.15 * max(_highest(power), _highest(limit)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0f} W")
    right = axis.twinx()
    right.spines[:].set_visible(False)
    right.tick_params(axis="y", labelsize=7.5, labelcolor=_VERMILION, color="#999999", length=2.5)
    _stairs(right, temperature, _VERMILION)
    allowed = telemetry.temperature_limit_c[-1]
    for edge, style in ((episode.throttle_c, (0, (5, 3))), (allowed, "-")):
        if math.isfinite(edge):
            right.axhline(edge, color=_ALARM, linewidth=0.9, linestyle=style)
    right.set_ylim(20, max(episode.throttle_c, _highest(temperature)) + 6)
    right.yaxis.set_major_formatter(lambda value, _: f"{value:.0f} °C")
    named = [("power and limit", _GREEN), ("temperature", _VERMILION), ("throttling (dashed)", _ALARM)]
    _title(axis, *named, *([("limit of the job (solid)", _ALARM)] if math.isfinite(allowed) else []))
    _now(axis, f"{power[-1]:.0f} W", _GREEN, second=(f"{temperature[-1]:.0f} °C", _VERMILION))


def _draw_reward(axis: Axes, scores: Array) -> None:
    axis.axhline(0, color=_FAINT, linewidth=0.8)
    for values, colour in zip(scores.T, _TERM_COLOURS, strict=False):
        _stairs(axis, values, colour, linewidth=0.9)
    _stairs(axis, scores[:, -1], _INK, linewidth=1.8)
    known = scores[np.isfinite(scores)]
    low = min(known.min(initial=0.0), -0.8)
    axis.set_ylim(max(low, _LOWEST_TERM) - 0.1, max(known.max(initial=0.0), 0.2) + 0.1)
    _title(axis, ("reward", _INK), *zip(OBJECTIVES, _TERM_COLOURS, strict=True))
    if math.isfinite(scores[-1, -1]):
        _now(axis, f"{scores[-1, -1]:+.2f}", _INK)


# What all panels share ------------------------------------------------------------------------------------------------


def _edges(values: Array) -> Array:
    """Where the intervals begin and end on the axis: decision k's interval ends at k."""
    return np.arange(-1.0, len(values))


def _held(values: Array) -> Array:
    """Values for steps that each last from edge to edge."""
    return np.append(values, values[-1:])


def _stairs(axis: Axes, values: Array, colour: str, *, filled: bool = False, **style: Any) -> None:
    """Values as a step line: each holds for the whole of its interval."""
    style = {"linewidth": 1.4, "solid_joinstyle": "miter"} | style
    axis.plot(_edges(values), _held(values), drawstyle="steps-post", color=colour, **style)
    if filled:
        axis.fill_between(_edges(values), 0.0, _held(values), step="post", color=colour, alpha=0.12, linewidth=0)


def _dress(axis: Axes, horizon: int, *, named: bool) -> None:
    from matplotlib.ticker import NullLocator

    axis.set_xlim(-1, horizon)
    if named:
        axis.set_xlabel("control interval", fontsize=8, color=_INK, labelpad=2)
    else:
        axis.xaxis.set_major_locator(NullLocator())  # most of a picture's time goes into ticks
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color("#999999")
    axis.tick_params(labelsize=7.5, labelcolor=_INK, color="#999999", length=2.5)
    axis.yaxis.grid(color="#e6e6e6", linewidth=0.6)
    axis.set_axisbelow(True)


def _title(axis: Axes, *named: tuple[str, str]) -> None:
    """What a panel shows, each name in the colour of its line."""
    text, colour = named[0]
    last = axis.annotate(
        text,
        (0, 1),
        xytext=(0, 3),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=8.5,
        fontweight="bold",
        color=colour,
    )
    for text, colour in named[1:]:
        place: Any = (last, axis.transAxes)  # beside the name before, all on one line
        last = axis.annotate(
            text, (1, 1), xytext=(9, 3), xycoords=place, textcoords="offset points", fontsize=8.5, color=colour
        )


def _now(axis: Axes, text: str, colour: str, second: tuple[str, str] | None = None) -> None:
    """The last interval's value, at the upper right corner."""
    style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8.5, "fontweight": "bold", "ha": "right"}
    last = axis.annotate(text, (1, 1), xytext=(0, 3), xycoords="axes fraction", color=colour, **style)
    if second is not None:
        place: Any = (last, axis.transAxes)
        axis.annotate(second[0], (0, 1), xytext=(-9, 3), xycoords=place, color=second[1], **style)


def _mark_ooms(axes: Sequence[Axes], telemetry: Telemetry) -> None:
    """A hair line through all panels for every interval with an out-of-memory event, and a mark at its top."""
    places = np.flatnonzero(telemetry.oom_count > 0) - 0.5
    for axis in axes:
        axis.vlines(places, 0, 1, transform=axis.get_xaxis_transform(), color=_ALARM, linewidth=0.7, alpha=0.55)
    axes[0].plot(
        places,
        np.full(len(places), 0.95),
        transform=axes[0].get_xaxis_transform(),
        color=_ALARM,
        marker="v",
        markersize=6,
        linestyle="",
        clip_on=False,
    )


def _heading(figure: Figure, episode: _Episode, telemetry: Telemetry, interval: int, ended: bool) -> None:
    figure.text(0.085, 0.975, episode.scenario, va="top", fontsize=12, fontweight="bold", color=_INK)
    figure.text(0.085, 0.951, f"{episode.training}, on {episode.device}", va="top", fontsize=8.5, color=_FAINT)
    style: dict[str, Any] = {"ha": "right", "va": "top"}
    figure.text(0.925, 0.973, f"interval {interval} of {episode.horizon}", fontsize=9.5, color=_INK, **style)
    ooms = int(telemetry.oom_count.sum())
    if ooms:
        text = f"{ooms} out-of-memory event{'s' if ooms > 1 else ''}" + (
            ", the last one ended the job" if ended else ""
        )
        figure.text(0.925, 0.95, text, fontsize=8.5, color=_ALARM, **style)


def _highest(values: Array) -> float:
    return float(np.nanmax(values, initial=0.0))


def _count(value: float, _position: float | None = None) -> str:
    return f"{value:,.0f}"
