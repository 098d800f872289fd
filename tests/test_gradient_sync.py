"""Averaging gradients over real processes: as DDP does, however the ranks split their work and wherever they fail."""

from __future__ import annotations

import copy
import datetime
import itertools
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from swiftcruise.runtime.gradient_sync import GradientSync, plan_buckets
from swiftcruise.runtime.macro_batch import MacroBatchRunner, Settings
from swiftcruise.runtime.memory_model import PeakMemoryModel
from swiftcruise.runtime.memory_watch import MemoryWatch

from .small_trainer import OUT_OF_MEMORY, Model, SmallTrainer, batch_loss, layers_of, rows_of

#: Of each rank: the lengths of its samples.
LENGTHS = [[9, 3, 14, 5, 2, 11], [4, 12, 6, 7, 8, 1], [13, 13, 2, 5, 6, 10], [1, 2, 3, 4, 5, 6]]
BATCH, ACCUMULATION, STEPS = 2, 3, 3
EVERYONE = (0, 1, 2, 3)
FORWARD, EARLY, LATE = "forward", "backward", "backward, with all gradients but one"
LAST = -1


@dataclass(frozen=True)
class Case:
    """How the ranks go through their steps. Failures hit the second one: the first is never overlapped."""

    overlap: tuple[int, ...] = EVERYONE  #: ranks that overlap
    fails: dict[int, list[tuple[int, str]]] = field(default_factory=dict)  #: of a rank: micro-batch and stage, in turn
    budgets: dict[int, float] = field(default_factory=dict)


CASES = {
    "no overlap": Case(overlap=()),
    "overlap": Case(),
    "overlap on one rank": Case(overlap=(1,)),
    "different numbers of micro-batches": Case(budgets={0: 1.0, 1: 1000.0}),
    "failure in the first micro-batch": Case(fails={1: [(0, FORWARD)]}),
    "failure in the last forward": Case(fails={1: [(LAST, FORWARD)]}),
    "failure early in the last backward": Case(fails={1: [(LAST, EARLY)]}),
    "failure without overlap": Case(overlap=(), fails={1: [(LAST, LATE)]}),
    "failure after buckets went out": Case(fails={1: [(LAST, LATE)]}),
    "failure after buckets went out, others without overlap": Case(overlap=(1,), fails={1: [(LAST, LATE)]}),
    "failure on two ranks at once": Case(fails={0: [(LAST, EARLY)], 1: [(LAST, LATE)]}),
    "failure twice in a row": Case(fails={1: [(LAST, LATE), (LAST, LATE)]}),
    "failure everywhere": Case(fails={0: [(LAST, LATE)], 1: [(0, EARLY), (LAST, LATE)], 3: [(LAST, LATE), (0, EARLY)]}),
}


class ParallelTrainer(SmallTrainer):
    """The small trainer over DDP and the gradient synchronisation."""

    def __init__(self, model: Any, overlap: bool) -> None:
        super().__init__("mean")
        self.sync = GradientSync(model, bucket_bytes=200)
        self.overlap = overlap
        self.fails: list[tuple[int, str]] = []
        self.sent: list[int] = []  #: of every last micro-batch: buckets sent before the last gradient was there
        self.discards = 0
        self._position = 0

    def forward_backward(self, model: Any, *args: Any, last: bool, **kwargs: Any) -> torch.Tensor:
        stage = None
        if self.fails and self.fails[0][0] == (LAST if last else self._position):
            stage = self.fails.pop(0)[1]
        self._position += 1

        def fail(call: int, reached: str) -> None:
            if reached == stage:
                raise torch.OutOfMemoryError(OUT_OF_MEMORY)

        def at_the_last_gradient(_: torch.Tensor) -> None:
            if last:
                self.sent.append(self.sync.buckets_sent)
            fail(0, LATE)

        self.fail = fail
        handle = model.module.embed.weight.register_hook(at_the_last_gradient)
        try:
            with self.sync.accumulating(last=last, overlap=self.overlap):
                return super().forward_backward(model, *args, last=last, **kwargs)
        finally:
            handle.remove()

    def end_step(self, model: Any) -> None:
        super().end_step(model)
        self.sync.finish()
        self._position = 0

    def discard_gradients(self, model: Any) -> None:
        self.sync.discard()
        self.discards += 1
        self._position = 0


def _ddp(module: nn.Module, **options: Any) -> Any:
    return nn.parallel.DistributedDataParallel(module, **options)


