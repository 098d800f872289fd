"""One interval's telemetry from its optimizer steps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from swiftcruise.runtime.controls import Controls
from swiftcruise.runtime.interval import IntervalMeter
from swiftcruise.runtime.macro_batch import MicroResult, StepResult

NOTHING = np.empty(0)


def step(*micro: tuple[int, float, float], loss: float = 1.0, **fields) -> StepResult:
    """A step of micro-batches given as (tokens, checkpointed fraction, peak)."""
    results = [MicroResult(tokens, 0.0, 2, tokens // 2, 0.1, fraction, peak) for tokens, fraction, peak in micro]
    tokens = sum(m.tokens for m in results)
    return StepResult(results, 2 * len(results), tokens - 5, tokens, loss=torch.tensor(loss), **fields)


def telemetry_of(meter: IntervalMeter, upcoming: np.ndarray = NOTHING, **readings: float) -> dict[str, float]:
    return meter.telemetry(60.0, Controls.of(1, token_budget=512, checkpoint_fraction=0.3), readings, upcoming).plant(0)


def test_an_interval_adds_up_its_steps():
    meter = IntervalMeter()
    meter.add(step((100, 0.5, 0.6), (50, 0.0, math.nan), loss=2.0, wait_s=0.25, oom_count=1), 1.5)
    meter.add(step((50, 1.0, 0.7), loss=4.0, wait_s=0.25), 0.5)
    seen = telemetry_of(meter)
    assert (seen["optimizer_steps"], seen["samples"], seen["oom_count"]) == (2, 6, 1)
    assert (seen["real_tokens"], seen["padded_tokens"], seen["tokens_per_s"]) == (190, 200, 95)
    assert (seen["step_time_s"], seen["data_wait_fraction"], seen["micro_batches_per_step"]) == (1.0, 0.25, 1.5)
    assert (seen["largest_micro_batch"], seen["memory_peak_fraction"], seen["loss"]) == (100, 0.7, 3.0)
    assert seen["checkpoint_fraction"] == 0.5  # weighted by tokens, not the order
    assert seen["token_budget"] == 512


def test_before_the_first_step_nothing_that_takes_a_step_is_measured():
    seen = telemetry_of(IntervalMeter())
    unmeasured = ("tokens_per_s", "step_time_s", "data_wait_fraction", "micro_batches_per_step", "loss")
    assert all(math.isnan(seen[name]) for name in unmeasured)
    assert math.isnan(seen["largest_micro_batch"])
    assert math.isnan(seen["memory_peak_fraction"])
    assert seen["checkpoint_fraction"] == 0.3


def test_a_run_without_layers_to_checkpoint_measures_no_fraction():
    meter = IntervalMeter()
    meter.add(step((100, math.nan, 0.5)), 1.0)
    assert math.isnan(telemetry_of(meter)["checkpoint_fraction"])


def test_upcoming_lengths_and_sensor_readings_are_passed_on():
    seen = telemetry_of(IntervalMeter(), np.array([10.0, 20.0, 30.0]), fill=0.7)
    assert (seen["upcoming_mean"], seen["upcoming_max"], seen["fill"]) == (20, 30, 0.7)
    assert seen["upcoming_p95"] == pytest.approx(29)


def test_totals_are_those_of_all_intervals():
    total, whole = IntervalMeter(), IntervalMeter()
    for peak in (0.4, 0.9, math.nan):
        one = IntervalMeter()
        for meter in (one, whole):
            meter.add(step((64, 0.5, peak), wait_s=0.1, oom_count=1), 1.0)
        total.add_totals(one)
    ours, theirs = telemetry_of(total), telemetry_of(whole)
    assert {k: v for k, v in ours.items() if k != "loss"} == pytest.approx(
        {k: v for k, v in theirs.items() if k != "loss"}, nan_ok=True
    )
