"""Sharded training over real processes: FSDP2 under gloo."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import resource
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from swiftcruise.runtime.macro_batch import MacroBatchRunner, Settings
from swiftcruise.runtime.memory_model import PeakMemoryModel
from swiftcruise.runtime.memory_watch import MemoryWatch
from swiftcruise.runtime.sharding import (
    EXIT_NOT_SAVED,
    EXIT_SAVED,
    AgreedSave,
    ShardedOutOfMemory,
    agree_on_micro_batches,
    sharded_state,
)

from .small_trainer import OUT_OF_MEMORY, Model, SmallTrainer, layers_of, plain_step, rows_of

LENGTHS = [[9, 3, 14, 5], [4, 12, 6, 7], [2, 8, 1, 10], [11, 13, 5, 3]]  #: of each rank
BUDGETS = [1.0, 1000.0, 20.0, 12.0]
STEPS, FAILS_IN = 4, 2
LIMIT_S = 90  #: that ranks are waited for
SAVED_FIRST = f"All {FAILS_IN} steps before it are saved in"

# Forked from a process that has imported torch: a second less for every rank.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch._dynamo"])


class ShardedTrainer(SmallTrainer):
    """The small trainer over FSDP2."""

    cannot_redo = "every pass involves all ranks"

    def __init__(self, agree: bool = True) -> None:
        super().__init__("mean")
        self.agree = agree

    def agreed_micro_batches(self, count: int) -> int:
        return agree_on_micro_batches(count, "cpu") if self.agree else count

    def forward_backward(self, model: Any, *args: Any, last: bool, **kwargs: Any) -> torch.Tensor:
        model.set_requires_gradient_sync(last)
        return super().forward_backward(model, *args, last=last, **kwargs)


@dataclass
class Training:
    """A model, its optimizer and what computes a step of this rank."""

    model: Any
    trainer: SmallTrainer
    rank: int

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, eps=1e-4)
        self.runner = MacroBatchRunner(self.trainer, 2)
        self.runner.memory = MemoryWatch(PeakMemoryModel(1), None, 1.0, layers_of(self.model))
        self.runner.settings = Settings(token_budget=BUDGETS[self.rank])

    def gradients_of(self, step: int) -> None:
        macro = rows_of([n + step for n in LENGTHS[self.rank]], 2)
        self.runner.run(self.model, [(macro, self.trainer.count_items(self.runner.prepare(macro)))])

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def one_process(steps: range, ranks: int, training: tuple[nn.Module, torch.optim.Optimizer] | None = None) -> Any:
    """The same training by one unsharded process: the ranks' samples one after the other, averaged."""
    model, optimizer = training or unsharded()
    for step in steps:
        optimizer.zero_grad()
        for rank in range(ranks):
            plain_step(model, SmallTrainer("mean"), rows_of([n + step for n in LENGTHS[rank]], 2), 2)
        for parameter in model.parameters():
            parameter.grad /= ranks  # type: ignore[operator]
        optimizer.step()
    return model


def unsharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    model.register_buffer("statistics", torch.zeros(3, dtype=torch.float64))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


def sharded() -> Any:
    model, _ = unsharded()
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    fully_shard(model)
    return model


def assert_same_weights(ours: nn.Module, plain: nn.Module) -> None:
    for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


# -- processes -----------------------------------------------------------------------------------------------------


@dataclass
class Ended:
    """How the processes of a training ended."""

    codes: list[int | None]  #: exit codes; None: still running after the time that is granted
    said: list[str]  #: standard error


def run_ranks(
    function: Callable[..., None],
    ranks: int,
    folder: Path,
    *arguments: Any,
    frozen: int | None = None,
    collective_s: float = 300,
) -> Ended:
    """Run `function(rank, folder, *arguments)` on every rank; whoever is left after `LIMIT_S` is killed.

    A collective waits longer than that unless told otherwise: nobody is let out of it by its own time-out.
    """
    # The store lives outside the ranks, as torchrun's does.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = (ranks, store.port, collective_s, folder, *arguments)
    started = [processes.Process(target=_start, args=(function, rank, *common)) for rank in range(ranks)]
    for process in started:
        process.start()
    end = time.monotonic() + LIMIT_S
    try:
        for rank, process in enumerate(started):
            process.join(0.0 if rank == frozen else max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in started]
    finally:
        for process in started:
            process.kill()
            process.join()
    return Ended(codes, [(folder / f"{rank}.err").read_text() for rank in range(ranks)])


