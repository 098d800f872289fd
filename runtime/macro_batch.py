"""One optimizer step as a macro-batch: planned into micro-batches, computed, and redone as a whole after an OOM."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .errors import SwiftcruiseError
from .macro_loader import MacroRows
from .oom import is_out_of_memory
from .planner import MicroBatch, pack, plain_plan
from .random_state import RandomState

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Prepared:
    """A micro-batch ready to run."""

    plan: MicroBatch
    inputs: Any  #: collated
    group_size: int  #: samples of the sampler's batch its samples came from
    checkpoint_fraction: float
    share: MacroRows  #: the macro-batch it belongs to (a stream's leftover is one of its own)


@dataclass(slots=True)
class MicroResult:
    """What one micro-batch cost."""

    tokens: int
    quadratic: float
    samples: int
    length: int
    seconds: float
    checkpoint_fraction: float
    peak_fraction: float  #: NaN where it was not measured


@dataclass(slots=True)
class StepResult:
    """What one optimizer step cost on this rank (the redone attempts are in `redo_s`)."""

    micro: list[MicroResult] = field(default_factory=list)
    samples: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    wait_s: float = 0.0
    collate_s: float = 0.0
    redo_s: float = 0.0
    oom_count: int = 0
    skipped: int = 0  #: samples left out because they fit in no way (`skip_oversized`)
    lengths: list[int] = field(default_factory=list)
    loss: Any = None  #: a tensor, not read yet


@dataclass(slots=True)
class Settings:
    """The controls in force, as the runner uses them. None = as plain ms-swift does it."""

    token_budget: float | None = None
    micro_batch_cap: float | None = None
    memory_target: float | None = None
    checkpoint_fraction: float | None = None

    @property
    def plain(self) -> bool:
        """Whether the sampler's batches are run as they are."""
        return self.token_budget is None and self.micro_batch_cap is None


class Trainer(Protocol):
    """What the runner needs of a trainer; `runtime.swift_patch` provides it for ms-swift."""

    @property
    def padding_free(self) -> bool:
        """Whether the collator concatenates the samples instead of padding them."""
        ...

    @property
    def sequences_per_row(self) -> int:
        """Sequences that a sample becomes (2 for preference pairs)."""
        ...

    @property
    def fixed_composition(self) -> str | None:
        """Why samples may not change company, or None."""
        ...

    @property
    def cannot_redo(self) -> str | None:
        """Why a step that failed on this rank cannot be computed again, or None."""
        ...

    def row_length(self, row: Any) -> int:
        """Tokens of the sample's longest sequence."""
        ...

    def row_tokens(self, row: Any) -> int:
        """Tokens of all the sample's sequences."""
        ...

    def collate(self, rows: list[Any]) -> Any:
        """The model's inputs of these samples; the rows stay as they are."""
        ...

    def count_items(self, collated: list[Any]) -> Any:
        """What the loss of these micro-batches together is divided by."""
        ...

    def agreed_micro_batches(self, count: int) -> int:
        """How many micro-batches every rank runs in this step; `count` where ranks need not agree."""
        ...

    def forward_backward(
        self,
        model: Any,
        inputs: Any,
        items: Any,
        *,
        divisors: tuple[float, float],
        last: bool,
        spare_bytes: Callable[[], float],
    ) -> torch.Tensor:
        """Add one micro-batch's gradients.

        Args:
            model: The (wrapped) model.
            inputs: The collated micro-batch.
            items: What the loss of the step is divided by.
            divisors: Of a batch-mean loss, in this step and nominal.
            last: Whether it is the step's last micro-batch.
            spare_bytes: Asks for the memory that is expected to stay free all the while.
        """
        ...

    def end_step(self, model: Any) -> None:
        """All micro-batches of this rank are done."""
        ...

    def discard_gradients(self, model: Any) -> None:
        """Forget the step's gradients."""
        ...

    def metrics_state(self) -> Any:
        """The training metrics so far."""
        ...

    def restore_metrics(self, state: Any) -> None:
        """Forget what was logged since `state`."""
        ...

    def weigh_metrics(self, marks: Sequence[Any], weights: Sequence[float]) -> None:
        """Let what micro-batch i logged (between `marks[i]` and `marks[i + 1]`) count `weights[i]` times."""
        ...


