"""Memory of a live training: measured per micro-batch, modelled online, kept by splitting and checkpointing."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from .checkpointing import LayerCheckpointing
from .macro_batch import MicroResult, Settings
from .memory_model import PeakMemoryModel
from .planner import MicroBatch

logger = logging.getLogger(__name__)


class Meter(Protocol):
    """Measures the peak memory of what runs inside `watching`."""

    def watching(self) -> AbstractContextManager[object]:
        """Context in which memory is counted."""
        ...

    def reset_peak(self) -> None:
        """Let the peak begin again."""
        ...

    @property
    def peak_bytes(self) -> int:
        """Highest memory since `reset_peak`."""
        ...


class MemoryWatch:
    """Decides how a macro-batch fits into memory (`macro_batch.Memory`).

    A meter that costs time is asked only while the model still learns, for shapes larger than any it has seen, and
    now and then; while no control depends on the model it need not learn, and is kept up more seldom still. A meter
    that enforces a limit has to see every micro-batch.

    Args:
        model: The online model of peak memory (n = 1), in fractions of capacity.
        meter: What measures; None leaves memory unmodelled and checkpointing as it is.
        capacity_bytes: What counts as full.
        checkpointing: The layers, or None to leave checkpointing alone.
        memory_cap: Fraction of capacity that no planned micro-batch may be predicted to exceed.
        every: Measure one micro-batch in so many once the model has learnt (1 = all).
        others: Fraction of capacity that other processes hold at this moment; asked at every macro-batch, so that one
            which arrives in the middle of a control interval is made room for at once.
        room: Fraction of capacity that was within this process's reach, asked when an allocation has failed.
    """

    LEARNING = 48  #: micro-batches measured in any case once a control depends on the model
    IDLE = 4  #: so many times more seldom is measured before that
    DEFAULT_TARGET = 0.85  #: memory target while no policy has set one

    def __init__(
        self,
        model: PeakMemoryModel,
        meter: Meter | None,
        capacity_bytes: float,
        checkpointing: LayerCheckpointing | None,
        memory_cap: float = 0.90,
        every: int = 1,
        others: Callable[[], float] = lambda: 0.0,
        room: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.model = model
        self.capacity_bytes = capacity_bytes
        self.checkpointing = checkpointing if checkpointing is not None and checkpointing.available else None
        self.memory_cap = memory_cap
        self._meter = meter
        self._every = every
        self._others = others
        self._room = room
        self._seen = 0
        self._measured = 0
        self._largest = 0.0
        self._measuring = False
        self._needed = True  # whether a control depends on the model

    # -- before a micro-batch --------------------------------------------------------------------------------------

    def choose_checkpointing(self, plans: Sequence[MicroBatch], settings: Settings) -> list[float]:
        """The checkpointed fraction of every micro-batch: fixed, or the least that keeps the memory target."""
        control = self.checkpointing
        self._needed = control is not None or not settings.plain
        if control is None:
            return [np.nan] * len(plans)
        if settings.checkpoint_fraction is not None:
            return [settings.checkpoint_fraction] * len(plans)
        if self._meter is None:
            return [control.original_fraction] * len(plans)
        target = self.DEFAULT_TARGET if settings.memory_target is None else settings.memory_target
        fractions = self.model.least_checkpointing(
            np.array([p.tokens for p in plans], dtype=np.float64),
            np.array([p.quadratic for p in plans]),
            min(target, self.available),
            control.grid,
        )
        return [float(f) for f in fractions]

    def token_ceilings(self, lengths: Sequence[int], settings: Settings) -> np.ndarray | None:
        """Per sample: most tokens of a micro-batch whose longest sample it is; None while nothing is known."""
        if self._meter is None or not self.known:
            return None
        # The most that checkpointing can do; where it is left alone, the model has learnt its effect as fraction 0.
        fraction = 1.0 if settings.checkpoint_fraction is None else settings.checkpoint_fraction
        fraction = fraction if self.checkpointing is not None else 0.0
        return self.model.fit_tokens(np.asarray(lengths, dtype=np.float64), fraction, self.available)

    @property
    def available(self) -> float:
        """Fraction of capacity that a micro-batch may be planned to reach: the cap less what others hold."""
        return max(0.0, self.memory_cap - self._others())

    def spare_bytes(self, plan: MicroBatch, checkpoint_fraction: float) -> float:
        """Memory below the cap that a micro-batch is expected to leave free; 0 where nothing is known."""
        if self._meter is None:
            return 0.0
        fraction = 0.0 if math.isnan(checkpoint_fraction) else checkpoint_fraction
        upper = float(self.model.upper(float(plan.tokens), plan.quadratic, fraction))
        return max(0.0, self.available - upper) * self.capacity_bytes

    @property
    def known(self) -> bool:
        """Whether the model has seen a micro-batch."""
        return bool(self.model.observations[0])

    def set_checkpointing(self, fraction: float) -> None:
        """Checkpoint this share of the layers from now on."""
        if self.checkpointing is not None:
            self.checkpointing.set_fraction(fraction)

    def watch(self, plan: MicroBatch, checkpoint_fraction: float) -> AbstractContextManager[object]:
        """Context in which a micro-batch runs."""
        if self._meter is None:
            return contextlib.nullcontext()
        # Activations kept grow with tokens and with layers that are not checkpointed.
        unchecked = 1.0 if math.isnan(checkpoint_fraction) else 1.0 - checkpoint_fraction
        load = plan.tokens * (1.0 + 7.0 * unchecked)
        self._seen += 1
        self._measuring = (
            self._every == 1
            or load > self._largest
            or self._seen % (self._every if self._needed else self.IDLE * self._every) == 0
            or (self._needed and self._measured < self.LEARNING)
        )
        if not self._measuring:
            return contextlib.nullcontext()
        self._measured += 1
        self._largest = max(self._largest, load)
        try:
            self._meter.reset_peak()
            return self._meter.watching()
        except Exception as error:
            self._give_up(error)
            return contextlib.nullcontext()

    # -- after it --------------------------------------------------------------------------------------------------

    def peak_fraction(self) -> float:
        """Peak of the micro-batch that just ran, as a fraction of capacity; NaN where it was not measured."""
        if self._meter is None or not self._measuring:
            return np.nan
        try:
            return self._meter.peak_bytes / self.capacity_bytes
        except Exception as error:
            self._give_up(error)
            return np.nan

    def _give_up(self, error: Exception) -> None:
        """Go on without the meter: checkpointing goes back to what it was before the hook came."""
        self._meter = None
        logger.warning("swiftcruise: memory cannot be measured any more: %r", error, exc_info=True)

    def record(self, results: Sequence[MicroResult]) -> None:
        """Teach the model what the micro-batches of a step took."""
        measured = [r for r in results if not math.isnan(r.peak_fraction)]
        self.model.passed(len(results) - len(measured))
        if measured:
            self.model.observe(
                np.array([r.tokens for r in measured], dtype=np.float64),
                np.array([r.quadratic for r in measured]),
                np.nan_to_num(np.array([r.checkpoint_fraction for r in measured])),
                np.array([r.peak_fraction for r in measured]),
            )

    def record_oom(self, plan: MicroBatch, checkpoint_fraction: float) -> None:
        """Teach the model that this micro-batch did not fit."""
        fraction = float(np.nan_to_num(checkpoint_fraction))
        self.model.observe_oom(float(plan.tokens), plan.quadratic, fraction, self._room())

    def observed_fraction(self) -> float:
        """Share of layers that are checkpointed at present, whoever set them."""
        return self.checkpointing.current_fraction if self.checkpointing is not None else np.nan

    def free(self) -> None:
        """Give cached blocks back to the device."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()
