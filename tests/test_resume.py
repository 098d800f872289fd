"""What a resumed run continues with: command line before file before checkpoint before defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swiftcruise.runtime.live import LiveRun

from .test_live import begin, make_run, train


def checkpoint_of(folder: Path, **config: Any) -> tuple[LiveRun, dict[str, Any]]:
    """A run of a few steps, and the controller's state that its checkpoint holds."""
    run = make_run(folder, **({"policy": "cruise"} | config))
    begin(run)
    run.swift.fits = 20  # an out-of-memory leaves its mark on guard and memory model
    train(run, 4)
    return run, json.loads(json.dumps(run.state_dict()))


def resumed(folder: Path, saved: dict[str, Any], **config: Any) -> LiveRun:
    run = make_run(folder, **({"policy": "cruise"} | config))
    begin(run, saved)
    return run


def test_controller_guard_memory_model_and_filters_continue_as_they_were(tmp_path: Path):
    first, saved = checkpoint_of(tmp_path)
    second = resumed(tmp_path, saved)
    again = json.loads(json.dumps(second.state_dict()))
    for part in ("loop", "fill", "controls"):
        assert json.dumps(again[part]) == json.dumps(saved[part])  # as text: NaN equals NaN
    assert np.isfinite(second.guard.state_dict()["ceiling"]).any()
    assert second.model.observations[0] == first.model.observations[0] > 0


def test_what_the_configuration_gave_before_as_well_continues_from_the_checkpoint(tmp_path: Path):
    first, saved = checkpoint_of(tmp_path, token_budget=60)
    assert first.runner.settings.token_budget != 60
    assert resumed(tmp_path, saved, token_budget=60).runner.settings.token_budget == first.runner.settings.token_budget
    assert resumed(tmp_path, saved).runner.settings.token_budget == first.runner.settings.token_budget


def test_what_the_configuration_says_anew_wins_over_the_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    first, saved = checkpoint_of(tmp_path, token_budget=60)
    run = resumed(tmp_path, saved, token_budget=17, cpu_threads=1)
    assert run.runner.settings.token_budget == 17
    assert run.runner.settings.memory_target == first.runner.settings.memory_target
    assert "token_budget, cpu_threads as configured now" in capfd.readouterr().err


def test_limits_are_always_the_present_ones(tmp_path: Path):
    _, saved = checkpoint_of(tmp_path)
    run = resumed(tmp_path, saved, limits={"token_budget": {"low": 1, "high": 12}}, guard={"hysteresis": 0.0})
    train(run, 2)
    assert run.runner.settings.token_budget <= 12


def test_another_policy_starts_afresh_behind_the_guard_and_memory_model_of_the_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    first, saved = checkpoint_of(tmp_path)
    run = resumed(tmp_path, saved, policy="pid")
    assert run.runner.settings.token_budget == first.runner.settings.token_budget  # bumpless
    assert json.dumps(run.guard.state_dict()) == json.dumps(saved["loop"]["guard"])
    assert run.model.observations[0] == first.model.observations[0]
    assert "policy pid starts afresh (it was cruise)" in capfd.readouterr().err


def test_a_checkpoint_from_a_larger_device_predicts_the_same_bytes_on_a_smaller_one(tmp_path: Path):
    first, saved = checkpoint_of(tmp_path, memory_limit_gib=0.02)
    run = resumed(tmp_path, saved, memory_limit_gib=0.01)
    expected = first.model.mean(30.0, 0.0, 0.0) * first.sensors.capacity_bytes
    assert run.model.mean(30.0, 0.0, 0.0) * run.sensors.capacity_bytes == pytest.approx(expected, rel=0.05)


def test_without_resume_controller_the_checkpoint_is_left_alone(tmp_path: Path):
    from swiftcruise.runtime.config import CruiseConfig

    assert CruiseConfig().resume_controller
    _, saved = checkpoint_of(tmp_path)
    fresh = resumed(tmp_path, None)  # what the hook hands over then
    assert fresh.model.observations[0] == 0
    assert saved["memory_model"]["seen"] != fresh.state_dict()["memory_model"]["seen"]
