"""The micro-batch plan: which samples of one optimizer step are computed together. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples that one forward/backward takes together."""

    indices: tuple[int, ...]  #: positions of the samples in the macro-batch
    length: int  #: length of the longest sample, tokens
    tokens: int  #: tokens computed: samples x length when padded, the sum of lengths when padding-free

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.indices)

    @property
    def quadratic(self) -> float:
        """B S^2 for B > 1, else 0: what the padding mask adds to memory (attention saves one per layer)."""
        return float(self.samples * self.length**2) if self.samples > 1 else 0.0


def _micro_batch(indices: Sequence[int], lengths: Sequence[int], padding_free: bool) -> MicroBatch:
    longest = max(lengths[i] for i in indices)
    tokens = sum(lengths[i] for i in indices) if padding_free else longest * len(indices)
    return MicroBatch(tuple(indices), longest, tokens)


def plain_plan(
    lengths: Sequence[int], groups: Sequence[Sequence[int]], *, padding_free: bool = False
) -> list[MicroBatch]:
    """The micro-batches that ms-swift itself would run: one for each of the sampler's batches, in its order."""
    return [_micro_batch(group, lengths, padding_free) for group in groups]


def pack(
    lengths: Sequence[int],
    indices: Sequence[int] | None = None,
    *,
    token_budget: float = math.inf,
    micro_batch_cap: float = math.inf,
    launch_tokens: float = math.inf,
    token_ceilings: Sequence[float] | None = None,
    padding_free: bool = False,
) -> list[MicroBatch]:
    """Split samples into length-sorted micro-batches under a token budget, with the least predicted time.

    Samples are sorted by length (longest first; equal lengths keep their order) and cut into contiguous runs. Under
    the time model ``t = k (launch_tokens + tokens)`` a micro-batch (see `runtime.fill`: `launch_tokens` is a / k, the
    launch cost of a micro-batch counted in tokens) the best cuts follow from dynamic programming: O(n w) for n
    samples and runs of at most w. With `launch_tokens` infinite the number of micro-batches is minimised first, the
    padding second. A sample longer than the budget runs alone.

    Args:
        lengths: Length of every sample of the macro-batch, tokens.
        indices: The samples to plan; all by default.
        token_budget: Most tokens in a micro-batch.
        micro_batch_cap: Most samples in a micro-batch.
        launch_tokens: Fixed cost of one micro-batch, in tokens; may be infinite.
        token_ceilings: Per sample of `lengths`: most tokens of a micro-batch whose longest sample it is (memory).
        padding_free: Tokens add up without padding.

    Returns:
        The micro-batches, longest first.

    Raises:
        ValueError: a budget or cap below 1, or a negative launch cost.
    """
    if not token_budget >= 1 or not micro_batch_cap >= 1 or not launch_tokens >= 0:
        raise ValueError(f"cannot plan with {token_budget=}, {micro_batch_cap=}, {launch_tokens=}")
    order = sorted(range(len(lengths)) if indices is None else indices, key=lambda i: -lengths[i])
    count = len(order)
    sizes = [lengths[i] for i in order]
    prefix = [0]
    for size in sizes:
        prefix.append(prefix[-1] + size)
    launch = launch_tokens if math.isfinite(launch_tokens) else fewest_first(sum(sizes[:1]), count)
    ceiling = [token_budget if token_ceilings is None else min(token_budget, token_ceilings[i]) for i in order]

    best = [0.0] + [math.inf] * count
    start = [0] * (count + 1)
    cut(sizes, prefix, ceiling, int(min(micro_batch_cap, count)), launch, padding_free, best, start)
    plan = []
    end = count
    while end > 0:
        plan.append(_micro_batch(order[start[end] : end], lengths, padding_free))
        end = start[end]
    return plan[::-1]


def fewest_first(longest: float, samples: int) -> float:
    """A launch cost, tokens, that minimises the number of micro-batches first: above any possible saving in tokens."""
    return 1.0 + longest * samples


def cut(
    sizes: Sequence[float] | np.ndarray,
    prefix: Sequence[float] | np.ndarray,
    ceiling: Sequence[float] | np.ndarray,
    widest: int,
    launch: float,
    padding_free: bool,
    best: list[float] | np.ndarray,
    start: list[int] | np.ndarray,
) -> None:
    """The dynamic programme of `pack`: where n sorted samples are best cut.

    In the part of Python that numba compiles: the hook runs it on lists, the simulated plant compiled on arrays.

    Args:
        sizes: (n,) lengths of the samples, descending, tokens.
        prefix: (n + 1,) sums of the first 0, 1, ... n sizes; read only when padding-free.
        ceiling: (n,) most tokens of a micro-batch that begins with this sample.
        widest: Most samples in a micro-batch.
        launch: Fixed cost of one micro-batch, tokens; finite.
        padding_free: Tokens add up without padding.
        best: (n + 1,) given as 0, inf, inf, ...; on return entry j is the least cost of the first j samples, tokens.
        start: (n + 1,) on return entry j is where the last micro-batch of that plan begins.
    """
    count = len(sizes)
    for begin in range(count):
        base = best[begin] + launch
        longest, limit = sizes[begin], ceiling[begin]
        for end in range(begin + 1, min(begin + widest, count) + 1):
            tokens = prefix[end] - prefix[begin] if padding_free else longest * (end - begin)
            if tokens > limit and end > begin + 1:
                break
            if base + tokens < best[end]:
                best[end] = base + tokens
                start[end] = begin
