"""A long training under the hook, with everything changing and failing at random: nothing is lost, nothing piles up."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest

from swiftcruise.cli.tiny import LengthDistribution, write_data
from swiftcruise.runtime.controls import Controls
from swiftcruise.runtime.macro_batch import MacroBatchRunner
from swiftcruise.runtime.memory_watch import MemoryWatch
from swiftcruise.runtime.swift_patch import SwiftTrainer
from swiftcruise.runtime.telemetry import Telemetry
from swiftcruise.runtime.trace import read_trace

from .small_trainer import OUT_OF_MEMORY
from .training import Lab

SAMPLES, EPOCHS, ACCUMULATION = 450, 20, 3
STEPS = SAMPLES // ACCUMULATION * EPOCHS
EVERY = 100  #: steps between two looks
WARM_UP = 600  #: steps after which nothing may grow
#: What a look may differ by without being growth: allocators and caches breathe.
TOLERANCES = {"resident MiB": 12.0, "threads": 0, "native threads": 0, "file handles": 0}
OBJECTS = 4  #: the same for every other count: a step has so many micro-batches at most


class RandomPolicy:
    """Other controls at every decision; now and then it fails, or says nonsense."""

    def __init__(self) -> None:
        self.reset(1)

    def reset(self, n: int, seed: int | None = None) -> None:
        self._rng = random.Random(seed)
        self.failures = 0

    def act(self, telemetry: Telemetry) -> Controls:
        rng = self._rng
        if rng.random() < 0.03:
            raise RuntimeError("the policy fails on purpose")
        return Controls.of(
            telemetry.n,
            token_budget=np.inf if rng.random() < 0.03 else rng.choice([100, 150, 4000]),
            micro_batch_cap=rng.choice([2, 3, 64, np.nan]),
            checkpoint_fraction=rng.choice([0.0, 0.5, 1.0, np.nan]),
            memory_target=rng.choice([0.5, 0.85, np.nan]),
            num_workers=rng.choice([0, 1, 2]) if rng.random() < 0.02 else np.nan,
            cpu_threads=1,
        )

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def diagnostics(self) -> Mapping[str, Any]:
        return {}


CRUISE = {
    "policy": "tests.test_soak:RandomPolicy",
    "interval_steps": 1,
    "control_workers": True,
    # The least of both leaves two samples together, which is what may fail below.
    "limits": {
        "token_budget": {"rate": 1000, "low": 100},
        "micro_batch_cap": {"rate": 1000, "low": 2},
        "num_workers": {"dwell": 0},
    },
    "guard": {"hysteresis": 0.0, "ceiling_recovery": 4.0},
}


class Soak:
    """Injects out-of-memory errors at random and looks at the process now and then."""

    def __init__(self) -> None:
        self.rng = random.Random(1)
        self.steps = 0
        self.injected: Counter[str] = Counter()
        self.consumed: Counter[int] = Counter()  #: how often each sample was in a finished step
        self.looks: list[dict[str, float]] = []
        self._failed = False  # in the step under way

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        forward_backward, run = SwiftTrainer.forward_backward, MacroBatchRunner.run

        def failing(trainer: SwiftTrainer, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            # One sample alone that does not fit ends a training, so that only what can be split fails, once a step.
            stage = self.rng.choice(["forward", "backward"])
            if self._failed or len(inputs["input_ids"]) < 2 or self.rng.random() > 0.1:
                return forward_backward(trainer, model, inputs, *args, **options)
            self._failed = True
            self.injected[stage] += 1
            with _out_of_memory(trainer.trainer.model.model.norm, stage):
                return forward_backward(trainer, model, inputs, *args, **options)

        def counting(runner: MacroBatchRunner, model: Any, shares: Any) -> Any:
            loss = run(runner, model, shares)
            self._failed = False
            self.consumed.update(index for share, _ in shares for index in share.indices)
            self.steps += 1
            if self.steps % EVERY == 0:
                self.looks.append(look())
            return loss

        with (
            mock.patch.object(SwiftTrainer, "forward_backward", failing),
            mock.patch.object(MacroBatchRunner, "run", counting),
            # The failures are made up: a memory model that believed them would soon leave every sample alone.
            mock.patch.object(MemoryWatch, "record_oom", _unheeded),
        ):
            yield


def _unheeded(*_: Any) -> None: ...


@contextlib.contextmanager
def _out_of_memory(module: Any, stage: str) -> Iterator[None]:
    """The module before the head fails: after all layers' forward, or with the head's gradients already added."""
    import torch

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    if stage == "forward":
        handle = module.register_forward_pre_hook(fail)
    else:
        handle = module.register_forward_hook(lambda _module, _inputs, output: output.register_hook(fail) and None)
    try:
        yield
    finally:
        handle.remove()


def look() -> dict[str, float]:
    """What the process holds at present."""
    import torch

    gc.collect()
    process = psutil.Process()
    kinds = Counter(map(type, gc.get_objects()))
    counts: dict[str, float] = {
        "resident MiB": process.memory_info().rss / 2**20,
        "threads": threading.active_count(),
        "native threads": process.num_threads(),
        "file handles": process.num_fds(),
        "tensors": sum(count for kind, count in kinds.items() if issubclass(kind, torch.Tensor)),
    }
    for kind, count in kinds.items():
        if str(kind.__module__).startswith("swiftcruise."):
            counts[kind.__qualname__] = counts.get(kind.__qualname__, 0) + count
    return counts


def growth(looks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What grew beyond its tolerance: by how much the least value of the last third exceeds that of the first.

    The least value, because workers and prefetched batches come and go, while what leaks stays.
    """
    third = len(looks) // 3
    least = [
        {name: min(look.get(name, 0.0) for look in part) for name in set().union(*looks)}
        for part in (looks[:third], looks[-third:])
    ]
    grown = {name: least[1][name] - least[0][name] for name in least[0]}
    return {name: by for name, by in grown.items() if by > TOLERANCES.get(name, OBJECTS)}