def _model() -> Model:
    torch.manual_seed(0)
    model = Model()
    model.register_buffer("statistics", torch.zeros(3))  # DDP broadcasts buffers at the first forward
    return model


def _descend(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.data -= 0.1 * parameter.grad
    model.zero_grad()


def _gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def _has_hooks(model: nn.Module) -> bool:
    return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())


# -- training steps ------------------------------------------------------------------------------------------------


def plain_steps(rank: int) -> list[dict[str, Any]]:
    """Gradients of every step under plain DDP."""
    model, trainer, steps = _ddp(_model()), SmallTrainer("mean"), []
    for _ in range(STEPS):
        macro = rows_of(LENGTHS[rank], BATCH)
        for group in macro.groups:
            ids = trainer.collate([macro.rows[i] for i in group])["input_ids"]
            model.require_backward_grad_sync = group is macro.groups[-1]
            batch_loss(model(ids), ids, "mean", None, (ACCUMULATION, ACCUMULATION)).backward()
        steps.append(_gradients(model.module))
        _descend(model)
    return steps


def case_steps(rank: int, case: Case) -> dict[str, Any]:
    """The same steps as the macro-batch runner computes them."""
    model = _ddp(_model())
    trainer = ParallelTrainer(model, overlap=rank in case.overlap)
    runner = MacroBatchRunner(trainer, ACCUMULATION)
    runner.memory = MemoryWatch(PeakMemoryModel(1), None, 1.0, layers_of(model.module))
    runner.settings = Settings(token_budget=case.budgets.get(rank))
    steps = []
    for step in range(STEPS):
        trainer.fails = list(case.fails.get(rank, [])) if step == 1 else []
        macro = rows_of(LENGTHS[rank], BATCH)
        runner.run(model, [(macro, trainer.count_items(runner.prepare(macro)))])
        assert not trainer.fails
        steps.append(_gradients(model.module))
        _descend(model)
    return {
        "steps": steps,
        "sent": trainer.sent,
        "discards": trainer.discards,
        "calls": trainer.calls,
        "hooks": _has_hooks(model),
    }


# -- models out of the ordinary ------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Parameters of several precisions that all ranks, some, or none use; tied and frozen ones.

    `late` is what a backward pass reaches last, although it comes last in the order of the parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.tied = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3)
        self.rough, self.again = nn.Linear(3, 3).bfloat16(), nn.Linear(3, 3)
        self.again.weight = self.tied.weight
        self.precise, self.unused = nn.Linear(3, 3).double(), nn.Linear(3, 3)
        self.late = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, with_late: bool = True) -> torch.Tensor:
        y = self.late(x) if with_late else x
        y = self.frozen(self.tied(y))
        y = self.rough(y.bfloat16()).float() + self.precise(y.double()).float()
        return self.again(y).square().sum()


