"""From scenarios to the arrays that the simulated plant computes with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from statistics import NormalDist

import numpy as np

from ...runtime.controls import CONTROL_FIELDS, ControlLimits, Limit
from ...runtime.errors import ConfigError
from ..scenarios.disturbances import fill
from ..scenarios.scenario import Scenario
from ..scenarios.workloads import dataset
from . import physics
from .interval import NODES
from .lengths import Lengths
from .packing import CLASSES, PackingTable, StackedTables
from .profile import GIB, HardwareProfile, load_framework, load_hardware, load_model
from .records import CONSTANTS
from .setting import architecture, coefficients, power_curve, tuning

# Costs of moving an actuator, assumed: seconds to start loader workers (a process imports torch), to run with new
# micro-batch shapes (kernels are chosen, the allocator grows), and to give back the allocator's blocks.
RESPAWN_S, RETUNE_S, FLUSH_S = 4.0, 1.0, 1.0

# Prices, assumed: what clouds ask in 2025 for an hour of a device per 1e15 FLOP/s, of a CPU core, and for a kWh.
DEVICE_PRICE, CORE_PRICE, ENERGY_PRICE = 2.5, 0.04, 0.25
_REFERENCE_TARGET = 0.9


@dataclass(frozen=True, eq=False)
class Assembly:
    """Scenarios as arrays, indexed alike.

    Attributes:
        scenarios: They themselves.
        constants: (scenarios,) records of `CONSTANTS`.
        limits: Control limits; `constants["limits"]` tells which are whose.
        packing: Packing tables; `constants["table"]` likewise.
        curves: (curves, 3, NODES) power curves, see `interval.under_limit`; `constants["curve"]` likewise.
        longest: (scenarios, 2, NODES) see `interval.foresee`.
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
    longest = np.empty((len(scenarios), 2, NODES))
    tables: dict[tuple[str, float, float, int], int] = {}
    limits: dict[ControlLimits, int] = {}
    curves: dict[str, int] = {}
    for i, scenario in enumerate(scenarios):
        work, hardware = scenario.workload, load_hardware(scenario.hardware)
        key = (work.data, load_model(work.model).tokens_scale.value, work.max_length, work.batch // work.ranks)
        record = constants[i]
        record["table"] = tables.setdefault(key, len(tables))
        record["curve"] = curves.setdefault(scenario.hardware, len(curves))
        own = control_limits(hardware, scenario.host.cores)
        record["limits"] = limits.setdefault(own, len(limits))
        longest[i] = _fill(record, scenario, own, horizon)
    return Assembly(
        tuple(scenarios),
        constants,
        tuple(limits),
        PackingTable.stack([_table(*key) for key in tables]),
        np.stack([_power_curve(name) for name in curves]),
        longest,
    )


@cache
def _lengths(data: str, tokens_scale: float, max_length: float) -> Lengths:
    return dataset(data).lengths().scaled(tokens_scale).limited(max_length, "truncate")


@cache
def _table(data: str, tokens_scale: float, max_length: float, samples: int) -> PackingTable:
    return PackingTable.build(_lengths(data, tokens_scale, max_length), samples)


def _power_curve(hardware: str) -> np.ndarray:
    """What `interval.under_limit` and `interval.when_drawing` read of a busy device, shape ``(3, NODES)``.

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


def _longest(lengths: Lengths, samples: float) -> np.ndarray:
    """(NODES,) quantiles of the longest of some samples, at equal steps from 0 to 1."""
    steps = np.linspace(0.0, 1.0, NODES)
    return lengths.quantile(np.power(steps, 1.0 / max(samples, 1e-3)))


def _fill(record: np.void, scenario: Scenario, limits: ControlLimits, horizon: int) -> np.ndarray:
    """Write a scenario's constants; returns the quantiles of its longest samples, see `interval.foresee`."""
    work, mismatch, host = scenario.workload, scenario.mismatch, scenario.host
    framework = load_framework()
    nominal = load_hardware(scenario.hardware)
    model = load_model(work.model)
    lengths = _lengths(work.data, model.tokens_scale.value, work.max_length)
    samples = work.batch // work.ranks
    true = nominal.replace(
        {
            "time_scale": nominal.time_scale.value * mismatch.time,
            "launch_scale": nominal.launch_scale.value * mismatch.launch,
            "activation_scale": nominal.activation_scale.value * mismatch.activations,
        },
        "mismatch of the scenario",
    )
    time, memory = coefficients(true, model, work.setting, framework)
    for name, values in (("time", time), ("memory", memory), ("power", power_curve(true))):
        record[name] = tuple(values)
    fill(record["disturbances"], scenario.disturbances)

    accelerator = nominal.accelerator
    capacity = nominal.memory_gib.value * GIB
    trained = tuning(model, work.setting, framework)
    shape = architecture(model)
    parameters = trained.adapter_parameters
    parameters += trained.full * (shape.matmul_parameters + shape.embedding_parameters)
    share = 2.0 * (work.ranks - 1) / work.ranks  # of the gradients that a ring sends from each rank
    spread = float(np.std(lengths.values)) / lengths.mean / math.sqrt(samples)
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
        "mean_length": lengths.mean,
        "p95_length": float(lengths.quantile(0.95)),
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
    table = _table(work.data, model.tokens_scale.value, work.max_length, samples)
    speed = _reference(record, table, lengths.longest)
    record["reference_tokens_per_s"] = speed * work.ranks
    record["reference_energy"] = watts / speed
    device_s = price + float(record["price_worker_s"]) / work.ranks  # with one loader worker
    record["reference_price"] = (device_s + watts * ENERGY_PRICE / 3.6e6) / speed
    start = {
        "token_budget": work.max_length,
        "micro_batch_cap": limits.micro_batch_cap.high,
        "memory_target": 0.85,
        "num_workers": 1.0,
        "power_limit_w": nominal.power_w.value if accelerator else math.nan,
        "cpu_threads": math.nan if accelerator else host.cores,
    }
    record["start"] = [start.get(name, math.nan) for name in CONTROL_FIELDS]
    # A preview shows the first part of an interval's samples; how many there are hardly depends on the controls.
    count = max(samples, speed * scenario.interval_s / lengths.mean)
    shown = scenario.preview.share
    return np.stack([_longest(lengths, shown * count), _longest(lengths, (1.0 - shown) * count)])


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


def _reference(c: np.void, table: PackingTable, longest: float) -> float:
    """Most real tokens a second of one rank by a fixed token budget, undisturbed and without waiting for data."""
    time = physics.TimeCoefficients(*c["time"])
    memory = physics.MemoryCoefficients(*c["memory"])
    best = 0.0
    limit = _REFERENCE_TARGET * c["capacity"]
    fits = physics.fitting_tokens(memory, longest, 1.0, c["least_fragmentation"], limit)
    for exponent in range(4, 41):
        budget = min(2.0 ** (exponent / 2), max(fits, 1.0))
        row = table.at(budget)
        seconds = 0.0
        for k in range(CLASSES):
            tokens = row[f"class_tokens_{k}"]
            length = row[f"class_token_lengths_{k}"] / tokens
            checkpointed = physics.least_checkpointing(
                memory, tokens, length, c["layers"], c["least_fragmentation"], limit
            )
            seconds += physics.micro_batch_seconds(time, tokens, length, checkpointed) / CLASSES
        compute = (row["micro_batches"] * seconds + time.optimizer) * c["imbalance"]
        best = max(best, row["real_tokens"] / (compute + c["synchronisation_s"]))
    return float(best)
