"""An out-of-memory in evaluation shrinks evaluation alone; what it reports, and what is learned, stay as they are."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftcruise.runtime.evaluation import (
    ROWS,
    EvaluationDoesNotFit,
    EvaluationSplitter,
    KeepRows,
    weighted_mean,
)
from swiftcruise.runtime.planner import MicroBatch, plain_plan

from .small_trainer import OUT_OF_MEMORY, Model
from .test_real_training import SGD
from .training import CHANGING, UNCHANGED, Lab, Trained


class Batch:
    """Samples of these lengths for a small model, which runs out of memory where `fails` says so."""

    repeatable = True

    def __init__(self, lengths: Sequence[int], fails: Callable[[MicroBatch], bool], kept_whole: str | None = None):
        generator = torch.Generator().manual_seed(sum(lengths))
        self.rows = [torch.randint(1, 20, (n,), generator=generator) for n in lengths]
        self.kept_whole, self.samples, self.sizes = kept_whole, len(lengths), []
        self._fails, self._lengths = fails, lengths
        torch.manual_seed(0)
        self._model = Model()

    def size(self, indices: Sequence[int]) -> MicroBatch:
        return plain_plan(self._lengths, [indices])[0]

    def compute(self, indices: Sequence[int]) -> tuple[torch.Tensor, int]:
        """Mean loss over the tokens, and how many they are."""
        self.sizes.append(self.size(indices).tokens)
        ids = torch.nn.utils.rnn.pad_sequence([self.rows[i] for i in indices], batch_first=True)
        with torch.no_grad():
            values = self._model(ids)  # genuine tensors, lost where this fails
        if self._fails(self.size(indices)):
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return values[ids != 0].mean(), int((ids != 0).sum())


def above(tokens: float) -> Callable[[MicroBatch], bool]:
    return lambda size: size.tokens > tokens


def never(size: MicroBatch) -> bool:
    return False


def splitter() -> EvaluationSplitter:
    return EvaluationSplitter(free=lambda: None)


lengths_of_a_batch = st.lists(st.integers(1, 15), min_size=1, max_size=12)


@settings(max_examples=25, deadline=None)
@given(lengths=lengths_of_a_batch, failures=st.lists(st.booleans(), max_size=40), ceiling=st.floats(1, 200))
def test_whatever_fails_the_joined_result_is_that_of_the_whole_batch(lengths, failures, ceiling):
    whole = Batch(lengths, never).compute(range(len(lengths)))[0]
    pattern = iter(failures)
    ours = splitter()
    ours.ceiling = ceiling
    batch = Batch(lengths, lambda size: size.samples > 1 and next(pattern, False))
    parts = ours.run(batch)
    assert [i for indices, _ in parts for i in indices] == list(range(len(lengths)))
    means, tokens = zip(*(result for _, result in parts), strict=True)
    torch.testing.assert_close(weighted_mean(means, tokens), whole, rtol=1e-12, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(lengths=lengths_of_a_batch, fits=st.integers(15, 200))
def test_a_size_that_failed_is_not_tried_again_at_once(lengths: list[int], fits: int):
    ours, batch = splitter(), Batch(lengths, above(fits))
    ours.run(batch)
    failed = [size for size in batch.sizes if size > fits]
    batch.sizes.clear()
    ours.run(batch)
    assert not failed or max(batch.sizes) < min(failed)


def test_a_larger_size_comes_back_after_many_batches():
    ours, batch = splitter(), Batch([10] * 8, above(40))
    for _ in range(20):
        ours.run(batch)
    assert batch.sizes.count(80) == 1
    batch._fails = never
    held = 0
    while batch.sizes[-1] != 80:
        ours.run(batch)
        held += 1
    assert 50 < held < 200


def test_what_cannot_be_split_is_tried_once_more_after_memory_was_freed():
    for batch in (Batch([5], never), Batch([5, 6], never, kept_whole="its loss couples the samples")):
        failing: list[int] = [1]
        batch._fails = lambda size, failing=failing: bool(failing)
        events: list[str] = []
        ours = EvaluationSplitter(failing.clear, lambda kind, line, details, events=events: events.append(kind))
        assert len(ours.run(batch)) == 1
        assert events == ["evaluation_oom"]
        assert ours.ceiling == math.inf


def test_what_fits_in_no_way_ends_with_its_length_and_the_remedy():
    with pytest.raises(EvaluationDoesNotFit, match=r"a sample of 9 tokens .* Shorten it \(--max_length\)"):
        splitter().run(Batch([3, 9, 2], lambda size: size.length == 9))
    with pytest.raises(EvaluationDoesNotFit, match=r"3 samples x 9 tokens .* couples.* smaller per_device_eval_batch"):
        splitter().run(Batch([3, 9, 2], above(5), kept_whole="its loss couples the samples"))


def test_where_ranks_wait_in_the_middle_nothing_is_repeated():
    batch = Batch([3, 4], above(5), kept_whole="the ranks gather")
    batch.repeatable = False
    with pytest.raises(EvaluationDoesNotFit):
        splitter().run(batch)
    assert len(batch.sizes) == 1


def test_other_errors_pass_unchanged():
    def broken(size: MicroBatch) -> bool:
        raise ValueError("shapes do not match")

    with pytest.raises(ValueError, match="shapes do not match"):
        splitter().run(Batch([3, 4], broken))


def test_samples_travel_with_their_batch_whatever_the_collator_does_to_them():
    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"input_ids": torch.tensor([row.pop("input_ids") for row in rows])}

    rows = [{"input_ids": [1, 2]}, {"input_ids": [3, 4]}]
    batch = KeepRows(collate)(rows)
    assert batch[ROWS].rows == [{"input_ids": [1, 2]}, {"input_ids": [3, 4]}]
    assert batch[ROWS].count == 2


def test_samples_that_cannot_be_pickled_stay_behind():
    batch = KeepRows(lambda rows: {"n": len(rows)})([{"encode": lambda: None}])
    assert batch == {"n": 1}


# -- real trainings ----------------------------------------------------------------------------------------------------

EVALUATION = ("--split_dataset_ratio", "0.4", "--eval_strategy", "steps", "--eval_steps", "2")
EVALUATION += ("--per_device_eval_batch_size", "8")
LORA = ("--tuner_type", "lora", "--lora_dropout", "0", "--learning_rate", "1e-2")


class Failing:
    """Lets a forward pass of evaluation above `fits` padded tokens run out of memory, after most of its work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fits: float) -> None:
        from swiftcruise.runtime.swift_patch import SwiftTrainer

        self.fits, self.failures = fits, 0
        self.events: list[tuple[str, str, dict[str, Any]]] = []
        install = SwiftTrainer.install

        def install_with_failures(swift: Any, *args: Any, **kwargs: Any) -> None:
            kwargs["on_event"] = lambda kind, line, details: self.events.append((kind, line, details))
            install(swift, *args, **kwargs)
            model = swift.trainer.template.get_base_model(swift.trainer.model)
            model.model.register_forward_hook(self._fail)

        monkeypatch.setattr(SwiftTrainer, "install", install_with_failures)

    def _fail(self, module: Any, args: Any, output: Any) -> None:
        hidden = output.last_hidden_state
        if not module.training and hidden.shape[0] * hidden.shape[1] > self.fits:
            self.failures += 1
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)


