"""A scenario: one training with everything that decides how it goes, but for the policy and the random draws."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ...runtime.errors import ConfigError
from ..plants.profile import load_hardware, load_model
from ..plants.setting import Quantization, Targets, TrainingSetting, Tuner
from .disturbances import Disturbance
from .workloads import dataset

Positive = Annotated[float, Field(gt=0)]
Scale = Annotated[float, Field(ge=0.2, le=5)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Workload(_Part):
    """What is trained, and on what data."""

    model: str  #: name of a model profile, or the path of one
    data: str = "instructions"  #: name of a length distribution, see `workloads`
    max_length: Annotated[float, Field(ge=16)] = 4096.0  #: longer samples are cut to it, tokens
    batch: Annotated[int, Field(ge=1, le=4096)] = 16  #: samples in an optimizer step, all ranks together
    ranks: Annotated[int, Field(ge=1, le=64)] = 1  #: data-parallel processes, one device each
    tuner: Tuner = "lora"
    quantization: Quantization = "none"
    lora_rank: Annotated[float, Field(ge=1)] = 8.0
    lora_targets: Targets = "all-linear"
    flash_attention: bool = True

    @model_validator(mode="after")
    def _divisible(self) -> Workload:
        if self.batch % self.ranks:
            raise ValueError(f"batch={self.batch} must be a multiple of ranks={self.ranks}")
        return self

    @property
    def setting(self) -> TrainingSetting:
        """How the model is trained, as the physics take it."""
        return TrainingSetting(
            tuner=self.tuner,
            quantization=self.quantization,
            lora_rank=self.lora_rank,
            lora_targets=self.lora_targets,
            flash_attention=self.flash_attention,
        )


class Host(_Part):
    """The machine around the device."""

    cores: Annotated[float, Field(ge=1)] = 16.0  #: CPU cores of one rank's share
    network_gbps: Positive = 100.0  #: of gradient synchronisation between ranks, Gbit/s
    ambient_c: Annotated[float, Field(ge=-20, le=50)] = 25.0


class Preview(_Part):
    """What is known of the samples that the coming interval will train on."""

    share: Annotated[float, Field(ge=0, le=1)] = 1.0  #: of those samples that have been fetched; 0: no preview
    error: Annotated[float, Field(ge=0, le=1)] = 0.0  #: standard deviation of the logarithm of the lengths told


class Mismatch(_Part):
    """Where the plant differs from its profiles; no policy is told."""

    time: Scale = 1.0  #: time of everything on device and host, relative
    launch: Scale = 1.0  #: host time to launch kernels, relative
    activations: Scale = 1.0  #: memory of activations, relative
    cooling: Scale = 1.0  #: thermal resistance, relative
    memory_model: Annotated[float, Field(ge=-1, le=1)] = 0.0
    #: error of the run's own memory model at the start, logarithm of predicted over true activations


class Budgets(_Part):
    """What the job may use as a whole; None: no such budget."""

    energy: Annotated[float, Field(gt=0, le=1)] | None = None
    #: share of the energy that full power all the time would draw
    temperature_c: Annotated[float, Field(ge=30, le=110)] | None = None  #: not to be exceeded, degrees C


class Scenario(_Part):
    """One training to be controlled.

    Random draws (which intervals bring a burst, how long the longest sample is) follow from the scenario and the key of
    an episode. In a frozen split `seed` fixes that key, so that all policies meet the same draws.
    """

    name: Annotated[str, Field(min_length=1)]
    hardware: str  #: name of a hardware profile, or the path of one
    workload: Workload
    host: Host = Host()
    disturbances: tuple[Disturbance, ...] = ()
    preview: Preview = Preview()
    mismatch: Mismatch = Mismatch()
    budgets: Budgets = Budgets()
    interval_s: Annotated[float, Field(ge=1, le=3600)] = 30.0  #: control interval
    dead_time: Literal[0, 1] = 0  #: intervals from a decision to its effect
    noise: Annotated[float, Field(ge=0, le=5)] = 1.0  #: of measurements and of times, relative to the usual
    dropout: Annotated[float, Field(ge=0, le=0.5)] = 0.0  #: chance an interval that the device's sensors are silent
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None

    @model_validator(mode="after")
    def _once(self) -> Scenario:
        kinds = [disturbance.kind for disturbance in self.disturbances]
        for kind in kinds:
            if kinds.count(kind) > 1:
                raise ValueError(f"disturbances has {kind!r} more than once: keep one")
        return self

    def check(self) -> Scenario:
        """Itself, if the profiles and the data that it names exist.

        Raises:
            ConfigError: one does not.
        """
        load_hardware(self.hardware)
        load_model(self.workload.model)
        dataset(self.workload.data)
        return self

    def data(self) -> dict[str, Any]:
        """What differs from the defaults, JSON-serialisable."""
        return self.model_dump(mode="json", exclude_defaults=True) | {
            "disturbances": [d.model_dump(mode="json") for d in self.disturbances]
        }


def scenario_from(data: Mapping[str, Any], origin: str) -> Scenario:
    """A scenario from its data; `origin` is named in errors.

    Raises:
        ConfigError: a field that is unknown, missing or out of range; the message names it, its value and the remedy.
    """
    try:
        return Scenario.model_validate(dict(data)).check()
    except ValidationError as error:
        raise ConfigError("\n".join(_line(detail, origin) for detail in error.errors())) from None
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None


def _line(detail: Any, origin: str) -> str:
    field = ".".join(str(part) for part in detail["loc"]) or "scenario"
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        return f"{origin}: {field} is unknown: remove it"
    if detail["type"] == "missing":
        return f"{origin}: {field} is missing: add it"
    shown = f", not {detail['input']!r}" if isinstance(detail["input"], (str, int, float, bool)) else ""
    return f"{origin}: {field}: {message}{shown}"


def digest(scenarios: list[dict[str, Any]]) -> str:
    """SHA-256 of scenarios' data, independent of the order of keys and of white space."""
    return hashlib.sha256(json.dumps(scenarios, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
