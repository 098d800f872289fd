"""Rows of measured trainings, and what the plant predicts for them. Used by plant_fidelity.py."""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swiftcruise.envs.plants import physics, setting
from swiftcruise.envs.plants.calibration import Probe
from swiftcruise.envs.plants.lengths import Gamma, Lengths, Uniform
from swiftcruise.envs.plants.profile import (
    GIB,
    FrameworkProfile,
    HardwareProfile,
    ModelProfile,
    load_framework,
    load_hardware,
    load_model,
    parse_model,
)
from swiftcruise.runtime.errors import ConfigError

DATA = Path(__file__).parent / "data"
#: Constants of the tables themselves, not of the plant; fitted with the others.
TABLES = {
    "short_share": 0.1693,  # of cls-fudan-news-zh: share of the short news,
    "short_longest": 618.5,  # and its longest, tokens
    "first_mean": 3449,  # mean length of its first 1000 rows, tokens,
    "first_deviation": 2506,  # and standard deviation
    "run_seconds": 18.77,  # December 2023: minutes of a run hold this start-up,
    "run_seconds_billion": 0.2788,  # and this for each billion parameters
    "device_context_gib": 1.912,  # what a device's memory holds beside the allocator's (Qwen's table)
    "qwen_quantized_logits": 0.658,  # Qwen's Q-LoRA runs are in 16-bit float and hold fewer copies of the logits
    "december_pool": 0.5002,  # share of `bnb4_load_bytes` in December 2023
    "first_fragmentation": 2.525,  # reserved over allocated transient memory after 1000 rows
}
DECEMBER_SAMPLES = 1000  #: samples of a run in the table of December 2023


@dataclass(frozen=True)
class Row:
    """One measured run; what is empty in the table is None."""

    dataset: str
    table: str
    model: ModelProfile
    gpu: str
    gpus: int
    split_layers: bool  #: several GPUs share out the layers (else each has a copy)
    setting: setting.TrainingSetting
    checkpointed: float
    batch_size: int
    accumulation: int
    length: float | None
    length_mean: float | None
    length_deviation: float | None
    max_length: float | None
    lengths: str
    overlong: str
    samples_per_s: float | None
    run_minutes: float | None
    memory_gib: float | None
    device_memory: bool  #: memory_gib is the device's, driver context included, not the allocator's
    oom: bool | None


#: Short names of columns, as other tables have them.
SYNONYMS = {
    "L": "layers", "h": "hidden_size", "ffn": "intermediate_size", "nh": "heads", "nkv": "key_value_heads",
    "hd": "head_size", "V": "vocabulary", "quant": "quantization", "grad_ckpt": "checkpointed",
    "gradient_checkpointing": "checkpointed", "flash_attn": "flash_attention", "grad_accum": "accumulation",
    "gradient_accumulation": "accumulation", "n_gpu": "gpus", "S_fixed": "length", "mem_gib": "memory_gib",
    "lora_target": "lora_targets", "group": "table",
}  # fmt: skip
#: Other words for the same.
WORDS = {
    "bf16": "none", "fp16": "none", "int4 (gptq)": "gptq4", "int8 (gptq)": "gptq8", "int4 (bnb)": "bnb4",
    "nf4": "bnb4", "bnb": "bnb4", "gptq": "gptq4", "all": "all-linear", "default": "attention",
    "true": "1", "false": "0", "yes": "1", "no": "0",
}  # fmt: skip
ARCHITECTURE = ("layers", "hidden_size", "intermediate_size", "heads", "key_value_heads", "head_size", "vocabulary")


def _model(line: Mapping[str, str]) -> ModelProfile:
    """The model profile of that name, or one made of a row's architecture columns."""
    if not line.get("layers"):
        return load_model(line.get("model", ""))
    facts = {name: line[name] for name in ARCHITECTURE if line.get(name)}
    facts.setdefault("key_value_heads", facts.get("heads", ""))
    if "heads" in facts and "hidden_size" in facts:
        facts.setdefault("head_size", str(float(facts["hidden_size"]) / float(facts["heads"])))
    data: dict[str, Any] = {
        name: {"value": value, "source": "column of the table", "basis": "stated"} for name, value in facts.items()
    }
    data |= {name: line.get(name) or default for name, default in (("family", "llama"), ("attention", "flash"))}
    data |= {name: bool(float(line.get(name) or 0)) for name in ("tied_embeddings", "fused_qkv")}
    scale = {"value": line.get("tokens_scale") or 1.0, "source": "lengths are in its own tokens", "basis": "stated"}
    return parse_model({"name": line.get("model") or "?", "description": "-", "tokens_scale": scale, **data}, "row")


