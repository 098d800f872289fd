"""The oracle: what no policy can exceed on a simulated plant.

It knows the whole future of an episode, which in the simulated plant does not depend on the controls. Dynamic
programming over the sink's temperature, interval by interval from the end, in a plant that is better than the real one
wherever the real one is hard to bound:

- changing controls costs nothing, and there are no rate limits, dwell times or dead time;
- the run's memory model is exact and fills memory to what tensors can have at all; a layer less than that need be
  checkpointed; memory does not creep, the allocator's cache does not fragment;
- loading is as fast as all free cores make it, and loader workers cost nothing;
- budgets of a job need not be kept;
- the next temperature is rounded down to the grid.

Token budget, sample cap and power limit are searched on grids much finer than what they are good for (`SLACK` covers
the rest). Every out-of-memory event costs more than it can win at the weights that are admitted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..envs import simulation  # noqa: F401  # registers what is compiled below
from ..envs.objectives import OBJECTIVES, WORST
from ..envs.plants import physics
from ..envs.plants.assembly import Assembly
from ..envs.plants.compiling import compiled, register
from ..envs.plants.course import foresee, length_scale
from ..envs.plants.heat import activity_of, powered
from ..envs.plants.interval import TIME_NOISE, TIME_STREAM, data_wait
from ..envs.plants.packing import CLASSES, COLUMNS, read_all
from ..envs.plants.random_numbers import bell
from ..envs.plants.records import STATE
from ..envs.plants.simulated import CONTROLS, SCRATCH, reset_plant
from ..runtime.controls import CONTROL_FIELDS
from ..runtime.errors import ConfigError
from ..runtime.telemetry import TELEMETRY_FIELDS

Array = NDArray[np.float64]

SLACK = 0.005  #: added to an interval's bound for each unit of the weights of throughput, energy and cost
_BUDGETS, _CAPS = 256, 16  # grid points of token budget (a quarter of the table's step apart) and sample cap
_ACTIVITIES, _POWERS, _TEMPERATURES = 16, 48, 96
_MICRO_BATCHES, _REAL = COLUMNS.index("micro_batches"), COLUMNS.index("real_tokens")
_CLASS_TOKENS, _CLASS_LENGTHS = COLUMNS.index("class_tokens_0"), COLUMNS.index("class_token_lengths_0")
_COLUMNS = len(COLUMNS)
_POWER = CONTROL_FIELDS.index("power_limit_w")
_THREADS = CONTROL_FIELDS.index("cpu_threads")


def _least_seconds(c: Any, x: Any, values, caps, low, step, columns, front) -> float:
    """Shortest computing time of an optimizer step by activity of the device, over all budgets and caps.

    Writes `front` (_ACTIVITIES,): seconds of a step, infinite where there is none, by activity from low to high.
    Returns the real tokens of a step, which no plan changes.
    """
    for k in range(_ACTIVITIES):
        front[k] = math.inf
    scale = length_scale(c, x)
    available = c.usable - x.neighbour_memory * c.capacity
    real = 0.0
    for i in range(_BUDGETS):
        budget = 2.0 ** (low[c.table] + 0.25 * step * i)
        for j in range(_CAPS):
            if j > 0 and caps[c.table, j] == caps[c.table, j - 1]:
                continue
            read_all(values, caps, low, step, c.table, budget, caps[c.table, j], columns)
            real = columns[_REAL] * scale
            seconds = device = 0.0
            for k in range(CLASSES):
                tokens = columns[_CLASS_TOKENS + k] * scale
                length = columns[_CLASS_LENGTHS + k] * scale * scale / tokens
                share = physics.least_checkpointing(
                    c.memory, tokens, length, c.layers, c.least_fragmentation, available
                )
                share = max(0.0, share - 1.0 / c.layers)
                own = physics.device_seconds(c.time, tokens, length, share)
                host = c.time.launch + c.time.launch_g * share
                reading = c.time.weights + c.time.weights_g * share
                device += own
                seconds += math.sqrt(own * own + host * host + reading * reading)
            occupancy = min(1.0, device / seconds)
            k = min(int(occupancy * _ACTIVITIES), _ACTIVITIES - 1)
            total = columns[_MICRO_BATCHES] * seconds / CLASSES
            if total < front[k]:
                front[k] = total
    return real


def _bound(
    c: Any, s: Any, longest, values, caps, low, step, curves, weights, options, value, then, choice, path, work, out
) -> None:
    """Bound of every interval of an episode that stands after its first one, written to `out` (horizon,).

    Room to work in: `options` (horizon, _ACTIVITIES x _POWERS, 4) real tokens (-inf: no such option), seconds, activity
    and power limit of each; `value` (horizon + 1, _TEMPERATURES) best sum of rewards from an interval on, `then` the
    grid point reached with it, `choice` its reward; `path` (horizon, 7) conditions of each interval.
    """
    horizon = out.shape[0]
    columns, front = work[:_COLUMNS], work[_COLUMNS:]
    slack = SLACK * (weights[0] + weights[1] + weights[3])
    coldest = s.temperature_c
    for t in range(horizon):
        x = s.now
        ambient = c.ambient_c + x.ambient_c
        path[t, 0] = ambient
        path[t, 1] = c.thermal_resistance * x.cooling
        coldest = min(coldest, ambient + path[t, 1] * c.idle_w)
        real = _least_seconds(c, x, values, caps, low, step, columns, front)
        free = max(c.cores * (1.0 - x.host_load), 0.25)
        loading = c.samples * c.preparation_s * x.preparation * x.disk / max(free, 1.0)
        threads = 1.0
        if c.start[_THREADS] == c.start[_THREADS]:
            threads = 0.1 + 0.9 * c.cores / min(c.cores, free)
        noise = 1.0 + c.noise * TIME_NOISE * bell(s.key, TIME_STREAM, s.interval)
        for a in range(_ACTIVITIES):
            seconds = (front[a] * threads + c.time.optimizer) / (1.0 - x.neighbour_compute) * noise
            for p in range(_POWERS):
                option = options[t, a * _POWERS + p]
                option[0] = -math.inf
                if seconds == math.inf:
                    continue
                option[1] = seconds
                option[2] = activity_of(a / _ACTIVITIES)
                # From a twentieth of the design power to all of it; a device without a limit has one choice.
                option[3] = 0.05 + 0.95 * p / (_POWERS - 1.0)
                if c.start[_POWER] != c.start[_POWER]:
                    option[3] = 1.0
                    if p > 0:
                        continue
                option[0] = real
        s.interval += 1
        path[t, 2], path[t, 3], path[t, 4] = loading, x.straggler, x.network
        path[t, 5] = x.evaluation * c.interval_s
        foresee(c, s, longest, s.interval + 1)
    spread = max(c.throttle_c - coldest, 1.0) / (_TEMPERATURES - 1.0)
    for k in range(_TEMPERATURES):
        value[horizon, k] = 0.0
    for t in range(horizon - 1, -1, -1):
        ambient, resistance, loading = path[t, 0], path[t, 1], path[t, 2]
        for k in range(_TEMPERATURES):
            value[t, k] = -math.inf
        for o in range(options.shape[1]):
            option = options[t, o]
            if option[0] == -math.inf:
                continue
            unthrottled = True
            total = watts = wall = 0.0
            for k in range(_TEMPERATURES):
                temperature = coldest + spread * k
                if k == 0 or not unthrottled:
                    slow, watts, _ = powered(
                        c, curves, option[2], option[3], option[1], loading, 1.0, temperature, ambient, resistance
                    )
                    # Once heat plays a part it depends on where one starts; without it nothing does.
                    unthrottled = k == 0 and _never_hot(
                        c, curves, option[2], option[3], option[1], loading, ambient, resistance
                    )
                    compute = option[1] * slow * c.imbalance * path[t, 3] + c.synchronisation_s * path[t, 4]
                    step_time = compute + data_wait(loading, compute, 1.0)
                    wall = max(c.interval_s, path[t, 5] + step_time)
                    steps = (wall - path[t, 5]) / step_time
                    computing = min(1.0, (steps * compute + path[t, 5]) / wall)
                    watts = c.idle_w + (watts - c.idle_w) * computing
                    tokens = steps * option[0] * c.ranks
                    energy = watts * wall * c.ranks
                    price = wall * c.price_s + energy * c.price_j
                    total = slack + weights[0] * max(WORST, math.log(tokens / wall / c.reference_tokens_per_s))
                    total += weights[1] * max(WORST, -math.log(energy / tokens / c.reference_energy))
                    total += weights[3] * max(WORST, -math.log(price / tokens / c.reference_price))
                settled = ambient + resistance * watts
                reached = settled + (temperature - settled) * math.exp(-wall / c.sink_seconds)
                reached = min(reached, c.throttle_c)
                grid = min(max(math.floor((reached - coldest) / spread), 0), _TEMPERATURES - 1)
                if total + value[t + 1, grid] > value[t, k]:
                    value[t, k] = total + value[t + 1, grid]
                    then[t, k] = grid
                    choice[t, k] = total
    k = path[0, 6]
    where = min(max(math.floor((k - coldest) / spread), 0), _TEMPERATURES - 1)
    for t in range(horizon):
        out[t] = choice[t, where]
        where = int(then[t, where])


def _never_hot(c: Any, curves, activity, limit, compute, loading, ambient, resistance) -> bool:
    """Whether heat plays no part at any temperature."""
    _, _, throttled = powered(c, curves, activity, limit, compute, loading, 1.0, c.throttle_c, ambient, resistance)
    return throttled == 0.0


register(_least_seconds, _never_hot, _bound)


def _bounds(
    first, last, constants, keys, scenarios, state, longest, values, caps, low, step, curves, weights,
    in_force, pending, row, scratch, options, value, then, choice, path, work, out,
):  # fmt: skip
    for i in range(first, last):
        s = state[0]
        c = constants[scenarios[i]]
        reset_plant(
            c, s, keys[i], scenarios[i], in_force, pending, values, caps, low, step, curves, longest, row, scratch
        )
        path[0, 6] = s.temperature_c
        s.creep = 0.0
        _bound(
            c, s, longest[scenarios[i]], values, caps, low, step, curves, weights, options, value, then, choice, path,
            work, out[i],
        )  # fmt: skip


_bounds_compiled = compiled(_bounds, allocates=False)


def upper_bound(
    assembly: Assembly,
    keys: Sequence[int] | NDArray[np.uint64],
    scenarios: Sequence[int] | NDArray[np.int64],
    weights: Sequence[float] | Array,
    horizon: int = 120,
) -> Array:
    """Rewards of each interval whose sum over an episode no policy exceeds.

    Args:
        assembly: Scenarios.
        keys: Of k episodes.
        scenarios: Their indices in the assembly.
        weights: One for each of `OBJECTIVES`.
        horizon: Intervals of an episode after the first one, which runs at the starting controls.

    Returns:
        Shape ``(k, horizon)``.

    Raises:
        ConfigError: weights with which running out of memory could pay: safety below half of the others' sum.
    """
    given = _checked(weights)
    k = len(keys)
    out = np.empty((k, horizon))
    packed = assembly.packing
    _bounds_compiled(
        0, k, assembly.constants, np.asarray(keys, dtype=np.uint64), np.asarray(scenarios, dtype=np.int64),
        np.zeros(1, STATE), assembly.longest, packed.values, packed.caps, packed.low, packed.step, assembly.curves,
        given,
        np.empty(CONTROLS), np.empty(CONTROLS), np.empty(len(TELEMETRY_FIELDS)), np.empty(SCRATCH),
        np.empty((horizon, _ACTIVITIES * _POWERS, 4)), np.empty((horizon + 1, _TEMPERATURES)),
        np.empty((horizon, _TEMPERATURES)), np.empty((horizon, _TEMPERATURES)), np.empty((horizon, 7)),
        np.empty(_COLUMNS + _ACTIVITIES), out,
    )  # fmt: skip
    return out


def _checked(weights: Sequence[float] | Array) -> Array:
    given = np.asarray(weights, dtype=np.float64)
    if given.shape != (len(OBJECTIVES),):
        raise ConfigError(f"weights={weights!r} must have {len(OBJECTIVES)} numbers: {', '.join(OBJECTIVES)}")
    if given[2] < 0.5 * (given[0] + given[1] + given[3]):
        raise ConfigError(
            f"weights={given.tolist()}: with safety below half of the others' sum running out of memory could pay, and "
            "the bound would not hold; raise the weight of safety"
        )
    return given
