"""Verdicts on a training under the hook while a neighbour came and went, from its records. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from verdicts import Check

from swiftcruise.runtime.memory_model import PeakMemoryModel
from swiftcruise.runtime.trace import Trace


@dataclass(frozen=True)
class Acts:
    """Optimizer steps before, during and after the neighbour."""

    before: int
    during: int
    after: int

    @property
    def total(self) -> int:
        """Steps of the training."""
        return self.before + self.during + self.after

    @property
    def arrival(self) -> int:
        """The first step with the neighbour, counted from 1."""
        return self.before + 1

    @property
    def departure(self) -> int:
        """The first step without it."""
        return self.before + self.during + 1

    def of(self, step: int) -> str:
        """The act of a step."""
        return "before" if step < self.arrival else "during" if step < self.departure else "after"


@dataclass(frozen=True)
class Recorded:
    """What the training under the hook left behind."""

    steps: Sequence[Mapping[str, Any]]  #: lines of the probe
    trace: Trace
    samples: int  #: of the data set
    acts: Acts
    memory_bytes: float  #: what the training may have without the neighbour
    room_bytes: float  #: and with it

    def in_act(self, act: str) -> list[Mapping[str, Any]]:
        """The probe's lines of an act."""
        return [line for line in self.steps if self.acts.of(line["step"]) == act]

    def intervals(self, act: str) -> list[dict[str, Any]]:
        """The trace's intervals that lie in an act altogether."""
        begins = [0, *(interval["step"] for interval in self.trace.intervals)]
        return [
            interval
            for begin, interval in zip(begins, self.trace.intervals, strict=False)
            if self.acts.of(begin + 1) == act == self.acts.of(interval["step"])
        ]


def out_of_memory(run: Recorded) -> Check:
    """Allocations failed for real, and the training went on to its end."""
    failures = [failure for line in run.steps for failure in line["failures"]]
    stages = Counter(failure["stage"] for failure in failures)
    kinds = Counter(failure["kind"] for failure in failures)
    survived = sum(line["oom_count"] for line in run.steps)
    told = sum(event["event"] == "oom" for event in run.trace.events)
    finished = len(run.steps) == run.acts.total
    passed = finished and survived == len(failures) == told and survived > 0
    return Check.of(
        "out_of_memory",
        passed,
        "" if survived else "nothing failed: lower --room-gib",
        failures=len(failures),
        survived=survived,
        in_forward=stages["forward"],
        in_backward=stages["backward"],
        kinds=" ".join(f"{kind}:{count}" for kind, count in sorted(kinds.items())),
        message=failures[0]["message"][:100] if failures else "",
        redo_s=sum(line["redo_s"] for line in run.steps),
        steps=len(run.steps),
    )


def samples(run: Recorded) -> Check:
    """Every sample took part in exactly one optimizer step, in the data set's order of steps, by probe and by trace."""
    taken = [index for line in run.steps for index in line["indices"]]
    count = Counter(taken)
    lost = run.samples - len(count)
    repeated = sum(n - 1 for n in count.values())
    traced = sum(len(lengths) for i in range(len(run.trace.intervals)) for lengths in run.trace.lengths(i))
    ordered = taken == sorted(taken)
    passed = not lost and not repeated and ordered and traced == run.samples
    return Check.of("samples", passed, lost=lost, repeated=repeated, in_order=ordered, in_trace=traced, of=run.samples)