class Memory(Protocol):
    """What the runner needs to know of memory; see `runtime.memory_watch`."""

    def choose_checkpointing(self, plans: Sequence[MicroBatch], settings: Settings) -> list[float]:
        """Checkpointed fraction of every micro-batch (NaN: left as it is)."""
        ...

    def token_ceilings(self, lengths: Sequence[int], settings: Settings) -> np.ndarray | None:
        """Per sample: most tokens of a micro-batch whose longest sample it is."""
        ...

    def set_checkpointing(self, fraction: float) -> None:
        """Checkpoint this share of the layers from now on."""
        ...

    def observed_fraction(self) -> float:
        """Share of layers that are checkpointed now."""
        ...

    def watch(self, plan: MicroBatch, checkpoint_fraction: float) -> AbstractContextManager[object]:
        """Context in which a micro-batch runs."""
        ...

    def spare_bytes(self, plan: MicroBatch, checkpoint_fraction: float) -> float:
        """Memory below the cap that a micro-batch is expected to leave free; 0 where nothing is known."""
        ...

    def peak_fraction(self) -> float:
        """Peak of the micro-batch that just ran; NaN where it was not measured."""
        ...

    def record(self, results: Sequence[MicroResult]) -> None:
        """Learn from the micro-batches of a step."""
        ...

    def record_oom(self, plan: MicroBatch, checkpoint_fraction: float) -> None:
        """Learn that a micro-batch did not fit."""
        ...

    def free(self) -> None:
        """Give cached blocks back to the device."""
        ...


#: What the loss of a dummy is divided by.
_NOTHING = float("inf")


class SampleDoesNotFit(SwiftcruiseError):
    """What cannot be made any smaller does not fit into memory."""


