"""How far a trainer's metrics have come: to forget what a failed attempt logged, to weigh what its parts logged.

A trainer keeps running means (sum `state` and `count`) and lists of values, each by name.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class RunningMean(Protocol):
    """A mean as ms-swift keeps it."""

    state: float
    count: int


@dataclass(frozen=True, slots=True)
class MetricMark:
    """How far the metrics had come at some moment."""

    means: dict[str, tuple[float, int]]  #: sum and count of every running mean
    lengths: dict[str, int]  #: values so far of every list

    @classmethod
    def of(cls, means: Mapping[str, RunningMean], lists: Mapping[str, list[float]]) -> MetricMark:
        """The present moment."""
        return cls({k: (m.state, m.count) for k, m in means.items()}, {k: len(v) for k, v in lists.items()})

    def restore(self, means: MutableMapping[str, RunningMean], lists: MutableMapping[str, list[float]]) -> None:
        """Forget what was added since."""
        for key in list(means):
            if key in self.means:
                means[key].state, means[key].count = self.means[key]
            else:
                del means[key]
        for key in list(lists):
            if key in self.lengths:
                del lists[key][self.lengths[key] :]
            else:
                del lists[key]


def weigh_means(means: Mapping[str, RunningMean], marks: Sequence[MetricMark], weights: Sequence[float]) -> None:
    """Let what was added between `marks[i]` and `marks[i + 1]` count `weights[i]` times."""
    for key, metric in means.items():
        path = np.array([mark.means.get(key, (0.0, 0)) for mark in marks], dtype=np.float64)
        state, count = path[0] + np.asarray(weights) @ np.diff(path, axis=0)
        metric.state, metric.count = float(state), round(count)
