import logging
import re
import shutil
import threading

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from torch.utils.tensorboard.writer import SummaryWriter

from swiftcruise.runtime.controls import CONTROL_FIELDS, Controls
from swiftcruise.runtime.telemetry import TELEMETRY_FIELDS, Telemetry
from swiftcruise.runtime.tensorboard import DEFAULT_BANDS, GROUPS, Band, CruiseBoard

EVERYTHING = Telemetry.of(**{name: float(i) for i, name in enumerate(TELEMETRY_FIELDS)})


def read(log_dir):
    events = EventAccumulator(str(log_dir))
    events.Reload()
    return events


def scalars(events):
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def layout_of(events):
    layout = layout_pb2.Layout()
    (event,) = events.Tensors("custom_scalars__config__")
    layout.ParseFromString(event.tensor_proto.string_val[0])
    return layout


def test_every_telemetry_field_has_one_group():
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(TELEMETRY_FIELDS)


def test_every_measurement_control_and_term_becomes_a_point_at_its_step(tmp_path):
    controls = Controls.of(**dict.fromkeys(CONTROL_FIELDS, 2.0))
    with CruiseBoard(tmp_path) as board:
        board.interval(120, EVERYTHING, controls, {"p": np.array([0.5]), "i": np.array([-0.25])})
    points = scalars(read(tmp_path))
    for group, names in GROUPS.items():
        for name in names:
            expected = (120, TELEMETRY_FIELDS.index(name))
            assert points[f"swiftcruise/telemetry/{group}/{name}"] == [expected]
    assert all(points[f"swiftcruise/controls/{name}"] == [(120, 2.0)] for name in CONTROL_FIELDS)
    assert points["swiftcruise/controller/p"] == [(120, 0.5)]
    assert points["swiftcruise/controller/i"] == [(120, -0.25)]


def test_padding_is_charted_as_a_share(tmp_path):
    with CruiseBoard(tmp_path) as board:
        board.interval(1, Telemetry.of(real_tokens=750, padded_tokens=1000), Controls.of())
    assert scalars(read(tmp_path))["swiftcruise/telemetry/throughput/padding_share"] == [(1, 0.25)]


def test_what_was_not_measured_gets_no_point(tmp_path):
    with CruiseBoard(tmp_path) as board:
        board.interval(1, Telemetry.of(), Controls.of(), {"setpoint": np.array([np.nan])})
    assert scalars(read(tmp_path)) == {}


def test_margin_charts_draw_each_band_at_exactly_the_steps_of_its_measurement(tmp_path):
    with CruiseBoard(tmp_path) as board:
        for step, fill in enumerate([0.6, np.nan, 0.7]):
            board.interval(step, Telemetry.of(fill=fill), Controls.of())
    events = read(tmp_path)
    points = scalars(events)
    margins = layout_of(events).category[0]
    assert [chart.title for chart in margins.chart] == [
        f"{band.field}: {kind} band" for band in DEFAULT_BANDS for kind in ("setpoint", "alarm")
    ]
    setpoint = next(chart for chart in margins.chart if chart.title == "fill: setpoint band").margin.series[0]
    assert setpoint.value == "swiftcruise/telemetry/device/fill"
    assert points[setpoint.value] == [(0, pytest.approx(0.6)), (2, pytest.approx(0.7))]
    assert points[setpoint.lower] == [(0, pytest.approx(0.65)), (2, pytest.approx(0.65))]
    assert points[setpoint.upper] == [(0, pytest.approx(0.75)), (2, pytest.approx(0.75))]


def test_every_overview_chart_finds_its_tags(tmp_path):
    with CruiseBoard(tmp_path) as board:
        board.interval(1, EVERYTHING, Controls.of(**dict.fromkeys(CONTROL_FIELDS, 2.0)), {"p": np.array([0.5])})
    events = read(tmp_path)
    tags = events.Tags()["scalars"]
    charts = [chart for category in layout_of(events).category for chart in category.chart if chart.multiline.tag]
    assert len(charts) > 5
    for chart in charts:
        assert all(any(re.match(regex, tag) for tag in tags) for regex in chart.multiline.tag), chart.title


def test_an_event_is_text_at_its_step(tmp_path):
    with CruiseBoard(tmp_path) as board:
        board.event(7, "oom", tokens=8192)
    (event,) = read(tmp_path).Tensors("swiftcruise/events/text_summary")
    assert event.step == 7
    assert event.tensor_proto.string_val[0] == b"**oom** tokens = 8192"


def test_the_trainings_own_events_in_the_same_directory_stay_readable(tmp_path):
    own = SummaryWriter(str(tmp_path))
    own.add_scalar("train/loss", 1.5, 1)
    with CruiseBoard(tmp_path) as board:
        board.interval(1, Telemetry.of(fill=0.5), Controls.of())
    own.close()
    assert scalars(read(tmp_path)).keys() >= {"train/loss", "swiftcruise/telemetry/device/fill"}


def test_a_directory_that_cannot_be_made_costs_the_run_one_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    board = CruiseBoard(tmp_path / "file" / "runs")
    board.interval(1, EVERYTHING, Controls.of())
    board.event(1, "oom")
    board.close()
    assert not board.ok
    assert sum(record.levelno == logging.WARNING and "swiftcruise" in record.message for record in caplog.records) == 1


def test_a_directory_removed_in_mid_run_costs_the_run_one_warning(tmp_path, caplog, monkeypatch):
    writer_thread_ended = threading.Event()  # TensorBoard writes in a thread, which dies of the first error
    monkeypatch.setattr(threading, "excepthook", lambda args: writer_thread_ended.set())
    board = CruiseBoard(tmp_path / "runs")
    board.flush()  # the thread opens its file now, not in the middle of the removal
    shutil.rmtree(tmp_path / "runs")
    board.interval(0, EVERYTHING, Controls.of())
    board.flush()
    assert writer_thread_ended.wait(10)
    for step in range(1, 4):  # the error reaches the writer at its next event
        board.interval(step, EVERYTHING, Controls.of())
        board.flush()
    assert not board.ok
    assert sum(record.levelno == logging.WARNING and "swiftcruise" in record.message for record in caplog.records) == 1


def test_a_band_of_an_unknown_field_is_refused():
    with pytest.raises(ValueError, match="'speed'"):
        Band("speed", (0, 1), (0, 1))
