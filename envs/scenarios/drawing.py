"""Draws scenarios from documented distributions.

Three *populations* are drawn from: `COMMON` (the splits train, val and test-id), `UNKNOWN` (test-ood: models, devices,
data and disturbances that `COMMON` never holds) and `HARD` (test-hard). Their tables below are the definition; the
documentation is generated from them. U is uniform, logU log-uniform, and a..b a whole number.

A scenario is drawn from the top down: device, model and data, then the rest of the workload, disturbances and so on.
One that no policy could do well in (`Limits.obstacle`) is drawn again; when device, model and data do not come to terms
in `_ATTEMPTS` draws, so are they. Each scenario has a random stream of its own, named by split, seed and index: a
longer split begins with the shorter one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from ..plants.profile import load_hardware, load_model
from ..plants.setting import architecture
from .distributions import Distribution, LogUniform, OneOf, Range, Uniform, Whole
from .disturbances import KINDS
from .limits import EPISODE, Limits
from .scenario import Scenario

#: Counted up when the same seed gives other scenarios than before.
VERSION = 1

#: What train, val and test-id never hold.
HELD_OUT: dict[str, tuple[str, ...]] = {
    "models": ("qwen3-8b", "qwen-14b", "baichuan2-7b", "baichuan2-13b", "zephyr-7b", "yi-34b", "qwen-72b"),
    "hardware": ("h100", "h200", "rtx4090", "jetson-orin"),
    "data": ("code", "reasoning"),
    "disturbances": ("fan-fault", "stragglers", "host-load"),
}

_ATTEMPTS = 40
_INTERVALS_S = (30.0, 60.0, 120.0, 300.0)
_SEVERAL_RANKS = ("network-jitter", "stragglers")  # mean nothing to a single one

#: `max_length` by kind of data, tokens.
MAX_LENGTHS: dict[str, OneOf] = {
    "benchmark": OneOf.equal(2048.0, 4096.0, 8192.0),
    "benchmark-1000": OneOf.equal(2048.0, 4096.0, 8192.0),
    "chat": OneOf.equal(1024.0, 2048.0),
    "instructions": OneOf.equal(2048.0, 4096.0),
    "reasoning": OneOf.equal(4096.0, 8192.0, 16384.0),
    "code": OneOf.equal(2048.0, 4096.0, 8192.0),
    "documents": OneOf.equal(4096.0, 8192.0, 16384.0),
    "multimodal": OneOf.equal(2048.0, 4096.0),
    "classification": OneOf.equal(512.0, 1024.0),
    "tiny": OneOf.equal(256.0, 512.0),
}


@dataclass(frozen=True)
class Population:
    """What scenarios are drawn from.

    Attributes:
        hardware: Devices; `cpu` always trains the tiny model on its data, and nothing else does.
        models: Models, for all other devices.
        data: Kinds of data, for all other models.
        steady: Share of scenarios without disturbances.
        chances: How often a family of disturbances occurs in the others.
        needed: Of each group of families at least one occurs in the others.
        disturbances: Parameters by family; `loss` of memory-creep, the share of capacity lost in 120 intervals of
            micro-batches that fill the device, becomes its rate.
        ambient_c: Degrees C.
        cores: Of a rank.
        preview: Parameters of `Preview`.
        mismatch: Parameters of `Mismatch`.
        budget: Which budget a job has: none, energy, temperature or both.
        energy: Share of full power.
        below_throttling: Budget of temperature, degrees C below throttling.
        dead_time: Intervals.
        noise: Relative to the usual.
        dropout: Chance an interval.
    """

    hardware: OneOf
    models: OneOf
    data: OneOf
    steady: float
    chances: Mapping[str, float]
    needed: tuple[tuple[str, ...], ...]
    disturbances: Mapping[str, Mapping[str, Distribution]]
    ambient_c: Uniform
    cores: OneOf
    preview: Mapping[str, Distribution]
    mismatch: Mapping[str, Distribution]
    budget: OneOf
    energy: Uniform
    below_throttling: Uniform
    dead_time: OneOf
    noise: LogUniform
    dropout: OneOf


_MILD: dict[str, dict[str, Distribution]] = {
    "long-bursts": {"start": Uniform(0.02, 0.1), "intervals": Uniform(2, 10), "factor": Uniform(1.3, 3)},
    "task-switches": {"intervals": Uniform(8, 40), "factor": LogUniform(0.4, 2.5), "preparation": LogUniform(1, 10)},
    "neighbours": {
        "arrival": Uniform(0.02, 0.15),
        "intervals": Uniform(3, 20),
        "memory": Range(Uniform(0.02, 0.1), Uniform(0.02, 0.3)),
        "compute": Range(Uniform(0, 0.1), Uniform(0.05, 0.4)),
    },
    "hot-room": {"degrees": Uniform(5, 28), "period": LogUniform(30, 200)},
    "fan-fault": {"start": Uniform(0.01, 0.05), "intervals": Uniform(10, 40), "factor": Uniform(1.2, 1.8)},
    "slow-disk": {"start": Uniform(0.02, 0.1), "intervals": Uniform(3, 15), "factor": LogUniform(2, 30)},
    "network-jitter": {
        "spread": Uniform(0.05, 0.4),
        "start": Uniform(0.02, 0.1),
        "intervals": Uniform(2, 8),
        "factor": Uniform(1.5, 5),
    },
    "stragglers": {"start": Uniform(0.02, 0.1), "intervals": Uniform(2, 12), "factor": Uniform(1.1, 1.8)},
    "memory-creep": {"loss": Uniform(0.02, 0.1)},
    "evaluations": {"every": Whole(10, 40), "share": Uniform(0.1, 0.8), "memory": Uniform(0.02, 0.25)},
    "host-load": {
        "start": Uniform(0.02, 0.1),
        "intervals": Uniform(3, 15),
        "share": Range(Uniform(0.1, 0.4), Uniform(0.1, 0.45)),
    },
}

_KNOWN_CHANCES = {
    "long-bursts": 0.35,
    "task-switches": 0.2,
    "neighbours": 0.35,
    "hot-room": 0.3,
    "slow-disk": 0.25,
    "network-jitter": 0.7,
    "memory-creep": 0.15,
    "evaluations": 0.3,
}

COMMON = Population(
    hardware=OneOf.of({"a100-80g": 0.24, "a100-40g": 0.2, "a40": 0.18, "rtx3090": 0.18, "v100": 0.14, "cpu": 0.06}),
    models=OneOf.equal("qwen-1.8b", "qwen-7b", "qwen3-0.6b", "qwen3-1.7b", "yi-6b", "chatglm3-6b"),
    data=OneOf.of(
        {
            "benchmark": 0.15,
            "benchmark-1000": 0.1,
            "chat": 0.15,
            "instructions": 0.15,
            "documents": 0.15,
            "multimodal": 0.22,
            "classification": 0.08,
        }
    ),
    steady=0.11,
    chances=_KNOWN_CHANCES,
    needed=(tuple(_KNOWN_CHANCES),),
    disturbances={family: _MILD[family] for family in _KNOWN_CHANCES},
    ambient_c=Uniform(18, 36),
    cores=OneOf.of({2.0: 0.3, 4.0: 0.25, 8.0: 0.25, 16.0: 0.2}),
    preview={
        "share": OneOf((0.55, 1.0), (0.3, Uniform(0.3, 1)), (0.15, 0.0)),
        "error": OneOf((0.5, 0.0), (0.5, Uniform(0.02, 0.15))),
    },
    mismatch={
        "time": LogUniform(0.9, 1.11),
        "launch": LogUniform(0.8, 1.25),
        "activations": LogUniform(0.93, 1.08),
        "cooling": LogUniform(0.9, 1.11),
        "memory_model": Uniform(-0.1, 0.1),
    },
    budget=OneOf.of({"none": 0.86, "energy": 0.07, "temperature": 0.07}),
    energy=Uniform(0.8, 0.95),
    below_throttling=Uniform(0, 4),
    dead_time=OneOf.of({0: 0.8, 1: 0.2}),
    noise=LogUniform(0.5, 1.5),
    dropout=OneOf((0.85, 0.0), (0.15, Uniform(0.005, 0.02))),
)

UNKNOWN = Population(
    hardware=OneOf.equal(*HELD_OUT["hardware"]),
    models=OneOf.equal(*HELD_OUT["models"]),
    data=OneOf.equal(*HELD_OUT["data"]),
    steady=0.11,
    chances=_KNOWN_CHANCES | {"fan-fault": 0.45, "stragglers": 0.8, "host-load": 0.45},
    needed=(HELD_OUT["disturbances"],),
    disturbances=_MILD,
    ambient_c=COMMON.ambient_c,
    cores=COMMON.cores,
    preview=COMMON.preview,
    mismatch=COMMON.mismatch,
    budget=COMMON.budget,
    energy=COMMON.energy,
    below_throttling=COMMON.below_throttling,
    dead_time=COMMON.dead_time,
    noise=COMMON.noise,
    dropout=COMMON.dropout,
)

HARD = Population(
    hardware=OneOf.equal(*(name for name in COMMON.hardware.values if name != "cpu"), *HELD_OUT["hardware"]),
    models=OneOf.equal(*COMMON.models.values, *HELD_OUT["models"]),
    data=OneOf.equal(*COMMON.data.values, *HELD_OUT["data"]),
    steady=0.0,
    chances={
        "long-bursts": 1.0,
        "task-switches": 0.25,
        "neighbours": 1.0,
        "hot-room": 0.7,
        "fan-fault": 0.5,
        "slow-disk": 0.2,
        "network-jitter": 0.7,
        "stragglers": 0.5,
        "memory-creep": 0.5,
        "evaluations": 0.3,
        "host-load": 0.25,
    },
    needed=(("long-bursts",), ("neighbours",), ("hot-room", "fan-fault")),
    disturbances=_MILD
    | {
        "long-bursts": {"start": Uniform(0.08, 0.25), "intervals": Uniform(4, 15), "factor": Uniform(2, 4)},
        "neighbours": {
            "arrival": OneOf.equal(1.0),
            "intervals": Uniform(3, 15),
            "memory": Range(Uniform(0.05, 0.15), Uniform(0.1, 0.3)),
            "compute": Range(Uniform(0.05, 0.2), Uniform(0.1, 0.4)),
        },
        "hot-room": {"degrees": Uniform(15, 35), "period": LogUniform(30, 200)},
        "fan-fault": {"start": Uniform(0.03, 0.08), "intervals": Uniform(15, 50), "factor": Uniform(1.4, 2.2)},
        "memory-creep": {"loss": Uniform(0.1, 0.3)},
    },
    ambient_c=Uniform(24, 38),
    cores=COMMON.cores,
    preview={"share": OneOf((0.4, 0.0), (0.6, Uniform(0.05, 0.5))), "error": Uniform(0.1, 0.4)},
    mismatch={
        "time": OneOf.equal(LogUniform(0.7, 0.85), LogUniform(1.18, 1.45)),
        "launch": OneOf.equal(LogUniform(0.6, 0.75), LogUniform(1.35, 1.8)),
        "activations": OneOf((0.3, LogUniform(0.8, 0.9)), (0.7, LogUniform(1.1, 1.3))),
        "cooling": OneOf((0.3, LogUniform(0.8, 0.9)), (0.7, LogUniform(1.1, 1.3))),
        "memory_model": OneOf((0.7, Uniform(-0.35, -0.12)), (0.3, Uniform(0.12, 0.35))),
    },
    budget=OneOf.of({"none": 0.5, "energy": 0.2, "temperature": 0.2, "both": 0.1}),
    energy=Uniform(0.5, 0.8),
    below_throttling=Uniform(2, 8),
    dead_time=OneOf.equal(0, 1),
    noise=LogUniform(1, 2.5),
    dropout=OneOf((0.6, 0.0), (0.4, Uniform(0.02, 0.2))),
)

#: Tuner of a model below and above this many parameters; above the second it is quantised.
SMALL, HUGE = 3e9, 3e10
SMALL_TUNER = OneOf.of({"lora": 0.5, "full": 0.35, "zero": 0.15})
LARGE_TUNER = OneOf.of({"lora": 0.92, "full": 0.08})
QUANTIZATION = OneOf.of({"none": 0.7, "bnb4": 0.15, "gptq4": 0.1, "gptq8": 0.05})
HUGE_QUANTIZATION = OneOf.equal("bnb4", "gptq4")
LORA_RANK = OneOf.of({8.0: 0.5, 16.0: 0.2, 64.0: 0.3})
LORA_TARGETS = OneOf.of({"all-linear": 0.7, "attention": 0.3})
FLASH_ATTENTION = OneOf.of({True: 0.85, False: 0.15})
RANKS = OneOf.of({1: 0.7, 2: 0.1, 4: 0.1, 8: 0.1})
SAMPLES = OneOf.of({8: 0.15, 16: 0.35, 32: 0.3, 64: 0.2})  # of a rank in an optimizer step
NETWORK_GBPS = OneOf.equal(10.0, 25.0, 100.0, 200.0)


def draw_scenario(population: Population, name: str, stream: str) -> Scenario:
    """A scenario without a seed of its own.

    Args:
        population: Where it is drawn from.
        name: Its name.
        stream: Names the random numbers: the same name gives the same scenario.
    """
    random = Random(f"swiftcruise scenario, version {VERSION}: {stream}")
    while True:
        hardware = population.hardware.draw(random)
        model = "tiny" if hardware == "cpu" else population.models.draw(random)
        data = "tiny" if hardware == "cpu" else population.data.draw(random)
        for _ in range(_ATTEMPTS):
            scenario = _draw(population, random, name, hardware, model, data)
            if Limits(scenario).obstacle is None:
                return scenario


def _draw(population: Population, random: Random, name: str, hardware: str, model: str, data: str) -> Scenario:
    """A scenario that may be impossible."""
    workload = _workload(random, model, data)
    several = workload["ranks"] > 1
    host = {
        "cores": 2.0 if hardware == "cpu" else population.cores.draw(random),
        "network_gbps": NETWORK_GBPS.draw(random) if several else 100.0,
        "ambient_c": population.ambient_c.draw(random),
    }
    parts = {
        "preview": {field: values.draw(random) for field, values in population.preview.items()},
        "mismatch": {field: values.draw(random) for field, values in population.mismatch.items()},
        "budgets": _budgets(population, random, hardware),
    }
    plain = Scenario.model_validate(
        {
            "name": name,
            "hardware": hardware,
            "workload": workload,
            "host": host,
            **parts,
            "dead_time": population.dead_time.draw(random),
            "noise": population.noise.draw(random),
            "dropout": population.dropout.draw(random),
        }
    )
    disturbances = [
        {"kind": family, **{field: values.draw(random) for field, values in population.disturbances[family].items()}}
        for family in _families(population, random, several)
    ]
    limits = Limits(plain)
    for disturbance in disturbances:
        if "loss" in disturbance:
            micro_batches = EPISODE * _interval_s(limits.step_seconds) / limits.full_seconds
            disturbance["rate"] = min(1.0, float(f"{disturbance.pop('loss') / micro_batches * 1000.0:.3g}"))
    disturbed = Scenario.model_validate(plain.model_dump() | {"disturbances": disturbances})
    return disturbed.model_copy(update={"interval_s": _interval_s(Limits(disturbed).step_seconds)})


def _workload(random: Random, model: str, data: str) -> dict[str, Any]:
    shape = architecture(load_model(model))
    parameters = shape.matmul_parameters + shape.embedding_parameters
    tuner = (SMALL_TUNER if parameters < SMALL else LARGE_TUNER).draw(random) if parameters < HUGE else "lora"
    workload = {"model": model, "data": data, "max_length": MAX_LENGTHS[data].draw(random), "tuner": tuner}
    workload["ranks"] = 1 if tuner == "zero" or model == "tiny" else RANKS.draw(random)
    workload["batch"] = workload["ranks"] * SAMPLES.draw(random)
    if tuner == "lora":
        if model != "tiny":
            workload["quantization"] = (QUANTIZATION if parameters < HUGE else HUGE_QUANTIZATION).draw(random)
        workload["lora_rank"] = LORA_RANK.draw(random)
        workload["lora_targets"] = LORA_TARGETS.draw(random)
    workload["flash_attention"] = FLASH_ATTENTION.draw(random)
    return workload


def _families(population: Population, random: Random, several_ranks: bool) -> list[str]:
    """Families of disturbances, in the order in which they act."""
    if random.random() < population.steady:
        return []
    chances = {f: p for f, p in population.chances.items() if several_ranks or f not in _SEVERAL_RANKS}
    while True:
        drawn = {family for family, chance in chances.items() if random.random() < chance}
        if all(drawn.intersection(group) for group in population.needed):
            return [family for family in (kind.replace("_", "-") for kind in KINDS) if family in drawn]


def _budgets(population: Population, random: Random, hardware: str) -> dict[str, float]:
    budget = population.budget.draw(random)
    budgets = {}
    if budget in ("energy", "both"):
        energy = population.energy.draw(random)
        if load_hardware(hardware).accelerator:  # nothing keeps a budget where no power limit can be set
            budgets["energy"] = energy
    if budget in ("temperature", "both"):
        throttles = load_hardware(hardware).throttle_celsius.value
        budgets["temperature_c"] = round(throttles - population.below_throttling.draw(random), 1)
    return budgets


def _interval_s(step_seconds: float) -> float:
    """The shortest usual control interval that holds two optimizer steps."""
    return next((interval for interval in _INTERVALS_S if 2.0 * step_seconds <= interval), _INTERVALS_S[-1])
