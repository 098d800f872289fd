"""What packing by length costs, for any token budget and micro-batch cap: a table built once and read very often.

The hook sorts each optimizer step's samples and cuts them into micro-batches (`runtime.planner.pack`). A simulated
control interval holds dozens of such steps; what they are on average is read from a table over budget and cap, made by
running the planner itself on drawn macro-batches, with the launch cost that the hook would have learned. Time and
memory are not linear in a micro-batch's tokens, so the table tells besides means how large the smaller and the larger
micro-batches are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from ...runtime.planner import cut, fewest_first
from . import compiling
from .lengths import Lengths

#: Columns of the table: six means over the optimizer steps of one rank, and what its micro-batches are like. Those of
#: all steps, sorted by tokens, form `CLASSES` classes of equally many: the smallest quarter, ... the largest quarter.
COLUMNS = (
    "micro_batches",  # micro-batches in a step
    "real_tokens",  # tokens without padding
    "padded_tokens",  # tokens computed
    "token_lengths",  # sum over micro-batches of tokens x longest sample (attention)
    "largest_tokens",  # tokens of the step's largest micro-batch
    "longest",  # the step's longest sample, tokens
    "class_tokens_0",  # mean tokens of a micro-batch of this class, ascending
    "class_tokens_1",
    "class_tokens_2",
    "class_tokens_3",
    "class_token_lengths_0",  # mean tokens x longest sample of a micro-batch of this class
    "class_token_lengths_1",
    "class_token_lengths_2",
    "class_token_lengths_3",
)
CLASSES = 4
_FIRST_CLASS = COLUMNS.index("class_tokens_0")

#: Every table has this shape, so that tables stack: caps, budgets, columns. Budgets that follow each other lie side by
#: side: one read of a table touches few lines of the processor's cache, and of a table without a cap few pages.
CAPS, BUDGETS = 16, 64
STEP = 0.25  #: step between budgets, log2
_TYPICAL = 8  # steps from which the caps are chosen


@dataclass(frozen=True, eq=False)
class StackedTables:
    """Several tables as the arrays that `read_all` takes.

    Attributes:
        values: (tables, CAPS, BUDGETS, len(COLUMNS)), see `PackingTable`.
        caps: (tables, CAPS).
        low: (tables,).
        step: step in log2 of the budget.
    """

    values: np.ndarray
    caps: np.ndarray
    low: np.ndarray
    step: float = STEP


@dataclass(frozen=True, eq=False)
class PackingTable:
    """Means over optimizer steps, by token budget and micro-batch cap.

    Lengths that are all `s` times as long need an `s` times as large budget: read the table at budget / s, and
    multiply tokens by s (token lengths by s^2). A finite launch cost would have to be `s` times as large, too.

    Attributes:
        low: log2 of the smallest budget. The largest one, 55 000 times as large, holds any step.
        caps: (CAPS,) micro-batch caps, ascending from 1; the last one holds every sample, and is repeated where
            there are fewer.
        values: (CAPS, BUDGETS, len(COLUMNS)), float32. The columns of the classes hold sums over a class and a step
            here, mean x micro_batches / CLASSES: sums can be interpolated and still add up to all micro-batches.
    """

    low: float
    caps: np.ndarray
    values: np.ndarray

    @classmethod
    def build(
        cls,
        lengths: Lengths,
        samples: int,
        launch_tokens: float = math.inf,
        draws: int | None = None,
        seed: int = 0,
    ) -> PackingTable:
        """The table of a distribution of lengths.

        Args:
            lengths: Distribution of the samples' lengths.
            samples: Samples in a macro-batch (one rank's share of an optimizer step).
            launch_tokens: Fixed cost of a micro-batch that the planner reckons with, tokens; infinite: as few
                micro-batches as possible.
            draws: Macro-batches to average over; by default 2048 samples' worth, at least 8. With that, counts and
                padded tokens of up to 64 samples are within 4 % of the planner's mean (root mean square over budgets
                and caps), for lengths cut at up to 20 times their mean. Where many samples have exactly the same
                length, the planner's mean jumps at multiples of it; counts are then within 9 %.
            seed: Of the draws.
        """
        rng = np.random.default_rng(seed)
        draws = draws or max(8, 2048 // samples)
        # Over all draws, each equally likely part of the distribution is met once: the mean length is exact.
        shares = (rng.permutation(samples * draws).reshape(draws, samples) + 0.5) / (samples * draws)
        return cls.of_steps(lengths.quantile(shares), launch_tokens)

    @classmethod
    def of_steps(cls, steps: np.ndarray, launch_tokens: float = math.inf) -> PackingTable:
        """The table of these optimizer steps: the planner runs on each of them, for every budget and cap.

        Args:
            steps: (steps, samples) lengths of the samples of each step, tokens; rounded to whole ones.
            launch_tokens: See `build`.

        Raises:
            ValueError: a negative launch cost.
        """
        if not launch_tokens >= 0:
            raise ValueError(f"cannot plan with {launch_tokens=}")
        launch_tokens = float(launch_tokens)
        steps = -np.sort(-np.maximum(1.0, np.rint(steps)), axis=1)
        samples = steps.shape[1]
        high = math.ceil(math.log2(steps.max() * samples))
        low = high - STEP * (BUDGETS - 1)
        caps = _cap_grid(steps[:_TYPICAL], launch_tokens)
        values = np.empty((CAPS, BUDGETS, len(COLUMNS)), dtype=np.float32)
        _compiled(_tabulate)(steps, 2.0 ** (low + STEP * np.arange(BUDGETS)), caps, launch_tokens, values)
        return cls(low, caps, values)

    @staticmethod
    def stack(tables: Sequence[PackingTable]) -> StackedTables:
        """The tables of a run as arrays."""
        return StackedTables(
            np.stack([table.values for table in tables]),
            np.stack([table.caps for table in tables]),
            np.array([table.low for table in tables]),
        )

    def at(self, token_budget: float, micro_batch_cap: float = math.inf) -> dict[str, float]:
        """All columns by name, interpolated (see `read_all`)."""
        out = np.empty(len(COLUMNS))
        low = np.array([self.low])
        read_all(self.values[None], self.caps[None], low, STEP, 0, token_budget, micro_batch_cap, out)
        return dict(zip(COLUMNS, out.tolist(), strict=True))


def read_all(
    values: np.ndarray,
    caps: np.ndarray,
    low: np.ndarray,
    step: float,
    table: int,
    token_budget: float,
    micro_batch_cap: float,
    out: np.ndarray,
) -> None:
    """Every column of one of several stacked tables; compiles under numba.

    Linear in the logarithm of the budget and in the cap, the classes in what they add up to. A budget or cap outside
    the table counts as the nearest one inside.

    Args:
        values: Of `StackedTables`.
        caps: Of `StackedTables`.
        low: Of `StackedTables`.
        step: Of `StackedTables`.
        table: Which table.
        token_budget: Most tokens of a micro-batch; infinite or NaN: no limit.
        micro_batch_cap: Most samples of a micro-batch; infinite or NaN: no limit.
        out: (len(COLUMNS),) to be filled.
    """
    budget = token_budget if token_budget < 1e15 else 1e15  # NaN too
    x = (math.log2(max(1.0, budget)) - low[table]) / step
    x = min(max(x, 0.0), BUDGETS - 1.0)
    i = min(int(x), BUDGETS - 2)
    u = x - i
    # caps[j] is the largest one within the cap; caps are different integers, so at most cap of them come that far.
    cap = max(1.0, micro_batch_cap if micro_batch_cap < 1e15 else 1e15)
    j = int(min(cap, float(CAPS))) - 1
    while caps[table, j] > cap:
        j -= 1
    k = min(j + 1, CAPS - 1)
    if caps[table, j] < cap < caps[table, k]:
        v = (cap - caps[table, j]) / (caps[table, k] - caps[table, j])
        near_few, near_many, far_few, far_many = (1.0 - u) * (1.0 - v), (1.0 - u) * v, u * (1.0 - v), u * v
        for column in range(len(COLUMNS)):
            out[column] = (
                float(values[table, j, i, column]) * near_few
                + float(values[table, k, i, column]) * near_many
                + float(values[table, j, i + 1, column]) * far_few
                + float(values[table, k, i + 1, column]) * far_many
            )
    else:
        for column in range(len(COLUMNS)):
            near, far = float(values[table, j, i, column]), float(values[table, j, i + 1, column])
            out[column] = near * (1.0 - u) + far * u
    mean = CLASSES / out[0]
    for column in range(_FIRST_CLASS, len(COLUMNS)):
        out[column] *= mean


def _cap_grid(steps: np.ndarray, launch_tokens: float) -> np.ndarray:
    """(CAPS,) caps between which what a cap alone does to a step is best interpolated.

    Caps are added one by one where interpolation is most wrong: just below n, n / 2, n / 3, ... for n samples, where
    one more micro-batch is needed, and where long samples come to run alone.

    Args:
        steps: (steps, samples) lengths of some steps' samples, descending, tokens.
        launch_tokens: See `PackingTable.build`.
    """
    samples = steps.shape[1]
    every = np.arange(1.0, samples + 1.0)
    if samples <= CAPS:
        return np.pad(every, (0, CAPS - samples), mode="edge")
    curves = np.empty((2, samples))
    _compiled(_tabulate_caps)(steps, launch_tokens, curves)
    chosen = np.array([0, samples - 1])
    while chosen.size < CAPS:
        wrong = [np.abs(np.interp(every, every[chosen], curve[chosen]) / curve - 1.0) for curve in curves]
        worst = np.max(wrong, axis=0)
        if not worst.max() > 0:
            break
        chosen = np.union1d(chosen, worst.argmax())
    return np.pad(every[chosen], (0, CAPS - chosen.size), mode="edge")


@cache
def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    compiling.register(cut, fewest_first, _plan, _extent, _measure)
    return compiling.compiled(function)


def _plan(
    sizes: np.ndarray, budget: float, cap: float, launch_tokens: float, best: np.ndarray, plan: np.ndarray
) -> None:
    """Let `cut` fill `plan`; `best` is room to work in."""
    best[:] = np.inf
    best[0] = 0.0
    ceiling = np.full(sizes.shape[0], budget)
    launch = launch_tokens if launch_tokens < np.inf else fewest_first(sizes[0], sizes.shape[0])
    cut(sizes, best, ceiling, int(cap), launch, False, best, plan)


def _tabulate_caps(steps: np.ndarray, launch_tokens: float, curves: np.ndarray) -> None:
    """Fill `curves` (2, samples) with micro-batches and tokens of all steps under a cap of 1, 2, ... samples alone."""
    count, samples = steps.shape
    best = np.empty(samples + 1)
    plan = np.zeros(samples + 1, dtype=np.int64)
    curves[:] = 0.0
    for step in range(count):
        widest = samples + 1
        for cap in range(samples, 0, -1):
            if widest > cap:  # else the plan for a larger cap stays the best
                _plan(steps[step], np.inf, cap, launch_tokens, best, plan)
                widest = _extent(steps[step], plan)[0]
            end = samples
            while end > 0:
                curves[0, cap - 1] += 1.0
                curves[1, cap - 1] += steps[step, plan[end]] * (end - plan[end])
                end = plan[end]


def _tabulate(
    steps: np.ndarray, budgets: np.ndarray, caps: np.ndarray, launch_tokens: float, values: np.ndarray
) -> None:
    """Fill `values` (caps, budgets, columns) from steps (steps, samples) whose lengths descend; numba compiles it."""
    count, samples = steps.shape
    best = np.empty(samples + 1)
    keys = np.empty(count * samples, dtype=np.int64)
    # Of each cap (one more, which is never used) and step: the plan, as `cut` gives it, the samples of its widest
    # micro-batch and the tokens of its largest one of several samples.
    start = np.zeros((CAPS + 1, count, samples + 1), dtype=np.int64)
    widest = np.full((CAPS + 1, count), samples + 1)
    largest = np.full((CAPS + 1, count), np.inf)
    row = np.empty(len(COLUMNS))
    for i in range(BUDGETS - 1, -1, -1):
        for j in range(CAPS - 1, -1, -1):
            all_of_budget = all_of_cap = True
            for step in range(count):
                # A plan that keeps to a smaller budget or cap too stays the plan: no better one has come up.
                of_budget = largest[j, step] <= budgets[i]
                of_cap = widest[j + 1, step] <= caps[j]
                all_of_budget &= of_budget
                all_of_cap &= of_cap
                if of_budget:
                    continue
                if of_cap:
                    start[j, step] = start[j + 1, step]
                    widest[j, step], largest[j, step] = widest[j + 1, step], largest[j + 1, step]
                    continue
                _plan(steps[step], budgets[i], caps[j], launch_tokens, best, start[j, step])
                widest[j, step], largest[j, step] = _extent(steps[step], start[j, step])
            if all_of_budget:
                values[j, i] = values[j, i + 1]
            elif all_of_cap:
                values[j, i] = values[j + 1, i]
            else:
                _measure(steps, start[j], keys, row)
                values[j, i] = row


def _extent(sizes: np.ndarray, plan: np.ndarray):
    """Most samples of a micro-batch, and most tokens of one with several samples (0: there is none)."""
    widest, largest = 1, 0.0
    end = sizes.shape[0]
    while end > 0:
        begin = plan[end]
        if end - begin > 1:
            widest = max(widest, end - begin)
            largest = max(largest, sizes[begin] * (end - begin))
        end = begin
    return widest, largest


def _measure(steps: np.ndarray, start: np.ndarray, keys: np.ndarray, row: np.ndarray) -> None:
    """Fill one row (columns,) of the table from every step's plan `start`; `keys` is room to work in."""
    count, samples = steps.shape
    found = 0
    row[:] = 0.0
    for step in range(count):
        largest = 0.0
        end = samples
        while end > 0:
            begin = start[step, end]
            tokens = steps[step, begin] * (end - begin)
            largest = max(largest, tokens)
            row[2] += tokens
            row[3] += tokens * steps[step, begin]
            # Tokens and number of samples in one integer: its order is that of tokens.
            keys[found] = int(tokens) * (samples + 1) + end - begin
            found += 1
            end = begin
        row[4] += largest
        row[5] += steps[step, 0]
        row[1] += steps[step].sum()
    row[0] = found
    keys[:found].sort()
    for group in range(CLASSES):
        low, high = found * group / CLASSES, found * (group + 1) / CLASSES
        for k in range(int(low), math.ceil(high)):
            share = min(k + 1.0, high) - max(float(k), low)  # a micro-batch may belong to two classes
            tokens = float(keys[k] // (samples + 1))
            row[_FIRST_CLASS + group] += share * tokens
            row[_FIRST_CLASS + CLASSES + group] += share * tokens * tokens / (keys[k] % (samples + 1))
    for column in range(row.shape[0]):
        row[column] /= count
