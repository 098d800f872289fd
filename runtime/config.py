"""Configuration of a run: one YAML file, checked in full before anything starts.

Precedence: command line (`SWIFTCRUISE_OVERRIDES`, JSON) > file (`--config` or `SWIFTCRUISE_CONFIG`) > defaults.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from .errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from .controls import ControlLimits, Limit

#: Environment variable that names the configuration file.
CONFIG_VARIABLE = "SWIFTCRUISE_CONFIG"
#: Environment variable with values that win over the file, as a JSON object.
OVERRIDES_VARIABLE = "SWIFTCRUISE_OVERRIDES"

_COMMAND_LINE = "command line"
_MODULE_ATTRIBUTE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class _Section(BaseModel):
    """A part of the configuration: frozen, unknown keys refused, no infinities, no yes/no where a number belongs."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        # YAML reads on/off/yes/no as booleans, and pydantic would read those as 1 and 0.
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            raise ValueError("must not be a yes/no value")
        return value


class GuardConfig(_Section):
    """The safety guard that every policy stands behind."""

    hysteresis: float = Field(
        default=0.05,
        ge=0,
        le=0.5,
        description="Relative changes of token budget and micro-batch cap below this are dropped.",
    )
    ceiling_recovery: float = Field(
        default=1.05,
        gt=1,
        le=4,
        description="Factor an interval by which the ceiling set by an out-of-memory error is lifted, to just below "
        "what failed.",
    )
    ceiling_relaxation: float = Field(
        default=1.002,
        gt=1,
        le=4,
        description="Factor an interval by which it is lifted from there on, until what failed is tried again.",
    )


class LimitConfig(_Section):
    """Bounds of one control; what is left out keeps its default."""

    low: float | None = Field(default=None, ge=0, description="Least value.")
    high: float | None = Field(default=None, ge=0, description="Greatest value.")
    rate: float | None = Field(
        default=None,
        gt=0,
        description="Largest change an interval: a factor (> 1) for token budget and micro-batch cap.",
    )
    dwell: int | None = Field(default=None, ge=0, description="Least number of intervals between two changes.")


class LimitsConfig(_Section):
    """Bounds of the controls, by control."""

    token_budget: LimitConfig = Field(default=LimitConfig(), description="Limits of the token budget, tokens.")
    micro_batch_cap: LimitConfig = Field(default=LimitConfig(), description="Limits of the micro-batch cap, samples.")
    memory_target: LimitConfig = Field(default=LimitConfig(), description="Limits of the memory target, fraction.")
    checkpoint_fraction: LimitConfig = Field(
        default=LimitConfig(), description="Limits of the checkpointed share of layers."
    )
    num_workers: LimitConfig = Field(default=LimitConfig(), description="Limits of the loader worker processes.")
    power_limit_w: LimitConfig = Field(default=LimitConfig(), description="Limits of the GPU power limit, watts.")
    cpu_threads: LimitConfig = Field(default=LimitConfig(), description="Limits of the intra-op threads of a CPU run.")

    @field_validator("*")
    @classmethod
    def _makes_a_limit(cls, value: LimitConfig, info: ValidationInfo) -> LimitConfig:
        try:
            _limit(info.field_name or "", value)
        except ConfigError as error:
            raise ValueError(f"{error}; what is left out keeps its default") from None
        return value


