"""A small real training step in torch: what the macro-batch runner needs of a trainer, without ms-swift."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from swiftcruise.runtime.checkpointing import LayerCheckpointing, make_checkpointable
from swiftcruise.runtime.macro_loader import MacroRows, RawRows

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB"


class Layer(nn.Module):
    """A residual layer with transformers' checkpointing flag."""

    gradient_checkpointing = False

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(dropout)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.dropout(torch.nn.functional.gelu(self.up(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(self.compute, x)  # type: ignore[operator]
        return self.compute(x)


class Model(nn.Module):
    """Token ids to one value a token; no token sees another, so company cannot matter."""

    def __init__(self, dropout: float = 0.0, layers: int = 3, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.layers = nn.ModuleList(Layer(width, dropout) for _ in range(layers))
        self.head = nn.Linear(width, 1)
        make_checkpointable(list(self.layers))
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).squeeze(-1)

    def gradients(self) -> list[torch.Tensor]:
        return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.parameters()]


def rows_of(lengths: Sequence[int], batch: int) -> MacroRows:
    """Rows of random tokens in sampler batches of `batch` (the last one may be smaller)."""
    generator = torch.Generator().manual_seed(sum(lengths))
    rows = [{"input_ids": torch.randint(1, 20, (n,), generator=generator).tolist()} for n in lengths]
    return MacroRows.join([RawRows(rows[i : i + batch]) for i in range(0, len(rows), batch)])


class SmallTrainer:
    """A loss that is a sum over tokens ("tokens") or a mean over samples that is divided by the batches of the step
    ("mean") or by the nominal accumulation ("nominal").

    `fail(call, stage)` may raise at the call's "forward" or in mid-"backward"; a micro-batch of more than `fits` padded
    tokens runs out of memory.
    """

    padding_free = False
    sequences_per_row = 1
    fixed_composition: str | None = None
    cannot_redo: str | None = None

    def __init__(self, loss: str = "tokens") -> None:
        self.loss = loss
        self.calls = 0
        self.metrics: list[int] = []  # samples of every micro-batch that logged
        self.weights: list[float] = []
        self.steps_ended = 0
        self.fail: Any = lambda call, stage: None
        self.fits = math.inf

    def row_length(self, row: Any) -> int:
        return len(row["input_ids"])

    row_tokens = row_length

    def collate(self, rows: list[Any]) -> Any:
        ids = [torch.tensor(row["input_ids"]) for row in rows]
        return {"input_ids": nn.utils.rnn.pad_sequence(ids, batch_first=True)}

    def count_items(self, collated: list[Any]) -> int:
        return sum(int((inputs["input_ids"] != 0).sum()) for inputs in collated)

    def agreed_micro_batches(self, count: int) -> int:
        return count

    def forward_backward(
        self,
        model: nn.Module,
        inputs: Any,
        items: Any,
        *,
        divisors: tuple[float, float],
        last: bool,
        spare_bytes: Any = None,
    ) -> torch.Tensor:
        call, self.calls = self.calls, self.calls + 1
        ids = inputs.pop("input_ids")  # trainers take entries out of what they are given
        self.metrics.append(len(ids))
        self.fail(call, "forward")
        if ids.numel() > self.fits:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        values = model(ids)
        values.register_hook(lambda grad: self.fail(call, "backward"))
        loss = batch_loss(values, ids, self.loss, items, divisors)
        loss.backward()
        return loss.detach()

    def end_step(self, model: Any) -> None:
        self.steps_ended += 1

    def discard_gradients(self, model: nn.Module) -> None:
        model.zero_grad(set_to_none=True)

    def metrics_state(self) -> int:
        return len(self.metrics)

    def restore_metrics(self, state: int) -> None:
        del self.metrics[state:]

    def weigh_metrics(self, marks: Sequence[int], weights: Sequence[float]) -> None:
        assert [b - a for a, b in itertools.pairwise(marks)] == [1] * len(weights)
        self.weights += weights


def batch_loss(
    values: torch.Tensor, ids: torch.Tensor, kind: str, items: Any, divisors: tuple[float, float]
) -> torch.Tensor:
    mask = ids != 0
    losses = (values.square() + values) * mask
    if kind == "tokens":
        return losses.sum() / items
    return (losses.sum(1) / mask.sum(1)).mean() / divisors[1 if kind == "nominal" else 0]


def plain_step(model: nn.Module, trainer: SmallTrainer, macro: MacroRows, accumulation: int) -> torch.Tensor:
    """The step as a loop without macro-batches computes it: the sampler's batches one after the other."""
    collated = [trainer.collate([macro.rows[i] for i in group]) for group in macro.groups]
    items = trainer.count_items(collated)
    total = torch.zeros((), dtype=torch.float64)
    for inputs in collated:
        ids = inputs["input_ids"]
        loss = batch_loss(model(ids), ids, trainer.loss, items, (len(collated), accumulation))
        loss.backward()
        total += loss.detach()
    return total


def twins(dropout: float = 0.0) -> tuple[Model, Model]:
    """Two equal models."""
    torch.manual_seed(0)
    model = Model(dropout)
    return model, copy.deepcopy(model)


def layers_of(model: Model) -> LayerCheckpointing:
    return LayerCheckpointing(list(model.layers))
