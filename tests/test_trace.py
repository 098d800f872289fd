import json
import logging
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftcruise.runtime.controls import Controls
from swiftcruise.runtime.telemetry import TELEMETRY_FIELDS, Telemetry
from swiftcruise.runtime.trace import SCHEMA, TraceError, TraceWriter, decode_lengths, encode_lengths, read_trace


def write_run(path, intervals=3, **header):
    with TraceWriter(path, header) as writer:
        for i in range(intervals):
            telemetry = Telemetry.of(time_s=30.0 * (i + 1), tokens_per_s=1000.1 + i, loss=0.1 + i)
            writer.interval(telemetry, Controls.of(token_budget=512 + i), step=i)
    return path


@settings(max_examples=50)
@given(st.lists(st.integers(0, 2**32 - 1)) | st.lists(st.integers(0, 300)))
def test_lengths_survive_the_round_trip_exactly(lengths):
    assert decode_lengths(encode_lengths(lengths)).tolist() == lengths


def test_sixteen_ordinary_lengths_take_under_fifty_characters():
    assert len(encode_lengths([4096] * 16)) < 50


@pytest.mark.parametrize("lengths", [[-1], [2**32], [1.5]])
def test_lengths_that_are_no_token_counts_are_refused(lengths):
    with pytest.raises(ValueError, match="whole numbers"):
        encode_lengths(lengths)


@pytest.mark.parametrize("text", ["", "u2:AQ==", "u3:AAAA", "u1:A", "u1:!"])
def test_damaged_lengths_are_refused(text):
    with pytest.raises(TraceError, match="damaged"):
        decode_lengths(text)


@settings(max_examples=30)
@given(st.lists(st.floats(allow_infinity=False), min_size=len(TELEMETRY_FIELDS), max_size=len(TELEMETRY_FIELDS)))
def test_telemetry_is_read_back_to_the_last_bit(tmp_path_factory, values):
    telemetry = Telemetry.of(**dict(zip(TELEMETRY_FIELDS, values, strict=True)))
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    with TraceWriter(path, {}) as writer:
        writer.interval(telemetry, Controls.of(), step=1)
    back = read_trace(path).telemetry()
    np.testing.assert_equal([back.plant(0)], [telemetry.plant(0)])


def test_an_interval_keeps_controls_proposal_reasons_diagnostics_and_lengths(tmp_path):
    path = tmp_path / "new" / "directory" / "trace.jsonl"
    with TraceWriter(path, {"model": "qwen3", "output": tmp_path}) as writer:
        writer.interval(
            Telemetry.of(time_s=30.0),
            Controls.of(token_budget=768),
            step=120,
            proposed=Controls.of(token_budget=4096),
            reasons=["rate limit"],
            diagnostics={"p": np.array([0.25]), "ceiling": np.array([np.inf]), "mode": "auto"},
            macro_batches=[[7, 1200, 3], np.array([5])],
        )
    trace = read_trace(path)
    assert trace.headers == [{"kind": "header", "schema": SCHEMA, "model": "qwen3", "output": str(tmp_path)}]
    (line,) = trace.intervals
    assert line["step"] == 120
    assert line["controls"] == {"token_budget": 768.0}
    assert line["proposed"] == {"token_budget": 4096.0}
    assert line["reasons"] == ["rate limit"]
    assert line["diagnostics"] == {"p": 0.25, "ceiling": None}
    assert [lengths.tolist() for lengths in trace.lengths(0)] == [[7, 1200, 3], [5]]


def test_every_line_is_strict_json(tmp_path):
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path, {"cap": float("nan")}) as writer:
        writer.interval(Telemetry.of(loss=np.inf), Controls.of(), step=0, diagnostics={"p": float("nan")})
        writer.event("fault", value=np.float64("-inf"), where={"set"}, kind="thermal")

    def refuse(token):
        raise AssertionError(f"{token} is no JSON")

    records = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert [record["kind"] for record in records] == ["header", "interval", "event"]