def parse(line: Mapping[str, str]) -> Row:
    """A row of a table in the schema of benchmarks/data/README.md.

    Raises:
        ConfigError: a value that makes no sense, or an unknown model or GPU.
    """
    known = {SYNONYMS.get(key, key): (value or "").strip() for key, value in line.items() if key}
    known = {key: WORDS.get(value.lower(), value) for key, value in known.items() if value}

    def number(name: str, default: float | None = None) -> Any:
        try:
            return float(known[name]) if name in known else default
        except ValueError:
            raise ConfigError(f"{name} must be a number, not {known[name]!r}") from None

    tuner = known.get("tuner", "lora").lower()
    quantization = known.get("quantization", "bnb4" if tuner == "qlora" else "none")
    oom = number("oom")
    row = Row(
        dataset=known.get("dataset", "measurements"),
        table=known.get("table", known.get("gpu", "measurements")),
        model=_model(known),
        gpu=known.get("gpu", "a100-80g"),
        gpus=int(number("gpus", 1)),
        split_layers=bool(number("split_layers", 0)),
        setting=setting.TrainingSetting(
            tuner="lora" if tuner == "qlora" else tuner,  # type: ignore[arg-type]
            quantization=quantization.lower(),  # type: ignore[arg-type]
            lora_rank=number("lora_rank", 8.0),
            lora_targets=known.get("lora_targets", "all-linear").lower(),  # type: ignore[arg-type]
            train_embeddings=bool(number("train_embeddings", 0)),
            flash_attention=bool(number("flash_attention", 1)),
        ),
        checkpointed=number("checkpointed", 1.0),
        batch_size=int(number("batch_size", 1)),
        accumulation=int(number("accumulation", 1)),
        length=number("length"),
        length_mean=number("length_mean"),
        length_deviation=number("length_deviation"),
        max_length=number("max_length"),
        lengths=known.get("lengths", ""),
        overlong=known.get("overlong", "delete"),
        samples_per_s=number("samples_per_s"),
        run_minutes=number("run_minutes"),
        memory_gib=number("memory_gib"),
        device_memory=known.get("memory_seen_by") == "device",
        oom=None if oom is None else bool(oom),
    )
    load_hardware(row.gpu)
    for name in ("batch_size", "accumulation", "gpus"):
        if getattr(row, name) < 1:
            raise ConfigError(f"{name} must be at least 1, not {getattr(row, name)}")
    if not 0 <= row.checkpointed <= 1:
        raise ConfigError(f"checkpointed must be from 0 to 1, not {row.checkpointed}")
    if row.length is None and row.length_mean is None and not row.lengths:
        raise ConfigError("a row needs length, or length_mean and length_deviation")
    return row


def read(path: Path = DATA / "llm_training.csv") -> list[Row]:
    """All rows of a table. Raises ConfigError with file and line."""
    rows = []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for number, line in enumerate(csv.DictReader(file), start=2):
                try:
                    rows.append(parse(line))
                except ConfigError as error:
                    raise ConfigError(f"{path}, line {number}: {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    return rows


@functools.lru_cache(maxsize=64)
def fudan(name: str, share: float, longest: float, mean: float, deviation: float) -> Lengths:
    """Lengths of cls-fudan-news-zh under the Qwen tokenizer: all of it, or its first 1000 rows."""
    if name == "fudan-1000":
        return Lengths.mixture([Gamma(mean, deviation)])
    # The whole has 3234.4 +- 2547.5 tokens (ms-swift's page): the long news is what the short news leaves of that.
    short_mean, short_square = (91 + longest) / 2, (91**2 + 91 * longest + longest**2) / 3
    long_mean = (3234.4 - share * short_mean) / (1 - share)
    long_square = (2547.5**2 + 3234.4**2 - share * short_square) / (1 - share)
    return Lengths.mixture(
        [Uniform(91, longest, share), Gamma(long_mean, (long_square - long_mean**2) ** 0.5, 1 - share)]
    )


@functools.lru_cache(maxsize=64)
def gamma(mean: float, deviation: float) -> Lengths:
    """Lengths of which a table gives mean and standard deviation."""
    return Lengths.mixture([Gamma(mean, deviation)])


@dataclass(frozen=True)
class Constants:
    """Everything that a prediction rests on: profiles, and the tables' own constants."""

    framework: FrameworkProfile = field(default_factory=load_framework)
    hardware: Mapping[str, HardwareProfile] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)  #: `tokens_scale` by model, instead of the profile's
    tables: Mapping[str, float] = field(default_factory=lambda: TABLES)

    def device(self, name: str) -> HardwareProfile:
        """Hardware profile by name."""
        return self.hardware.get(name) or load_hardware(name)

    def lengths(self, row: Row) -> Lengths:
        """Lengths of the samples that a row trained on."""
        if row.length is not None:
            return Lengths.fixed(row.length)
        if row.length_mean is not None:
            deviation = max(row.length_deviation or 0.0, 1e-3 * row.length_mean)
            whole = gamma(row.length_mean, deviation)
        else:
            t = self.tables
            whole = fudan(row.lengths, t["short_share"], t["short_longest"], t["first_mean"], t["first_deviation"])
        scaled = whole.scaled(self.scales.get(row.model.name, row.model.tokens_scale.value))
        return scaled.limited(row.max_length or 1e9, row.overlong)  # type: ignore[arg-type]