class CruiseConfig(_Section):
    """All settings of a run."""

    policy: str = Field(
        default="cruise",
        description='Who decides: a registered policy, `"package.module:Class"`, or a policy file (YAML).',
    )
    policy_options: dict[str, Any] = Field(default={}, description="Keyword arguments of the policy.")
    observe: bool = Field(default=False, description="Only watch: measure and log, change nothing.")
    interval_s: float = Field(default=30.0, gt=0, le=86400, description="Seconds between two decisions.")
    interval_steps: int | None = Field(
        default=None, ge=1, description="Decide every so many optimizer steps instead of every `interval_s` seconds."
    )
    memory_limit_gib: float | None = Field(
        default=None,
        gt=0,
        description="Memory that the training may use, GiB, at most the GPU's; unset: all of the GPU's, or on a CPU "
        "run what the host has to spare.",
    )
    memory_cap: float = Field(
        default=0.90, gt=0, le=0.98, description="Fraction of memory capacity that nothing is allowed to exceed."
    )
    memory_target: float | None = Field(
        default=None,
        gt=0,
        le=0.98,
        description="Fraction of capacity that a micro-batch's predicted peak may reach, at most `memory_cap`; "
        "unset: the policy chooses.",
    )
    token_budget: int | None = Field(
        default=None,
        ge=1,
        description="Most padded tokens in a micro-batch at the start; unset: the policy chooses.",
    )
    micro_batch_cap: int | None = Field(
        default=None,
        ge=1,
        description="Most samples in a micro-batch at the start; unset: the token budget alone binds.",
    )
    checkpoint: Literal["auto", "keep"] | float = Field(
        default="auto",
        description="Gradient checkpointing: `auto` (the fewest layers that memory allows, per micro-batch), "
        "`keep` (as the training was started), or a fixed share of layers, 0..1.",
    )
    num_workers: int | None = Field(
        default=None, ge=0, description="Loader workers at the start; unset: as ms-swift was told."
    )
    control_workers: bool = Field(default=False, description="Let the policy change the number of loader workers.")
    cpu_threads: int | None = Field(
        default=None, ge=1, description="Intra-op threads of a CPU run at the start; unset: as torch chose."
    )
    control_threads: bool = Field(default=True, description="Let the policy change the threads of a CPU run.")
    control_power: bool = Field(default=False, description="Let the policy change the GPU's power limit (needs root).")
    nvml_period_s: float = Field(default=1.0, gt=0, le=60, description="Seconds between two NVML samples.")
    ranks: Literal["own", "follow"] = Field(
        default="own",
        description="Data-parallel ranks: `own` (each decides for itself) or `follow` (all apply what rank 0's policy "
        "proposes, each behind its own guard).",
    )
    skip_oversized: bool = Field(
        default=False,
        description="Leave out (and record) a sample that fits into memory in no way, instead of ending the training.",
    )
    decision_timeout_s: float = Field(
        default=1.0, gt=0, le=600, description="A decision that takes longer is dropped: the last safe setting holds."
    )
    guard: GuardConfig = Field(default=GuardConfig(), description="Safety guard.")
    limits: LimitsConfig = Field(default=LimitsConfig(), description="Bounds of the controls.")
    trace: bool = Field(default=True, description="Write `trace.jsonl` into the output directory.")
    tensorboard: bool = Field(
        default=True, description="Write telemetry and controls into the training's TensorBoard log."
    )
    resume_controller: bool = Field(default=True, description="Continue with the controller's state of the checkpoint.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of the policy.")

    @field_validator("policy")
    @classmethod
    def _policy_is_known(cls, value: str) -> str:
        from .policy import REGISTRY  # brings numpy, which merely reading the settings does not need
        from .policy_file import find_policy_file, is_policy_file

        if is_policy_file(value):
            try:
                find_policy_file(value)
            except ConfigError as error:
                raise ValueError(str(error).partition(": ")[2]) from None
            return value
        if value in REGISTRY or _MODULE_ATTRIBUTE.fullmatch(value) or (os.sep in value and Path(value).exists()):
            return value
        close = difflib.get_close_matches(value, REGISTRY, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(
            f"is not a known policy; {hint}choose one of {', '.join(sorted(REGISTRY))}, 'package.module:Class', or a "
            "policy file"
        )

    @field_validator("memory_target")
    @classmethod
    def _target_below_cap(cls, value: float | None, info: ValidationInfo) -> float | None:
        cap = info.data.get("memory_cap")
        if value is not None and cap is not None and value > cap:
            raise ValueError(f"must be <= memory_cap={cap}; lower it or raise memory_cap")
        return value

    @field_validator("checkpoint", mode="before")
    @classmethod
    def _mode_or_fraction(cls, value: object) -> object:
        if value in ("auto", "keep"):
            return value
        try:
            fraction = float(cast(str, value))
        except (TypeError, ValueError):
            fraction = float("nan")
        if not 0 <= fraction <= 1:
            raise ValueError("must be 'auto', 'keep' or a share of layers from 0 to 1")
        return fraction

    def control_limits(self) -> ControlLimits:
        """The limits of every control: the defaults, with what `limits` says in their place."""
        from .controls import ControlLimits

        limits = {name: _limit(name, getattr(self.limits, name)) for name in LimitsConfig.model_fields}
        return ControlLimits(**limits)


def _limit(control: str, given: LimitConfig) -> Limit:
    from dataclasses import replace

    from .controls import ControlLimits

    return replace(getattr(ControlLimits(), control), **given.model_dump(exclude_none=True))


def load_config(
    path: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> CruiseConfig:
    """The run's configuration, checked.

    Args:
        path: a YAML (or JSON) file; None takes the one `SWIFTCRUISE_CONFIG` names, if any.
        environ: environment variables; those of the process by default.
        overrides: values that win over everything else, nested like the file.

    Raises:
        ConfigError: one line for each mistake: where it stands, the field, its value, the remedy.
    """
    # Not a default argument: `datasets` puts a copy in the place of the os.environ that was there at import.
    environ = os.environ if environ is None else environ
    file = os.fspath(path) if path is not None else environ.get(CONFIG_VARIABLE) or None
    asked_by = "--config" if path is not None else CONFIG_VARIABLE
    file_values = _read_file(file, asked_by) if file is not None else {}
    command_line = merge(_read_overrides(environ), overrides or {})
    try:
        return CruiseConfig.model_validate(merge(file_values, command_line))
    except ValidationError as error:
        lines = [_line(details, file or "defaults", command_line) for details in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `over`'s values in place of its own; nested mappings are merged likewise."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def parse_assignment(text: str, option: str = "--set") -> dict[str, Any]:
    """`"guard.hysteresis=0.1"` as ``{"guard": {"hysteresis": 0.1}}``; the value is read as YAML.

    Args:
        text: What was given.
        option: The command line's option that it was given to, for errors.

    Raises:
        ConfigError: no `=`, an empty key, or a value that is not YAML.
    """
    key, equals, value = text.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(f"{option} {text}: write key=value, for example {option} guard.hysteresis=0.1")
    try:
        result: Any = yaml.load(value, _UniqueKeyLoader)
    except yaml.YAMLError:
        raise ConfigError(f"{option} {text}: the value is not YAML; put quotes around it") from None
    for name in reversed(names):
        result = {name: result}
    return result


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML without silent loss: a key given twice is an error (plain PyYAML keeps the last)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key_node.value!r} is given twice; keep one", problem_mark=key_node.start_mark
                )
            if isinstance(key_node, yaml.ScalarNode):
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _read_file(file: str, asked_by: str) -> dict[str, Any]:
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{asked_by}={file}: no such file; correct the path or leave it out") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{asked_by}={file}: cannot be read ({error}); give a YAML text file") from None
    try:
        values = yaml.load(text, _UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        raise ConfigError(f"{file}:{where} {error.problem or 'not YAML'}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not YAML: {error}") from None
    if values is None:  # an empty file: all defaults
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: must hold `key: value` lines, found a {type(values).__name__}")
    return {str(key): value for key, value in values.items()}


def _read_overrides(environ: Mapping[str, str]) -> dict[str, Any]:
    text = environ.get(OVERRIDES_VARIABLE)
    if not text:
        return {}
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{OVERRIDES_VARIABLE}={text}: not JSON ({error}); unset it") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{OVERRIDES_VARIABLE}={text}: must be a JSON object; unset it")
    return values


