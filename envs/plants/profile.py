"""Profiles: the constants of hardware, models and framework, in YAML, each with its source.

A profile is a file of entries `name: {value, source, basis}`, where `basis` says how the value is known: `measured`
(or fitted to measurements), `stated` (by the vendor's data sheet or the model's configuration) or `assumed`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ...runtime.errors import ConfigError

GIB = 2**30
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same, many times faster, where libyaml is there
PROFILES = Path(__file__).parent.parent / "profiles"

Basis = Literal["measured", "stated", "assumed"]
Attention = Literal["flash", "masked", "alibi"]
Profile = TypeVar("Profile", bound="_Profile")


class Constant(BaseModel):
    """One constant: its value, where it comes from, and how well it is known."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    value: float
    source: str = Field(min_length=3)
    basis: Basis

    @model_validator(mode="before")
    @classmethod
    def _number(cls, entry: Any) -> Any:
        # YAML reads on/off/yes/no as booleans, and pydantic would read those as 1 and 0.
        if isinstance(entry, Mapping) and isinstance(entry.get("value"), bool):
            raise ValueError("value must be a number, not yes/no")
        return entry


class Positive(Constant):
    """A constant above 0."""

    value: float = Field(gt=0)


class NotNegative(Constant):
    """A constant of 0 or more."""

    value: float = Field(ge=0)


class Fraction(Constant):
    """A constant above 0 and at most 1."""

    value: float = Field(gt=0, le=1)


_NEUTRAL = Positive(value=1.0, source="not calibrated on a run of this machine", basis="assumed")


class _Profile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def constants(self) -> dict[str, Constant]:
        """Its constants by name."""
        return {name: entry for name, entry in self if isinstance(entry, Constant)}

    def values(self) -> dict[str, float]:
        """Its constants' values by name."""
        return {name: entry.value for name, entry in self.constants().items()}

    def replace(self: Profile, values: Mapping[str, float], source: str) -> Profile:
        """A copy in which some constants have other values, marked as measured, with `source`.

        Raises:
            ConfigError: a name that is no constant of this profile, or a value that it cannot have.
        """
        data = self.model_dump()
        for name, value in values.items():
            if name not in self.constants():
                raise ConfigError(f"no constant {name!r} in this profile; it has {', '.join(self.constants())}")
            data[name] = {"value": value, "source": source, "basis": "measured"}
        return _checked(type(self), data, source)


class HardwareProfile(_Profile):
    """An accelerator, or a CPU."""

    name: str
    description: str
    accelerator: bool = Field(default=True, description="whether it has NVML's sensors and a power limit; false: a CPU")
    flops: Positive = Field(description="peak dense matrix throughput in training precision, FLOP/s")
    bandwidth: Positive = Field(description="peak memory bandwidth, bytes/s")
    memory_gib: Positive = Field(description="memory that a process can reserve, GiB")
    context_gib: NotNegative = Field(description="memory of the framework beside tensors, GiB")
    matmul_efficiency: Fraction = Field(description="reached share of peak in large matrix products")
    attention_efficiency: Fraction = Field(description="reached share of peak in flash attention")
    launch_scale: Positive = Field(description="host time to launch a kernel, relative to the A100 tables' host")
    power_w: Positive = Field(description="thermal design power (largest power limit), W")
    least_power_w: Positive = Field(description="smallest power limit that can be set, W")
    idle_power_w: NotNegative = Field(description="power when idle, W")
    load_power: Positive = Field(description="power of a full training load without a limit, in units of power_w")
    power_static: Fraction = Field(description="share of power_w that does not follow the clock")
    power_steepness: Positive = Field(description="speed over dynamic power at a low clock")
    power_slope: Fraction = Field(description="slope of speed over dynamic power near full clock")
    power_sharpness: Positive = Field(description="how sharp the two slopes meet")
    power_clock_bound: Fraction = Field(description="share of step time that follows the clock")
    power_evenness: Positive = Field(description="how evenly power is drawn; the larger, the harder a limit bites")
    thermal_resistance: Positive = Field(description="die above ambient, degrees C per W")
    sink_seconds: Positive = Field(description="time constant of the heat sink, s")
    throttle_celsius: Positive = Field(description="temperature at which the clock is throttled, degrees C")
    time_scale: Positive = Field(default=_NEUTRAL, description="all times, relative; calibration sets it")
    activation_scale: Positive = Field(default=_NEUTRAL, description="all activations, relative; calibration sets it")

    @model_validator(mode="after")
    def _ordered(self) -> HardwareProfile:
        if not self.idle_power_w.value < self.least_power_w.value <= self.power_w.value:
            raise ValueError("idle_power_w < least_power_w <= power_w must hold")
        if self.power_steepness.value <= 1:
            raise ValueError("power_steepness must be above 1")
        if self.context_gib.value >= self.memory_gib.value:
            raise ValueError("context_gib must be below memory_gib")
        return self


class ModelProfile(_Profile):
    """A language model."""

    name: str
    description: str
    family: Literal["qwen", "llama", "other", "recent"] = Field(
        description="whose code it costs as much as: Qwen 1, Llama in 2023, others in 2023, transformers 5"
    )
    attention: Attention = Field(description="attention in training: flash, masked (SDPA with a mask) or alibi")
    tied_embeddings: bool = Field(description="output layer and embedding are one matrix")
    fused_qkv: bool = Field(description="query, key and value are one matrix")
    layers: Positive
    hidden_size: Positive
    intermediate_size: Positive
    heads: Positive
    key_value_heads: Positive
    head_size: Positive
    vocabulary: Positive
    tokens_scale: Positive = Field(description="tokens of the same text, relative to the Qwen tokenizer")

    @model_validator(mode="after")
    def _whole(self) -> ModelProfile:
        for name, value in self.values().items():
            if name != "tokens_scale" and value != int(value):
                raise ValueError(f"{name} must be a whole number")
        if self.heads.value % self.key_value_heads.value:
            raise ValueError("heads must be a multiple of key_value_heads")
        return self