def predict_seconds(row: Row, constants: Constants) -> float:
    """Seconds a sample, over all GPUs."""
    time, _ = setting.coefficients(constants.device(row.gpu), row.model, row.setting, constants.framework)
    if row.length is not None:
        longest, weights = [row.length], [1.0]
    else:
        longest, weights = (array.tolist() for array in constants.lengths(row).longest_nodes(row.batch_size))
    batch = row.batch_size
    seconds = sum(
        weight * physics.micro_batch_seconds(time, batch * length, length, row.checkpointed)
        for length, weight in zip(longest, weights, strict=True)
    )
    copies = 1 if row.split_layers else row.gpus
    return (seconds + time.optimizer / row.accumulation) / batch / copies


def predict_minutes(row: Row, constants: Constants) -> float:
    """Minutes of a run in the table of December 2023."""
    shape = setting.architecture(row.model)
    billions = (shape.matmul_parameters + shape.embedding_parameters) / 1e9
    start = constants.tables["run_seconds"] + constants.tables["run_seconds_billion"] * billions
    return (DECEMBER_SAMPLES * predict_seconds(row, constants) + start) / 60


def _largest(row: Row, constants: Constants) -> tuple[physics.MemoryCoefficients, float, float]:
    """Memory coefficients of one of a run's GPUs, and padded tokens and length of the largest micro-batch."""
    _, memory = setting.coefficients(constants.device(row.gpu), row.model, row.setting, constants.framework)
    # Where GPUs share out the layers, each holds its share, and the last one the loss.
    share = 1.0 / row.gpus if row.split_layers else 1.0
    memory = memory._replace(
        **{name: share * getattr(memory, name) for name in ("static", "pool", "step", "stored", "checkpointed")}
    )
    longest = constants.lengths(row).longest
    return memory, row.batch_size * longest, longest


def predict_memory_gib(row: Row, constants: Constants) -> float:
    """Largest reserved memory over a run, GiB: of each GPU, or of all if they share out the layers."""
    memory, tokens, length = _largest(row, constants)
    tables = constants.tables
    built_up = tables["first_fragmentation"] if row.lengths == "fudan-1000" else constants.framework.fragmentation.value
    fragmentation = constants.lengths(row).fragmentation(built_up)
    if row.dataset == "qwen" and row.setting.quantization != "none":
        memory = memory._replace(logits=memory.logits * tables["qwen_quantized_logits"])
    if row.dataset == "dec2023":
        memory = memory._replace(pool=memory.pool * tables["december_pool"])
    capacity = constants.device(row.gpu).memory_gib.value * GIB
    parts = row.gpus if row.split_layers else 1
    extra = tables["device_context_gib"] * parts if row.device_memory else 0.0
    last = physics.reserved_bytes(memory, tokens, length, row.checkpointed, fragmentation, capacity)
    total = last
    if parts > 1:
        inner = memory._replace(logits=0.0)
        total += (parts - 1) * physics.reserved_bytes(inner, tokens, length, row.checkpointed, fragmentation, capacity)
    return total / GIB + extra


def predict_oom(row: Row, constants: Constants) -> bool:
    """Whether the run fails on its GPUs."""
    memory, tokens, length = _largest(row, constants)
    framework = constants.framework
    capacity = constants.device(row.gpu).memory_gib.value * GIB * framework.usable_share.value
    least = framework.least_fragmentation.value
    return physics.runs_out_of_memory(memory, tokens, length, row.checkpointed, least, capacity)


def probe(row: Row, constants: Constants) -> Probe:
    """What a run has measured, as calibration takes it."""
    lengths = constants.lengths(row)
    memory = row.memory_gib if not row.oom else None
    if memory is not None and row.split_layers:
        memory = None  # summed over GPUs that hold different things
    # A micro-batch of such a length that it takes the mean time.
    time, _ = setting.coefficients(constants.device(row.gpu), row.model, row.setting, constants.framework)
    mean = predict_seconds(row, constants)
    length = lengths.expected_longest(row.batch_size)
    seconds = None
    if row.samples_per_s is not None:
        typical = physics.micro_batch_seconds(time, row.batch_size * length, length, row.checkpointed)
        seconds = typical / (row.samples_per_s * mean)
    return Probe(
        tokens=row.batch_size * length,
        length=length,
        checkpointed=row.checkpointed,
        seconds=seconds,
        peak_tokens=row.batch_size * lengths.longest,
        peak_length=lengths.longest,
        reserved_gib=memory,
        fragmentation=lengths.fragmentation(constants.framework.fragmentation.value),
    )