class MacroBatchRunner:
    """Plans and computes macro-batches.

    The gradients, the loss normalisation and the random state after a step are those of plain ms-swift: the loss of
    every sample has the weight it would have had in the sampler's own batch, whatever company it is computed in.

    Args:
        trainer: The trainer at hand.
        accumulation: Sampler batches in a full macro-batch (ms-swift's gradient accumulation).
        on_event: Told of every event: its kind ("oom" or "skipped"), a line for the user, and details.
        skip_oversized: Leave out what fits in no way instead of ending the training. Its gradient counts as zero: the
            loss is divided as if it were there, so that no rank has to tell the others.

    Set `memory` (memory model, meter and checkpointing) before the first macro-batch.
    """

    memory: Memory
    _PREPARE_ATTEMPTS = 3

    def __init__(
        self,
        trainer: Trainer,
        accumulation: int,
        on_event: Callable[[str, str, dict[str, Any]], None] = lambda kind, line, details: None,
        skip_oversized: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.trainer = trainer
        self.accumulation = accumulation
        self.settings = Settings()
        self.launch_tokens = float("inf")
        self.failed_tokens: float | None = None  #: tokens of the last micro-batch that had to be split to fit
        self.last: StepResult = StepResult()
        self.skip_oversized = skip_oversized
        self._on_event = on_event
        self._clock = clock

    # -- planning ------------------------------------------------------------------------------------------------

    def prepare(self, macro: MacroRows) -> list[Any]:
        """Plan and collate a macro-batch; returns the collated micro-batches (in the order they will run).

        Where the host has no memory for that, what can be freed is freed, and it is tried again.
        """
        for attempt in range(self._PREPARE_ATTEMPTS):
            try:
                macro.prepared = self._plan(macro)
                break
            except Exception as error:
                if attempt + 1 == self._PREPARE_ATTEMPTS or not is_out_of_memory(error):
                    raise
            self._free()
        return [p.inputs for p in macro.prepared]

    def _plan(self, macro: MacroRows) -> list[Prepared]:
        trainer, settings = self.trainer, self.settings
        if not macro.lengths:
            macro.lengths = [trainer.row_length(row) for row in macro.rows]
        lengths = macro.lengths
        plans: list[tuple[MicroBatch, int]] = []
        if settings.plain or trainer.fixed_composition:
            plain = plain_plan(lengths, macro.groups, padding_free=trainer.padding_free)
            plans = [(p, p.samples) for p in plain if macro.skipped.isdisjoint(p.indices)]
        else:
            # Only the epoch's last batch differs in size; its samples weigh differently and stay among themselves.
            sizes = sorted({len(group) for group in macro.groups}, reverse=True)
            for size in sizes:
                groups = (group for group in macro.groups if len(group) == size)
                indices = [i for group in groups for i in group if i not in macro.skipped]
                sequences = trainer.sequences_per_row
                packed = pack(
                    lengths,
                    indices,
                    token_budget=max(1.0, (settings.token_budget or np.inf) / sequences),
                    micro_batch_cap=max(1.0, settings.micro_batch_cap or np.inf),
                    launch_tokens=self.launch_tokens / sequences,
                    token_ceilings=self._ceilings(lengths, sequences),
                    padding_free=trainer.padding_free,
                )
                plans += [(p, size) for p in packed]
        fractions = self.memory.choose_checkpointing([self._computed(p) for p, _ in plans], settings)
        prepared = []
        for (plan, size), fraction in zip(plans, fractions, strict=True):
            inputs = trainer.collate([macro.rows[i] for i in plan.indices])
            prepared.append(Prepared(plan, inputs, size, fraction, macro))
        return prepared

    def _ceilings(self, lengths: Sequence[int], sequences: int) -> Sequence[float] | None:
        ceilings = self.memory.token_ceilings(lengths, self.settings)
        return None if ceilings is None else (ceilings / sequences).tolist()

    def _computed(self, plan: MicroBatch) -> MicroBatch:
        """The micro-batch as the model sees it: a preference pair is two sequences."""
        sequences = self.trainer.sequences_per_row
        return plan if sequences == 1 else MicroBatch(plan.indices * sequences, plan.length, plan.tokens * sequences)

    # -- computing -----------------------------------------------------------------------------------------------

    def run(self, model: Any, shares: Sequence[tuple[MacroRows, Any]]) -> torch.Tensor:
        """Compute the gradients of one optimizer step and return its loss.

        The step is a transaction: when an allocation fails, all gradients and metrics of the step are discarded, the
        random state goes back to the step's begin, and the step is computed again in smaller micro-batches.

        Args:
            model: The (wrapped) model.
            shares: Macro-batches of this step with their `count_items` result; more than one only where a stream's
                leftover is owed.

        Raises:
            SampleDoesNotFit: one sample alone does not fit with every layer checkpointed, and may not be skipped.
        """
        result = StepResult()
        random_state = RandomState(model)
        marks = [self.trainer.metrics_state()]
        while True:
            begin = self._clock()
            work = [(p, items) for share, items in shares for p in share.prepared]
            result.micro = []
            del marks[1:]
            failed: tuple[Prepared, str] | None = None
            total = None
            current = None
            try:
                for current in self._dummies([p for p, _ in work]):
                    self._run_one(model, current, _NOTHING, last=False)
                    self.trainer.restore_metrics(marks[0])
                for position, (current, items) in enumerate(work):
                    loss, micro = self._run_one(model, current, items, last=position == len(work) - 1)
                    total = loss if total is None else total + loss
                    result.micro.append(micro)
                    marks.append(self.trainer.metrics_state())
            except Exception as error:
                if current is None or self.trainer.cannot_redo or not is_out_of_memory(error):
                    raise
                failed = current, f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
            if failed is None:
                break
            # Outside the handler the traceback, and with it the activations, is gone.
            total = None
            result.oom_count += 1
            self.trainer.discard_gradients(model)
            self._free()
            random_state.restore()
            self.trainer.restore_metrics(marks[0])
            self._shrink(*failed)
            for share, _ in shares:
                share.prepared = []
            del work, current, failed
            for share, _ in shares:
                self.prepare(share)
            result.redo_s += self._clock() - begin
        # Ranks may wait for each other from here on, so nothing below is ever repeated.
        self.trainer.end_step(model)
        self.trainer.weigh_metrics(marks, [p.plan.samples / p.group_size for p, _ in work])
        self.memory.record(result.micro)
        self._finish(result, [share for share, _ in shares])
        result.loss = _zero(model) if total is None else total
        return result.loss

    def _dummies(self, work: Sequence[Prepared]) -> list[Prepared]:
        """What this rank runs beyond its own work, for ranks that must all run equally many micro-batches."""
        missing = self.trainer.agreed_micro_batches(len(work)) - len(work)
        return [min(work, key=lambda p: p.plan.tokens)] * missing if missing else []

    def _run_one(self, model: Any, prepared: Prepared, items: Any, *, last: bool) -> tuple[torch.Tensor, MicroResult]:
        """Loss and cost of one micro-batch; a dummy (`_NOTHING`) adds zero to loss and gradients."""
        plan = self._computed(prepared.plan)
        self.memory.set_checkpointing(prepared.checkpoint_fraction)
        # plain divides a batch mean by the number of batches (of this step, or nominal); a micro-batch of n samples
        # out of batches of b samples stands for n / b of them.
        scale = prepared.group_size / prepared.plan.samples
        divisors = (len(prepared.share.groups) * scale, self.accumulation * scale)
        if items is _NOTHING:
            divisors = (_NOTHING, _NOTHING)
        inputs = prepared.inputs
        # The trainer takes entries out of what it is given; a redo needs them again.
        if isinstance(inputs, dict):
            inputs = dict(inputs)
        spare = partial(self.memory.spare_bytes, plan, prepared.checkpoint_fraction)
        begin = self._clock()
        with self.memory.watch(plan, prepared.checkpoint_fraction):
            loss = self.trainer.forward_backward(model, inputs, items, divisors=divisors, last=last, spare_bytes=spare)
        return loss, MicroResult(
            plan.tokens,
            plan.quadratic,
            prepared.plan.samples,
            plan.length,
            self._clock() - begin,
            prepared.checkpoint_fraction,
            self.memory.peak_fraction(),
        )

    def _finish(self, result: StepResult, shares: Sequence[MacroRows]) -> None:
        for share in shares:
            kept = [i for i in range(len(share.rows)) if i not in share.skipped]
            result.lengths += [share.lengths[i] for i in kept]
            result.real_tokens += sum(self.trainer.row_tokens(share.rows[i]) for i in kept)
            result.samples += len(kept)
            result.skipped += len(share.skipped)
            result.wait_s += share.wait_s
            share.prepared = []
        result.padded_tokens = sum(m.tokens for m in result.micro)
        self.last = result

    def _free(self) -> None:
        gc.collect()
        self.memory.free()

    def _shrink(self, failed: Prepared, why: str) -> None:
        """Halve what failed; a sample that is alone already gets every layer checkpointed."""
        plan = self._computed(failed.plan)
        self.memory.record_oom(plan, failed.checkpoint_fraction)
        settings = self.settings
        details = {
            "tokens": plan.tokens,
            "samples": failed.plan.samples,
            "length": plan.length,
            "checkpoint_fraction": failed.checkpoint_fraction,
            "error": why,
        }
        splittable = failed.plan.samples > 1 and not self.trainer.fixed_composition
        if splittable:
            budget = max(1.0, plan.tokens // 2)
            if settings.token_budget is not None:
                budget = min(budget, settings.token_budget)
            settings.token_budget = budget
            self.failed_tokens = float(plan.tokens)
            action = f"token budget {budget:.0f}"
        elif failed.checkpoint_fraction < 1.0:
            settings.checkpoint_fraction = 1.0
            action = "every layer checkpointed"
        elif self.skip_oversized:
            failed.share.skipped.update(failed.plan.indices)
            line = f"out of memory: {self._name(failed)} of length {plan.length} tokens fits in no way, it is left out"
            self._on_event("skipped", line, details | {"indices": self._data_indices(failed)})
            return
        else:
            every = ", even with every layer checkpointed" if failed.checkpoint_fraction == 1.0 else ""
            reason = self.trainer.fixed_composition if failed.plan.samples > 1 else None
            whole = f" It cannot be split: {reason}." if reason else ""
            raise SampleDoesNotFit(
                f"out of memory: {self._name(failed)} of length {plan.length} tokens does not fit{every} ({why})."
                f"{whole} Shorten it (--max_length), leave such samples out (skip_oversized: true), free memory on the "
                "device, or use a smaller model or LoRA."
            )
        self._on_event(
            "oom",
            f"out of memory in a micro-batch of {failed.plan.samples} samples x {plan.length} tokens "
            f"-> {action}; the optimizer step is computed again",
            details | {"action": action},
        )

    @staticmethod
    def _data_indices(failed: Prepared) -> list[int]:
        """Where the samples stand in the train data set; empty where that is not known."""
        known = failed.share.indices
        return [known[i] for i in failed.plan.indices] if known else []

    def _name(self, failed: Prepared) -> str:
        indices = self._data_indices(failed)
        if failed.plan.samples > 1:
            return f"a micro-batch of {failed.plan.samples} samples"
        return f"sample {indices[0]} of the train data set," if indices else "a sample"


def _zero(model: Any) -> torch.Tensor:
    """The loss of a step without samples."""
    import torch

    return torch.zeros((), device=next(model.parameters()).device)
