"""Promise 2 on real trainings: whatever fails beside it, a training ends as if nothing had happened."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks import faults, injection_controller, injection_files, injection_kills, injection_memory  # noqa: F401
from benchmarks.injection import KINDS, Injector, Plan, Strike
from swiftcruise.runtime import hook

from .test_real_training import SGD
from .training import Lab, Trained

TWO_EPOCHS = (*SGD, "--num_train_epochs", "2", "--save_steps", "6")
STEPS = 16


@dataclass
class Struck:
    """A training under the hook, and what struck it."""

    run: Trained
    plain: Trained
    injected: Counter[str]
    steps: dict[int, Counter[str]]  #: samples of every optimizer step, counted at the model
    told: str  #: all that was printed and logged

    def unharmed(self) -> bool:
        """Whether it took every sample once an epoch and came to plain ms-swift's weights."""
        samples = sum(self.steps.values(), Counter())
        complete = len(samples) == Lab.COUNT and set(samples.values()) == {2} and len(self.steps) == STEPS
        return complete and self.run.difference(self.plain) <= 1e-6

    def times_told(self, kind: str) -> int:
        """How often the user was told of a kind of fault."""
        warning = KINDS[kind].warning
        assert warning is not None
        return len(re.findall(warning, self.told))


@pytest.fixture
def strike(
    lab: Lab,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> Iterator[Any]:
    """Train in this process while kinds of faults strike at the steps given."""

    def train(moments: dict[str, tuple[int, ...]], **cruise: Any) -> Struck:
        plan = Plan(str(tmp_path), tuple(Strike(step, kind) for kind, steps in moments.items() for step in steps))

        class StruckCallback(hook.CruiseCallback):
            def __init__(self, args: Any, trainer: Any) -> None:
                super().__init__(args, trainer)
                self.injector = Injector(plan, args, trainer)

            def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
                super().on_train_begin(*args, **kwargs)
                self.injector.on_train_begin(*args, **kwargs)

            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                self.injector.on_step_begin(*args, **kwargs)

            def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
                self.injector.on_pre_optimizer_step(*args, **kwargs)

            def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
                self.injector.on_optimizer_step(*args, **kwargs)

            def on_save(self, *args: Any, **kwargs: Any) -> None:
                self.injector.on_save(*args, **kwargs)
                super().on_save(*args, **kwargs)

        plain = lab.train("sft", *TWO_EPOCHS)
        monkeypatch.setattr(hook, "CruiseCallback", StruckCallback)
        caplog.clear()
        capfd.readouterr()
        run = lab.train("sft", *TWO_EPOCHS, cruise=faults.CRUISE | cruise)
        assert Injector.current is not None
        Injector.current.close()
        injected = Counter(line["kind"] for line in faults.records_of(tmp_path, "fired"))
        assert injected.keys() == moments.keys()
        return Struck(run, plain, injected, faults.steps(tmp_path), caplog.text + capfd.readouterr().err)

    yield train
    if Injector.current is not None:
        Injector.current.close()
        Injector.current = None


def test_memory_that_runs_out_in_any_form_and_place_costs_neither_a_sample_nor_a_weight(strike: Any):
    kinds = [kind for kind, fault in KINDS.items() if issubclass(fault, injection_memory.OutOfMemory)]
    kinds.remove("oom_evaluation")  # see test_evaluation
    struck = strike({kind: (2 + i,) for i, kind in enumerate(kinds)})
    assert struck.unharmed()
    assert struck.times_told("oom_forward") == struck.injected.total() == struck.run.summary["oom_count"]


def test_a_limit_lowered_and_a_neighbour_that_comes_are_out_of_memory_like_any_other(strike: Any):
    struck = strike({"rlimit_lowered": (2, 6), "neighbour": (4, 8)}, memory_limit_gib=0.5)
    assert struck.unharmed()
    assert struck.times_told("neighbour") == struck.injected.total() == struck.run.summary["oom_count"]


def test_a_policy_may_do_what_it_will(strike: Any):
    kinds = [kind for kind, fault in KINDS.items() if issubclass(fault, injection_controller.PolicyFault)]
    struck = strike({kind: (2 + 2 * i, 12) for i, kind in enumerate(kinds)})
    assert struck.unharmed()
    assert struck.times_told("policy_raises") == 1


def test_a_gpu_sensor_may_break_in_any_way(strike: Any):
    kinds = [kind for kind, fault in KINDS.items() if issubclass(fault, injection_controller.GpuSensorFault)]
    struck = strike({kind: (2 + 2 * i,) for i, kind in enumerate(kinds)})
    assert struck.unharmed()
    for kind in kinds:
        if KINDS[kind].warning is not None:
            assert struck.times_told(kind) == 1, kind


@pytest.mark.parametrize(
    ("trace", "board"), [("trace_disk_full", "board_disk_full"), ("trace_removed", "board_replaced")]
)
def test_a_full_disk_costs_the_logs_not_the_training(strike: Any, trace: str, board: str):
    kinds = [trace, board, "summary_unwritable", "state_unwritable"]
    struck = strike(dict.fromkeys(kinds, (5,)))
    assert struck.unharmed()
    for kind in kinds:
        assert struck.times_told(kind) == 1, kind


def test_a_training_whose_logs_cannot_even_be_opened_is_controlled_all_the_same(strike: Any):
    kinds = ["trace_unopenable", "board_replaced", "summary_unwritable"]
    struck = strike(dict.fromkeys(kinds, (0,)))
    assert struck.unharmed()
    for kind in kinds:
        assert struck.times_told(kind) == 1, kind


# -- in processes of their own ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> faults.Laboratory:
    return faults.Laboratory(tmp_path_factory.mktemp("faults"), seed=1, steps=20)


@pytest.mark.long
@pytest.mark.parametrize(
    "scenario",
    [
        faults.Scenario(
            "clocks and pauses",
            {"clock_forward": 4, "clock_backward": 4, "paused": 1},
            {"interval_steps": None, "interval_s": 0.2},
        ),
        faults.Scenario("killed", {"sigkill": 1, "sigterm": 1}, spoiled=("state_truncated", "state_foreign")),
        faults.Scenario("ranks", {"oom_forward": 2, "oom_backward": 2}, ranks=2, only_rank={"oom_forward": 1}),
        faults.Scenario("a rank killed", {"sigkill": 1}, ranks=2, only_rank={"sigkill": 1}),
    ],
    ids=lambda scenario: scenario.name,
)
def test_it_survives_or_resumes_to_the_same_weights(laboratory: faults.Laboratory, scenario: faults.Scenario):
    outcome = faults.carry_out(laboratory, scenario)
    assert outcome.problems == []
    assert outcome.injected.keys() == {*scenario.often, *scenario.spoiled}
