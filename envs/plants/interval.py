"""One control interval of a simulated training: scalar functions, interpreted or compiled.

The state carries what makes control more than a choice of settings: fragmentation of the allocator's cache, which
changing budgets build up and a costly flush removes; the heat of the sink; leaked memory; what the run's own memory
model believes. Symbols and equations of time, memory and power: `physics`. What is added here and has no measurement
behind it is marked *assumed*.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...runtime.controls import CONTROL_FIELDS
from ...runtime.telemetry import TELEMETRY_FIELDS
from ..scenarios import disturbances
from . import physics
from .course import foresee, length_scale
from .heat import activity_of, powered
from .memory_belief import CAUTION_FADES, MOST_CAUTION, belief, fitting_tokens, least_checkpointing, more_careful
from .packing import CLASSES, COLUMNS, read_all
from .random_numbers import bell, uniform

_BUDGET = CONTROL_FIELDS.index("token_budget")
_CAP = CONTROL_FIELDS.index("micro_batch_cap")
_TARGET = CONTROL_FIELDS.index("memory_target")
_FRACTION = CONTROL_FIELDS.index("checkpoint_fraction")
_WORKERS = CONTROL_FIELDS.index("num_workers")
_POWER = CONTROL_FIELDS.index("power_limit_w")
_THREADS = CONTROL_FIELDS.index("cpu_threads")
_CONTROLS = len(CONTROL_FIELDS)

_MICRO_BATCHES = COLUMNS.index("micro_batches")
_REAL = COLUMNS.index("real_tokens")
_PADDED = COLUMNS.index("padded_tokens")
_LARGEST = COLUMNS.index("largest_tokens")
_CLASS_TOKENS = COLUMNS.index("class_tokens_0")
_CLASS_LENGTHS = COLUMNS.index("class_token_lengths_0")
_COLUMNS = len(COLUMNS)

# Telemetry columns.
_T_TIME = TELEMETRY_FIELDS.index("time_s")
_T_INTERVAL = TELEMETRY_FIELDS.index("interval_s")
_T_STEPS = TELEMETRY_FIELDS.index("optimizer_steps")
_T_SAMPLES = TELEMETRY_FIELDS.index("samples")
_T_REAL = TELEMETRY_FIELDS.index("real_tokens")
_T_PADDED = TELEMETRY_FIELDS.index("padded_tokens")
_T_SPEED = TELEMETRY_FIELDS.index("tokens_per_s")
_T_STEP_TIME = TELEMETRY_FIELDS.index("step_time_s")
_T_WAIT = TELEMETRY_FIELDS.index("data_wait_fraction")
_T_MICRO_BATCHES = TELEMETRY_FIELDS.index("micro_batches_per_step")
_T_LARGEST = TELEMETRY_FIELDS.index("largest_micro_batch")
_T_UTILIZATION = TELEMETRY_FIELDS.index("gpu_utilization")
_T_FILL = TELEMETRY_FIELDS.index("fill")
_T_PEAK = TELEMETRY_FIELDS.index("memory_peak_fraction")
_T_DEVICE = TELEMETRY_FIELDS.index("memory_device_fraction")
_T_CREEP = TELEMETRY_FIELDS.index("memory_creep")
_T_RETRIES = TELEMETRY_FIELDS.index("allocation_retries")
_T_OOM = TELEMETRY_FIELDS.index("oom_count")
_T_POWER = TELEMETRY_FIELDS.index("power_w")
_T_ENERGY = TELEMETRY_FIELDS.index("energy_j")
_T_TEMPERATURE = TELEMETRY_FIELDS.index("temperature_c")
_T_CLOCK = TELEMETRY_FIELDS.index("clock_fraction")
_T_THROTTLED = TELEMETRY_FIELDS.index("throttled")
_T_NEIGHBOURS = TELEMETRY_FIELDS.index("neighbours")
_T_HOST = TELEMETRY_FIELDS.index("host_cpu_fraction")
_T_OTHERS_HOST = TELEMETRY_FIELDS.index("neighbour_cpu_fraction")
_T_UPCOMING_MEAN = TELEMETRY_FIELDS.index("upcoming_mean")
_T_UPCOMING_P95 = TELEMETRY_FIELDS.index("upcoming_p95")
_T_UPCOMING_MAX = TELEMETRY_FIELDS.index("upcoming_max")
_T_FIT_0 = TELEMETRY_FIELDS.index("fit_tokens_uncheckpointed")
_T_FIT_1 = TELEMETRY_FIELDS.index("fit_tokens_checkpointed")
_T_FRACTION = TELEMETRY_FIELDS.index("checkpoint_fraction")
_T_PROGRESS = TELEMETRY_FIELDS.index("job_progress")
_T_BUDGET_USED = TELEMETRY_FIELDS.index("energy_budget_used")
_T_TEMPERATURE_LIMIT = TELEMETRY_FIELDS.index("temperature_limit_c")
_T_CONTROLS = np.array([TELEMETRY_FIELDS.index(name) for name in CONTROL_FIELDS])
_TELEMETRY = len(TELEMETRY_FIELDS)

# Random streams beyond those of the disturbances (1 to 15) and of the longest samples (20, 21).
_PREVIEW, TIME_STREAM, _POWER_NOISE, _MODEL, _SILENCE, _START = 22, 23, 24, 25, 26, 27

_MODEL_LEARNS = 0.15  # share of the memory model's error that an interval's peaks remove (assumed)
_MODEL_NOISE = 0.02  # what an interval adds to it, relative to what it learns: a deviation of 0.006 remains
_USUAL_GROWTH, _CHANGE_GROWTH = 0.05, 0.4  # fragmentation: share of the way an interval, and an octave (assumed)
TIME_NOISE = 0.005  # of the mean over an interval; single runs repeat within 0.4 % (ms-swift's tables)
_POWER_SIGMA = 0.025  # of the power sensor (Zeus's traces at 2 s: 2-3 %)
MEMORY_ALARM = 0.95  #: peak of all processes that counts as a violation, fraction of capacity
_PACE_SLACK = 0.02  # share of an energy budget that may be used ahead of time
MEMORY_CAP = 0.90  #: of all processes, fraction of capacity: what the run itself plans for (`MemoryWatch`)
_SMOOTH = 0.1  # data wait starts this share of the compute time before loading becomes slower
_RETUNED = 0.1  # octaves of budget that need no retuning


def begin(c: Any, s: Any, longest: np.ndarray, key: np.uint64, scenario: int) -> None:
    """Start an episode: cold sink, empty cache, nothing learned, the first two intervals' conditions drawn."""
    s.key = key
    s.scenario = scenario
    s.interval = 0
    s.time_s = s.energy_j = s.creep = s.ended = 0.0
    s.tokens_per_s = s.interval_j = s.real_tokens = s.wall_s = s.ooms = s.memory_share = s.neighbour_memory = 0.0
    s.fragmentation = c.least_fragmentation
    s.caution = 1.0
    s.memory_error = c.memory_error
    disturbances.calm(s.memory)
    foresee(c, s, longest, 0)
    foresee(c, s, longest, 1)
    s.temperature_c = c.ambient_c + s.now.ambient_c + (5.0 + 10.0 * uniform(key, _START, 0))


