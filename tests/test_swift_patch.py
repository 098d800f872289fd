"""What the hook knows of ms-swift, on stand-ins with its trainers' names."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from swiftcruise.runtime.macro_batch import Prepared
from swiftcruise.runtime.macro_loader import MacroRows
from swiftcruise.runtime.planner import pack, plain_plan
from swiftcruise.runtime.swift_patch import SwiftTrainer, _observed

from .small_trainer import rows_of


class Accelerator:
    num_processes = 1

    def __init__(self) -> None:
        self.gathered = 0
        self.gradient_state = SimpleNamespace(_set_sync_gradients=lambda value: None)

    def gather_for_metrics(self, value: Any) -> Any:
        self.gathered += 1
        return value


class Mean:
    def __init__(self) -> None:
        self.state, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.state += value
        self.count += 1


def swift_of(name: str, *, args: dict[str, Any] | None = None, **attributes: Any) -> SwiftTrainer:
    """The hook's view of a trainer of that name."""
    values = {
        "accelerator": Accelerator(),
        "template": SimpleNamespace(padding_free=False, mode="train"),
        "model": SimpleNamespace(model_info=SimpleNamespace(is_moe_model=False), main_input_name="input_ids"),
        "processing_class": SimpleNamespace(pad_token_id=0),
        "model_accepts_loss_kwargs": True,
        "compute_loss_func": None,
        "label_smoother": None,
        "calculate_KL": True,
        "cpo_alpha": 0.0,
        "loss_type": ["sigmoid"],
        "custom_metrics": {"train": defaultdict(Mean)},
    }
    trainer = type(name, (SimpleNamespace,), {})(**values | attributes)
    given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "rpo_alpha": None, "loss_type": None}
    return SwiftTrainer(SimpleNamespace(**given | (args or {})), trainer)


FREE = [
    ("Seq2SeqTrainer", {}, {}),
    ("Trainer", {}, {}),
    ("DPOTrainer", {}, {}),
    ("DPOTrainer", {}, {"loss_type": ["ipo", "sigmoid"]}),
    ("RewardTrainer", {}, {}),
    ("CPOTrainer", {}, {}),
    ("KTOTrainer", {}, {"calculate_KL": False}),
]
MOE = SimpleNamespace(model_info=SimpleNamespace(is_moe_model=True))
FIXED = [
    ("Seq2SeqTrainer", {}, {"model_accepts_loss_kwargs": False}),
    ("Seq2SeqTrainer", {}, {"compute_loss_func": print}),
    ("Trainer", {}, {"compute_loss_func": print}),
    ("Trainer", {}, {"label_smoother": print}),
    ("Seq2SeqTrainer", {"router_aux_loss_coef": 0.1}, {"model": MOE}),
    ("Seq2SeqTrainer", {"neftune_noise_alpha": 5}, {}),
    ("ORPOTrainer", {}, {}),
    ("CPOTrainer", {}, {"cpo_alpha": 1.0}),
    ("DPOTrainer", {"rpo_alpha": 0.5}, {}),
    *[("DPOTrainer", {}, {"loss_type": ["sigmoid", kind]}) for kind in ("aot", "aot_unpaired", "bco_pair", "sft")],
    ("KTOTrainer", {}, {}),
    ("EmbeddingTrainer", {}, {}),
]


@pytest.mark.parametrize(("name", "args", "attributes"), FREE)
def test_losses_that_are_sums_over_tokens_or_means_over_samples_may_be_split(name, args, attributes):
    assert swift_of(name, args=args, **attributes).fixed_composition is None


@pytest.mark.parametrize(("name", "args", "attributes"), FIXED)
def test_losses_that_depend_on_a_samples_company_keep_the_samplers_batches(name, args, attributes):
    assert swift_of(name, args=args, **attributes).fixed_composition


