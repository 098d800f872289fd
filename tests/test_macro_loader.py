"""The macro loader over real torch loaders: every sample once, in order, whatever the workers do."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from swiftcruise.runtime.macro_loader import MacroLoader, MacroRows, collate_raw

SAMPLES, BATCH, ACCUMULATION = 29, 2, 3


class Numbers(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


class Shuffled:
    """Batches in an order that is a function of the epoch, like ms-swift's sampler."""

    epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter([order[i : i + BATCH] for i in range(0, SAMPLES, BATCH)])

    def __len__(self) -> int:
        return -(-SAMPLES // BATCH)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Skipping:
    """accelerate's way to resume in mid-epoch."""

    def __init__(self, batch_sampler: Shuffled, skip: int) -> None:
        self.batch_sampler, self.skip = batch_sampler, skip

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(self.batch_sampler, self.skip, None)

    def __len__(self) -> int:
        return len(self.batch_sampler) - self.skip


class Loader(DataLoader):
    """ms-swift's loader: knows the epoch, iterates by a generator."""

    def set_epoch(self, epoch: int) -> None:
        sampler: Any = self.batch_sampler
        getattr(sampler, "batch_sampler", sampler).set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().__iter__()


def plain_loader(workers: int = 0, persistent: bool = False, sampler: Any = None) -> Loader:
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent} if workers else {}
    return Loader(Numbers(), batch_sampler=sampler or Shuffled(), collate_fn=collate_raw, **options)


def macro_loader(inner: Any, accumulation: int = ACCUMULATION, **options: Any) -> MacroLoader:
    loader = MacroLoader()
    loader.bind(inner, accumulation, **options)
    return loader


def sample_order(loader: Any, epochs: int, at_each_step: Callable[[int], None] = lambda step: None) -> list[Any]:
    """All samples in order, with the global random state after each epoch."""
    seen: list[Any] = []
    step = 0
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for item in loader:
            seen += item.rows
            at_each_step(step)
            step += 1
        seen.append(torch.get_rng_state().sum().item())
    return seen


def worker_processes() -> set[int]:
    gc.collect()  # an iterator that nobody holds ends its workers
    return {process.pid for process in psutil.Process().children()}


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, True), (2, False)])
@pytest.mark.parametrize("seed", range(3))
def test_workers_that_come_and_go_lose_no_sample_and_leave_the_random_state_alone(workers, persistent, seed):
    torch.manual_seed(seed)
    expected = sample_order(plain_loader(workers, persistent), 3)
    others = worker_processes()
    torch.manual_seed(seed)
    loader = macro_loader(plain_loader(workers, persistent))
    draw = random.Random(seed)

    def change(step: int) -> None:
        if draw.random() < 0.4:
            loader.num_workers = draw.randint(0, 2)

    loader.num_workers = [workers, 0, 2][seed]  # also before the first sample
    assert sample_order(loader, 3, change) == expected
    loader.stop_workers()
    assert worker_processes() == others


def test_a_macro_batch_is_one_optimizer_step_of_the_samplers_batches():
    steps = list(macro_loader(plain_loader()))
    assert len(steps) == len(macro_loader(plain_loader())) == 5
    assert all(step.groups == [(0, 1), (2, 3), (4, 5)] for step in steps[:-1])
    assert steps[-1].groups == [(0, 1), (2, 3), (4,)]  # 29 samples: the last batch has one


@pytest.mark.parametrize("skipped", [3, 12])
def test_a_resumed_epoch_knows_how_far_it_is(skipped: int):
    whole, inner = Shuffled(), plain_loader(sampler=Skipping(Shuffled(), skipped))
    loader = macro_loader(inner, skipped=skipped)
    loader.set_epoch(2)
    whole.set_epoch(2)
    iterator = iter(loader)
    first = next(iterator)
    assert first.rows == [i for batch in list(whole)[skipped : skipped + ACCUMULATION] for i in batch]
    assert loader.epoch_progress == pytest.approx(min(skipped + ACCUMULATION, 15) / 15)
    list(iterator)
    assert loader.epoch_progress == 1.0


def test_the_preview_is_what_comes_next():
    loader = macro_loader(plain_loader(), lengths=np.arange(100.0, 100.0 + SAMPLES))
    iterator = iter(loader)
    assert loader.upcoming_lengths(2).size == SAMPLES  # nothing has begun: whatever may come
    for _ in range(3):
        next(iterator)
        ahead = loader.upcoming_lengths(1)
        assert ahead.size in (5, 6)
    assert list(ahead - 100) == next(iterator).rows
    assert [*loader.upcoming_lengths(9) - 100] == next(iterator).rows


def test_an_order_that_depends_on_the_random_state_is_left_to_its_loader():
    def random_loader() -> DataLoader:
        sampler = BatchSampler(RandomSampler(Numbers()), BATCH, drop_last=False)
        return DataLoader(Numbers(), batch_sampler=sampler, collate_fn=collate_raw)

    torch.manual_seed(3)
    expected = [row for _ in range(2) for item in random_loader() for row in item.rows]
    torch.manual_seed(3)
    loader = macro_loader(random_loader(), lengths=np.ones(SAMPLES))
    assert not loader.workers_can_change
    assert [row for _ in range(2) for item in loader for row in item.rows] == expected
    assert loader.upcoming_lengths(1).size == 0


@pytest.mark.parametrize("sampler", [SequentialSampler, RandomSampler])
def test_loaders_that_accelerate_prepared_keep_their_order_too(sampler):
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))

    def prepared() -> Any:
        torch.manual_seed(11)
        loader = DataLoader(Numbers(), BATCH, sampler=sampler(Numbers()), collate_fn=collate_raw)
        return accelerator.prepare(loader)

    expected = sample_order(prepared(), 3)
    loader = macro_loader(prepared())

    def change(step: int) -> None:
        loader.num_workers = step % 3 == 1

    assert sample_order(loader, 3, change) == expected
    loader.stop_workers()


def test_what_a_stream_owes_is_paid_in_the_next_epochs_first_step():
    loader = macro_loader(DataLoader(Stream(), BATCH, collate_fn=collate_raw), 4)
    first, second = list(loader), list(loader)
    assert [len(step.groups) for step in first] == [4, 4, 4]  # 15 batches, 3 of them owed
    owed = second[0].carried
    assert owed is not None
    assert owed.rows == list(range(24, 29))
    assert all(step.carried is None for step in (*first, *second[1:]))


def test_the_loader_after_a_resumed_epoch_goes_on_with_its_workers_and_its_debt():
    def stream() -> MacroLoader:
        return macro_loader(DataLoader(Stream(), BATCH, collate_fn=collate_raw), 4)

    resumed, original = stream(), stream()
    list(resumed)
    original.take_over(resumed)
    carried = next(iter(original)).carried
    assert carried is not None
    assert carried.rows == list(range(24, 29))

    others = worker_processes()
    before, after = macro_loader(plain_loader(1, True)), macro_loader(plain_loader(1, True))
    before.num_workers = 2
    list(before)
    assert worker_processes() != others
    after.take_over(before)
    assert after.num_workers == 2
    assert worker_processes() == others


def test_the_trainer_is_told_which_loader_delivers():
    told: list[MacroLoader] = []
    loader = macro_loader(plain_loader(), on_epoch=told.append)
    for _ in range(2):
        step: MacroRows = next(iter(loader))
        assert step.rows
    assert told == [loader, loader]
