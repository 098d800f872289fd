"""What packing by length costs on average, for any token budget and micro-batch cap: a table built once.

The hook sorts each optimizer step's samples and cuts them into micro-batches (`runtime.planner.pack`). A simulated
control interval holds dozens of such steps; their mean is read from a table over budget and cap, which was made by
running the planner itself on drawn macro-batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...runtime.planner import pack
from .lengths import Lengths

#: Columns of the table, all means over optimizer steps of one rank.
COLUMNS = (
    "micro_batches",  # micro-batches in a step
    "real_tokens",  # tokens without padding
    "padded_tokens",  # tokens computed
    "token_lengths",  # sum over micro-batches of tokens x longest sample (attention)
    "largest_tokens",  # tokens of the step's largest micro-batch
    "longest",  # the step's longest sample, tokens
)


@dataclass(frozen=True, eq=False)
class PackingTable:
    """Means over optimizer steps, by token budget and micro-batch cap.

    Lengths that are all `s` times as long need an `s` times as large budget: read the table at budget / s, and
    multiply tokens by s (token_lengths by s^2).

    Attributes:
        low: log2 of the smallest budget.
        step: step in log2 of the budget.
        caps: micro-batch caps, ascending from 1; the last one holds every sample.
        values: shape (budgets, caps, len(COLUMNS)), float64.
    """

    low: float
    step: float
    caps: np.ndarray
    values: np.ndarray

    @classmethod
    def build(cls, lengths: Lengths, samples: int, draws: int | None = None, seed: int = 0) -> PackingTable:
        """Run the planner over grids of budget and cap.

        Args:
            lengths: Distribution of the samples' lengths.
            samples: Samples in a macro-batch (one rank's share of an optimizer step).
            draws: Macro-batches to average over, the same ones for every budget and cap; by default 512 samples'
                worth, at least 8. With that, counts and padded tokens are within 4 % of the planner's mean (root
                mean square over budgets and caps; at worst 10 %) for lengths cut at up to 20 times their mean.
            seed: Of the draws.
        """
        rng = np.random.default_rng(seed)
        draws = draws or max(8, 512 // samples)
        # Over all draws, each equally likely part of the distribution is met once: the mean length is exact.
        shares = (rng.permutation(samples * draws).reshape(draws, samples) + 0.5) / (samples * draws)
        steps = np.maximum(1, np.rint(lengths.quantile(shares))).astype(int).tolist()
        low = math.floor(math.log2(max(1.0, float(lengths.values[0]))))
        high = math.ceil(math.log2(lengths.longest * samples)) + 1
        count = 4 * (high - low) + 1
        # The smallest cap for each number of micro-batches, and, where that matters, the largest: a cap of 5 lets 16
        # samples run as 1 + 5 + 5 + 5 with an outlier alone, a cap of 4 only as 4 + 4 + 4 + 4.
        smallest = {math.ceil(samples / count) for count in range(1, samples + 1)}
        caps = sorted(smallest | ({cap - 1 for cap in smallest if cap > 1} if samples <= 32 else set()))
        values = np.empty((count, len(caps), len(COLUMNS)))
        for i in range(count):
            for j, cap in enumerate(caps):
                plans = [pack(step, token_budget=2.0 ** (low + i / 4), micro_batch_cap=cap) for step in steps]
                values[i, j] = np.mean(
                    [
                        (
                            len(plan),
                            sum(step),
                            sum(batch.tokens for batch in plan),
                            sum(batch.tokens * batch.length for batch in plan),
                            max(batch.tokens for batch in plan),
                            max(step),
                        )
                        for step, plan in zip(steps, plans, strict=True)
                    ],
                    axis=0,
                )
        return cls(float(low), 0.25, np.array(caps, dtype=float), values)

    def at(self, token_budget: float, micro_batch_cap: float = math.inf) -> dict[str, float]:
        """Means by column name, interpolated."""
        return {
            name: interpolate(self.values, self.caps, self.low, self.step, token_budget, micro_batch_cap, column)
            for column, name in enumerate(COLUMNS)
        }


def interpolate(
    values: np.ndarray,
    caps: np.ndarray,
    low: float,
    step: float,
    token_budget: float,
    micro_batch_cap: float,
    column: int,
) -> float:
    """One entry of a `PackingTable`, linear in the logarithm of the budget and in the cap; compiles under numba.

    A budget or cap outside the table counts as the nearest one inside.
    """
    budgets = values.shape[0]
    x = (math.log2(max(1.0, min(token_budget, 1e15))) - low) / step
    x = min(max(x, 0.0), budgets - 1.0)
    i = min(int(x), budgets - 2)
    u = x - i
    cap = min(max(micro_batch_cap, 1.0), caps[-1])
    j = 0
    while j < caps.shape[0] - 2 and caps[j + 1] <= cap:
        j += 1
    k = min(j + 1, caps.shape[0] - 1)
    v = (cap - caps[j]) / (caps[k] - caps[j]) if k > j else 0.0
    near = values[i, j, column] * (1.0 - v) + values[i, k, column] * v
    far = values[i + 1, j, column] * (1.0 - v) + values[i + 1, k, column] * v
    return near * (1.0 - u) + far * u
