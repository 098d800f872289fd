"""What keeps the hook cheap. Times are in `benchmarks/hook_overhead.py`; here is what they follow from."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from contextlib import AbstractContextManager, ExitStack, nullcontext
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftcruise.runtime.interval import IntervalMeter
from swiftcruise.runtime.loop import ControlLoop
from swiftcruise.runtime.macro_batch import MicroResult, Settings, StepResult
from swiftcruise.runtime.memory_model import PeakMemoryModel
from swiftcruise.runtime.memory_watch import MemoryWatch
from swiftcruise.runtime.planner import MicroBatch
from swiftcruise.runtime.sensors.live import LiveSensors
from swiftcruise.runtime.tensorboard import CruiseBoard
from swiftcruise.runtime.trace import TraceWriter

from .training import UNCHANGED, Lab

NEW_MODULES = """
import sys
from swift import sft_main
import swift.trainers
from swift.callbacks import callbacks_map
before = set(sys.modules)
import swiftcruise.runtime.hook
print(*{name.partition(".")[0] for name in sys.modules.keys() - before})
"""


def test_importing_the_hook_loads_no_library_that_ms_swift_does_not_load_but_the_small_sensor_ones():
    done = subprocess.run([sys.executable, "-c", NEW_MODULES], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "swiftcruise" in loaded
    assert loaded <= {"swiftcruise", "psutil", "pynvml"}


class Calls(Counter[str]):
    """Counts calls of methods, which do their work as before."""

    def watch(self, *methods: tuple[type, str]) -> AbstractContextManager[object]:
        stack = ExitStack()
        for owner, name in methods:
            original, key = getattr(owner, name), f"{owner.__name__}.{name}"

            def counting(instance, *args, _original=original, _key=key, **options):
                self[_key] += 1
                return _original(instance, *args, **options)

            stack.enter_context(mock.patch.object(owner, name, counting))
        return stack


LOGS_AND_SENSORS = (
    (ControlLoop, "decide"),
    (LiveSensors, "readings"),
    (TraceWriter, "_write"),
    (CruiseBoard, "interval"),
)


@pytest.mark.parametrize(("steps", "decisions"), [({}, 2), ({"interval_steps": 4}, 3)])
def test_between_intervals_nothing_is_read_decided_or_written(lab: Lab, steps: dict, decisions: int):
    calls = Calls()
    with calls.watch(*LOGS_AND_SENSORS):
        run = lab.train(cruise={key: UNCHANGED[key] for key in ("policy", "checkpoint")} | steps)
    assert run.summary["optimizer_steps"] == 8
    assert calls == {
        "ControlLoop.decide": decisions,
        "LiveSensors.readings": decisions,
        "TraceWriter._write": decisions,  # the header, and every interval: the first decision ends none
        "CruiseBoard.interval": decisions - 1,
    }
    assert set(run.samples.values()) == {1}  # each sample is collated once


class CountingMeter:
    """A meter that says how often it was asked."""

    peak_bytes = 10

    def __init__(self) -> None:
        self.metered = 0

    def watching(self) -> AbstractContextManager[object]:
        self.metered += 1
        return nullcontext()

    def reset_peak(self) -> None:
        pass


def test_a_meter_that_costs_time_is_hardly_asked_while_no_control_depends_on_memory():
    meter = CountingMeter()
    watch = MemoryWatch(PeakMemoryModel(1), meter, 100.0, None, every=16)

    def run(settings: Settings, tokens: int, times: int) -> int:
        """How often the meter is asked."""
        before = meter.metered
        for _ in range(times):
            plan = MicroBatch((0,), tokens, tokens)
            (fraction,) = watch.choose_checkpointing([plan], settings)
            with watch.watch(plan, fraction):
                pass
        return meter.metered - before

    assert run(Settings(), 500, 640) == 11  # the first, and one in 64
    assert run(Settings(), 501, 1) == 1  # larger than any before
    assert run(Settings(token_budget=500.0), 500, 100) >= MemoryWatch.LEARNING - 12


steps = st.builds(
    lambda micro, wait_s, oom_count: StepResult(
        micro=micro,
        samples=sum(m.samples for m in micro),
        real_tokens=sum(m.tokens for m in micro),
        padded_tokens=sum(m.tokens for m in micro),
        wait_s=wait_s,
        oom_count=oom_count,
    ),
    st.lists(
        st.builds(
            MicroResult,
            tokens=st.integers(1, 1000),
            quadratic=st.just(0.0),
            samples=st.integers(1, 8),
            length=st.integers(1, 100),
            seconds=st.sampled_from([0.25, 1.5]),
            checkpoint_fraction=st.sampled_from([0.0, 0.25, 1.0]),
            peak_fraction=st.sampled_from([0.125, 0.5, math.nan]),
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([0.0, 0.125]),
    st.integers(0, 1),
)


@given(intervals=st.lists(st.lists(steps, max_size=4), max_size=4))
def test_the_run_s_totals_are_those_of_all_its_steps_though_only_intervals_are_added_up(intervals):
    total, direct = IntervalMeter(), IntervalMeter()
    for interval in intervals:
        meter = IntervalMeter()
        for step in interval:
            meter.add(step, 2.0)
            direct.add(step, 2.0)
        total.add_totals(meter)
    direct.lengths.clear()
    assert repr(total) == repr(direct)  # NaN included
