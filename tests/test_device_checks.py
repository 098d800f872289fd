"""The prepared checks for a GPU, as far as they go without one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from swiftcruise.runtime.trace import Trace, encode_lengths

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "device"))
import neighbour
from training_checks import Acts, Recorded, memory_model, out_of_memory, samples, settles, speed
from verdicts import Check, flat

DEVICE = Path(neighbour.__file__).parent
SCRIPT = DEVICE / "out_of_memory.py"


@pytest.mark.long
def test_the_rehearsal_passes_every_check_that_needs_no_gpu(tmp_path: Path):
    figures_file = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--json", str(figures_file), "--time-limit", "540"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    figures = json.loads(figures_file.read_text())
    assert figures["failed"] == 0
    assert figures["out_of_memory.survived"] >= 1
    assert figures["samples.lost"] == figures["samples.repeated"] == 0
    for name in ("random_state", "weights", "settles", "speed_returns", "memory_model"):
        assert figures[name] == "PASS"
    for name in ("library_messages", "nvml_device", "neighbour_seen"):
        assert figures[name] == "SKIP"


def processes_of(folder: Path) -> list[psutil.Process]:
    """Processes that work in or for `folder`."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder) in word for word in process.info["cmdline"] or ()):
            found.append(process)
    return found


def test_when_the_time_limit_is_over_everything_is_ended_and_said_so(tmp_path: Path):
    figures_file, kept = tmp_path / "figures.json", tmp_path / "kept"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--time-limit", "1"]
    done = subprocess.run([*command, "--keep", str(kept), "--json", str(figures_file)], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr[-3000:]
    figures = json.loads(figures_file.read_text())
    assert "--time-limit" in figures["training.note"]
    assert processes_of(kept) == []


def test_a_terminated_check_leaves_no_process(tmp_path: Path):
    kept = tmp_path / "kept"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--keep", str(kept)]
    checking = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        while not (started := [p for p in processes_of(kept) if p.pid != checking.pid]):
            assert checking.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        checking.terminate()
        assert checking.wait(60) == 143
    finally:
        checking.kill()
    assert psutil.wait_procs(started, timeout=10)[1] == []
    assert processes_of(kept) == []


def test_the_neighbour_holds_what_it_is_told_and_ends_with_its_starter(tmp_path: Path):
    command = [sys.executable, str(DEVICE / "neighbour.py"), str(tmp_path), "--device", "cpu", "--seconds", "120"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        try:
            for wanted in (5_000_000, 300_000_000, 1_000, 0):
                assert neighbour.ask(tmp_path, wanted, seconds=60) == wanted
            process.stdin.close()
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_the_neighbour_goes_on_where_there_is_too_little():
    holder = neighbour.Holder("cpu")
    holder._smallest, neighbour_chunk = 2**50, neighbour._CHUNK  # pieces of a pebibyte: no machine has one
    neighbour._CHUNK = 2**60
    try:
        assert holder.hold(2**60) == 0
    finally:
        neighbour._CHUNK = neighbour_chunk
    holder._smallest = 1
    assert holder.hold(3) == 3


ACTS = Acts(2, 4, 4)
GIB = 2**30


def recorded(ooms: dict[int, int] | None = None, indices: dict[int, list[int]] | None = None) -> Recorded:
    """A run of two samples a step; `ooms` and `indices` by step where they are not the usual."""
    steps: list[dict[str, Any]] = []
    trace = Trace(headers=[{}])
    for step in range(1, ACTS.total + 1):
        during = ACTS.of(step) == "during"
        failures = [{"stage": "forward", "kind": "OutOfMemoryError", "message": "CUDA out of memory"}]
        oom_count = ({3: 1} if ooms is None else ooms).get(step, 0)
        tokens = 100.0 + step
        line: dict[str, Any] = {"step": step, "begin_s": 10.0 * step, "end_s": 10.0 * step + (2.0 if during else 1.0)}
        line |= {"real_tokens": 100, "oom_count": oom_count, "failures": failures * oom_count, "redo_s": 0.0}
        line["indices"] = (indices or {}).get(step, [2 * step - 2, 2 * step - 1])
        line["micro"] = [
            [n * tokens, 0.0, c, 0.1 + n * tokens * (4 - 3 * c) / 3000] for n in (1, 2) for c in (0.0, 1.0)
        ]
        steps.append(line)
        trace.events.extend([{"event": "oom"}] * oom_count)
        budget = 256.0 if during else 500.0
        trace.intervals.append({"step": step, "controls": {"token_budget": budget}})
        trace.intervals[-1]["macro_batches"] = [encode_lengths([7, 9])]
    return Recorded(steps, trace, 2 * ACTS.total, ACTS, 2 * GIB, GIB)


def test_a_run_in_which_nothing_failed_proves_nothing():
    assert out_of_memory(recorded()).verdict == "PASS"
    assert out_of_memory(recorded(ooms={})).verdict == "FAIL"


def test_a_lost_a_repeated_and_a_misplaced_sample_are_seen():
    assert samples(recorded()).verdict == "PASS"
    lost = samples(recorded(indices={4: [6]}))
    assert (lost.verdict, lost.figures["lost"]) == ("FAIL", 1)
    repeated = samples(recorded(indices={4: [6, 7, 7]}))
    assert (repeated.verdict, repeated.figures["repeated"]) == ("FAIL", 1)
    assert samples(recorded(indices={4: [8, 9], 5: [6, 7]})).verdict == "FAIL"


def test_failures_that_go_on_are_no_settling():
    assert settles(recorded(ooms={3: 3, 5: 1})).verdict == "PASS"
    assert settles(recorded(ooms={3: 2, 5: 2, 6: 2})).verdict == "FAIL"


@pytest.mark.parametrize("by_time", [True, False])
def test_speed_has_to_come_back(by_time: bool):
    run = recorded()
    assert speed(run, run.steps, by_time).verdict == "PASS"
    for line, interval in zip(run.steps[-4:], run.trace.intervals[-4:], strict=True):
        line["end_s"] += 1.0  # type: ignore[index]
        interval["controls"]["token_budget"] = 256.0
    assert speed(run, run.steps, by_time).verdict == "FAIL"


def test_a_model_that_foretells_nothing_fails():
    run = recorded()
    assert memory_model(run).verdict == "PASS"
    for line in run.steps:
        for number, micro in enumerate(line["micro"]):
            micro[3] = [0.9, 0.2, 0.1, 0.8][(number + line["step"]) % 4]
    assert memory_model(run).verdict == "FAIL"


def test_the_figures_are_flat_and_what_is_not_measured_is_null():
    checks = [Check.of("one", True, figure=float("nan"), kind="a"), Check.skipped("two", "needs a GPU")]
    assert json.loads(json.dumps(flat(checks), allow_nan=False)) == {
        "one": "PASS",
        "one.figure": None,
        "one.kind": "a",
        "two": "SKIP",
        "two.note": "needs a GPU",
        "passed": 1,
        "failed": 0,
        "skipped": 1,
    }
