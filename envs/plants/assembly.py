"""From scenarios to the arrays that the simulated plant computes with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from ...runtime.controls import CONTROL_FIELDS, ControlLimits, Limit
from ...runtime.errors import ConfigError
from ..scenarios.disturbances import fill
from ..scenarios.scenario import Scenario
from ..scenarios.workloads import dataset, sample_lengths
from . import compiling, physics
from .kept_tables import kept_table
from .lengths import Lengths
from .packing import CLASSES, COLUMNS, PackingTable, StackedTables, read_all
from .profile import GIB, HardwareProfile, ModelProfile, load_framework, load_hardware, load_model
from .records import CONSTANTS, NODES
from .setting import architecture, framework_constants, hardware_constants, implementation, power_curve, tuning

# Costs of moving an actuator, assumed: seconds to start loader workers (a process imports torch), to run with new
# micro-batch shapes (kernels are chosen, the allocator grows), and to give back the allocator's blocks.
RESPAWN_S, RETUNE_S, FLUSH_S = 4.0, 1.0, 1.0

# Prices, assumed: what clouds ask in 2025 for an hour of a device per 1e15 FLOP/s, of a CPU core, and for a kWh.
DEVICE_PRICE, CORE_PRICE, ENERGY_PRICE = 2.5, 0.04, 0.25
_REFERENCE_TARGET = 0.9

_MICRO_BATCHES, _REAL = COLUMNS.index("micro_batches"), COLUMNS.index("real_tokens")
_CLASS_TOKENS, _CLASS_LENGTHS = COLUMNS.index("class_tokens_0"), COLUMNS.index("class_token_lengths_0")


@dataclass(frozen=True, eq=False)
class Assembly:
    """Scenarios as arrays, indexed alike.

    Attributes:
        scenarios: They themselves.
        constants: (scenarios,) records of `CONSTANTS`.
        limits: Control limits; `constants["limits"]` tells which are whose.
        packing: Packing tables; `constants["table"]` likewise.
        curves: (curves, 3, NODES) power curves, see `heat.under_limit`; `constants["curve"]` likewise.
        longest: (scenarios, 2, NODES) see `course.foresee`.
    """

    scenarios: tuple[Scenario, ...]
    constants: np.ndarray
    limits: tuple[ControlLimits, ...]
    packing: StackedTables
    curves: np.ndarray
    longest: np.ndarray

    @cached_property
    def names(self) -> dict[str, int]:
        """Index by a scenario's name."""
        return {scenario.name: i for i, scenario in enumerate(self.scenarios)}


def assemble(scenarios: Sequence[Scenario], horizon: int = 120) -> Assembly:
    """The arrays of some scenarios.

    Args:
        scenarios: At least one.
        horizon: Control intervals of an episode; budgets of a job count on it.

    Raises:
        ConfigError: a profile or a kind of data that does not exist, or a scenario that fits into memory in no way.
    """
    constants = np.zeros(len(scenarios), CONSTANTS)
    tables: dict[_Packing, int] = {}
    limits: dict[ControlLimits, int] = {}
    curves: dict[str, int] = {}
    device, model = cache(_device), cache(load_model)  # each file is read once; a user's may be another one next time
    for record, scenario in zip(constants, scenarios, strict=True):
        own = control_limits(device(scenario.hardware).profile, scenario.host.cores)
        packing = _fill(record, scenario, device(scenario.hardware), model(scenario.workload.model), own, horizon)
        record["table"] = tables.setdefault(packing, len(tables))
        record["curve"] = curves.setdefault(scenario.hardware, len(curves))
        record["limits"] = limits.setdefault(own, len(limits))
    stacked = _stacked(tuple(tables))
    lengths = [sample_lengths(*packing[:3]) for packing in tables]
    own_lengths = [lengths[table] for table in constants["table"]]
    speeds = _reference_speeds(constants, stacked, np.array([each.longest for each in own_lengths]))
    _fill_references(constants, speeds)
    return Assembly(
        tuple(scenarios),
        constants,
        tuple(limits),
        stacked,
        np.stack([_power_curve(name) for name in curves]),
        np.stack([_longest(*each) for each in zip(constants, own_lengths, speeds, strict=True)]),
    )