def test_a_killed_process_leaves_every_line_it_wrote(tmp_path):
    path = tmp_path / "trace.jsonl"
    code = (
        "import os, sys; from swiftcruise.runtime.trace import TraceWriter\n"
        "w = TraceWriter(sys.argv[1], {}); w.event('oom', step=1); w.event('oom', step=2); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 9
    assert [event["step"] for event in read_trace(path).events] == [1, 2]


def test_a_trace_cut_at_any_byte_after_the_header_reads_up_to_the_cut(tmp_path):
    data = write_run(tmp_path / "whole.jsonl").read_bytes()
    cut = tmp_path / "cut.jsonl"
    for size in range(data.index(b"\n") + 1, len(data), 97):
        cut.write_bytes(data[:size])
        assert len(read_trace(cut).intervals) >= data[:size].count(b"\n") - 1


def test_a_resumed_run_starts_on_its_own_line_under_its_own_header(tmp_path):
    path = write_run(tmp_path / "trace.jsonl", intervals=2, attempt=1)
    with open(path, "ab") as file:
        file.write(b'{"kind":"interval","time_s":9')
    write_run(path, intervals=1, attempt=2)
    trace = read_trace(path)
    assert [header["attempt"] for header in trace.headers] == [1, 2]
    assert [line["run"] for line in trace.intervals] == [0, 0, 1]
    assert trace.skipped == ["line 4 is cut or damaged"]


def test_what_cannot_be_read_costs_only_itself(tmp_path):
    path = write_run(tmp_path / "trace.jsonl", intervals=1)
    with open(path, "ab") as file:
        file.write(b'\n  \n{"kind":"hologram"}\n[1]\n\xff\xfe\n{"kind":"interval","loss":"high"}\n')
        file.write(b'{"kind":"interval","time_s":60.0,"loss":NaN,"fill":null}\n')
    trace = read_trace(path)
    assert trace.telemetry().time_s.tolist() == [30.0, 60.0]
    assert np.isnan(trace.telemetry().fill).all()
    assert len(trace.skipped) == 4
    assert "'hologram'" in trace.skipped[0]


def test_a_newer_schema_is_refused_with_the_remedy(tmp_path):
    path = write_run(tmp_path / "trace.jsonl", schema=SCHEMA + 1)
    with pytest.raises(TraceError, match=f"schema={SCHEMA + 1}.*upgrade"):
        read_trace(path)


@pytest.mark.parametrize("content", [None, "", "hello\n", '{"kind":"event","event":"oom"}\n', '{"kind":"header"}\n'])
def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path, content):
    path = tmp_path / "trace.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TraceError, match=r"trace\.jsonl"):
        read_trace(path)


def warnings_of(caplog):
    return [record for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_costs_the_run_one_warning(caplog):
    writer = TraceWriter("/dev/full", {})
    writer.event("oom")
    writer.interval(Telemetry.of(), Controls.of(), step=1)
    assert not writer.ok
    assert len(warnings_of(caplog)) == 1


def test_a_place_that_cannot_be_written_costs_the_run_one_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    writer = TraceWriter(tmp_path / "file" / "trace.jsonl", {})
    writer.event("oom")
    writer.close()
    assert not writer.ok
    assert len(warnings_of(caplog)) == 1


@pytest.mark.skipif(os.name == "nt", reason="an open file cannot be removed there")
def test_a_removed_file_is_noticed_once(tmp_path, caplog):
    writer = TraceWriter(tmp_path / "trace.jsonl", {})
    (tmp_path / "trace.jsonl").unlink()
    writer.event("oom")
    writer.event("oom")
    assert not writer.ok
    assert len(warnings_of(caplog)) == 1


def test_a_value_that_cannot_be_written_never_reaches_the_training(tmp_path, caplog):
    writer = TraceWriter(tmp_path / "trace.jsonl", {})
    writer.interval(Telemetry.of(), Controls.of(), step=1, macro_batches=[[-5]])
    assert not writer.ok
    assert len(warnings_of(caplog)) == 1
