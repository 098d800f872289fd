"""Memory that really runs out: trainings in processes of their own, under a budget or a limit that changes meanwhile.

The hook counts on more memory than there is: the failures come as from a neighbour that no sensor sees.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from swiftcruise.cli.tiny import training_arguments
from swiftcruise.runtime.trace import Trace, decode_lengths, read_trace

from .allocator_meter import AllocatorMeter, MeterUnavailable, build_meter
from .training import Lab, Trained

ROOT = Path(__file__).parents[1]
STEPS_PER_EPOCH = 8  # 61 samples, eight a step
BATCHES_OF_EIGHT = ("--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "1", "--optim", "sgd")
# In a long run a larger one makes the training itself unstable, which amplifies the last bit of every sum.
LEARNING_RATE = ("--learning_rate", "0.01")
#: The policy always asks for more than fits, so that what is in force is what the guard lets pass.
GREEDY = {
    "policy": "static",
    "policy_options": {"token_budget": 100_000},
    "interval_steps": 1,
    "memory_limit_gib": 0.03,
}
BUDGET = 10_000_000  # bytes; a batch of eight takes up to 17 million, the longest sample alone 3
TAKEN = 5_000_000  # by a neighbour


@pytest.fixture(scope="session")
def meter_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build_meter(tmp_path_factory.mktemp("meter"))
    except MeterUnavailable as reason:
        pytest.skip(str(reason))


def in_a_process(code: str, environment: Mapping[str, str] | None = None) -> None:
    """Run assertions in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_meter_counts_what_tensors_take_and_lets_torch_fail_beyond_the_budget(meter_library: Path, tmp_path: Path):
    meter = AllocatorMeter(meter_library, tmp_path / "meter", budget_bytes=9_000_000)
    in_a_process(
        """
import ctypes, os, threading, torch
from swiftcruise.runtime.oom import is_out_of_memory
from tests.allocator_meter import AllocatorMeter
meter = AllocatorMeter.of_this_process()
before = meter.live_bytes
live = lambda: meter.live_bytes - before
def fails():
    try:
        torch.empty(1_000_000)
    except RuntimeError as error:
        return "can't allocate memory" in str(error) and is_out_of_memory(error)
one, two = torch.empty(1_000_000), torch.empty(1_000_000)
assert live() == 8_000_000 and fails() and live() == 8_000_000
del two
assert not fails()
meter.neighbour_bytes = 5_000_000
assert fails()
meter.neighbour_bytes = 0
del one
def churn():
    for size in range(1, 2000):
        kept = torch.ones(size % 97, 64)
        kept += 1
threads = [threading.Thread(target=churn) for _ in range(4)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
assert live() == 0
c = ctypes.CDLL(None)
c.realloc.restype = ctypes.c_void_p
for alignment in (8, 16, 64, 4096):
    block, size, more = ctypes.c_void_p(), ctypes.c_size_t(100_000), ctypes.c_size_t(300_000)
    assert c.posix_memalign(ctypes.byref(block), ctypes.c_size_t(alignment), size) == 0
    assert block.value % alignment == 0 and live() == 100_000
    ctypes.memset(block, 7, 100_000)
    moved = ctypes.c_void_p(c.realloc(block, more))
    assert ctypes.string_at(moved, 100_000) == bytes([7]) * 100_000 and live() == 0
    c.free(moved)
if os.fork() == 0:  # as a loader worker is
    kept = torch.empty(2_000_000), torch.empty(2_000_000)
    os._exit(0)
assert os.wait()[1] == 0 and live() == 0
""",
        meter.environment,
    )
    assert meter.live_bytes == 0  # a process that ended holds nothing
    assert 8_000_000 <= meter.peak_bytes <= 9_000_000
    assert meter.refusals == 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA limits mapped memory on Linux alone")
def test_what_a_limit_of_the_kernel_raises_is_known_as_out_of_memory():
    in_a_process("""
import resource, torch
from swiftcruise.runtime.oom import is_out_of_memory
kinds = set()
resource.setrlimit(resource.RLIMIT_DATA, (2**20, resource.RLIM_INFINITY))
for allocate in (lambda: torch.empty(2**26), lambda: bytearray(2**28)):
    try:
        allocate()
    except Exception as error:
        assert is_out_of_memory(error), error
        kinds.add(type(error))
assert kinds == {RuntimeError, MemoryError}
""")


# -- trainings -----------------------------------------------------------------------------------------------------


@dataclass
class Finished:
    """A training that was disturbed from outside."""

    run: Trained
    trace: Trace

    def out_of_memory(self, first: int = 0, last: int = 10**6) -> list[dict[str, Any]]:
        """What failed in steps `first` to `last`."""
        return [e for e in self.trace.events if e["event"] == "oom" and first <= e["step"] <= last]

    def budgets(self, first: int, last: int) -> list[float]:
        """Token budgets that the steps `first` to `last` were followed by."""
        return [line["controls"]["token_budget"] for line in self.trace.intervals if first <= line["step"] <= last]

    def epochs(self) -> list[Counter[int]]:
        """The lengths of each epoch's samples."""
        steps = [decode_lengths(text) for line in self.trace.intervals for text in line["macro_batches"]]
        return [
            Counter(int(n) for lengths in steps[i : i + STEPS_PER_EPOCH] for n in lengths)
            for i in range(0, len(steps), STEPS_PER_EPOCH)
        ]


