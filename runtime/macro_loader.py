"""The loader of macro-batches: one optimizer step's raw samples at a time, in the sampler's own order."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True)
class RawRows:
    """Uncollated samples of one sampler batch. Opaque: nothing copies it to a device or pins it on the way."""

    rows: list[Any]
    indices: list[int] = field(default_factory=list)  #: of the rows in the data set, where the loader knows them


def collate_raw(rows: list[Any]) -> RawRows:
    """Collate function of the loader's workers: hand the rows over as they are."""
    return RawRows(rows)


@dataclass(slots=True)
class MacroRows:
    """The raw samples of one optimizer step on this rank."""

    rows: list[Any]  #: the samples, in the sampler's order
    groups: list[tuple[int, ...]]  #: positions in `rows` of each of the sampler's batches
    carried: MacroRows | None = None  #: a stream's leftover of the epoch before, owed to this optimizer step
    wait_s: float = 0.0  #: seconds the training waited for the loader
    indices: list[int] = field(default_factory=list)  #: of the samples in the data set; empty where unknown
    # Filled in by the macro-batch runner:
    lengths: list[int] = field(default_factory=list)  #: length of every sample, tokens
    prepared: list[Any] = field(default_factory=list)  #: micro-batches, planned and collated
    skipped: set[int] = field(default_factory=set)  #: positions of samples that fit in no way and are left out

    @classmethod
    def join(cls, batches: Sequence[RawRows], carried: MacroRows | None = None) -> MacroRows:
        """The macro-batch of several sampler batches."""
        rows: list[Any] = []
        groups = []
        indices: list[int] = []
        for batch in batches:
            groups.append(tuple(range(len(rows), len(rows) + len(batch.rows))))
            rows += batch.rows
            indices += batch.indices
        return cls(rows, groups, carried, indices=indices)


