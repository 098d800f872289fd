import io
import json
import math
import subprocess
import sys

import pytest
from rich.console import Console
from tqdm import tqdm

from swiftcruise.runtime.console import RunSummary, change_line, say, start_lines, summary_table
from swiftcruise.runtime.controls import ControlLimits, Controls

SUMMARY = RunSummary(
    policy="cruise",
    real_tokens=900_000,
    padded_tokens=1_000_000,
    wall_s=90.0,
    optimizer_steps=100,
    samples=1600,
    micro_batches=420,
    peak_memory_fraction=0.84,
    memory_cap=0.90,
    changes=5,
    oom_count=1,
    data_wait_s=4.5,
    controls={"token_budget": 768.0},
)


def shown(table):
    console = Console(file=io.StringIO(), width=100)
    console.print(table)
    return console.file.getvalue()


def test_a_change_is_one_short_line():
    line = change_line(120, Controls.of(token_budget=512), Controls.of(token_budget=768), ["fill 0.61 below 0.90"])
    assert line == "swiftcruise step 120: token budget 512 -> 768 (fill 0.61 below 0.90)"


def test_several_changes_share_the_line():
    old = Controls.of(memory_target=0.8, cpu_threads=2)
    assert change_line(3, old, Controls.of(memory_target=0.85, cpu_threads=1)) == (
        "swiftcruise step 3: memory target 0.80 -> 0.85, CPU threads 2 -> 1"
    )


def test_what_stays_or_reads_the_same_is_not_said():
    old = Controls.of(token_budget=512, memory_target=0.8)
    assert change_line(3, old, Controls.of(token_budget=512.2)) is None
    assert change_line(3, old, old, ["held"]) is None


def test_a_slight_change_of_a_relative_control_is_not_worth_a_line():
    old = Controls.of(token_budget=1000, cpu_threads=40)
    assert change_line(3, old, Controls.of(token_budget=1040)) is None
    assert "1,060" in str(change_line(3, old, Controls.of(token_budget=1060)))
    assert "CPU threads 40 -> 41" in str(change_line(3, old, Controls.of(cpu_threads=41)))


def test_of_the_guards_reasons_the_rules_of_what_changed_are_shown():
    old = Controls.of(token_budget=1000, memory_target=0.8)
    reasons = [
        "climbs",
        "token_budget: memory cap (asked 900, set 600)",
        "memory_target: rate limit (asked 1, set 0.8)",
    ]
    assert change_line(3, old, Controls.of(token_budget=600, memory_target=0.8), reasons) == (
        "swiftcruise step 3: token budget 1,000 -> 600 (climbs; memory cap)"
    )


def test_a_control_set_for_the_first_time_was_unset():
    assert change_line(0, Controls.of(), Controls.of(power_limit_w=250)) == (
        "swiftcruise step 0: power limit unset -> 250 W"
    )


def test_the_start_names_the_controls_at_hand_the_cap_the_sensors_and_what_is_left_alone():
    lines = start_lines(
        "cruise",
        ControlLimits(),
        controlled=["token_budget", "power_limit_w"],
        memory_cap=0.9,
        sensors=["NVML", "host"],
        missing={"NVML": "no driver"},
        refused={"num_workers": "the data set streams"},
    )
    assert lines == [
        "swiftcruise: policy cruise controls token budget 16..1,048,576, power limit 0 W..any",
        "swiftcruise: keeps memory below 90%; sensors: NVML, host",
        "swiftcruise: without NVML: no driver",
        "swiftcruise: leaves num_workers alone: the data set streams",
    ]


def test_a_run_without_actuators_is_said_to_be_observed():
    assert start_lines("static", ControlLimits(), controlled=[], memory_cap=0.9)[0] == "swiftcruise: observes only"


def test_the_summary_computes_rate_padding_and_margin():
    assert SUMMARY.tokens_per_s == 10_000
    assert SUMMARY.padding_share == pytest.approx(0.1)
    assert SUMMARY.memory_margin == pytest.approx(0.06)


def test_the_table_shows_what_was_measured_and_nothing_else():
    text = shown(summary_table(SUMMARY))
    for expected in ("10,000", "10.0%", "1 min 30 s", "5.0%", "84.0%", "+6.0%", "final token budget", "768"):
        assert expected in text
    assert "GiB" not in text
    assert "nan" not in text


def test_a_run_that_never_took_a_step_still_has_a_summary():
    empty = RunSummary("none", 0, 0, 0.0, 0, 0, 0)
    assert math.isnan(empty.tokens_per_s)
    assert "nan" not in shown(summary_table(empty))


def test_the_summary_is_strict_json():
    values = json.loads(json.dumps(SUMMARY.to_json(), allow_nan=False))
    assert values["tokens_per_s"] == 10_000
    assert values["peak_memory_bytes"] is None
    assert values["controls"] == {"token_budget": 768.0}


def test_only_rank_zero_speaks(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    say("hello")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    say("hello")
    say(None)
    assert capsys.readouterr().err == "hello\n"


def test_a_line_under_a_progress_bar_stands_alone(capsys):
    with tqdm(total=10, ascii=True) as bar:
        bar.update(1)
        say("swiftcruise step 1")
    assert any(part.strip() == "swiftcruise step 1" for part in capsys.readouterr().err.replace("\r", "\n").split("\n"))


def test_other_ranks_speak_only_where_they_must_and_say_who_they_are(monkeypatch, capfd):
    monkeypatch.setenv("RANK", "3")
    say("of rank 0 alone")
    say("swiftcruise: out of memory", every_rank=True)
    assert capfd.readouterr().err == "[rank 3] swiftcruise: out of memory\n"


def test_a_terminal_that_is_gone_costs_the_line_and_nothing_else(monkeypatch):
    class Gone:
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

        def flush(self) -> None:
            raise ValueError("I/O operation on closed file")

    monkeypatch.setattr("sys.stderr", Gone())
    say("swiftcruise: out of memory")


def test_warnings_stand_on_lines_of_their_own_above_a_progress_bar():
    program = """
import logging, sys, tqdm
from swiftcruise.runtime.console import show_warnings
show_warnings(); show_warnings()
for _ in tqdm.tqdm(range(2), desc="Train", file=sys.stderr):
    logging.getLogger("swiftcruise.runtime.trace").warning("swiftcruise: the disk is full")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == ""
    lines = [line.rpartition("\r")[2] for line in done.stderr.split("\n")]
    assert lines.count("swiftcruise: the disk is full") == 2
