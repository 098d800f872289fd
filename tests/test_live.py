"""A live run around a small real trainer: what fails costs the training nothing, and nothing stays behind."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swiftcruise.runtime import live as live_module
from swiftcruise.runtime.config import CruiseConfig
from swiftcruise.runtime.controls import Controls
from swiftcruise.runtime.errors import SwiftcruiseError
from swiftcruise.runtime.live import LiveRun
from swiftcruise.runtime.macro_loader import MacroLoader
from swiftcruise.runtime.telemetry import Telemetry

from .small_trainer import Model, SmallTrainer, layers_of, rows_of

LENGTHS = [9, 3, 14, 5, 2, 11, 7, 4]


class Proposing:
    """Proposes what it was built with, and keeps what it saw."""

    seen: list[dict[str, float]] = []  # noqa: RUF012

    def __init__(self, **controls: float) -> None:
        self.controls = controls

    def reset(self, n: int, seed: int | None = None) -> None:
        Proposing.seen = []

    def act(self, telemetry: Telemetry) -> Controls:
        Proposing.seen.append(telemetry.plant(0))
        return Controls.of(1, **self.controls)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def diagnostics(self) -> dict[str, Any]:
        return {}


class Swift(SmallTrainer):
    """What a live run needs of `swift_patch.SwiftTrainer`."""

    batch_size, accumulation = 2, 4
    loader: MacroLoader | None = None

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.trainer = SimpleNamespace(model=self.model)

    def layer_checkpointing(self, enable: bool) -> Any:
        return layers_of(self.model)


def make_run(folder: Path, **config: Any) -> LiveRun:
    values = {"policy": "tests.test_live:Proposing", "interval_steps": 1, "tensorboard": False} | config
    return LiveRun(CruiseConfig(**values), Swift(), folder)


def begin(run: LiveRun, saved: Any = None) -> None:
    args = SimpleNamespace(device=torch.device("cpu"), logging_dir=str(run.output_dir))
    run.begin(args, SimpleNamespace(global_step=0, is_world_process_zero=True), saved)


def train(run: LiveRun, steps: int = 2) -> Any:
    swift = run.swift
    for step in range(run.step + 1, run.step + steps + 1):
        macro = rows_of(LENGTHS, 2)
        run.runner.run(swift.model, [(macro, swift.count_items(run.runner.prepare(macro)))])
        run.end_step(step, 0.1)
    return swift


def test_a_run_ends_with_a_trace_and_a_summary_and_leaves_layers_and_threads_as_they_were(tmp_path: Path):
    threads = torch.get_num_threads()
    run = make_run(tmp_path, policy_options={"checkpoint_fraction": 1.0}, cpu_threads=threads + 1)
    begin(run)
    assert torch.get_num_threads() == threads + 1
    swift = train(run)
    assert all(layer.gradient_checkpointing for layer in swift.model.layers)
    run.end(2)
    assert not any(layer.gradient_checkpointing for layer in swift.model.layers)
    assert torch.get_num_threads() == threads
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert kinds == ["header", "interval", "interval"]
    assert json.loads((tmp_path / "swiftcruise_summary.json").read_text())["optimizer_steps"] == 2


def test_the_loss_of_the_interval_is_measured(tmp_path: Path):
    run = make_run(tmp_path)
    begin(run)
    train(run)
    assert Proposing.seen[-1]["loss"] == pytest.approx(float(run.runner.last.loss))


def test_a_run_that_ends_by_an_exception_puts_back_just_as_much(tmp_path: Path):
    threads, alive = torch.get_num_threads(), threading.active_count()
    run = make_run(tmp_path, policy_options={"checkpoint_fraction": 1.0}, cpu_threads=threads + 1)
    begin(run)
    train(run, 1)
    for _ in range(2):
        run.close()
    assert (torch.get_num_threads(), threading.active_count()) == (threads, alive)
    assert not any(layer.gradient_checkpointing for layer in run.swift.model.layers)
    run.end_step(2, 0.1)  # a late callback finds nothing to do
    run.end(2)
    assert not (tmp_path / "swiftcruise_summary.json").exists()


def test_a_second_training_in_the_same_process_starts_afresh(tmp_path: Path):
    run = make_run(tmp_path, policy_options={"token_budget": 64})
    for _ in range(2):
        begin(run)
        train(run, 3)
        run.end(3)
        assert run.summary().optimizer_steps == 3
        assert run.summary().oom_count == 0


@pytest.mark.parametrize("broken", ["LiveSensors", "CruiseBoard", "TraceWriter", "IntervalTimer"])
def test_whatever_cannot_start_leaves_the_training_to_plain_ms_swift(
    tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("no such device")

    monkeypatch.setattr(live_module, broken, fail)
    threads = torch.get_num_threads()
    run = make_run(tmp_path, tensorboard=True, token_budget=8)
    begin(run)
    swift = train(run)
    run.end(2)
    assert swift.metrics == [2] * 8  # the sampler's own batches
    assert torch.get_num_threads() == threads
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def test_a_mistake_of_the_users_ends_the_training_before_it_starts(tmp_path: Path):
    run = make_run(tmp_path, policy="static", policy_options={"token_budgets": 64})
    with pytest.raises(SwiftcruiseError, match="token_budgets"):
        begin(run)


@pytest.mark.parametrize("sensor", ["_read_host", "_read_cuda", "_read_nvml"])
def test_a_sensor_that_fails_later_is_missed_alone(
    tmp_path: Path, sensor: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    run = make_run(tmp_path, policy_options={"token_budget": 30})
    begin(run)

    def fail() -> dict[str, float]:
        raise RuntimeError("unplugged")

    monkeypatch.setattr(run.sensors, sensor, fail)
    swift = train(run, 3)
    assert len(Proposing.seen) == 4
    assert Proposing.seen[-1]["tokens_per_s"] > 0
    assert run.runner.settings.token_budget == 30
    assert sum(swift.metrics) == 3 * len(LENGTHS)
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def test_an_out_of_memory_halves_the_budget_once_not_twice(tmp_path: Path):
    run = make_run(tmp_path, policy_options={"token_budget": 64})
    begin(run)
    run.swift.fits = 40
    train(run, 1)
    failed = Proposing.seen[-1]["token_budget"]
    assert 40 < failed <= 64
    assert run.runner.settings.token_budget == failed // 2
    train(run, 1)
    assert Proposing.seen[-1]["oom_count"] == 0


def test_a_sample_that_fails_alone_is_not_the_budgets_fault(tmp_path: Path):
    run = make_run(tmp_path, policy_options={"token_budget": 20})
    begin(run)
    train(run, 2)
    run.swift.fail = lambda call, stage: _fail_once(run, stage)
    train(run, 1)
    assert Proposing.seen[-1]["oom_count"] == 1
    assert run.runner.settings.token_budget == 20


def _fail_once(run: LiveRun, stage: str) -> None:
    alone = run.swift.metrics[-1] == 1
    if stage == "forward" and alone and run.runner.settings.checkpoint_fraction != 1.0:
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_configured_share_of_checkpointed_layers_holds_for_the_whole_run(tmp_path: Path):
    run = make_run(tmp_path, checkpoint=0.34)
    begin(run)
    swift = train(run, 3)
    assert [layer.gradient_checkpointing for layer in swift.model.layers] == [True, True, False]


def test_a_checkpoint_goes_on_with_its_controller(tmp_path: Path):
    first = make_run(tmp_path, policy_options={"token_budget": 64})
    begin(first)
    train(first)
    saved = json.loads(json.dumps(first.state_dict()))
    second = make_run(tmp_path)
    begin(second, saved)
    assert second.runner.settings.token_budget == 64
    assert second.model.observations[0] == first.model.observations[0]


@pytest.mark.parametrize(
    "saved",
    [{}, [], {"version": 1, "policy": "tests.test_live:Proposing", "loop": {}}, {"version": 1, "policy": "pid"}],
)
def test_a_checkpoint_whose_controller_cannot_be_read_is_no_obstacle(tmp_path: Path, saved: Any):
    run = make_run(tmp_path, policy_options={"token_budget": 64})
    begin(run, saved)
    assert run.live
    assert run.runner.settings.token_budget == 64