def evaluations(run: Trained) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if k.startswith("eval_")} for line in run.log if "eval_loss" in line]


def assert_as_plain(ours: Trained, plain: Trained, rel: float) -> None:
    assert ours.difference(plain) == 0.0
    assert len(evaluations(plain)) > 1
    for one, other in zip(evaluations(ours), evaluations(plain), strict=True):
        for key, value in other.items():
            # Rewards are differences of log-probabilities, sums of about 1000 in single precision.
            assert one.pop(key) == pytest.approx(value, rel=rel, abs=1e-5 if "rewards" in key else 1e-9), key
        assert not one
    training = ([line for line in run.log if "loss" in line] for run in (ours, plain))
    assert next(training) == next(training)


def events_of_training(run: Trained) -> list[str]:
    lines = (run.directory / "trace.jsonl").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if json.loads(line).get("event") == "oom"]


def test_a_sample_that_does_not_fit_ends_the_run_after_a_checkpoint_was_saved(lab: Lab, monkeypatch):
    Failing(monkeypatch, fits=20)
    with pytest.raises(EvaluationDoesNotFit, match=r"tokens does not fit alone .* All 2 steps before it are in"):
        lab.train("sft", *EVALUATION, cruise=UNCHANGED)


VARIANTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "full": ("sft", "sft", ()),
    "loss scale, sequence accuracy": ("sft", "sft", ("--loss_scale", "ignore_empty_think", "--acc_strategy", "seq")),
    "predictions": ("sft", "sft", ("--eval_metric", "acc")),
    "label smoothing": ("sft", "sft", ("--label_smoothing_factor", "0.1")),
    "dpo": ("rlhf", "dpo", ("--rlhf_type", "dpo", *LORA)),
    "dpo, losses that couple the pairs": ("rlhf", "dpo", ("--rlhf_type", "dpo", "--rpo_alpha", "0.5", *LORA)),
    "reward": ("rlhf", "dpo", ("--rlhf_type", "rm")),
    "classification": ("sft", "classes", ("--task_type", "seq_cls", "--num_labels", "2")),
}


