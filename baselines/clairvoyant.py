"""A clairvoyant policy for the simulated plant: what can be achieved with the future known.

At every interval it tries some hundred settings from where the plant stands, holds each for some intervals of the true
future, and takes the best. What lies between it and the oracle's bound is not known to be reachable, nor to be out of
reach.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..envs import simulation  # noqa: F401  # registers what is compiled below
from ..envs.objectives import OBJECTIVES, reward_vector
from ..envs.plants.assembly import Assembly
from ..envs.plants.compiling import compiled, register
from ..envs.plants.course import foresee
from ..envs.plants.interval import run_interval
from ..envs.plants.records import STATE
from ..envs.plants.simulated import CONTROLS, SCRATCH, reset_plant, set_controls
from ..runtime.telemetry import TELEMETRY_FIELDS

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Clairvoyant:
    """What the clairvoyant policy did: shapes ``(k, horizon)`` and ``(k, horizon, objectives)``."""

    rewards: Array
    terms: Array


def _copy_row(source, target):
    for i in range(source.shape[0]):
        target[i] = source[i]


register(_copy_row)


def _clairvoyant(
    constants, keys, scenarios, candidates, holding, state, trial, longest, values, caps, low, step, curves, weights,
    in_force, pending, tried_force, tried_pending, asked, row, terms, work, rewards, out_terms,
):  # fmt: skip
    horizon = rewards.shape[1]
    previous, scratch = work[:CONTROLS], work[CONTROLS:]
    for e in range(keys.shape[0]):
        s = state[0]
        c = constants[scenarios[e]]
        mine = longest[scenarios[e]]
        reset_plant(c, s, keys[e], scenarios[e], in_force, pending, values, caps, low, step, curves, longest, row, work)
        for t in range(horizon):
            best, best_value = 0, -math.inf
            count = min(holding, horizon - t)
            for k in range(candidates.shape[1] + 1):
                trial[0] = state[0]
                q = trial[0]
                _copy_row(in_force, tried_force)
                _copy_row(pending, tried_pending)
                if k < candidates.shape[1]:
                    _copy_row(candidates[e, k], asked)
                else:
                    _copy_row(pending, asked)  # all stays as it is
                total = 0.0
                for _ in range(count):
                    set_controls(c, asked, tried_force, tried_pending, previous)
                    run_interval(
                        c, q, tried_force, previous, tried_pending, values, caps, low, step, curves, row, scratch
                    )
                    foresee(c, q, mine, q.interval + 1)
                    reward_vector(c, q, tried_force, terms)
                    for j in range(terms.shape[0]):
                        total += weights[j] * terms[j]
                if total > best_value:
                    best, best_value = k, total
            if best < candidates.shape[1]:
                _copy_row(candidates[e, best], asked)
            else:
                _copy_row(pending, asked)
            set_controls(c, asked, in_force, pending, previous)
            run_interval(c, s, in_force, previous, pending, values, caps, low, step, curves, row, scratch)
            foresee(c, s, mine, s.interval + 1)
            reward_vector(c, s, in_force, terms)
            rewards[e, t] = 0.0
            for j in range(terms.shape[0]):
                rewards[e, t] += weights[j] * terms[j]
                out_terms[e, t, j] = terms[j]


_clairvoyant_compiled = compiled(_clairvoyant, allocates=False)


def _candidates(c: Any) -> Array:
    """Settings that the clairvoyant policy tries, shape ``(candidates, controls)``; NaN where it asks for nothing."""
    budgets = c["mean_length"] * 2.0 ** np.arange(-0.5, 7.5, 0.5)
    accelerator = c["accelerator"] > 0
    powers = c["power_w"] * np.array([0.45, 0.6, 0.7, 0.8, 1.0]) if accelerator else [math.nan]
    workers = [w for w in (1.0, 3.0, 8.0) if w == 1.0 or w <= c["cores"]]
    rows = []
    for budget in budgets:
        for target in (0.75, 0.85, 0.9):
            for power in powers:
                rows += [(budget, math.nan, target, math.nan, w, power, math.nan) for w in workers]
    return np.array(rows)


def clairvoyant(
    assembly: Assembly,
    keys: Sequence[int] | NDArray[np.uint64],
    scenarios: Sequence[int] | NDArray[np.int64],
    weights: Sequence[float] | Array,
    horizon: int = 120,
    holding: int = 3,
) -> Clairvoyant:
    """Control episodes with the future known; arguments as in `oracle.upper_bound`.

    Args:
        assembly: .
        keys: .
        scenarios: .
        weights: .
        horizon: .
        holding: Intervals of the true future for which a setting is judged.
    """
    given = np.asarray(weights, dtype=np.float64)
    k = len(keys)
    chosen = np.asarray(scenarios, dtype=np.int64)
    result = Clairvoyant(np.empty((k, horizon)), np.empty((k, horizon, len(OBJECTIVES))))
    packed = assembly.packing
    for i in range(k):
        options = _candidates(assembly.constants[chosen[i]])[None]
        _clairvoyant_compiled(
            assembly.constants, np.asarray(keys, dtype=np.uint64)[i : i + 1], chosen[i : i + 1], options, holding,
            np.zeros(1, STATE), np.zeros(1, STATE), assembly.longest, packed.values, packed.caps, packed.low,
            packed.step, assembly.curves, given, np.empty(CONTROLS), np.empty(CONTROLS), np.empty(CONTROLS),
            np.empty(CONTROLS), np.empty(CONTROLS), np.empty(len(TELEMETRY_FIELDS)), np.empty(len(OBJECTIVES)),
            np.empty(SCRATCH),
            result.rewards[i : i + 1], result.terms[i : i + 1],
        )  # fmt: skip
    return result