def passes(
    c: Any,
    s: Any,
    believed: float,
    columns: np.ndarray,
    scale: float,
    fixed: float,
    target: float,
    launch: float,
    out: np.ndarray,
) -> None:
    """Mean over a step's micro-batches, by the table's classes: written to `out`.

    Args:
        c: Constants.
        s: State.
        believed: See `belief`.
        columns: (len(COLUMNS),) of the packing table.
        scale: Lengths relative to the table's.
        fixed: Checkpointed share of the layers, NaN: the least for `target`.
        target: Fraction of capacity.
        launch: Host time, relative.
        out: (3,) seconds of a micro-batch, device-bound seconds of it, token-weighted checkpointed share.
    """
    seconds = device = share = weight = 0.0
    for k in range(CLASSES):
        tokens = columns[_CLASS_TOKENS + k] * scale
        length = columns[_CLASS_LENGTHS + k] * scale * scale / tokens
        checkpointed = least_checkpointing(c, s, believed, tokens, length, fixed, target)
        own = physics.device_seconds(c.time, tokens, length, checkpointed)
        host = (c.time.launch + c.time.launch_g * checkpointed) * launch
        reading = c.time.weights + c.time.weights_g * checkpointed
        device += own
        seconds += math.sqrt(own * own + host * host + reading * reading)
        share += checkpointed * tokens
        weight += tokens
    out[0] = seconds / CLASSES
    out[1] = device / CLASSES
    out[2] = share / weight


def data_wait(loading: float, compute: float, workers: float) -> float:
    """Seconds an optimizer step waits for its samples, which workers prepare while the device computes."""
    if workers <= 0.0:
        return loading
    excess, smooth = loading - compute, _SMOOTH * compute
    return 0.5 * (excess + math.sqrt(excess * excess + smooth * smooth))


