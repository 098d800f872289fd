"""What a comparison says of each policy: figures with 95 % intervals, flat by ``POLICY/SPLIT/figure``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .compare import BEST_STATIC_SPLIT, Result, SplitResult
from .statistics import (
    draw_units,
    interquartile_mean,
    mean,
    optimality_gap,
    percentile_interval,
    probability_of_improvement,
    zero_events_bound,
)

Array = NDArray[np.float64]
Summary = dict[str, float | int | None]


def summarise(result: Result) -> Summary:
    """All figures of all policies; None where one does not exist.

    Of each policy and split: `score_iqm` (`score_low`, `score_high`), `score_mean`, `optimality_gap`,
    `throughput_ratio_to_best_static` (`..._low`, `..._high`) and `energy_ratio_to_best_static` (geometric means over
    the episodes), `violated_interval_share`, `ooms`, `unrecovered_ooms`, `unrecovered_bound` (upper 95 % bound of the
    share of jobs lost, where none was), `policy_failures`. Against each other policy ``versus/OTHER/``: `difference` of
    the interquartile means and `probability` of improvement, each with `..._low` and `..._high`.
    """
    summary: Summary = {}
    for split, own in result.splits.items():
        summary |= _summarise_split(split, own, result.comparison.horizon, result.comparison.policies)
    return summary


def _summarise_split(split: str, result: SplitResult, horizon: int, policies: tuple[str, ...]) -> Summary:
    units = len(result.names)
    draws = draw_units(units)  # the same for all policies: differences are paired

    def interval(statistic: Callable[..., Array], *samples: Array) -> tuple[float | None, float | None]:
        low, high = percentile_interval(statistic(*(sample[draws] for sample in samples)), units)
        return _known(low), _known(high)

    summary: Summary = {}
    resampled = {policy: interquartile_mean(result.scores[policy][draws]) for policy in policies}
    for policy in policies:
        name = f"{policy}/{split}"
        scores = result.scores[policy]
        low, high = percentile_interval(resampled[policy], units)
        summary[f"{name}/score_iqm"] = float(interquartile_mean(scores))
        summary[f"{name}/score_low"], summary[f"{name}/score_high"] = _known(low), _known(high)
        summary[f"{name}/score_mean"] = float(scores.mean())
        summary[f"{name}/optimality_gap"] = float(optimality_gap(scores))
        if "tokens" in result.figures[policy]:
            summary |= _of_figures(name, result, policy, horizon, interval)
        for other in policies:
            if other == policy:
                continue
            pair = f"{name}/versus/{other}"
            summary[f"{pair}/difference"] = float(interquartile_mean(scores) - interquartile_mean(result.scores[other]))
            low, high = percentile_interval(resampled[policy] - resampled[other], units)
            summary[f"{pair}/difference_low"], summary[f"{pair}/difference_high"] = _known(low), _known(high)
            wins = (scores > result.scores[other]) + 0.5 * (scores == result.scores[other])
            summary[f"{pair}/probability"] = float(probability_of_improvement(scores, result.scores[other]))
            low, high = interval(mean, wins)
            summary[f"{pair}/probability_low"], summary[f"{pair}/probability_high"] = low, high
    return summary


def _of_figures(
    name: str, result: SplitResult, policy: str, horizon: int, interval: Callable[..., tuple[Any, Any]]
) -> Summary:
    own, best = result.figures[policy], result.figures[BEST_STATIC_SPLIT]
    with np.errstate(divide="ignore", invalid="ignore"):
        speed = np.log(own["tokens"] / own["seconds"]) - np.log(best["tokens"] / best["seconds"])
        energy = np.log(own["joules"] / own["tokens"]) - np.log(best["joules"] / best["tokens"])
    low, high = interval(mean, speed)
    unrecovered = int(own["unrecovered"].sum())
    return {
        f"{name}/throughput_ratio_to_best_static": _known(math.exp(speed.mean())),
        f"{name}/throughput_ratio_low": None if low is None else math.exp(low),
        f"{name}/throughput_ratio_high": None if high is None else math.exp(high),
        f"{name}/energy_ratio_to_best_static": _known(math.exp(energy.mean())),
        f"{name}/violated_interval_share": float(own["violated"].mean() / horizon),
        f"{name}/ooms": int(own["ooms"].sum()),
        f"{name}/unrecovered_ooms": unrecovered,
        f"{name}/unrecovered_bound": None if unrecovered else zero_events_bound(own["unrecovered"].size),
        f"{name}/policy_failures": int(own["failures"].max()),
    }


def ladder(summary: Mapping[str, Any], policies: tuple[str, ...], split: str) -> list[str]:
    """Policies from the highest score to the lowest."""
    return sorted(policies, key=lambda policy: -summary[f"{policy}/{split}/score_iqm"])


HEAD = ("policy", "score", "95 %", "vs best static", "tokens/s", "J/token", "violated", "OOMs", "lost")


def table(summary: Mapping[str, Any], policies: tuple[str, ...], split: str) -> list[list[str]]:
    """Rows under `HEAD` from the highest score to the lowest, as text.

    "vs best static" is the difference of scores to the best fixed setting of the split, with its paired interval;
    tokens/s and J/token are relative to that setting. Where no job was lost, the 3 / n bound stands behind.
    """
    rows = []
    for policy in ladder(summary, policies, split):
        name = f"{policy}/{split}"

        def value(figure: str, text: str, name: str = name) -> str:
            found = summary.get(f"{name}/{figure}")
            return "" if found is None else text.format(found)

        versus = f"versus/{BEST_STATIC_SPLIT}/difference"
        rows.append(
            [
                policy,
                value("score_iqm", "{:.3f}"),
                _range(summary, f"{name}/score_low", f"{name}/score_high", "{:.3f}"),
                (
                    value(versus, "{:+.3f}")
                    + f" {_range(summary, f'{name}/{versus}_low', f'{name}/{versus}_high', '{:+.3f}')}"
                ).strip(),
                value("throughput_ratio_to_best_static", "×{:.2f}"),
                value("energy_ratio_to_best_static", "×{:.2f}"),
                value("violated_interval_share", "{:.2%}"),
                value("ooms", "{}"),
                f"{value('unrecovered_ooms', '{}')} {value('unrecovered_bound', '(≤ {:.1%})')}".strip(),
            ]
        )
    return rows


def markdown(result: Result, summary: Mapping[str, Any]) -> str:
    """The tables of all splits as Markdown."""
    parts = []
    for split in result.comparison.splits:
        rows = [HEAD, ["---"] * len(HEAD), *table(summary, result.comparison.policies, split)]
        lines = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        parts.append(f"**{split}**\n\n{lines}\n")
    return "\n".join(parts)


def _range(summary: Mapping[str, Any], low: str, high: str, text: str) -> str:
    ends = summary.get(low), summary.get(high)
    return "" if None in ends else f"({text.format(ends[0])} to {text.format(ends[1])})"


def _known(value: float) -> float | None:
    """None for what is not finite, which JSON does not have."""
    return float(value) if math.isfinite(value) else None