def weights(
    plain: Mapping[str, np.ndarray], ours: Mapping[str, np.ndarray], start: Mapping[str, np.ndarray], tolerance: float
) -> Check:
    """The weights are those of a plain run without neighbour, and training has moved them."""

    def largest(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> float:
        return max(float(np.abs(one[name].astype(np.float64) - other[name]).max()) for name in one)

    difference, moved = largest(plain, ours), largest(plain, start)
    passed = plain.keys() == ours.keys() and difference <= tolerance and moved > 10 * tolerance
    dtype = str(next(iter(ours.values())).dtype)
    return Check.of("weights", passed, max_difference=difference, tolerance=tolerance, moved=moved, dtype=dtype)


def settles(run: Recorded) -> Check:
    """Failures are a matter of the neighbour's arrival: few, and no more of them in the second half."""
    during = run.in_act("during")
    half = len(during) // 2
    first = sum(line["oom_count"] for line in during[:half])
    second = sum(line["oom_count"] for line in during[half:])
    elsewhere = sum(line["oom_count"] for line in run.steps) - first - second
    retries = sum(interval.get("allocation_retries") or 0 for interval in run.trace.intervals)
    passed = second <= max(1, first // 2)
    figures = {"first_half": first, "second_half": second, "without_neighbour": elsewhere}
    return Check.of("settles", passed, **figures, allocation_retries=retries)


def speed(run: Recorded, plain_steps: Sequence[Mapping[str, Any]], by_time: bool) -> Check:
    """Speed comes back when the neighbour has gone.

    Args:
        run: The training.
        plain_steps: The probe's lines of the plain run, which took the same samples step by step.
        by_time: Judge real tokens/s; else the token budget in force, as a shared CPU's times say little.
    """
    figures: dict[str, float] = {}
    tokens = {line["step"]: line["real_tokens"] for line in run.steps}
    for act in ("before", "during", "after"):
        lines = run.in_act(act)
        settled = {line["step"] for line in lines[len(lines) // 2 :]}  # the first half of an act is its transient
        figures[f"{act}_tokens_per_s"] = _tokens_per_s([x for x in run.steps if x["step"] in settled], tokens)
        figures[f"{act}_plain_tokens_per_s"] = _tokens_per_s([x for x in plain_steps if x["step"] in settled], tokens)
        sizes = [micro[0] for line in lines if line["step"] in settled for micro in line["micro"]]
        figures[f"{act}_micro_batch_tokens"] = statistics.fmean(sizes) if sizes else math.nan
        budgets = [line["controls"].get("token_budget", math.nan) for line in run.intervals(act)]
        figures[f"{act}_token_budget"] = budgets[-1] if budgets else math.nan
    ratios = {
        f"{what}_after_to_before": figures[f"after_{what}"] / figures[f"before_{what}"]
        for what in ("tokens_per_s", "token_budget")
    }
    passed = ratios["tokens_per_s_after_to_before" if by_time else "token_budget_after_to_before"] >= 0.8
    return Check.of("speed_returns", passed, **ratios, **figures)


def _tokens_per_s(lines: Sequence[Mapping[str, Any]], tokens: Mapping[int, float]) -> float:
    seconds = sum(line["end_s"] - line["begin_s"] for line in lines)
    return sum(tokens.get(line["step"], 0) for line in lines) / seconds if seconds else math.nan


def memory_model(run: Recorded) -> Check:
    """The online model of peak memory foretells the meter's next micro-batches (R2 over the second half)."""
    model = PeakMemoryModel(1)
    foretold, measured, bounds = [], [], []
    for line in run.steps:
        micro = np.array(line["micro"], dtype=np.float64).reshape(-1, 4)
        tokens, quadratic, fraction, peak = micro[np.isfinite(micro[:, 3])].T
        if not tokens.size:
            continue
        fraction = np.nan_to_num(fraction)
        if model.observations[0]:
            foretold += model.mean(tokens, quadratic, fraction).tolist()
            bounds += model.upper(tokens, quadratic, fraction).tolist()
            measured += peak.tolist()
        model.observe(tokens, quadratic, fraction, peak)
    half = len(measured) // 2
    y, p, upper = (np.array(values[half:]) for values in (measured, foretold, bounds))
    if y.size < 10 or not y.std():
        return Check.of("memory_model", False, "too few micro-batches were measured", micro_batches=y.size)
    r2 = 1.0 - float(((y - p) ** 2).sum() / ((y - y.mean()) ** 2).sum())
    exceeded = float((y > upper).mean())
    worst = float(np.abs(y - p).max())
    return Check.of("memory_model", r2 >= 0.9, r2=r2, worst=worst, above_bound=exceeded, micro_batches=y.size)


def neighbour_seen(run: Recorded) -> Check:
    """NVML saw the neighbour's memory and no more, and only while it was there."""

    def others(act: str) -> list[float]:
        values = [
            line["memory_device_fraction"] - line["memory_peak_fraction"]
            for line in run.intervals(act)
            if None not in (line.get("memory_device_fraction"), line.get("memory_peak_fraction"))
        ]
        return values[len(values) // 2 :]  # NVML looks now and then: once an act has settled

    seen = {act: statistics.median(others(act) or [math.nan]) for act in ("before", "during", "after")}
    expected = 1.0 - run.room_bytes / run.memory_bytes
    passed = abs(seen["during"] - expected) <= 0.25 and seen["before"] <= 0.15 and seen["after"] <= 0.15
    return Check.of("neighbour_seen", passed, "fractions of capacity", expected=expected, **seen)


def target_gives_way(run: Recorded) -> Check:
    """The memory target in force leaves the neighbour its memory, and comes back."""

    def target(act: str) -> float:
        values = [line["controls"].get("memory_target", math.nan) for line in run.intervals(act)]
        return statistics.median(values[len(values) // 2 :]) if values else math.nan

    targets = {act: target(act) for act in ("before", "during", "after")}
    passed = targets["during"] < 0.8 * targets["before"] and targets["after"] >= 0.85 * targets["before"]
    return Check.of("target_gives_way", passed, **targets)


def power_and_temperature(run: Recorded) -> Check:
    """Telemetry of the training holds what NVML measures."""
    intervals = run.trace.intervals
    shares = {
        name: sum(line.get(name) is not None for line in intervals) / max(1, len(intervals))
        for name in ("power_w", "temperature_c", "gpu_utilization", "energy_j")
    }
    return Check.of("telemetry", max(shares["power_w"], shares["temperature_c"]) >= 0.8, "share measured", **shares)