def run_interval(
    c: Any,
    s: Any,
    controls: np.ndarray,
    previous: np.ndarray,
    pending: np.ndarray,
    values: np.ndarray,
    caps: np.ndarray,
    low: np.ndarray,
    step: float,
    curves: np.ndarray,
    row: np.ndarray,
    work: np.ndarray,
) -> None:
    """Train for one control interval under `s.now` and write its telemetry, but for what comes next (`tell_upcoming`).

    Args:
        c: Constants of the scenario.
        s: State, moved on.
        controls: (controls,) in force during the interval, NaN = no such actuator.
        previous: (controls,) in force before.
        pending: (controls,) in force in the next interval, which is what telemetry tells.
        values: Packing tables, see `packing.StackedTables`, as are `caps`, `low` and `step`.
        caps: .
        low: .
        step: .
        curves: See `under_limit`.
        row: (telemetry fields,) written.
        work: (len(COLUMNS) + 3,) scratch.
    """
    x = s.now
    key, interval = s.key, s.interval
    scale = length_scale(c, x)
    target, fixed, workers = controls[_TARGET], controls[_FRACTION], controls[_WORKERS]

    # What moving the actuators costs.
    change = lost = 0.0
    if controls[_BUDGET] != previous[_BUDGET]:
        change = abs(math.log2(controls[_BUDGET] / previous[_BUDGET]))
        if change > _RETUNED:
            lost = c.retune_s * min(1.0, change)
    if workers != previous[_WORKERS] and workers > 0.0:
        lost += c.respawn_s
    built_up = c.usual_fragmentation
    built_up += (c.most_fragmentation - built_up) * min(1.0, change)
    if built_up > s.fragmentation:
        s.fragmentation += (built_up - s.fragmentation) * min(1.0, _USUAL_GROWTH + _CHANGE_GROWTH * change)

    # Memory: the longest sample decides, alone or with as many of its like as the budget allows. What the run's memory
    # model predicts not to fit beside the neighbours is split beforehand; a longer sample runs alone.
    longest = x.longest
    room = max(MEMORY_CAP - x.neighbour_memory, 0.0)
    target = min(target, room)
    available = c.usable - (x.neighbour_memory + s.creep) * c.capacity
    columns = work[:_COLUMNS]
    believed = belief(s)
    most_checkpointed = fixed if fixed == fixed else 1.0
    # A neighbour that has just come meets one micro-batch that was planned without it.
    surprised = x.neighbour_memory > s.neighbour_memory
    before = max(MEMORY_CAP - s.neighbour_memory, 0.0) if surprised else room
    ceiling = fitting_tokens(c, s, believed, longest, most_checkpointed, before)
    budget = max(min(controls[_BUDGET], ceiling), 1.0)
    read_all(values, caps, low, step, c.table, budget / scale, controls[_CAP], columns)
    tokens = max(longest, min(budget, columns[_LARGEST] * scale))
    planned = min(controls[_TARGET], before)
    checkpointed = least_checkpointing(c, s, believed, tokens, longest, fixed, planned)
    ooms = 0.0
    while physics.runs_out_of_memory(c.memory, tokens, longest, checkpointed, c.least_fragmentation, available):
        ooms += 1.0
        if tokens <= longest and checkpointed >= 1.0:
            s.ended = 1.0
            break
        if not surprised:
            # The memory model takes the failure as a measurement: at most twice as careful as before.
            more = more_careful(c, believed, tokens, longest, checkpointed, available)
            s.caution = min(s.caution * more, MOST_CAUTION)
            believed = belief(s)
        surprised = False
        if tokens > longest:
            ceiling = fitting_tokens(c, s, believed, longest, most_checkpointed, room)
            tokens = max(longest, min(0.5 * tokens, ceiling))
            checkpointed = max(checkpointed, least_checkpointing(c, s, believed, tokens, longest, fixed, target))
        else:
            checkpointed = 1.0
    if ooms > 0.0 or before != room:
        # From then on the interval is planned with what has been learned.
        ceiling = fitting_tokens(c, s, believed, longest, most_checkpointed, room)
        budget = max(min(controls[_BUDGET], ceiling), 1.0)
        read_all(values, caps, low, step, c.table, budget / scale, controls[_CAP], columns)
    s.neighbour_memory = x.neighbour_memory
    micro_batches = columns[_MICRO_BATCHES]
    real, padded = columns[_REAL] * scale, columns[_PADDED] * scale

    # The host: cores are shared by launching (or, on a CPU, computing), loader workers and other programs.
    free = max(c.cores * (1.0 - x.host_load), 0.25)
    crowding = max(1.0, (1.0 + workers) / free)
    means = work[_COLUMNS:]
    passes(c, s, believed, columns, scale, fixed, target, crowding, means)
    compute = micro_batches * means[0]
    occupancy = min(1.0, means[1] / means[0])
    computing_threads = 1.0
    if controls[_THREADS] == controls[_THREADS]:
        # A CPU run: threads beyond the free cores do not help (Amdahl with a serial tenth, assumed).
        computing_threads = min(controls[_THREADS], free)
        compute *= 0.1 + 0.9 * c.cores / computing_threads
    compute = (compute + c.time.optimizer) / (1.0 - x.neighbour_compute)
    compute *= 1.0 + c.noise * TIME_NOISE * bell(key, TIME_STREAM, interval)
    lost += ooms * (c.flush_s + 0.5 * compute)
    allocated = physics.allocated_bytes(c.memory, tokens, longest, checkpointed)
    reserved = physics.reserved_bytes(c.memory, tokens, longest, checkpointed, s.fragmentation, 1e18)
    evaluation = c.memory.static + x.evaluation_memory * c.capacity if x.evaluation > 0.0 else 0.0
    evaluating = x.evaluation * c.interval_s
    planned_for = max(room - s.creep, 0.0) * c.capacity
    if evaluation > planned_for:  # its batches are split until they fit
        evaluating *= 2.0
        evaluation = planned_for
    retries = 0.0
    if ooms > 0.0:
        s.fragmentation = c.least_fragmentation
    elif reserved > available:
        # The cache no longer fits: the allocator gives its blocks back, again and again as it builds up anew.
        retries = math.ceil(4.0 * (reserved - available) / c.capacity * c.interval_s / 30.0 + 1e-9)
        s.fragmentation = c.least_fragmentation
    lost += retries * c.flush_s
    peak = min(max(allocated, evaluation) + s.creep * c.capacity, c.capacity)

    # Loading: workers prepare the next samples while the device computes.
    loading = c.samples * c.preparation_s * x.preparation * x.disk * crowding / max(workers, 1.0)

    # Power and heat.
    limit = controls[_POWER] / c.power_w if controls[_POWER] == controls[_POWER] else 1.0
    ambient = c.ambient_c + x.ambient_c
    resistance = c.thermal_resistance * x.cooling
    slow, watts, throttled = powered(
        c, curves, activity_of(occupancy), limit, compute, loading, workers, s.temperature_c, ambient, resistance
    )
    compute *= slow

    # Time of an optimizer step: the slowest rank, gradient synchronisation, and what loading adds.
    compute = compute * c.imbalance * x.straggler + c.synchronisation_s * x.network
    wait = data_wait(loading, compute, workers)
    step_time = compute + wait
    wall = max(c.interval_s, lost + evaluating + step_time)
    steps = (wall - lost - evaluating) / step_time

    computing = min(1.0, (steps * compute + evaluating) / wall)
    mean_watts = c.idle_w + (watts - c.idle_w) * computing
    heating = math.exp(-wall / c.sink_seconds)  # first-order heat, exact over the interval
    settled = ambient + resistance * mean_watts
    hottest = s.temperature_c
    s.temperature_c = min(settled + (s.temperature_c - settled) * heating, max(c.throttle_c, ambient))
    hottest = max(hottest, s.temperature_c)

    # Memory that leaks, and what the run's memory model learns.
    passed = steps * micro_batches
    s.creep = min(s.creep + x.creep * passed / 1000.0, 0.9)
    if s.caution > 1.0:
        s.caution = 1.0 + (s.caution - 1.0) * math.exp(passed * CAUTION_FADES)
    s.memory_error += _MODEL_LEARNS * (_MODEL_NOISE * c.noise * bell(key, _MODEL, interval) - s.memory_error)

    s.time_s += wall
    s.interval_j = mean_watts * wall * c.ranks
    s.energy_j += s.interval_j
    s.real_tokens = steps * real * c.ranks
    s.tokens_per_s = s.real_tokens / wall
    s.wall_s = wall
    s.ooms = ooms
    s.memory_share = min(peak / c.capacity + x.neighbour_memory, 1.0)
    s.interval = interval + 1

    # Telemetry of one rank, as its sensors show it.
    nan = math.nan
    for i in range(_TELEMETRY):
        row[i] = nan
    for i in range(_CONTROLS):
        row[_T_CONTROLS[i]] = pending[i]
    row[_T_TIME] = s.time_s
    row[_T_INTERVAL] = wall
    row[_T_STEPS] = steps
    row[_T_SAMPLES] = steps * c.samples
    row[_T_REAL] = steps * real
    row[_T_PADDED] = steps * padded
    row[_T_SPEED] = steps * real / wall
    row[_T_STEP_TIME] = step_time
    row[_T_WAIT] = steps * wait / wall
    row[_T_MICRO_BATCHES] = micro_batches
    row[_T_LARGEST] = tokens
    row[_T_FILL] = min(1.0, micro_batches * means[1] * steps / wall)
    row[_T_FRACTION] = means[2]
    row[_T_PEAK] = peak / c.capacity
    row[_T_DEVICE] = s.memory_share
    row[_T_CREEP] = x.creep
    row[_T_RETRIES] = retries
    row[_T_OOM] = ooms
    row[_T_NEIGHBOURS] = x.neighbours
    row[_T_HOST] = min(1.0, x.host_load + (computing_threads + min(workers, loading * workers / step_time)) / c.cores)
    row[_T_OTHERS_HOST] = x.host_load
    row[_T_PROGRESS] = min(1.0, s.interval / c.intervals)
    if c.energy_budget_j < math.inf:
        row[_T_BUDGET_USED] = s.energy_j / c.energy_budget_j
    row[_T_TEMPERATURE_LIMIT] = c.temperature_limit_c
    if c.accelerator > 0.0 and not (c.dropout > 0.0 and uniform(key, _SILENCE, interval) < c.dropout):
        # NVML tells whether some kernel was running, in whole percent; a neighbour's count as well.
        kernels = computing + (1.0 - computing) * x.neighbour_compute
        row[_T_UTILIZATION] = math.floor(100.0 * (1.0 - (1.0 - kernels) * (1.0 - 0.5 * kernels)) + 0.5) / 100.0
        measured = mean_watts * (1.0 + c.noise * _POWER_SIGMA * bell(key, _POWER_NOISE, interval))
        row[_T_POWER] = measured
        row[_T_ENERGY] = measured * wall
        row[_T_TEMPERATURE] = math.floor(hottest + 0.5)
        row[_T_CLOCK] = min(1.0, c.power.clock_bound / (slow - 1.0 + c.power.clock_bound))
        row[_T_THROTTLED] = throttled