class _Device(NamedTuple):
    profile: HardwareProfile
    constants: physics.Hardware
    curve: physics.PowerCurve


def _device(name: str) -> _Device:
    profile = load_hardware(name)
    return _Device(profile, hardware_constants(profile), power_curve(profile))


class _Packing(NamedTuple):
    """What a packing table depends on."""

    data: str
    tokens_scale: float
    max_length: float
    samples: int
    launch_tokens: float


class _Statistics(NamedTuple):
    mean: float
    deviation: float
    p95: float


@cache  # lengths are the same where they are the same object
def _statistics(lengths: Lengths) -> _Statistics:
    return _Statistics(lengths.mean, float(np.std(lengths.values)), float(lengths.quantile(0.95)))


@cache
def _most_padding(lengths: Lengths, samples: int) -> float:
    """Padding of an optimizer step in one micro-batch, tokens."""
    return samples * (lengths.expected_longest(samples) - lengths.mean)


@cache
def _table(packing: _Packing) -> PackingTable:
    return kept_table(sample_lengths(*packing[:3]), packing.samples, packing.launch_tokens)


@lru_cache(maxsize=4)  # environments beside each other share what they only read
def _stacked(packings: tuple[_Packing, ...]) -> StackedTables:
    return PackingTable.stack([_table(packing) for packing in packings])


def _launch_tokens(time: physics.TimeCoefficients, lengths: Lengths, samples: int) -> float:
    """Launch cost, tokens, that the hook plans with once it knows the run: a / k of `runtime.fill.FillEstimator`.

    The straight line goes through a micro-batch of one mean length and one of eight. The result is a power of 2, so
    that scenarios share tables; infinite where a micro-batch costs more than all padding that any cuts could save; and
    about a sixteenth of the mean length or more, as less hardly changes the time.
    """
    mean = _statistics(lengths).mean
    few, many = (physics.micro_batch_seconds(time, share * mean, mean, 0.5) for share in (1.0, 8.0))
    slope = (many - few) / (7.0 * mean)
    launch = (few - slope * mean) / slope
    if launch >= _most_padding(lengths, samples):
        return math.inf
    return 2.0 ** round(math.log2(max(launch, mean / 16.0)))


def _power_curve(hardware: str) -> np.ndarray:
    """What `heat.under_limit` and `heat.when_drawing` read of a busy device, shape ``(3, NODES)``.

    Over its power limit (0 to 1 of the design power) the share of the dynamic power and the time; the time over that
    share.
    """
    profile = load_hardware(hardware)
    curve, full = power_curve(profile), profile.load_power.value
    shares = [physics.limited_share(curve, full, limit) for limit in np.linspace(0.0, 1.0, NODES)]
    times = [physics.slowdown(curve, share) for share in shares]
    return np.array(
        [shares, times, [physics.slowdown(curve, max(share, 0.01)) for share in np.linspace(0.0, 1.0, NODES)]]
    )


def _longest(c: np.void, lengths: Lengths, speed: float) -> np.ndarray:
    """(2, NODES) quantiles of an interval's longest sample at equal steps from 0 to 1: previewed ones, and others."""
    # A preview shows the first part of an interval's samples; how many there are hardly depends on the controls.
    count = max(c["samples"], speed * c["interval_s"] / c["mean_length"])
    shown = c["preview_share"]
    steps = np.linspace(0.0, 1.0, NODES)
    return np.stack([lengths.quantile(np.power(steps, 1.0 / max(part * count, 1e-3))) for part in (shown, 1.0 - shown)])