def test_a_leak_of_one_object_a_look_would_be_seen():
    steady = [{"MacroRows": 2.0 + look % 2, "tensors": 100.0} for look in range(24)]
    assert growth(steady) == {}
    leaking = [{**counts, "MacroRows": counts["MacroRows"] + look} for look, counts in enumerate(steady)]
    assert growth(leaking) == {"MacroRows": 16.0}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_thousands_of_steps_of_changes_and_failures_lose_no_sample_and_leave_nothing_behind(lab: Lab):
    lengths = LengthDistribution(2.0, 0.6, longest=60).sample(SAMPLES, seed=5)
    lab.data["soak"] = write_data(lab.folder / "soak.jsonl", lab.model, lengths)
    soak = Soak()
    before = set(threading.enumerate())
    with soak.installed():
        run = lab.train(
            "sft",
            *("--num_train_epochs", str(EPOCHS), "--gradient_accumulation_steps", str(ACCUMULATION)),
            *("--logging_steps", "100", "--save_strategy", "no"),
            data="soak",
            cruise=CRUISE,
        )
    print(soak.injected, soak.looks[0], soak.looks[6], soak.looks[-1], sep="\n")
    assert soak.steps == STEPS
    assert soak.consumed == dict.fromkeys(range(SAMPLES), EPOCHS)
    assert min(soak.injected.values()) >= STEPS // 100
    assert run.summary["oom_count"] == soak.injected.total()
    assert run.summary["optimizer_steps"] == STEPS
    assert growth(soak.looks[WARM_UP // EVERY :]) == {}
    assert not [thread for thread in set(threading.enumerate()) - before if "swiftcruise" in thread.name]
    assert not psutil.Process().children()
    trace = read_trace(run.directory / "trace.jsonl")
    assert trace.skipped == []
    assert len(trace.intervals) == STEPS
    assert sum(event["event"] == "oom" for event in trace.events) == soak.injected.total()