@pytest.fixture(autouse=True)
def data_of_classes(request: pytest.FixtureRequest) -> None:
    """The chats of the laboratory with one of two classes each."""
    if "lab" not in request.fixturenames:
        return
    lab = request.getfixturevalue("lab")
    if "classes" not in lab.data:
        chats = lab.data["sft"].read_text(encoding="utf-8").splitlines()
        labelled = [json.dumps(json.loads(chat) | {"label": i % 3 % 2}) for i, chat in enumerate(chats)]
        lab.data["classes"] = lab.folder / "classes.jsonl"
        lab.data["classes"].write_text("\n".join(labelled) + "\n", encoding="utf-8")


@pytest.mark.parametrize(
    "variant",
    [v if v in ("full", "reward") else pytest.param(v, marks=pytest.mark.long) for v in VARIANTS],
)
def test_an_out_of_memory_shows_neither_in_the_metrics_nor_in_the_weights(lab: Lab, variant: str, monkeypatch):
    command, data, arguments = VARIANTS[variant]
    plain = lab.train(command, *arguments, *EVALUATION, data=data)
    failing = Failing(monkeypatch, fits=700 if command == "rlhf" else 300)
    ours = lab.train(command, *arguments, *EVALUATION, data=data, cruise=UNCHANGED)
    assert failing.failures
    assert [kind for kind, _, _ in failing.events] == ["evaluation_oom"] * failing.failures
    # A preference loss is one of differences, in which the last bits of log-probabilities weigh more.
    assert_as_plain(ours, plain, rel=1e-5 if command == "rlhf" else 1e-6)
    assert ours.summary["oom_count"] == 0
    assert not events_of_training(ours)


@pytest.mark.long
def test_losses_of_evaluation_are_those_of_plain_whatever_the_micro_batches_of_training(lab: Lab):
    command, data, arguments = VARIANTS["classification"]  # ms-swift divides its loss by the batches of a step
    plain = lab.train(command, *arguments, *EVALUATION, *SGD, data=data)
    ours = lab.train(command, *arguments, *EVALUATION, *SGD, data=data, cruise=CHANGING)
    for one, other in zip(evaluations(ours), evaluations(plain), strict=True):
        assert one == pytest.approx(other, rel=1e-4)