def _fill(
    record: np.void, scenario: Scenario, device: _Device, model: ModelProfile, limits: ControlLimits, horizon: int
) -> _Packing:
    """Write a scenario's constants, but for indices and `_fill_references`; returns what its table is of."""
    work, mismatch, host = scenario.workload, scenario.mismatch, scenario.host
    framework = load_framework()
    nominal = device.profile
    lengths = sample_lengths(work.data, model.tokens_scale.value, work.max_length)
    statistics = _statistics(lengths)
    samples = work.batch // work.ranks
    true = device.constants._replace(
        time_scale=device.constants.time_scale * mismatch.time,
        launch_scale=device.constants.launch_scale * mismatch.launch,
        activation_scale=device.constants.activation_scale * mismatch.activations,
    )
    shape, trained = architecture(model), tuning(model, work.setting, framework)
    parts = (shape, implementation(model, work.setting, framework), trained, true, framework_constants(framework))
    time, memory = physics.time_coefficients(*parts), physics.memory_coefficients(*parts)
    for name, values in (("time", time), ("memory", memory), ("power", device.curve)):
        record[name] = tuple(values)
    fill(record["disturbances"], scenario.disturbances)

    accelerator = nominal.accelerator
    capacity = nominal.memory_gib.value * GIB
    parameters = trained.adapter_parameters
    parameters += trained.full * (shape.matmul_parameters + shape.embedding_parameters)
    share = 2.0 * (work.ranks - 1) / work.ranks  # of the gradients that a ring sends from each rank
    spread = statistics.deviation / statistics.mean / math.sqrt(samples)
    slowest = NormalDist().inv_cdf((work.ranks - 0.375) / (work.ranks + 0.25)) if work.ranks > 1 else 0.0
    budgets = scenario.budgets
    watts = nominal.power_w.value * nominal.load_power.value
    intervals = horizon + 1  # the first one runs at the starting controls, before any decision
    price = DEVICE_PRICE * nominal.flops.value / 1e15 / 3600.0
    if not nominal.accelerator:
        price = CORE_PRICE * host.cores / 3600.0
    values = {
        "layers": model.layers.value,
        "capacity": capacity,
        "usable": capacity * framework.usable_share.value,
        "least_fragmentation": framework.least_fragmentation.value,
        "usual_fragmentation": max(
            framework.least_fragmentation.value, lengths.fragmentation(framework.fragmentation.value)
        ),
        "most_fragmentation": framework.fragmentation.value,
        "accelerator": float(accelerator),
        "power_w": nominal.power_w.value,
        "idle_w": nominal.idle_power_w.value,
        "dynamic_power": nominal.load_power.value - nominal.power_static.value,
        "thermal_resistance": nominal.thermal_resistance.value * mismatch.cooling,
        "sink_seconds": nominal.sink_seconds.value,
        "throttle_c": nominal.throttle_celsius.value,
        "ambient_c": host.ambient_c,
        "samples": samples,
        "mean_length": statistics.mean,
        "p95_length": statistics.p95,
        "max_length": work.max_length,
        "preparation_s": dataset(work.data).preparation_s,
        "cores": host.cores,
        "ranks": work.ranks,
        "synchronisation_s": share * 2.0 * parameters / (host.network_gbps * 1e9 / 8.0),
        "imbalance": 1.0 + spread * slowest,
        "respawn_s": RESPAWN_S,
        "retune_s": RETUNE_S,
        "flush_s": FLUSH_S,
        "interval_s": scenario.interval_s,
        "dead_time": scenario.dead_time,
        "noise": scenario.noise,
        "dropout": scenario.dropout,
        "preview_share": scenario.preview.share,
        "preview_error": scenario.preview.error,
        "memory_error": mismatch.memory_model,
        "energy_budget_j": (
            math.inf
            if budgets.energy is None
            else budgets.energy * watts * work.ranks * scenario.interval_s * intervals
        ),
        "temperature_limit_c": math.nan if budgets.temperature_c is None else budgets.temperature_c,
        "intervals": intervals,
        "price_s": price * work.ranks,
        "price_worker_s": CORE_PRICE / 3600.0 * work.ranks if nominal.accelerator else 0.0,  # a CPU's are paid for
        "price_j": ENERGY_PRICE / 3.6e6,
    }
    for name, value in values.items():
        record[name] = value
    if physics.runs_out_of_memory(
        memory, lengths.longest, lengths.longest, 1.0, framework.least_fragmentation.value, record["usable"]
    ):
        raise ConfigError(
            f"scenario {scenario.name!r} fits in no way: workload.max_length={work.max_length:g} of {work.model} on "
            f"{scenario.hardware} runs out of memory with every layer checkpointed; shorten it, quantise, or take a "
            "larger device"
        )
    start = {
        "token_budget": work.max_length,
        "micro_batch_cap": limits.micro_batch_cap.high,
        "memory_target": 0.85,
        "num_workers": 1.0,
        "power_limit_w": nominal.power_w.value if accelerator else math.nan,
        "cpu_threads": math.nan if accelerator else host.cores,
    }
    record["start"] = [start.get(name, math.nan) for name in CONTROL_FIELDS]
    launch_tokens = _launch_tokens(time, lengths, samples)
    return _Packing(work.data, model.tokens_scale.value, work.max_length, samples, launch_tokens)