class FrameworkProfile(_Profile):
    """What transformers, peft, bitsandbytes and ms-swift cost, whatever model and device. See `physics`."""

    elementwise_traffic: Positive
    adapter_traffic: Positive
    logits_traffic: Positive
    gradient_traffic: Positive
    optimizer_traffic: Positive
    masked_traffic: Positive
    alibi_traffic: Positive
    eager_traffic: Positive
    gptq4_traffic: Positive
    gptq8_traffic: Positive
    bnb4_traffic: Positive
    launch_seconds_qwen: Positive
    launch_seconds_llama: Positive
    launch_seconds_other: Positive
    launch_recomputed: Fraction
    adapter_launch_seconds: Positive
    quantized_launch_seconds: Positive
    zero_launch_seconds: Positive
    weight_bytes: Positive
    gptq4_weight_bytes: Positive
    gptq8_weight_bytes: Positive
    bnb4_weight_bytes: Positive
    bnb4_load_bytes: NotNegative
    checkpoint_bytes: Positive
    stored_bytes: Positive
    layer_bytes: Positive
    logits_bytes: Positive
    logits_bytes_llama: Positive
    eager_bytes: Positive
    masked_bytes: Positive
    alibi_bytes: Positive
    eager_stored: Positive
    state_bytes: Positive
    step_bytes: Positive
    zero_state_bytes: Positive
    zero_step_bytes: Positive
    adapter_state_bytes: Positive
    head_state_bytes: Positive
    fragmentation: Positive
    least_fragmentation: Positive
    usable_share: Fraction


def _checked(kind: type[Profile], data: Mapping[str, Any], origin: str) -> Profile:
    try:
        return kind.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError("\n".join(_line(kind, detail, origin) for detail in error.errors())) from None


def _line(kind: type[_Profile], detail: Any, origin: str) -> str:
    location = [str(part) for part in detail["loc"]]
    field = ".".join(location)
    known = list(Constant.model_fields) if len(location) > 1 else list(kind.model_fields)
    if detail["type"] == "extra_forbidden":
        close = difflib.get_close_matches(location[-1], known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
        return f"{origin}: unknown field {field!r}; {hint}"
    if detail["type"] == "missing":
        about = kind.model_fields[location[0]].description or location[0]
        remedy = "give it a value, a source and a basis" if len(location) == 1 else f"add {location[-1]!r}"
        return f"{origin}: {field} is missing ({about}); {remedy}"
    message = detail["msg"].removeprefix("Value error, ")
    if isinstance(detail["input"], (str, int, float, bool)):
        message += f", not {detail['input']!r}"
    if detail["type"] == "model_type" and len(location) == 1:
        message = "must be an entry {value: ..., source: ..., basis: measured|stated|assumed}"
    return f"{origin}: {field + ': ' if field else ''}{message}"


def _mapping(path: Path) -> Mapping[str, Any]:
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _LOADER)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the profile {path}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: a profile is a YAML mapping of names to entries")
    return data


def _read(path: Path, kind: type[Profile]) -> Profile:
    return _checked(kind, _mapping(path), str(path))


_read_own = cache(_read)  # the package's own files do not change; a user's may


@cache
def _names(kind: str) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (PROFILES / kind).glob("*.yaml")))


def profile_names(kind: Literal["hardware", "models"]) -> list[str]:
    """Names of the profiles that come with the package."""
    return list(_names(kind))


def _is_file(name: str) -> bool:
    return Path(name).suffix in (".yaml", ".yml") or Path(name).is_file()


def _unknown(name: str, kind: str, known: list[str]) -> ConfigError:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return ConfigError(f"unknown {kind} {name!r}; {hint}Known: {', '.join(known)}; or the path of your own YAML file")


def _load(name: str, folder: Literal["hardware", "models"], kind: type[Profile]) -> Profile:
    if name in profile_names(folder):
        return _read_own(PROFILES / folder / f"{name}.yaml", kind)
    if _is_file(name):
        return _read(Path(name).expanduser(), kind)
    raise _unknown(name, f"{folder.removesuffix('s')} profile", profile_names(folder))


def load_profile(name: str) -> HardwareProfile | ModelProfile:
    """A profile of either kind, by name or from a YAML file. Raises as `load_hardware`."""
    if name in profile_names("models"):
        return load_model(name)
    if name in profile_names("hardware"):
        return load_hardware(name)
    if not _is_file(name):
        raise _unknown(name, "profile", [*profile_names("hardware"), *profile_names("models")])
    path = Path(name).expanduser()
    return _read(path, ModelProfile if "layers" in _mapping(path) else HardwareProfile)


def load_hardware(name: str) -> HardwareProfile:
    """A hardware profile by name, or from the YAML file at that path.

    Raises:
        ConfigError: unknown name, unreadable file, or entries that make no sense.
    """
    return _load(name, "hardware", HardwareProfile)


def load_model(name: str) -> ModelProfile:
    """A model profile by name, or from the YAML file at that path. Raises as `load_hardware`."""
    return _load(name, "models", ModelProfile)


def parse_model(data: Mapping[str, Any], origin: str) -> ModelProfile:
    """A model profile from a mapping as in its YAML file; `origin` is named in errors. Raises as `load_hardware`."""
    return _checked(ModelProfile, data, origin)


def load_framework() -> FrameworkProfile:
    """The framework's constants."""
    return _read_own(PROFILES / "framework.yaml", FrameworkProfile)