def test_ranks_that_gather_within_a_micro_batch_run_equally_many_and_redo_none():
    several = Accelerator()
    several.num_processes = 2
    assert swift_of("KTOTrainer", accelerator=several, calculate_KL=False).fixed_composition
    assert swift_of("KTOTrainer", accelerator=several).cannot_redo
    assert swift_of("KTOTrainer").cannot_redo is None
    assert swift_of("DPOTrainer", accelerator=several).cannot_redo is None


@pytest.mark.parametrize(("name", "gathers"), [("DPOTrainer", False), ("ORPOTrainer", False), ("KTOTrainer", True)])
def test_preference_metrics_stay_on_their_rank_within_a_micro_batch(name: str, gathers: bool):
    swift = swift_of(name)
    accelerator = swift.trainer.accelerator

    def training_step(model: Any, inputs: Any, items: Any) -> torch.Tensor:
        return accelerator.gather_for_metrics(torch.ones(()))

    swift._original["training_step"] = training_step
    swift.forward_backward(torch.nn.Linear(1, 1), {}, None, divisors=(1.0, 1.0), last=True, spare_bytes=lambda: 0.0)
    assert accelerator.gathered == gathers
    accelerator.gather_for_metrics(1)
    assert accelerator.gathered == gathers + 1


# -- metrics -----------------------------------------------------------------------------------------------------------


def log_micro_batches(swift: SwiftTrainer, means: list[float]) -> list[Any]:
    marks = [swift.metrics_state()]
    for mean in means:
        swift.trainer.custom_metrics["train"]["margin"].update(mean)
        swift.trainer._stored_metrics["train"]["margin"].append(mean)
        marks.append(swift.metrics_state())
    return marks


def logged(swift: SwiftTrainer) -> tuple[float, float]:
    """What the trainer would log: from its running means, and from its lists."""
    mean = swift.trainer.custom_metrics["train"]["margin"]
    return mean.state / mean.count, float(np.mean(swift.trainer._stored_metrics["train"]["margin"]))


def preference_trainer() -> SwiftTrainer:
    return swift_of("DPOTrainer", _stored_metrics=defaultdict(lambda: defaultdict(list)))


def test_metrics_are_the_means_over_the_samplers_batches_whatever_the_micro_batches():
    values = [np.arange(4.0), np.arange(10.0, 14.0), np.array([100.0])]  # two batches of 4, the last of 1
    plain, ours = preference_trainer(), preference_trainer()
    log_micro_batches(plain, [float(v.mean()) for v in values])
    flat = np.concatenate(values[:2])
    parts = [flat[:3], flat[3:7], flat[7:], values[2]]
    marks = log_micro_batches(ours, [float(p.mean()) for p in parts])
    ours.weigh_metrics(marks, [3 / 4, 4 / 4, 1 / 4, 1 / 1])
    assert logged(ours) == pytest.approx(logged(plain))
    # a step of another composition follows in the same line of the log
    for swift in (plain, ours):
        log_micro_batches(swift, [7.0, 8.0])
    assert logged(ours) == pytest.approx(logged(plain))


def test_a_failed_attempt_leaves_no_metrics():
    swift = preference_trainer()
    log_micro_batches(swift, [1.0])
    before = swift.metrics_state()
    log_micro_batches(swift, [2.0, 3.0])
    swift.trainer.custom_metrics["train"]["new"].update(1.0)
    swift.trainer._stored_metrics["train"]["new"].append(1.0)
    swift.restore_metrics(before)
    assert swift.metrics_state() == before
    assert logged(swift) == (1.0, 1.0)
    assert "new" not in swift.trainer._stored_metrics["train"]


def test_running_moments_of_a_failed_attempt_are_forgotten():
    running = SimpleNamespace(mean=0.5, count=3)
    swift = swift_of("DPOTrainer", running=running)
    before = swift.metrics_state()
    running.mean, running.count = 0.9, 5
    swift.restore_metrics(before)
    assert (running.mean, running.count) == (0.5, 3)


# -- counts ------------------------------------------------------------------------------------------------------------