def _fill_references(constants: np.ndarray, speeds: np.ndarray) -> None:
    """Write what rewards are relative to, from the speed of one rank, tokens/s, shape ``(scenarios,)``."""
    watts = constants["power_w"] * (constants["power"]["static"] + constants["dynamic_power"])
    device_s = (constants["price_s"] + constants["price_worker_s"]) / constants["ranks"]  # with one loader worker
    constants["reference_tokens_per_s"] = speeds * constants["ranks"]
    constants["reference_energy"] = watts / speeds
    constants["reference_price"] = (device_s + watts * constants["price_j"]) / speeds


def control_limits(hardware: HardwareProfile, cores: float) -> ControlLimits:
    """Limits of the controls on a device; an actuator that it lacks has no choice."""
    usual = ControlLimits()
    power = Limit(hardware.least_power_w.value, hardware.power_w.value, dwell=1)
    return replace(
        usual,
        power_limit_w=power if hardware.accelerator else usual.power_limit_w,
        num_workers=replace(usual.num_workers, high=min(usual.num_workers.high, math.floor(cores))),
        cpu_threads=usual.cpu_threads if hardware.accelerator else replace(usual.cpu_threads, high=math.floor(cores)),
    )


def _reference_speeds(constants: np.ndarray, packing: StackedTables, longest: np.ndarray) -> np.ndarray:
    """(scenarios,) `_reference` of each; `longest` is of each the longest sample, tokens."""
    out = np.empty(constants.size)
    scratch = np.empty(len(COLUMNS))
    _compiled()(constants, packing.values, packing.caps, packing.low, packing.step, longest, scratch, out)
    return out


@cache
def _compiled() -> Callable[..., None]:
    compiling.register(*physics.FUNCTIONS, read_all, _reference)
    return compiling.compiled(_references, allocates=False)


def _references(constants, values, caps, low, step, longest, scratch, out):
    for i in range(constants.shape[0]):
        out[i] = _reference(constants[i], values, caps, low, step, longest[i], scratch)


def _reference(
    c: Any, values: np.ndarray, caps: np.ndarray, low: np.ndarray, step: float, longest: float, row: np.ndarray
) -> float:
    """Most real tokens a second of one rank by a fixed token budget, undisturbed and without waiting for data."""
    best = 0.0
    limit = _REFERENCE_TARGET * c.capacity
    fits = physics.fitting_tokens(c.memory, longest, 1.0, c.least_fragmentation, limit)
    for exponent in range(4, 41):
        budget = min(math.pow(2.0, exponent / 2.0), max(fits, 1.0))
        read_all(values, caps, low, step, c.table, budget, math.inf, row)
        seconds = 0.0
        for k in range(CLASSES):
            tokens = row[_CLASS_TOKENS + k]
            length = row[_CLASS_LENGTHS + k] / tokens
            checkpointed = physics.least_checkpointing(c.memory, tokens, length, c.layers, c.least_fragmentation, limit)
            seconds += physics.micro_batch_seconds(c.time, tokens, length, checkpointed) / CLASSES
        compute = (row[_MICRO_BATCHES] * seconds + c.time.optimizer) * c.imbalance
        best = max(best, row[_REAL] / (compute + c.synchronisation_s))
    return best