def _line(details: ErrorDetails, file: str, command_line: Mapping[str, Any]) -> str:
    """One mistake as `where: field=value: what is wrong; remedy`."""
    location = [str(part) for part in details["loc"]]
    where = _COMMAND_LINE if _holds(command_line, location) else file
    field, value = ".".join(location), details["input"]
    section = _section(location[:-1])
    if details["type"] == "extra_forbidden" and section is not None:
        close = difflib.get_close_matches(location[-1], section.model_fields, n=1)
        remedy = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(section.model_fields)}"
        return f"{where}: {field}: no such setting; {remedy}"
    context = details.get("ctx", {})
    bounds = {
        "less_than_equal": ("<=", "le"),
        "greater_than_equal": (">=", "ge"),
        "less_than": ("<", "lt"),
        "greater_than": (">", "gt"),
    }
    if details["type"] in bounds:
        symbol, key = bounds[details["type"]]
        problem = f"must be {symbol} {context[key]}"
    elif details["type"] == "value_error":
        problem = str(context["error"])
    else:
        problem = details["msg"].replace("Input should be", "must be")
    if ";" in problem or section is None or location[-1] not in section.model_fields:
        return f"{where}: {field}={value!r}: {problem}"
    default = section.model_fields[location[-1]].default
    shown = "" if isinstance(default, BaseModel) else ", unset" if default is None else f", {default!r}"
    return f"{where}: {field}={value!r}: {problem}; remove it for the default{shown}"


def _holds(values: Any, location: Sequence[str]) -> bool:
    for name in location:
        if not isinstance(values, Mapping) or name not in values:
            return False
        values = values[name]
    return True


def _section(location: Sequence[str]) -> type[BaseModel] | None:
    """The section of the configuration at `location`, None where there is none."""
    section: type[BaseModel] = CruiseConfig
    for name in location:
        field = section.model_fields.get(name)
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return None
        section = field.annotation
    return section


def settings_table() -> str:
    """Every setting as rows of a Markdown table (setting, default, meaning), for the documentation."""
    rows = ["| setting | default | meaning |", "| --- | --- | --- |"]

    def add(section: type[BaseModel], prefix: str) -> None:
        for name, field in section.model_fields.items():
            if isinstance(field.default, LimitsConfig):
                add(LimitConfig, f"{prefix}{name}.CONTROL.")
            elif isinstance(field.default, _Section):
                add(type(field.default), f"{prefix}{name}.")
            else:
                default = "unset" if field.default is None else f"`{json.dumps(field.default)}`"
                rows.append(f"| `{prefix}{name}` | {default} | {field.description} |")

    add(CruiseConfig, "")
    return "\n".join(rows)