class _Remaining:
    """A batch sampler over index lists that were not delivered yet."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class MacroLoader:
    """Groups the batches of ms-swift's own train loader into macro-batches.

    Until the number of workers changes, the samples come from the wrapped loader itself, so that random states,
    prefetching and persistent workers are exactly plain ms-swift's. A change of workers in mid-epoch rebuilds a
    loader over the index lists that were not delivered yet; no sample is lost or repeated, and the global random
    state advances as the wrapped loader would advance it. A sampler whose order is not a function of the epoch alone
    cannot be asked in advance: then there is no preview, and the workers stay as they are.

    Args:
        inner: The train loader, its collate function being `collate_raw`.
        accumulation: Sampler batches in a macro-batch.
        lengths: Length of every sample of the data set by index (a preview), or None where it is unknown.
    """

    inner: Any
    accumulation: int

    def bind(
        self,
        inner: Any,
        accumulation: int,
        lengths: np.ndarray | None = None,
        skipped: int = 0,
        on_epoch: Callable[[MacroLoader], None] = lambda loader: None,
    ) -> None:
        """Attach to `inner`.

        Args:
            inner: See the class.
            accumulation: See the class.
            lengths: See the class.
            skipped: Batches of the first epoch that were already trained on (resume).
            on_epoch: Told when an epoch of this loader begins.
        """
        self.inner = inner
        self.base_dataloader = getattr(inner, "base_dataloader", inner)
        self.accumulation = accumulation
        self.lengths = lengths
        self.epoch = 0
        self.delivered = skipped  #: sampler batches of this epoch handed out, the skipped ones included
        self._skipped = skipped
        self._on_epoch = on_epoch
        self._inner_begun = False
        self._begun = False
        self._batches: list[list[int]] = []
        self._position = 0
        self._carried: MacroRows | None = None
        self._own: tuple[int, _Remaining, Any] | None = None
        self.num_workers = int(getattr(self.base_dataloader, "num_workers", 0))
        self._inner_workers = self.num_workers

    @property
    def dataset(self) -> Any:
        """The data set of the wrapped loader."""
        return self.base_dataloader.dataset

    @property
    def batch_sampler(self) -> Any:
        """The batch sampler of the wrapped loader (None for a stream)."""
        return getattr(self.inner, "batch_sampler", None)

    @property
    def is_map_style(self) -> bool:
        """Whether the sampler's index lists are known in advance."""
        return self.batch_sampler is not None and hasattr(self.dataset, "__len__")

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch's order of samples."""
        self.epoch = epoch
        if hasattr(self.inner, "set_epoch"):
            self.inner.set_epoch(epoch)

    @property
    def order_is_known(self) -> bool:
        """Whether the sampler gives the same index lists again when asked twice: its order depends on the epoch."""
        from torch.utils.data import SequentialSampler

        sampler = self.batch_sampler
        while sampler is not None:
            if hasattr(sampler, "set_epoch") or isinstance(sampler, SequentialSampler):
                return True
            sampler = getattr(sampler, "batch_sampler", getattr(sampler, "sampler", None))
        return False

    @property
    def workers_can_change(self) -> bool:
        """Whether `num_workers` may be set."""
        return self.is_map_style and self.order_is_known

    def take_over(self, other: MacroLoader) -> None:
        """Go on where `other` left off: with its number of workers and the step that it owes."""
        if self.workers_can_change:
            self.num_workers = other.num_workers
        self._carried, other._carried = other._carried, None
        other.stop_workers()

    def __len__(self) -> int:
        """Optimizer steps in an epoch; a stream has no length (TypeError)."""
        return math.ceil(len(self.inner) / self.accumulation)

    @property
    def epoch_progress(self) -> float:
        """Share of this epoch's sampler batches that were handed out (skipped ones included)."""
        total = len(self.inner) + self._skipped
        return self.delivered / total

    def __iter__(self) -> Iterator[MacroRows]:
        self._on_epoch(self)
        self._begun = True
        self.delivered = self._skipped
        carried, self._carried = self._carried, None
        batches: list[RawRows] = []
        for batch in self._epoch():
            batches.append(batch)
            self.delivered += 1
            if len(batches) == self.accumulation:
                yield MacroRows.join(batches, carried)
                batches, carried = [], None
        if batches and self.is_map_style:
            yield MacroRows.join(batches, carried)
        elif batches:
            # Plain ms-swift computes the gradients of a stream's last, incomplete step but takes no optimizer step;
            # they are added to the next epoch's first step.
            self._carried = MacroRows.join(batches, carried)
        elif carried is not None:
            self._carried = carried

    def _epoch(self) -> Iterator[RawRows]:
        self._position = 0
        if not self.workers_can_change:
            self._batches = []
            yield from self.inner
            return
        self._batches = [list(batch) for batch in self.batch_sampler]
        self.set_epoch(self.epoch)  # some samplers move on to the next epoch when they are through
        while self._position < len(self._batches):
            workers = self.num_workers
            source = self._source(workers)
            for batch in source:
                batch.indices = self._batches[self._position]
                self._position += 1
                yield batch
                if self.num_workers != workers and self._position < len(self._batches):
                    if isinstance(source, Generator):
                        source.close()
                    self.stop_workers()
                    break

    def _source(self, workers: int) -> Iterator[RawRows]:
        import torch
        from torch.utils.data import DataLoader

        # A loader draws its workers' seed from the global random state whenever it makes an iterator: once an epoch,
        # or once for all where the workers persist.
        persists = self._inner_workers > 0 and self.base_dataloader.persistent_workers
        draws = self._position == 0 and not (persists and self._inner_begun)
        self._inner_begun = True
        if self._own is None and workers == self._inner_workers and self._position == 0:
            return iter(self.inner)
        if draws:
            torch.empty((), dtype=torch.int64).random_()
        if self._own is None or self._own[0] != workers:
            self.stop_workers()
            sampler = _Remaining()
            options: dict[str, Any] = {}
            if workers:
                options = {"num_workers": workers, "persistent_workers": True}
                options["prefetch_factor"] = self.inner.prefetch_factor or 2
                options["multiprocessing_context"] = self.inner.multiprocessing_context
            loader = DataLoader(
                self.dataset,
                batch_sampler=sampler,  # type: ignore[arg-type]
                collate_fn=self.inner.collate_fn,
                worker_init_fn=self.inner.worker_init_fn,
                # A generator of its own: the training's random state stays as plain ms-swift's.
                generator=torch.Generator().manual_seed(1_000_003 * self.epoch + self._position),
                **options,
            )
            self._own = (workers, sampler, loader)
        self._own[1].batches = self._batches[self._position :]
        return iter(self._own[2])

    def stop_workers(self) -> None:
        """End the worker processes of the present loader."""
        for loader in (self.base_dataloader, self._own[2] if self._own else None):
            iterator = getattr(loader, "_iterator", None)
            if iterator is not None:
                if hasattr(iterator, "_shutdown_workers"):
                    iterator._shutdown_workers()
                loader._iterator = None  # type: ignore[union-attr]
        self._own = None

    def upcoming_lengths(self, steps: int) -> np.ndarray:
        """Lengths of the samples of the next `steps` macro-batches of this epoch; empty where unknown.

        Before the first epoch has begun, those of the whole data set.
        """
        if self.lengths is None:
            return np.empty(0)
        if not self._batches:
            return np.empty(0) if self._begun else self.lengths
        ahead = self._batches[self._position : self._position + steps * self.accumulation]
        flat = [i for batch in ahead for i in batch]
        return self.lengths[np.asarray(flat, dtype=np.int64)] if flat else np.empty(0)
