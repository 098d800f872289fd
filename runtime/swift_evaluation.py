"""Evaluation of ms-swift, transformers and trl under `runtime.evaluation`: what touches their internals.

On the trainer's instance `get_eval_dataloader` lets batches carry their samples, and `prediction_step` computes them in
parts where the whole does not fit. A part involves no collective operation, so that ranks need not split alike: what
the loss is divided by is counted (over the ranks) once for the whole batch. DPO gathers its metrics inside
`prediction_step`; there `concatenated_forward`, which needs all the memory, is split instead, and everything that
follows sees the whole batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_pt_utils import nested_concat

from .evaluation import ROWS, EvaluationDoesNotFit, EvaluationSplitter, KeepRows, KeptRows, weighted_mean
from .metric_marks import weigh_means
from .planner import MicroBatch, plain_plan
from .random_state import RandomState

if TYPE_CHECKING:
    from .swift_patch import SwiftTrainer

#: Trainers whose evaluation is a sum over tokens or a mean over samples (or tokens) of the batch.
_SPLITTABLE = {"Seq2SeqTrainer", "Trainer", "RewardTrainer", "DPOTrainer"}


class _Batch:
    """One batch of evaluation (`evaluation.EvaluationBatch`).

    Args:
        swift: The trainer.
        whole: The collated batch.
        kept: Its samples, where they are known.
        compute: The result for a collated batch, and whether it is a part of the whole.
    """

    def __init__(
        self, swift: SwiftTrainer, whole: Any, kept: KeptRows | None, compute: Callable[[Any, bool], Any]
    ) -> None:
        self._swift = swift
        self._whole = whole
        self._kept = kept
        self._compute = compute
        self._lengths: list[int] | None = None
        self.kept_whole = kept_whole(swift)
        if self.kept_whole is None and kept is None:
            self.kept_whole = "its samples are not known one by one (a stream)"
        self.repeatable = swift.trainer.accelerator.num_processes == 1 or kept_whole(swift) is None
        self.samples = kept.count if kept is not None else max(1, swift.shape(whole).samples)

    def size(self, indices: Sequence[int]) -> MicroBatch:
        """See the protocol."""
        if self._kept is None:
            return self._swift.shape(self._whole)
        if self._lengths is None:
            self._lengths = [self._swift.row_length(row) for row in self._kept.rows]
        return plain_plan(self._lengths, [indices], padding_free=self._swift.padding_free)[0]

    def compute(self, indices: Sequence[int]) -> Any:
        """See the protocol. Trainers take entries out of what they are given, so they get a copy."""
        swift, whole, kept = self._swift, self._whole, self._kept
        marks, random_state = swift.metrics_state("eval"), RandomState(swift.trainer.model)
        try:
            if len(indices) == self.samples or kept is None:
                return self._compute(dict(whole) if type(whole) is dict else whole, False)
            rows = kept.rows
            return self._compute(swift.collate([rows[i] for i in indices]), True)
        except Exception:
            swift.restore_metrics(marks, "eval")
            random_state.restore()
            raise


def kept_whole(swift: SwiftTrainer) -> str | None:
    """Why the batches of evaluation may not be split, or None where they may."""
    t, args, kind = swift.trainer, swift.args, type(swift.trainer).__name__
    if getattr(args, "predict_with_generate", False):
        return "it generates (predict_with_generate)"
    if kind not in _SPLITTABLE:
        return f"the loss or the metrics of {kind} depend on the samples of a batch together"
    if t.model.model_info.is_moe_model and getattr(args, "router_aux_loss_coef", 0):
        return "the router's auxiliary loss depends on each batch"
    if kind in ("Seq2SeqTrainer", "Trainer") and t.compute_loss_func is not None:
        return f"loss_type={args.loss_type} may average over each batch"
    if kind == "Trainer" and t.label_smoother is not None:
        return "label smoothing averages over each batch"
    return None


class SwiftEvaluation:
    """The evaluation of one trainer.

    Args:
        swift: The trainer.
        splitter: Splits the batches.
    """

    def __init__(self, swift: SwiftTrainer, splitter: EvaluationSplitter) -> None:
        self._swift = swift
        self._splitter = splitter
        self._kept: KeptRows | None = None  # samples of the batch in `prediction_step`
        self._evaluating = False

    def install(self) -> None:
        """Replace the trainer's methods of evaluation."""
        t = self._swift.trainer
        self._loader = t.get_eval_dataloader
        self._step = t.prediction_step
        t.get_eval_dataloader = self._get_eval_dataloader
        t.prediction_step = self._prediction_step
        if type(t).__name__ == "DPOTrainer":
            self._forward = t.concatenated_forward
            t.concatenated_forward = self._concatenated_forward

    # -- data --------------------------------------------------------------------------------------------------------

    def _get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        t = self._swift.trainer
        chosen = t.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, str):
            chosen = t.eval_dataset[chosen]
        # Streams and dispatched batches are cut and broadcast as tensors on their way.
        map_style = hasattr(chosen, "__len__") and not isinstance(chosen, torch.utils.data.IterableDataset)
        if not map_style or getattr(t.accelerator, "dispatch_batches", None) or kept_whole(self._swift):
            return self._loader(eval_dataset)
        collator, t.data_collator = t.data_collator, KeepRows(t.data_collator)
        try:
            return self._loader(eval_dataset)
        finally:
            t.data_collator = collator

    # -- computing ---------------------------------------------------------------------------------------------------

    def _prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        swift = self._swift
        kept = inputs.pop(ROWS, None) if isinstance(inputs, dict) else None
        with self._as_plain():
            try:
                if type(swift.trainer).__name__ == "DPOTrainer":
                    self._kept, self._evaluating = kept, True
                    return self._step(model, inputs, *args, **kwargs)
                return self._predict(model, inputs, kept, args, kwargs)
            except EvaluationDoesNotFit as error:
                swift.restore_adapter()
                saved = f" {swift.save_before_the_end(model)}" if swift.trainer.is_in_train else ""
                raise EvaluationDoesNotFit(f"{error}{saved}") from None
            finally:
                self._kept, self._evaluating = None, False

    @contextlib.contextmanager
    def _as_plain(self) -> Iterator[None]:
        """Some losses of evaluation are divided by the accumulation of training."""
        args = self._swift.args
        steps, args.gradient_accumulation_steps = args.gradient_accumulation_steps, self._swift.accumulation
        try:
            yield
        finally:
            args.gradient_accumulation_steps = steps

    def _predict(self, model: Any, inputs: Any, kept: KeptRows | None, args: Any, kwargs: Any) -> Any:
        swift, t = self._swift, self._swift.trainer
        kind = type(t).__name__
        marks = [swift.metrics_state("eval")]
        # Predictions are reduced (to the likeliest token, say) part by part: all of them together need not fit.
        reduce_logits = t.preprocess_logits_for_metrics if t.accelerator.num_processes == 1 else None

        def compute(collated: Any, part: bool) -> Any:
            counted = collated.get("labels") if isinstance(collated, dict) else None
            loss, logits, labels = self._step(model, collated, *args, **kwargs)
            if part and logits is not None and reduce_logits is not None:
                logits = reduce_logits(logits, labels)
            marks.append(swift.metrics_state("eval"))
            return loss, logits, labels, counted

        with self._counted_once(inputs) as count:
            parts = self._splitter.run(_Batch(swift, inputs, kept, compute))
        if len(parts) == 1:
            return parts[0][1][:3]
        losses, logits, labels, counted = zip(*(result for _, result in parts), strict=True)
        shares = [len(indices) / sum(len(other) for other, _ in parts) for indices, _ in parts]
        if logits[0] is not None and reduce_logits is not None:
            t.preprocess_logits_for_metrics = self._already_reduced(reduce_logits)
        if kind == "RewardTrainer":  # logs one scalar a batch
            weigh_means(t.custom_metrics["eval"], [m.mark for m in marks], shares)
        if losses[0] is None:
            loss = None
        elif kind != "Seq2SeqTrainer":
            loss = weighted_mean(losses, shares)
        elif count() is None or t.label_smoother is not None:
            loss = weighted_mean(losses, [float((own[..., 1:] != -100).sum()) for own in counted])
        else:
            loss = sum(losses[1:], losses[0])  # each was divided by the tokens of the whole batch
        return loss, _joined(logits), _joined(labels)

    def _already_reduced(self, reduce_logits: Callable[..., Any]) -> Callable[..., Any]:
        """Stands in for `reduce_logits` once: the loop is about to call it on what is reduced."""
        t = self._swift.trainer

        def once(logits: Any, labels: Any) -> Any:
            t.preprocess_logits_for_metrics = reduce_logits
            return logits

        return once

    @contextlib.contextmanager
    def _counted_once(self, whole: Any) -> Iterator[Callable[[], Any]]:
        """Let the loss of every part be divided by what the whole batch's is divided by.

        It is counted at the first call, over the ranks, and only then: a part that is computed again takes no part in a
        collective operation.
        """
        t = self._swift.trainer
        original = t._get_num_items_in_batch
        counted: list[Any] = []

        def count(*args: Any) -> Any:
            if not counted:
                counted.append(original([whole], self._swift.args.device))
            return counted[0]

        t._get_num_items_in_batch = count
        try:
            yield count
        finally:
            del t._get_num_items_in_batch

    def _concatenated_forward(self, model: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """DPO: log-probabilities of the batch's pairs, and means over their tokens."""
        swift, t = self._swift, self._swift.trainer
        if not self._evaluating:
            return self._forward(model, batch, *args, **kwargs)

        def compute(collated: Any, part: bool) -> Any:
            return self._forward(model, t._prepare_inputs(collated) if part else collated, *args, **kwargs)

        parts = [result for _, result in self._splitter.run(_Batch(swift, batch, self._kept, compute))]
        if len(parts) == 1:
            return parts[0]
        return {key: _joined_output(key, parts) for key in parts[0]}


def _joined_output(key: str, parts: Sequence[dict[str, torch.Tensor]]) -> torch.Tensor:
    """An output of DPO's forward: one value a pair, or a mean over the tokens of the chosen or rejected answers."""
    values = [part[key] for part in parts]
    if values[0].dim():
        return torch.cat(values)
    answers = "rejected" if "rejected" in key else "chosen"  # the likelihood (nll_loss) is the chosen answers'
    return weighted_mean(values, [float(part[f"{answers}_completion_token_counts"].sum()) for part in parts])


def _joined(parts: Sequence[Any]) -> Any:
    """Predictions or labels of all parts, padded as transformers pads those of batches."""
    return None if parts[0] is None else reduce(nested_concat, parts)
