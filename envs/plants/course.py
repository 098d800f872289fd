"""The course of an episode that no control changes: disturbances and the longest samples, one interval ahead.

Scalar functions, interpreted or compiled.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..scenarios import disturbances
from .random_numbers import uniform
from .records import NODES

_LONGEST, _HIDDEN_LONGEST = 20, 21  # random streams


def longest_sample(quantiles: np.ndarray, chance: float) -> float:
    """Length of an interval's longest sample, tokens.

    Args:
        quantiles: (NODES,) its quantiles at equal steps from 0 to 1.
        chance: Uniform on (0, 1).
    """
    y = chance * (NODES - 1.0)
    i = min(int(y), NODES - 2)
    return quantiles[i] + (quantiles[i + 1] - quantiles[i]) * (y - i)


def foresee(c: Any, s: Any, longest: np.ndarray, interval: int) -> None:
    """Move the conditions on: the interval to come is the one that was foreseen, and another is drawn after it.

    Args:
        c: Constants of the scenario.
        s: State; its `then` becomes `now`.
        longest: (2, NODES) quantiles of the longest of the samples that the preview shows, and of the others.
        interval: Number of the interval that is drawn, from 0.
    """
    x = s.then
    _copy_conditions(x, s.now)
    disturbances.advance(c.disturbances, s.memory, x, s.key, interval)
    previewed = longest_sample(longest[0], uniform(s.key, _LONGEST, interval))
    all_samples = previewed
    if c.preview_share < 1.0:
        all_samples = max(previewed, longest_sample(longest[1], uniform(s.key, _HIDDEN_LONGEST, interval)))
    x.longest = max(1.0, math.floor(min(all_samples * x.length_scale, c.max_length)))
    x.previewed = max(1.0, math.floor(min(previewed * x.length_scale, c.max_length)))


def _copy_conditions(source: Any, target: Any) -> None:
    target.length_scale = source.length_scale
    target.preparation = source.preparation
    target.disk = source.disk
    target.network = source.network
    target.straggler = source.straggler
    target.ambient_c = source.ambient_c
    target.cooling = source.cooling
    target.neighbours = source.neighbours
    target.neighbour_memory = source.neighbour_memory
    target.neighbour_compute = source.neighbour_compute
    target.host_load = source.host_load
    target.evaluation = source.evaluation
    target.evaluation_memory = source.evaluation_memory
    target.creep = source.creep
    target.longest = source.longest
    target.previewed = source.previewed


def length_scale(c: Any, x: Any) -> float:
    """Lengths of the samples relative to those of the packing table; a mean close to `max_length` cannot grow."""
    return min(x.length_scale, max(1.0, 0.9 * c.max_length / c.mean_length))


#: For `compiling.register`, callees before callers.
FUNCTIONS = (longest_sample, length_scale, _copy_conditions, foresee)