def train_disturbed(
    lab: Lab,
    name: str,
    epochs: int,
    cruise: Mapping[str, Any],
    disturb: Callable[[int, psutil.Process], None],
    environment: Mapping[str, str],
) -> Finished:
    """Train under the hook while `disturb(finished steps, process)` is called over and over."""
    run = Trained(lab.folder / name)
    command = [sys.executable, "-m", "swift.cli.sft", *training_arguments(lab.model, lab.data["sft"], run.directory)]
    command += ["--tuner_type", "full", "--num_train_epochs", str(epochs), *BATCHES_OF_EIGHT, *LEARNING_RATE]
    command = [str(Path(sys.executable).with_name("swiftcruise")), "run", "--", *command]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | dict(environment)
    environment["SWIFTCRUISE_OVERRIDES"] = json.dumps(dict(cruise))
    output, trace = lab.folder / f"{name}.txt", run.directory / "trace.jsonl"
    with output.open("wb") as file:
        launcher = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
    while launcher.poll() is None:
        steps = trace.read_bytes().count(b'{"kind":"interval"') if trace.exists() else 0
        children = psutil.Process(launcher.pid).children() if steps else []
        if children:
            disturb(steps, children[0])
        time.sleep(0.01)
    assert launcher.returncode == 0, output.read_text(errors="replace")[-4000:]
    return Finished(run, read_trace(trace))


def assert_nothing_was_lost(lab: Lab, finished: Finished, epochs: int) -> None:
    plain = lab.train("sft", *BATCHES_OF_EIGHT, *LEARNING_RATE, "--num_train_epochs", str(epochs))
    assert finished.run.difference(plain) <= 1e-6
    assert finished.run.summary["samples"] == epochs * Lab.COUNT
    assert finished.run.summary["optimizer_steps"] == epochs * STEPS_PER_EPOCH
    seen = finished.epochs()
    assert len(seen) == epochs
    assert all(epoch == seen[0] for epoch in seen)
    assert seen[0].total() == Lab.COUNT


EPOCHS = 26
COMES, LEAVES = 120, 140  # the neighbour, after these steps


@pytest.fixture(scope="module")
def under_a_budget(lab: Lab, meter_library: Path) -> Finished:
    """A long run under a budget of which a neighbour takes half for a while."""
    meter = AllocatorMeter(meter_library, lab.folder / "meter", BUDGET)

    def disturb(steps: int, _: psutil.Process) -> None:
        meter.neighbour_bytes = TAKEN if COMES <= steps < LEAVES else 0

    finished = train_disturbed(lab, "budget", EPOCHS, GREEDY, disturb, meter.environment)
    assert meter.refusals >= len(finished.out_of_memory()) > 0  # they were real ones
    return finished


@pytest.mark.slow
def test_no_sample_is_lost_to_a_neighbour_that_takes_half_of_the_memory(lab: Lab, under_a_budget: Finished):
    assert under_a_budget.out_of_memory(COMES, LEAVES + 1)
    assert_nothing_was_lost(lab, under_a_budget, EPOCHS)


@pytest.mark.slow
def test_under_a_constant_budget_failures_become_rare(under_a_budget: Finished):
    assert 1 <= len(under_a_budget.out_of_memory(0, COMES // 2)) <= 6
    assert len(under_a_budget.out_of_memory(COMES // 2 + 1, COMES)) <= 2


@pytest.mark.slow
def test_once_the_neighbour_has_left_larger_micro_batches_return(under_a_budget: Finished):
    last = EPOCHS * STEPS_PER_EPOCH
    before = statistics.median(under_a_budget.budgets(COMES // 2, COMES))
    assert min(under_a_budget.budgets(COMES, LEAVES + 2)) < before
    assert statistics.median(under_a_budget.budgets(last - 20, last)) >= 0.8 * before


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of another process are Linux's")
def test_a_limit_lowered_from_outside_in_mid_run_costs_no_sample(lab: Lab):
    epochs, lowered_after, raised_after, room = 12, 30, 50, 6_000_000  # room enough for the longest sample alone
    used: list[int] = []

    def disturb(steps: int, training: psutil.Process) -> None:
        if steps <= lowered_after:
            used.append(_data_bytes(training))
        if steps == lowered_after:
            training.rlimit(resource.RLIMIT_DATA, (min(used[len(used) // 2 :]) + room, resource.RLIM_INFINITY))
        elif steps >= raised_after:
            training.rlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    # Blocks of tensors go back to the kernel when they are freed, so that the limit is felt.
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    finished = train_disturbed(lab, "rlimit", epochs, {"interval_steps": 1}, disturb, environment)
    assert finished.out_of_memory(lowered_after, raised_after + 1)
    assert_nothing_was_lost(lab, finished, epochs)


def _data_bytes(process: psutil.Process) -> int:
    """What RLIMIT_DATA counts of a process."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmData:"))