def tell_upcoming(c: Any, s: Any, row: np.ndarray) -> None:
    """Write to the telemetry what is known of what comes, and what the memory model fits in.

    The preview reaches as far as a decision takes: to the interval to come, or with dead time to the one after it. Mean
    and percentile are of the interval in which the decision lands, the maximum is over all until then.
    """
    landing = s.now
    longest = landing.previewed
    if c.dead_time > 0.0:
        landing = s.then
        longest = max(longest, landing.previewed)
    length = c.max_length
    if c.preview_share > 0.0:
        told = math.exp(c.preview_error * bell(s.key, _PREVIEW, s.interval)) if c.preview_error > 0.0 else 1.0
        scale = length_scale(c, landing) * told
        length = max(1.0, min(math.floor(longest * told), c.max_length))
        row[_T_UPCOMING_MEAN] = min(c.mean_length * scale, length)
        row[_T_UPCOMING_P95] = min(c.p95_length * scale, length)
        row[_T_UPCOMING_MAX] = length
    room = MEMORY_CAP - max(row[_T_DEVICE] - row[_T_PEAK], 0.0)
    believed = belief(s)
    row[_T_FIT_0] = fitting_tokens(c, s, believed, length, 0.0, room)
    row[_T_FIT_1] = fitting_tokens(c, s, believed, length, 1.0, room)


def violation(c: Any, s: Any) -> float:
    """How badly the last interval broke a limit, 0 (kept all) to 1: memory, temperature, energy ahead of its budget."""
    worst = 1.0 if s.ooms > 0.0 or s.memory_share > MEMORY_ALARM else 0.0
    if c.temperature_limit_c == c.temperature_limit_c and s.temperature_c > c.temperature_limit_c:
        worst = max(worst, min(1.0, 0.2 + 0.1 * (s.temperature_c - c.temperature_limit_c)))
    if c.energy_budget_j < math.inf:
        ahead = s.energy_j / c.energy_budget_j - s.interval / c.intervals - _PACE_SLACK
        if ahead > 0.0:
            worst = max(worst, min(1.0, 0.2 + 10.0 * ahead))
    return worst


#: For `compiling.register`, callees before callers (besides those of the modules above).
FUNCTIONS = (begin, passes, data_wait, run_interval, tell_upcoming, violation)
