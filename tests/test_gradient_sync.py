"""Averaging gradients over real processes: as DDP does, however the ranks split their work."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from swiftcruise.runtime.gradient_sync import all_reduce_gradients, without_sync
from swiftcruise.runtime.macro_batch import MacroBatchRunner, Settings
from swiftcruise.runtime.memory_model import PeakMemoryModel
from swiftcruise.runtime.memory_watch import MemoryWatch

from .small_trainer import OUT_OF_MEMORY, Model, SmallTrainer, layers_of, plain_step, rows_of

RANKS = 2
LENGTHS = [[9, 3, 14, 5, 2, 11], [4, 12, 6, 7, 8, 1]]  #: of each rank
BATCH, ACCUMULATION = 2, 3


class Branches(nn.Module):
    """Parameters that some rank, or no rank, uses; in two precisions."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.first = nn.Linear(3, 1), nn.Linear(3, 1)
        self.unused, self.precise = nn.Linear(3, 1), nn.Linear(3, 1).double()
        self.frozen = nn.Linear(3, 1).requires_grad_(False)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        y = self.shared(x) + self.precise(x.double()).float()
        return (y + self.first(x) if rank == 0 else y).sum()


class ParallelTrainer(SmallTrainer):
    """The small trainer over DDP, held back until the end of the step."""

    def forward_backward(self, model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        with without_sync(model):
            return super().forward_backward(model, *args, **kwargs)

    def end_step(self, model: Any) -> None:
        super().end_step(model)
        all_reduce_gradients(model, bucket_bytes=200)


def _ddp(module: nn.Module, **options: Any) -> Any:
    return nn.parallel.DistributedDataParallel(module, **options)


def _model() -> Model:
    torch.manual_seed(0)
    model = Model()
    model.register_buffer("statistics", torch.zeros(3))  # DDP broadcasts buffers at the first forward
    return model


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", timeout, RANKS, rank)
    results: dict[str, Any] = {}

    plain = _ddp(_model())
    macro, trainer = rows_of(LENGTHS[rank], BATCH), SmallTrainer("mean")
    for group in macro.groups[:-1]:
        with plain.no_sync():
            plain_step(plain, trainer, type(macro)([macro.rows[i] for i in group], [(0, 1)]), ACCUMULATION)
    plain_step(plain, trainer, type(macro)([macro.rows[i] for i in macro.groups[-1]], [(0, 1)]), ACCUMULATION)
    # each of these steps was divided by one batch
    results["plain"] = [g / len(macro.groups) for g in plain.module.gradients()]

    for name, budgets, fails in (
        ("equal", (None, None), None),
        ("different numbers of micro-batches", (1.0, 1000.0), None),
        ("an out-of-memory on one rank", (40.0, 40.0), "backward"),
        ("an out-of-memory in the first forward", (None, None), "forward"),
    ):
        model, trainer = _ddp(_model(), find_unused_parameters=name == "equal"), ParallelTrainer("mean")
        runner = MacroBatchRunner(trainer, ACCUMULATION)
        runner.memory = MemoryWatch(PeakMemoryModel(1), None, 1.0, layers_of(model.module))
        runner.settings = Settings(token_budget=budgets[rank])

        def fail(call: int, stage: str, when: str | None = fails) -> None:
            if rank == 1 and stage == when and call == 0:
                raise torch.OutOfMemoryError(OUT_OF_MEMORY)

        trainer.fail = fail
        for _ in range(2):  # the second step shows what the first one left behind
            model.zero_grad()
            macro = rows_of(LENGTHS[rank], BATCH)
            runner.run(model, [(macro, trainer.count_items(runner.prepare(macro)))])
        results[name] = model.module.gradients()
        results[f"{name}: calls"] = trainer.calls

    torch.manual_seed(1)
    branches = _ddp(Branches(), find_unused_parameters=True)
    x = torch.full((2, 3), 1.0 + rank)
    with without_sync(branches):
        branches(x, rank).backward()
    all_reduce_gradients(branches, bucket_bytes=1)
    results["branches"] = {n: p.grad for n, p in branches.module.named_parameters()}
    torch.save(results, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two real processes computed."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(_rank, (str(folder),), nprocs=RANKS)
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize(
    "case",
    [
        "equal",
        "different numbers of micro-batches",
        "an out-of-memory on one rank",
        "an out-of-memory in the first forward",
    ],
)
def test_gradients_are_those_of_plain_ddp(ranks: list[dict[str, Any]], case: str):
    for rank in ranks:
        for ours, plain in zip(rank[case], rank["plain"], strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-12)
    calls = [rank[f"{case}: calls"] for rank in ranks]
    assert (calls[0] == calls[1]) == (case == "equal")


def test_every_rank_ends_with_the_same_gradients(ranks: list[dict[str, Any]]):
    for name, ours in ranks[0]["branches"].items():
        theirs = ranks[1]["branches"][name]
        assert ours is theirs is None or torch.equal(ours, theirs)


def test_a_parameter_that_one_rank_uses_gets_its_share_and_one_that_none_uses_gets_no_gradient(
    ranks: list[dict[str, Any]],
):
    gradients = ranks[1]["branches"]
    assert gradients["first.weight"].tolist() == [[1.0, 1.0, 1.0]]  # (2 + 0) / 2
    assert gradients["shared.weight"].tolist() == [[3.0, 3.0, 3.0]]  # (2 + 4) / 2
    assert gradients["precise.weight"].dtype == torch.float64
    assert gradients["unused.weight"] is None
    assert gradients["frozen.weight"] is None
