"""Figures of a comparison: score intervals, performance profiles, the front of speed and energy, safety."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .compare import BEST_STATIC, BEST_STATIC_SPLIT, CLAIRVOYANT, DEFAULT, Result
from .statistics import performance_profile
from .summary import ladder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by colour-blind readers too; line styles double their number.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_STYLES = ("-", "--", ":", "-.")
_MARKS = ("o", "s", "^", "D", "v", "P", "X")
_YARDSTICK_COLOUR = "#7a7a7a"
_YARDSTICKS = (DEFAULT, BEST_STATIC, BEST_STATIC_SPLIT, CLAIRVOYANT)

_Draw = Callable[["Axes", Result, Mapping[str, Any], str], None]


def draw_all(result: Result, summary: Mapping[str, Any], folder: Path) -> dict[str, Figure]:
    """Draw all figures and save them as PNG in a folder, which is made. Returns them by name."""
    folder.mkdir(parents=True, exist_ok=True)
    height = 1.2 + 0.28 * len(result.comparison.policies)
    figures = {
        "scores": _draw(result, summary, _scores, height, "Score, interquartile mean with 95 % interval"),
        "profiles": _draw(result, summary, _profile, 4.6, "Share of episodes with a score above"),
        "front": _draw(result, summary, _front, 4.6, "Speed against energy (down and right is better)"),
        "safety": _draw(result, summary, _safety, height, "Intervals in which a limit was broken, and OOMs an episode"),
    }
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.png")
    return figures


def _draw(result: Result, summary: Mapping[str, Any], draw: _Draw, height: float, title: str) -> Figure:
    """One panel a split."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    splits = result.comparison.splits
    figure = Figure(figsize=(1.5 + 4.5 * len(splits), height), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(splits), squeeze=False)[0]
    for axis, split in zip(axes, splits, strict=True):
        draw(axis, result, summary, split)
        axis.set_title(split, fontsize=10)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=11)
    handles, labels = axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right center", fontsize=8, frameon=False)
    return figure


def _look(policies: Sequence[str], policy: str) -> dict[str, Any]:
    """Colour and line style of a policy; yardsticks are grey."""
    if policy in _YARDSTICKS:
        return {"color": _YARDSTICK_COLOUR, "linestyle": _STYLES[_YARDSTICKS.index(policy)]}
    i = [name for name in policies if name not in _YARDSTICKS].index(policy)
    return {"color": _COLOURS[i % len(_COLOURS)], "linestyle": _STYLES[i // len(_COLOURS) % len(_STYLES)]}


def _rungs(axis: Axes, policies: Sequence[str]) -> np.ndarray:
    """Names of policies down the side; returns their heights."""
    heights = np.arange(len(policies), 0, -1)
    axis.set_yticks(heights, list(policies), fontsize=8)
    return heights


def _scores(axis: Axes, result: Result, summary: Mapping[str, Any], split: str) -> None:
    policies = ladder(summary, result.comparison.policies, split)
    for height, policy in zip(_rungs(axis, policies), policies, strict=True):
        name = f"{policy}/{split}"
        colour = _look(result.comparison.policies, policy)["color"]
        low, high = summary[f"{name}/score_low"], summary[f"{name}/score_high"]
        if low is not None and high is not None:
            axis.plot([low, high], [height, height], color=colour, linewidth=5, alpha=0.45, solid_capstyle="butt")
        axis.plot(summary[f"{name}/score_iqm"], height, "|", color=colour, markersize=11, markeredgewidth=2)
    axis.set_xlabel("0: ms-swift's default, 1: the oracle's bound", fontsize=8)


def _profile(axis: Axes, result: Result, summary: Mapping[str, Any], split: str) -> None:
    thresholds = np.linspace(-0.5, 1.0, 151)
    for policy in result.comparison.policies:
        shares = performance_profile(result.splits[split].scores[policy], thresholds)
        axis.plot(thresholds, shares, label=policy, linewidth=1.4, **_look(result.comparison.policies, policy))
    axis.set_xlabel("score", fontsize=8)


def _front(axis: Axes, result: Result, summary: Mapping[str, Any], split: str) -> None:
    points: dict[str, list[tuple[float, float]]] = {}
    for point in result.front:
        if point["split"] == split:
            points.setdefault(point["policy"], []).append((point["speed"], point["energy_per_token"]))
    for i, (policy, own) in enumerate(points.items()):
        look = _look(result.comparison.policies, policy) | {"marker": _MARKS[i % len(_MARKS)], "markersize": 5}
        axis.plot(*zip(*own, strict=True), label=policy, linewidth=1.2, **look)
    axis.set_xlabel("tokens/s, relative to the scenario's reference", fontsize=8)
    axis.set_ylabel("J/token, relative to the reference", fontsize=8)


def _safety(axis: Axes, result: Result, summary: Mapping[str, Any], split: str) -> None:
    policies = ladder(summary, result.comparison.policies, split)
    policies = [policy for policy in policies if f"{policy}/{split}/ooms" in summary]
    heights = _rungs(axis, policies)
    episodes = result.splits[split].bound.size
    shares = [100.0 * summary[f"{policy}/{split}/violated_interval_share"] for policy in policies]
    ooms = [summary[f"{policy}/{split}/ooms"] / episodes for policy in policies]
    axis.barh(heights + 0.19, shares, 0.36, color="#d55e00", label="intervals, %")
    axis.barh(heights - 0.19, ooms, 0.36, color="#0072b2", label="OOMs an episode")
