"""ms-swift's own setting, the fixed rule, and the rule for loader workers."""

from __future__ import annotations

import numpy as np
import pytest

from swiftcruise.baselines.simple import DefaultPolicy, RulePolicy
from swiftcruise.baselines.workers import WorkerRule
from swiftcruise.envs.plants.simulated import SimulatedPlant
from swiftcruise.envs.scenarios.splits import load_scenarios
from swiftcruise.runtime.errors import ConfigError
from swiftcruise.runtime.guard import SafetyGuard
from swiftcruise.runtime.loop import ControlLoop
from swiftcruise.runtime.policy import make_policy
from swiftcruise.runtime.telemetry import Telemetry


def test_default_is_one_sample_a_micro_batch_and_every_layer_checkpointed():
    plant = SimulatedPlant(load_scenarios(["val-001", "val-014"]))
    last = [t for t, _ in ControlLoop(DefaultPolicy(), SafetyGuard()).run(plant, 8)][-1]
    assert last.micro_batches_per_step == pytest.approx(last.samples / last.optimizer_steps)
    assert last.checkpoint_fraction.tolist() == [1.0, 1.0]
    assert last.num_workers.tolist() == [1.0, 1.0]


def test_rule_holds_its_budget_and_lets_the_memory_model_choose_the_layers():
    controls = RulePolicy(2048, 0.8).act(Telemetry.of(2, token_budget=512.0, checkpoint_fraction=1.0))
    assert controls.token_budget.tolist() == [2048.0] * 2
    assert controls.memory_target.tolist() == [0.8] * 2
    assert np.isnan(controls.checkpoint_fraction).all()


def test_fit_takes_what_fits_uncheckpointed_but_the_longest_sample_and_no_more_than_pays():
    telemetry = Telemetry.of(
        4, fit_tokens_uncheckpointed=[3000.0, 500.0, 90000.0, np.nan], upcoming_max=[1000.0, 1000.0, np.nan, 1000.0]
    )
    asked = RulePolicy("fit", most_tokens=8192).act(telemetry).token_budget
    assert asked == pytest.approx([3000.0, 1000.0, 8192.0, np.nan], nan_ok=True)


def workers_after(loading: list[float], intervals: int, disk_limit: float = np.inf, start: float = 1.0) -> list[float]:
    """Workers in force where loading takes ``loading[k] / workers`` of the compute time; the disk serves so many."""
    rule, workers, counts = WorkerRule(8), start, []
    for k in range(intervals):
        share = loading[min(k, len(loading) - 1)] / min(workers, disk_limit)
        wait = max(0.0, 1.0 - 1.0 / share) if share > 0 else 0.0
        asked = rule.update(np.array([workers]), np.array([wait]))[0]
        workers = workers if np.isnan(asked) else asked
        counts.append(workers)
    return counts


def test_workers_rise_to_what_hides_loading():
    assert workers_after([0.5], 60)[-1] == 1
    assert workers_after([3.5], 30)[-1] == 4
    assert workers_after([100.0], 60)[-1] == 8


def test_workers_that_do_not_help_are_taken_back_and_tried_ever_more_rarely():
    counts = workers_after([3.5], 200, disk_limit=1.0)
    trials = np.flatnonzero(np.diff(counts) > 0)
    assert counts[-1] == 1
    assert len(trials) >= 2
    assert (np.diff(trials, 2) >= 0).all()
    assert np.mean(np.array(counts) > 1) < 0.3


def test_workers_come_back_down_when_loading_was_slow_for_a_while_only():
    counts = workers_after([3.5] * 30 + [0.4], 150)
    assert counts[29] == 4
    assert counts[-1] == 1


def test_where_there_are_no_workers_or_no_sensor_nothing_is_asked():
    rule = WorkerRule(8, n=2)
    for _ in range(20):
        assert np.isnan(rule.update(np.array([np.nan, 2.0]), np.array([0.5, np.nan]))).all()


@pytest.mark.parametrize(
    "bad",
    [{"token_budget": 0}, {"token_budget": "large"}, {"memory_target": 90}, {"most_tokens": -1}, {"max_workers": -1}],
)
def test_bad_options_are_refused_by_name(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        make_policy("rule", **bad)