def _start(
    function: Callable[..., None], rank: int, ranks: int, port: int, collective_s: float, folder: Path, *arguments: Any
) -> None:
    os.dup2(os.open(folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # the small model returns a view
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    timeout = datetime.timedelta(seconds=collective_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    function(rank, folder, *arguments)


# -- agreement on the number of micro-batches ------------------------------------------------------------------------


def _gradients(rank: int, folder: Path) -> None:
    training = Training(sharded(), ShardedTrainer(), rank)
    for step in range(2):  # the second step shows what the first one left behind
        training.optimizer.zero_grad()
        training.gradients_of(step)
    result = {
        "gradients": [parameter.grad.full_tensor() for parameter in training.model.parameters()],
        "own micro-batches": len(training.runner.last.micro),
        "passes": training.trainer.calls,
    }
    torch.save(result, folder / f"{rank}.pt")


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_with_unequal_numbers_of_micro_batches_get_the_gradients_of_one_process(tmp_path: Path, ranks: int):
    assert run_ranks(_gradients, ranks, tmp_path).codes == [0] * ranks
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    model, _ = unsharded()
    for rank in range(ranks):
        plain_step(model, SmallTrainer("mean"), rows_of([n + 1 for n in LENGTHS[rank]], 2), 2)
    for result in results:
        for ours, parameter in zip(result["gradients"], model.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad / ranks, rtol=1e-10, atol=1e-10)
    assert len({result["own micro-batches"] for result in results}) > 1
    assert len({result["passes"] for result in results}) == 1


def _without_agreement(rank: int, folder: Path) -> None:
    Training(sharded(), ShardedTrainer(agree=False), rank).gradients_of(0)


def test_without_agreement_they_would_wait_for_each_other(tmp_path: Path):
    ended = run_ranks(_without_agreement, 2, tmp_path, collective_s=3)
    assert 1 in ended.codes
    assert "Timed out waiting" in "".join(ended.said)


# -- out of memory ---------------------------------------------------------------------------------------------------


def _out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError(OUT_OF_MEMORY)


class _Deadly:
    """Kills the process that saves it."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_the_notice() -> None:
    store = dist.distributed_c10d._get_default_store()
    while not store.check(["swiftcruise/out_of_memory"]):
        time.sleep(0.01)


@contextlib.contextmanager
def _fault(training: Training, moment: str) -> Iterator[None]:
    """Let this rank run out of memory at some moment of its passes."""
    model, trainer = training.model, training.trainer
    first = trainer.calls

    def fail(call: int, stage: str) -> None:
        if call == first and moment == "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
        if call == first and moment == "after a second":
            time.sleep(1)
        if call == first and moment in (stage, "after a second"):
            _out_of_memory()

    trainer.fail = fail
    if moment == "mid-forward":
        model.layers[1].up.register_forward_pre_hook(_out_of_memory)
    elif moment == "mid-backward":
        model.layers[1].up.register_full_backward_hook(_out_of_memory)
    elif moment == "end of backward":
        model.embed.register_forward_hook(lambda module, args, output: output.register_hook(_out_of_memory) and None)
    yield
    if moment == "end of the step":
        _out_of_memory()


def _training(rank: int, folder: Path, failing: dict[int, str], save_in: str = "output") -> None:
    training = Training(sharded(), ShardedTrainer(), rank)
    model, optimizer, moment = training.model, training.optimizer, failing.get(rank)
    before = threading.active_count()
    extra = {"deadly": _Deadly()} if moment == "dies while it saves" else {}
    with AgreedSave(
        lambda: sharded_state(model, optimizer) | extra, folder / save_in, "cpu", timeout_s=10, poll_s=0.05
    ) as save:
        for step in range(STEPS):
            with save.passes(step), torch.no_grad():
                if step == FAILS_IN and moment == "at once":
                    _out_of_memory()
                model(torch.ones(1, 2, dtype=torch.long))  # an evaluation: FSDP2 leaves the outermost layers gathered
            with save.passes(step), _fault(training, moment or "") if step == FAILS_IN else contextlib.nullcontext():
                if step == FAILS_IN and moment == "disk full":
                    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
                model.statistics += 1
                training.gradients_of(step)
            if step == FAILS_IN - 1 and moment == "late":
                _wait_for_the_notice()
                time.sleep(0.5)
            if step == FAILS_IN and moment == "update":
                _out_of_memory()
            training.update()
    assert threading.active_count() == before
    weights = [parameter.full_tensor() for parameter in model.parameters()]
    if rank == 0:
        torch.save(weights, folder / "weights.pt")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # the checkpoint is loaded by one process
@pytest.mark.parametrize(
    ("ranks", "failing"),
    [
        (2, {1: "forward"}),
        (2, {0: "mid-forward"}),
        (2, {1: "backward"}),
        (2, {1: "mid-backward"}),
        (2, {0: "end of backward"}),
        (2, {1: "end of the step"}),
        (4, {1: "mid-backward", 2: "mid-backward"}),
        (2, {1: "at once", 0: "late"}),
    ],
    ids=lambda value: str(value).strip("{}"),
)
def test_out_of_memory_at_any_moment_ends_all_ranks_in_a_checkpoint_that_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, ranks: int, failing: dict[int, str]
):
    ended = run_ranks(_training, ranks, tmp_path, failing)
    fails = {rank for rank, moment in failing.items() if moment != "late"}
    assert ended.codes == [1 if rank in fails else EXIT_SAVED for rank in range(ranks)]
    folder = tmp_path / "output" / f"rescue-{FAILS_IN}"
    for rank, said in enumerate(ended.said):
        if rank == 0 or rank in fails:
            assert f"{SAVED_FIRST} {folder}" in said
            assert any(f"rank {fail} (OutOfMemoryError: {OUT_OF_MEMORY}" in said for fail in fails)
            assert (ShardedOutOfMemory.__name__ in said) == (rank in fails)
        else:
            assert said == ""

    model, optimizer = unsharded()
    weights, optimizer_state = get_state_dict(model, optimizer)
    state = {"steps_done": 0, "model": weights, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert state["steps_done"] == FAILS_IN
    assert model.statistics.tolist() == [FAILS_IN] * 3
    assert_same_weights(model, one_process(range(FAILS_IN), ranks))
    assert_same_weights(
        one_process(range(FAILS_IN, STEPS), ranks, (model, optimizer)), one_process(range(STEPS), ranks)
    )


def test_a_frozen_rank_keeps_no_other_from_ending(tmp_path: Path):
    ended = run_ranks(_training, 3, tmp_path, {1: "after a second", 0: "frozen"}, frozen=0)
    assert ended.codes == [None, 1, EXIT_NOT_SAVED]
    assert all("No checkpoint could be agreed: TimeoutError: no answer from rank 0" in said for said in ended.said[1:])
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize("dies", [0, 2])
def test_a_rank_that_dies_while_it_saves_keeps_no_other_from_ending(tmp_path: Path, dies: int):
    ended = run_ranks(_training, 3, tmp_path, {1: "forward", dies: "dies while it saves"})
    codes = {0: EXIT_NOT_SAVED, 1: 1, 2: EXIT_NOT_SAVED} | {dies: -signal.SIGKILL}
    assert ended.codes == [codes[rank] for rank in range(3)]
    assert all("No checkpoint could be agreed" in said for rank, said in enumerate(ended.said) if rank != dies)
    assert not list(tmp_path.glob("output/*/.metadata"))


def test_out_of_memory_in_the_update_ends_all_ranks_and_saves_no_half_updated_weights(tmp_path: Path):
    ended = run_ranks(_training, 2, tmp_path, {1: "update"})
    assert ended.codes == [EXIT_NOT_SAVED, 1]
    assert all("in the middle of an update of the weights" in said for said in ended.said)
    assert not (tmp_path / "output").exists()


def test_a_shard_that_cannot_be_written_leaves_no_checkpoint_that_looks_complete(tmp_path: Path):
    ended = run_ranks(_training, 3, tmp_path, {1: "forward", 2: "disk full"})
    assert ended.codes == [EXIT_NOT_SAVED, 1, EXIT_NOT_SAVED]
    for said in ended.said[:2]:  # the third one cannot even write that
        assert "No checkpoint could be agreed: rank 2: OSError: [Errno 27] File too large" in said
    assert not list(tmp_path.glob("output/*/.metadata"))


def test_a_checkpoint_of_an_earlier_run_is_not_overwritten(tmp_path: Path):
    earlier = tmp_path / "output" / f"rescue-{FAILS_IN}"
    earlier.mkdir(parents=True)
    assert run_ranks(_training, 2, tmp_path, {1: "forward"}).codes == [EXIT_SAVED, 1]
    assert not list(earlier.iterdir())
    assert (tmp_path / "output" / f"rescue-{FAILS_IN}-2" / ".metadata").exists()


def test_without_failure_nothing_is_said_saved_or_left_running(tmp_path: Path):
    ended = run_ranks(_training, 2, tmp_path, {})
    assert ended == Ended([0, 0], ["", ""])
    assert not (tmp_path / "output").exists()
    for ours, plain in zip(torch.load(tmp_path / "weights.pt"), one_process(range(STEPS), 2).parameters(), strict=True):
        torch.testing.assert_close(ours, plain.detach(), rtol=1e-10, atol=1e-10)


def _without_state(rank: int, folder: Path) -> None:
    with AgreedSave(lambda: {}["no such entry"], folder, "cpu") as save:
        for step in range(3):
            with save.passes(step):
                pass


def test_a_state_that_cannot_be_taken_costs_one_warning(tmp_path: Path):
    ended = run_ranks(_without_state, 1, tmp_path)
    assert ended.codes == [0]
    assert ended.said[0].count("would end this training unsaved") == 1
