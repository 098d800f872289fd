"""From optimizer steps and sensor readings to one interval's telemetry."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .controls import Controls
from .macro_batch import StepResult
from .telemetry import Telemetry


@dataclass(slots=True)
class IntervalMeter:
    """Adds up what the optimizer steps of a control interval cost.

    The interval's wall time is the steps' own: evaluation, logging and checkpoints between steps do not count.
    """

    wall_s: float = 0.0
    steps: int = 0
    samples: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    wait_s: float = 0.0
    micro_batches: int = 0
    oom_count: int = 0
    skipped: int = 0
    checkpointed_tokens: float = 0.0
    largest: int = 0
    peak_fraction: float = np.nan
    losses: list[Any] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)

    def add(self, step: StepResult, wall_s: float) -> None:
        """Count one optimizer step; its loss, a tensor, is read only when telemetry is asked for."""
        self.wall_s += wall_s
        self.steps += 1
        self.samples += step.samples
        self.real_tokens += step.real_tokens
        self.padded_tokens += step.padded_tokens
        self.wait_s += step.wait_s
        self.micro_batches += len(step.micro)
        self.oom_count += step.oom_count
        self.skipped += step.skipped
        for micro in step.micro:
            self.checkpointed_tokens += micro.checkpoint_fraction * micro.tokens
            self.largest = max(self.largest, micro.tokens)
            self.peak_fraction = _highest(self.peak_fraction, micro.peak_fraction)
        if step.loss is not None:
            self.losses.append(step.loss)
        self.lengths.append(step.lengths)

    def add_totals(self, other: IntervalMeter) -> None:
        """Count all of another interval, except that its lengths and losses are not kept."""
        self.wall_s += other.wall_s
        self.steps += other.steps
        self.samples += other.samples
        self.real_tokens += other.real_tokens
        self.padded_tokens += other.padded_tokens
        self.wait_s += other.wait_s
        self.micro_batches += other.micro_batches
        self.oom_count += other.oom_count
        self.skipped += other.skipped
        self.checkpointed_tokens += other.checkpointed_tokens
        self.largest = max(self.largest, other.largest)
        self.peak_fraction = _highest(self.peak_fraction, other.peak_fraction)

    def telemetry(
        self,
        time_s: float,
        controls: Controls,
        readings: Mapping[str, float],
        upcoming: np.ndarray,
    ) -> Telemetry:
        """The interval's telemetry (n = 1).

        Args:
            time_s: Seconds since the run began.
            controls: In force during the interval.
            readings: Sensor values by telemetry field; they win over what is derived here.
            upcoming: Lengths of the samples that come next (empty where unknown).
        """
        wall = self.wall_s if self.wall_s > 0 else np.nan
        steps = self.steps or np.nan
        values: dict[str, float] = {
            "time_s": time_s,
            "interval_s": self.wall_s,
            "optimizer_steps": self.steps,
            "samples": self.samples,
            "real_tokens": self.real_tokens,
            "padded_tokens": self.padded_tokens,
            "tokens_per_s": self.real_tokens / wall,
            "step_time_s": self.wall_s / steps,
            "data_wait_fraction": float(np.minimum(1.0, self.wait_s / wall)),
            "micro_batches_per_step": self.micro_batches / steps,
            "largest_micro_batch": self.largest or np.nan,
            "oom_count": self.oom_count,
            "memory_peak_fraction": float(self.peak_fraction),
            "loss": float(np.mean([float(x) for x in self.losses])) if self.losses else np.nan,
        }
        values |= controls.plant(0)
        if self.padded_tokens:
            values["checkpoint_fraction"] = self.checkpointed_tokens / self.padded_tokens
        if upcoming.size:
            values["upcoming_mean"] = float(upcoming.mean())
            values["upcoming_p95"] = float(np.quantile(upcoming, 0.95))
            values["upcoming_max"] = float(upcoming.max())
        return Telemetry.of(1, **(values | dict(readings)))


def _highest(one: float, other: float) -> float:
    """The greater of two values, NaN being none (plain floats: this runs for every micro-batch)."""
    return one if one >= other or math.isnan(other) else other
