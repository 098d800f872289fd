import numpy as np
import pytest
from matplotlib.image import imread

from swiftcruise.cli.figures import FigureError, Span, draw_run, windowed_rate
from swiftcruise.runtime.controls import Controls
from swiftcruise.runtime.telemetry import Telemetry
from swiftcruise.runtime.trace import TraceError, TraceWriter

RED = (0xC1, 0x27, 0x2D)
BLUE = (0x00, 0x72, 0xB2)
YELLOW = (251, 247, 207)  # the span's colour over white


def record(path, intervals=20, oom_at=None, **fields):
    with TraceWriter(path, {"memory_cap": 0.9}) as writer:
        for i in range(intervals):
            telemetry = Telemetry.of(time_s=i + 1.0, interval_s=1.0, real_tokens=100, tokens_per_s=100, **fields)
            writer.interval(telemetry, Controls.of(), step=i)
            if i == oom_at:
                writer.event("oom", time_s=i + 0.5)
    return path


def pixels(path, colour):
    """Rows and columns of the pixels of about this colour."""
    image = np.round(imread(path)[..., :3] * 255).astype(int)
    return np.argwhere(np.abs(image - colour).max(axis=-1) <= 3)


def test_two_runs_become_one_png_of_the_promised_size(tmp_path):
    traces = {"plain": record(tmp_path / "a.jsonl"), "swiftcruise": record(tmp_path / "b.jsonl", token_budget=512)}
    out = draw_run(traces, tmp_path / "new" / "run.png", annotations=[Span("neighbour", 5, 9)], title="A run")
    assert imread(out).shape[:2] == (1050, 1500)
    assert len(pixels(out, BLUE)) > 100


def test_an_out_of_memory_event_is_marked_in_red(tmp_path):
    calm = draw_run({"run": record(tmp_path / "calm.jsonl")}, tmp_path / "calm.png")
    hit = draw_run({"run": record(tmp_path / "hit.jsonl", oom_at=10)}, tmp_path / "hit.png")
    assert len(pixels(calm, RED)) == 0
    assert len(pixels(hit, RED)) > 20


def test_a_span_shades_its_share_of_the_time(tmp_path):
    trace = record(tmp_path / "a.jsonl")
    columns = pixels(draw_run({"run": trace}, tmp_path / "a.png", annotations=[Span("x", 5, 15)]), YELLOW)[:, 1]
    plot_width = 1500 * (0.98 - 0.075)
    assert (columns.max() - columns.min()) / plot_width == pytest.approx(10 / 20.2, abs=0.01)


def test_a_panel_that_nobody_measured_is_left_out(tmp_path):
    def lowest_run_line(**fields):
        name = "-".join(fields) or "none"
        out = draw_run({"run": record(tmp_path / f"{name}.jsonl", **fields)}, tmp_path / f"{name}.png")
        return pixels(out, BLUE)[:, 0].max()

    # Alone, the rate fills the figure; with CPU threads below it, a second line stands at the foot of the page.
    assert lowest_run_line() < 525 < lowest_run_line(cpu_threads=2)


def test_a_resumed_run_is_laid_end_to_end(tmp_path):
    once = record(tmp_path / "resumed.jsonl", intervals=10)
    record(once, intervals=10, oom_at=4)  # appends: the same trace, its clock starting over
    whole = record(tmp_path / "whole.jsonl", intervals=20, oom_at=14)
    resumed_marks, whole_marks = (
        pixels(draw_run({"run": path}, path.with_suffix(".png")), RED) for path in (once, whole)
    )
    np.testing.assert_array_equal(resumed_marks, whole_marks)


def test_the_windowed_rate_is_exact_for_uneven_intervals():
    interval_s = np.array([1.0, 3.0, 0.5, 2.5, 1.0])
    rate = windowed_rate(np.cumsum(interval_s), interval_s, interval_s, 7.0 * interval_s, 2.0)
    np.testing.assert_allclose(rate, 7.0)


def test_an_unmeasured_interval_neither_speeds_up_nor_slows_down_its_neighbours():
    interval_s = np.ones(5)
    amount = np.array([7.0, 7.0, np.nan, 7.0, 7.0])
    rate = windowed_rate(np.cumsum(interval_s), interval_s, interval_s, amount, 4.0)
    np.testing.assert_allclose(rate, [7.0, 7.0, np.nan, 7.0, 7.0])


def test_a_missing_trace_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"nowhere\.jsonl"):
        draw_run({"run": tmp_path / "nowhere.jsonl"}, tmp_path / "out.png")


def test_a_trace_without_intervals_is_named(tmp_path):
    with pytest.raises(FigureError, match=r"short\.jsonl.*at least one"):
        draw_run({"run": record(tmp_path / "short.jsonl", intervals=0)}, tmp_path / "out.png")


def test_no_trace_at_all_is_refused(tmp_path):
    with pytest.raises(FigureError, match="trace_paths"):
        draw_run({}, tmp_path / "out.png")


def test_a_single_interval_is_enough(tmp_path):
    assert draw_run({"run": record(tmp_path / "one.jsonl", intervals=1)}, tmp_path / "one.png").exists()