class Repeated(nn.Module):
    """One layer, computed twice under reentrant checkpointing: its parameters get gradient twice a backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.layer, self.first(x), use_reentrant=True)
        return checkpoint(self.layer, y, use_reentrant=True).square().sum()


class Cramped(GradientSync):
    """Has no memory for two copies at a time."""

    refused = 0

    def _copy(self, number: int) -> torch.Tensor:
        if self._in_flight:
            self.refused += 1
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return super()._copy(number)


def _average(module: nn.Module, backward: Callable[[nn.Module], None]) -> dict[str, torch.Tensor | None]:
    """What the average over the ranks has to be, one parameter after the other."""
    module = copy.deepcopy(module)
    backward(module)
    for parameter in module.parameters():
        used = torch.tensor(float(parameter.grad is not None))
        dist.all_reduce(used)
        if used:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)
    return _gradients(module)


def odd_steps(rank: int, ranks: int) -> dict[str, list[tuple[dict[str, Any], dict[str, Any]]]]:
    """Gradients of every step and what they should be, of models out of the ordinary."""
    x = torch.linspace(-1, 1, 6).view(2, 3) * (1 + rank)
    results: dict[str, Any] = {}

    def play(
        name: str,
        module: nn.Module,
        steps: list[list[Callable[[Any], Any]]],
        kind: type[GradientSync] = GradientSync,
        prepare: Callable[[int], Any] = lambda step: None,
    ) -> GradientSync:
        """Each step is a list of attempts; all but the last are discarded."""
        model = _ddp(module)
        sync = kind(model, bucket_bytes=1)
        results[name] = []
        for step, attempts in enumerate(steps):
            prepare(step)
            expected = _average(module, attempts[-1])
            for number, attempt in enumerate(attempts):
                if number:
                    sync.discard()
                with sync.accumulating(last=True, overlap=step > 0):
                    attempt(model)
            sync.finish()
            results[name].append((_gradients(module), expected))
            model.zero_grad()
        assert not _has_hooks(module)
        return sync

    def branches(with_late: bool, scale: float = 1.0) -> Callable[[Any], Any]:
        return lambda model: model(scale * x, with_late).backward()

    def twice(model: Any) -> None:
        model(x).backward()
        model(2 * x).backward()

    def once(model: Any) -> None:
        model(x).backward()

    torch.manual_seed(1)
    mine = rank == 0
    start = [branches(False)]
    play("used by one rank", Branches(), [start, [branches(mine)], [branches(mine)]])
    play("used by the others", Branches(), [start, [branches(not mine)], [branches(mine)]])
    play("a layer computed twice", Repeated(), [[once], [once], [once]])
    play("a second backward", Branches(), [[once], [twice], [once]])
    # In the redo other gradients come out, as under dropout.
    redo = [branches(True), branches(True, 2.0)] if mine else [branches(True)]
    play("another gradient in the redo", Branches(), [[once], redo, [once]])
    lost = [branches(True), branches(False)] if mine else [branches(False)]
    play("unused in the redo", Branches(), [[once], lost, [once]])
    redo = [twice, branches(True, 2.0), twice] if mine else [once]
    play("a second backward in the redo", Branches(), [[once], redo, [once]])
    cramped = play("no memory for two copies", Branches(), [[once], [once], [once]], Cramped)
    assert isinstance(cramped, Cramped)
    assert cramped.refused > 1

    few = Branches().requires_grad_(False)
    few.tied.requires_grad_(True)
    play("few parameters", few, [[once], [once]])
    module = Branches()

    def freeze_for_a_while(step: int) -> None:
        module.late.requires_grad_(step not in (1, 2))

    play("frozen for a while", module, [[once]] * 5, prepare=freeze_for_a_while)

    plain = _ddp(Branches(), find_unused_parameters=True)  # DDP itself, to see that the expectation is right
    expected = _average(plain.module, branches(mine))
    branches(mine)(plain)
    results["plain"] = [(_gradients(plain.module), expected)]
    return results


# -- processes -----------------------------------------------------------------------------------------------------


def _rank(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", datetime.timedelta(seconds=60), ranks, rank)
    results: dict[str, Any] = {"plain": plain_steps(rank), "odd": odd_steps(rank, ranks)}
    results |= {name: case_steps(rank, case) for name, case in CASES.items()}
    torch.save(results, f"{folder}/{rank}.pt")
    _lose_a_rank(rank, Path(folder))


def _lose_a_rank(rank: int, folder: Path) -> None:
    """Rank 1 dies in its last backward pass; the others write down what they get to know of it."""
    model = _ddp(_model(), process_group=dist.new_group(timeout=datetime.timedelta(seconds=5)))
    sync = GradientSync(model, bucket_bytes=200)
    for step in range(2):
        if rank == 1 and step == 1:
            model.module.embed.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        try:
            with sync.accumulating(last=True, overlap=True):
                model(torch.tensor([[1, 2]])).sum().backward()
            sync.finish()
        except RuntimeError as error:
            (folder / f"error-{rank}-in-step-{step}").write_text(str(error))
            raise


@dataclass
class Ranks:
    results: list[dict[str, Any]]
    exit_codes: list[int | None]
    folder: Path


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What each of two or four real processes computed, and how it ended."""
    count, folder = request.param, tmp_path_factory.mktemp("ranks")
    context = torch.multiprocessing.get_context("spawn")
    processes = [context.Process(target=_rank, args=(rank, count, str(folder)), daemon=True) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return Ranks([torch.load(folder / f"{rank}.pt") for rank in range(count)], codes, folder)


def _assert_close(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        if gradient is None or theirs[name] is None:
            assert gradient is theirs[name], name
        else:
            atol = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}[gradient.dtype]
            atol *= max(1.0, float(theirs[name].abs().max()))
            torch.testing.assert_close(gradient, theirs[name], rtol=0, atol=atol, msg=name)


def _assert_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for name, gradient in ours.items():
        assert gradient is theirs[name] is None or torch.equal(gradient, theirs[name]), name


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_plain_ddp(ranks: Ranks, case: str):
    for rank in ranks.results:
        for ours, plain in zip(rank[case]["steps"], rank["plain"], strict=True):
            _assert_close(ours, plain)


@pytest.mark.parametrize("case", CASES)
def test_every_rank_ends_with_the_same_bits_and_without_hooks(ranks: Ranks, case: str):
    first, *others = ranks.results
    for rank in others:
        for ours, theirs in zip(rank[case]["steps"], first[case]["steps"], strict=True):
            _assert_equal(ours, theirs)
    assert not any(rank[case]["hooks"] for rank in ranks.results)


@pytest.mark.parametrize("case", CASES)
def test_a_rank_computes_again_what_failed_and_the_others_do_not(ranks: Ranks, case: str):
    for number, rank in enumerate(ranks.results):
        assert rank[case]["discards"] == len(CASES[case].fails.get(number, []))


def test_overlap_sends_nearly_everything_before_the_backward_pass_ends(ranks: Ranks):
    buckets = len(plan_buckets([p.numel() * 8 for p in Model().parameters()], [0] * 15, 200))
    assert buckets > 5
    for rank in ranks.results:
        assert rank["overlap"]["sent"] == [0, buckets - 1, buckets - 1]  # the first step only learns
        assert rank["no overlap"]["sent"] == [0, 0, 0]
    one, other = (rank["overlap on one rank"]["sent"][1:] for rank in ranks.results[:2])
    assert one == [0, 0]
    assert other == [buckets - 1, buckets - 1]


def test_what_is_sent_is_not_sent_again_by_a_rank_that_failed(ranks: Ranks):
    sent = ranks.results[1]["failure after buckets went out"]["sent"]
    assert sent == [0, sent[1], sent[1], sent[1]]
    assert sent[1] > 5


def test_the_ranks_work_differs_where_the_cases_say_so(ranks: Ranks):
    calls = [rank["different numbers of micro-batches"]["calls"] for rank in ranks.results]
    assert calls[0] > calls[1]


@pytest.mark.parametrize(
    "model",
    [
        "used by one rank",
        "used by the others",
        "a layer computed twice",
        "a second backward",
        "another gradient in the redo",
        "unused in the redo",
        "a second backward in the redo",
        "no memory for two copies",
        "few parameters",
        "frozen for a while",
        "plain",
    ],
)
def test_the_result_is_the_average_of_what_the_ranks_hold_in_the_end(ranks: Ranks, model: str):
    first = ranks.results[0]["odd"][model]
    for rank in ranks.results:
        for (ours, expected), (theirs, _) in zip(rank["odd"][model], first, strict=True):
            _assert_close(ours, expected)
            _assert_equal(ours, theirs)


def test_a_parameter_that_one_rank_uses_gets_its_share_and_one_that_none_uses_gets_no_gradient(ranks: Ranks):
    for rank in ranks.results:
        before, now, _ = (gradients for gradients, _ in rank["odd"]["used by one rank"])
        assert before["late.weight"] is None
        assert now["late.weight"].abs().sum() > 0
        assert now["unused.weight"] is now["frozen.weight"] is None
        assert rank["odd"]["unused in the redo"][1][0]["late.weight"] is None


def test_a_killed_rank_ends_the_others_with_an_error(ranks: Ranks):
    assert ranks.exit_codes[1] == -signal.SIGKILL
    for rank in set(range(len(ranks.results))) - {1}:
        assert ranks.exit_codes[rank] == 1
        assert (ranks.folder / f"error-{rank}-in-step-1").read_text()


@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from(["float32", "bfloat16"])), max_size=30), st.integers(1, 100)
)
def test_buckets_hold_every_parameter_once_in_backward_order(parameters: list[tuple[int, str]], bucket_bytes: int):
    sizes, kinds = [size for size, _ in parameters], [kind for _, kind in parameters]
    buckets = plan_buckets(sizes, kinds, bucket_bytes)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(parameters)))
    last = [bucket[-1] for bucket in buckets]
    assert last == sorted(last, reverse=True)
    for bucket in buckets:
        assert bucket == sorted(bucket, reverse=True)
        assert len({kinds[index] for index in bucket}) == 1
        assert sum(sizes[index] for index in bucket) <= bucket_bytes or len(bucket) == 1
    for kind in set(kinds):  # and no bucket is left half empty
        own = [bucket for bucket in buckets if kinds[bucket[0]] == kind]
        for one, following in itertools.pairwise(own):
            assert sum(sizes[index] for index in one) + sizes[following[0]] > bucket_bytes
