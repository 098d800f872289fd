"""Evaluation that survives an out-of-memory: the batch is halved, and the joined result is the whole batch's.

Evaluation runs without gradients, so nothing has to be discarded but what a failed forward pass left behind. The sizes
learnt here are evaluation's own: the batches of training are neither told nor changed.
"""

from __future__ import annotations

import gc
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .errors import SwiftcruiseError
from .oom import is_out_of_memory
from .planner import MicroBatch

if TYPE_CHECKING:
    import torch

#: Entry of a collated evaluation batch under which its `KeptRows` travel.
ROWS = "_swiftcruise_rows"


@dataclass(frozen=True, slots=True)
class KeptRows:
    """The samples of a collated batch before collation. Opaque: nothing copies them to a device or pins them.

    They are pickled, so that what a collator does to its rows does not show, and so that images and the like pass from
    a loader's worker through its pipe and not through shared memory, which is small in containers.
    """

    count: int
    pickled: bytes

    @property
    def rows(self) -> list[Any]:
        """The samples, anew at every call."""
        return pickle.loads(self.pickled)


class KeepRows:
    """A collate function whose batches carry their samples along (as `ROWS`, if they can be pickled)."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, rows: list[Any]) -> Any:
        """Collate the samples as ever, and put them in."""
        try:
            kept = KeptRows(len(rows), pickle.dumps(rows, protocol=pickle.HIGHEST_PROTOCOL))
        except Exception:  # whatever a row's own classes raise: such a batch is evaluated as ms-swift does it
            kept = None
        batch = self._collate(rows)
        if kept is not None and isinstance(batch, dict):
            batch[ROWS] = kept
        return batch


class EvaluationDoesNotFit(SwiftcruiseError):
    """What cannot be made any smaller does not fit into memory."""


class EvaluationBatch(Protocol):
    """A batch of evaluation as the splitter sees it; `runtime.swift_evaluation` provides it for ms-swift."""

    @property
    def samples(self) -> int:
        """Samples in the batch."""
        ...

    @property
    def kept_whole(self) -> str | None:
        """Why the batch may not be split, or None where it may."""
        ...

    @property
    def repeatable(self) -> bool:
        """Whether it may be computed again after a failure: not where ranks gather in the middle of it."""
        ...

    def size(self, indices: Sequence[int]) -> MicroBatch:
        """Shape of the batch of these samples."""
        ...

    def compute(self, indices: Sequence[int]) -> Any:
        """The result for these samples; if it raises, it leaves no trace (metrics, random state)."""
        ...


class EvaluationSplitter:
    """Computes evaluation batches, in parts where the whole does not fit.

    A size that failed is remembered: later batches above half of it are split before they run. This ceiling comes back
    slowly, so that a larger size is tried again now and then.

    Args:
        free: Gives cached memory back to the device.
        on_event: Told of every out-of-memory event: kind, a line for the user, details.
    """

    RECOVERY = 1.01  #: factor on the ceiling for every batch that it split without a failure: 70 batches to double

    def __init__(
        self,
        free: Callable[[], None],
        on_event: Callable[[str, str, dict[str, Any]], None] = lambda kind, line, details: None,
    ) -> None:
        self.ceiling = math.inf  #: most padded tokens of a part that several samples share
        self._free = free
        self._on_event = on_event

    def run(self, batch: EvaluationBatch) -> list[tuple[tuple[int, ...], Any]]:
        """The results of the batch's parts in the order of its samples: indices, result. Undivided, it is one part.

        Raises:
            EvaluationDoesNotFit: one sample alone does not fit, or a batch that may not be split.
        """
        results: list[tuple[tuple[int, ...], Any]] = []
        waiting = [tuple(range(batch.samples))]
        held = failed = tried_again = False
        while waiting:
            part = waiting.pop()
            splittable = len(part) > 1 and batch.kept_whole is None
            if splittable and self.ceiling < math.inf and batch.size(part).tokens > self.ceiling:
                middle = (len(part) + 1) // 2
                waiting += [part[middle:], part[:middle]]
                held = True
                continue
            why = _attempt(batch, part, results)
            if why is None:
                tried_again = False
                continue
            # The traceback, and with it what the failed pass had allocated, is gone.
            gc.collect()
            self._free()
            size = batch.size(part)
            shape = f"{size.samples} samples x {size.length} tokens" if len(part) > 1 else f"{size.length} tokens"
            if splittable:
                self.ceiling = size.tokens / 2
                action = f"at most {self.ceiling:.0f} tokens at a time"
            elif batch.repeatable and not tried_again:
                action = "memory freed, tried once more"
            else:
                raise EvaluationDoesNotFit(_last_words(batch, part, shape, why))
            failed, tried_again = True, not splittable
            waiting.append(part)
            details = {"samples": size.samples, "length": size.length, "tokens": size.tokens}
            self._on_event(
                "evaluation_oom",
                f"out of memory in evaluation of {shape} -> {action}",
                details | {"error": why, "action": action},
            )
        if held and not failed:
            self.ceiling *= self.RECOVERY
        return results


def _attempt(batch: EvaluationBatch, part: tuple[int, ...], results: list[tuple[tuple[int, ...], Any]]) -> str | None:
    """Add the part's result; the error, in short, where memory ran out."""
    try:
        result = batch.compute(part)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
    results.append((part, result))
    return None


def _last_words(batch: EvaluationBatch, part: tuple[int, ...], shape: str, why: str) -> str:
    if batch.kept_whole is None or len(part) == 1:
        return (
            f"out of memory in evaluation: a sample of {shape} does not fit alone ({why}). Shorten it (--max_length), "
            "free memory on the device, or leave evaluation out (--eval_strategy no)."
        )
    return (
        f"out of memory in evaluation: a batch of {shape} does not fit ({why}). It cannot be split: "
        f"{batch.kept_whole}. Set a smaller per_device_eval_batch_size."
    )


def weighted_mean(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The mean of a whole from the means of its parts; parts without weight do not count (their mean may be NaN)."""
    counted = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    if not counted:
        return values[0]
    total = sum(weight for _, weight in counted)
    mean: Any = sum(
        (value.double() if value.dtype.itemsize > 4 else value.float()) * (w / total) for value, w in counted
    )
    return mean.to(values[0].dtype)