def prepared(macro: MacroRows, plans: list[Any], collate: Callable[[list[Any]], Any]) -> MacroRows:
    macro.prepared = [Prepared(p, collate([macro.rows[i] for i in p.indices]), 2, 0.0, macro) for p in plans]
    return macro


def padded(rows: list[Any], sequences: int = 1, **extra: Any) -> dict[str, Any]:
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    return {"input_ids": ids.repeat(sequences, 1)} | extra


LENGTHS = [9, 3, 14, 5, 2]


@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("pad_token_id", [0, None])
@pytest.mark.parametrize("masked", [True, False])
def test_tokens_are_counted_as_the_samplers_batches_would_be(sequences, pad_token_id, masked):
    swift = swift_of("Seq2SeqTrainer", processing_class=SimpleNamespace(pad_token_id=pad_token_id))

    def collate(rows: list[Any]) -> dict[str, Any]:
        inputs = padded(rows, sequences)
        return inputs | {"attention_mask": inputs["input_ids"] != 0} if masked else inputs

    counts = []
    for plan in (plain_plan, lambda lengths, groups: pack(lengths, token_budget=20)):
        macro = rows_of(LENGTHS, 2)
        macro.lengths = LENGTHS
        counts.append(swift._counted_entries([prepared(macro, plan(LENGTHS, macro.groups), collate)]))
    assert all(c["input_ids"].numel() == sequences * (2 * 9 + 2 * 14 + 2) for c in counts)
    if masked or pad_token_id == 0:
        assert all(int(c["attention_mask"]) == sequences * sum(LENGTHS) for c in counts)
    else:  # as plain transformers counts where nothing tells padding from text
        assert int(counts[0]["attention_mask"]) == sequences * (2 * 9 + 2 * 14 + 2)


def test_images_are_counted_where_a_micro_batch_has_some():
    model = SimpleNamespace(main_input_name="pixel_values")
    swift = swift_of("Seq2SeqTrainer", model=model)

    def collate(rows: list[Any]) -> dict[str, Any]:
        images = [torch.ones(1, 6) for row in rows if len(row["input_ids"]) > 4]
        return padded(rows) | ({"pixel_values": torch.cat(images)} if images else {})

    macro = rows_of(LENGTHS, 2)
    macro.lengths = LENGTHS
    counted = swift._counted_entries([prepared(macro, pack(LENGTHS, token_budget=5), collate)])
    assert counted["pixel_values"].numel() == 18
    text = rows_of([2, 3], 2)
    text.lengths = [2, 3]
    assert swift._counted_entries([prepared(text, plain_plan([2, 3], [(0, 1)]), collate)]) == {}


# -- the trainer's own methods ---------------------------------------------------------------------------------------


def test_the_end_of_a_training_is_noticed_however_it_comes():
    ended = []

    def interrupted() -> None:
        raise KeyboardInterrupt

    for train in (lambda: "done", interrupted):
        methods = (
            "get_train_dataloader",
            "get_batch_samples",
            "training_step",
            "get_eval_dataloader",
            "prediction_step",
        )
        swift = swift_of("Seq2SeqTrainer", train=train, **dict.fromkeys(methods))
        swift.install(SimpleNamespace(), lambda: None, on_exit=lambda: ended.append(True))  # type: ignore[arg-type]
        with contextlib.suppress(KeyboardInterrupt):
            assert swift.trainer.train() == "done"
    assert ended == [True, True]


@pytest.mark.parametrize("inputs", [[{"prompt": "a list of rows"}], {"input_ids": [1, 2]}, None])
def test_an_observer_takes_whatever_a_trainer_computes_on(inputs: Any):
    plan, real = _observed(inputs, "input_ids")
    assert (plan.samples, plan.tokens, real) == (0, 0, [])


def test_an_observer_sees_the_shape_and_the_padding_of_a_batch():
    ids = torch.ones(2, 7, dtype=torch.long)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    plan, real = _observed({"completion_input_ids": ids, "attention_mask": mask}, "input_ids")
    assert (plan.samples, plan.length, plan.tokens, real) == (2, 7, 14, [7, 4])
