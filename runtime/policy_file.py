"""Policy files: a policy's name with options that were tuned for it, and where they come from.

    policy: pid
    policy_options: {kp: 0.05, ki: 0.02, kd: 0.0}
    provenance: {method: optuna, ...}

`policy` and `policy_options` are those of the run's configuration; `provenance` is for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigError

SUFFIXES = (".yaml", ".yml")
_KEYS = ("policy", "policy_options", "provenance")


@dataclass(frozen=True)
class PolicyFile:
    """What a policy file holds."""

    policy: str  #: registered name, or "package.module:Class"
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)  #: plain YAML values

    def write(self, path: Path) -> None:
        """Write the file; what is there is replaced."""
        data = {"policy": self.policy, "policy_options": dict(self.policy_options), "provenance": dict(self.provenance)}
        path.write_text(yaml.safe_dump(data, sort_keys=False, width=118), encoding="utf-8")


def is_policy_file(name: str) -> bool:
    """Whether a policy's name is that of a file."""
    return name.endswith(SUFFIXES)


def shipped() -> dict[str, Path]:
    """The tuned policies that come with the package, by file name."""
    folder = Path(str(files("swiftcruise.baselines"))) / "gains"
    return {path.name: path for path in sorted(folder.glob("*.yaml"))}


def find_policy_file(name: str) -> Path:
    """The path of a policy file: a file of the user's, else one that comes with the package.

    Raises:
        ConfigError: there is neither.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if name in (own := shipped()):
        return own[name]
    raise ConfigError(
        f"policy={name!r}: no such file; correct the path, or choose one that comes with swiftcruise: "
        f"{', '.join(own) or 'none'}"
    )


def read_policy_file(name: str) -> PolicyFile:
    """A policy file, checked for its form; whether the policy takes the options is for `make_policy` to say.

    Raises:
        ConfigError: no such file, or one that is not a policy file; the message says what is wrong in it.
    """
    path = find_policy_file(name)
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"policy={name!r}: {path} cannot be read as YAML: {error}") from None
    if not isinstance(data, Mapping) or not isinstance(data.get("policy"), str):
        raise ConfigError(f"policy={name!r}: {path} is no policy file: it needs a line such as `policy: pid`")
    for key in data:
        if key not in _KEYS:
            raise ConfigError(f"policy={name!r}: {path} has {key!r}: a policy file holds {', '.join(_KEYS)} only")
    for key in _KEYS[1:]:
        if not isinstance(data.get(key, {}), Mapping):
            raise ConfigError(f"policy={name!r}: {path}: {key}={data[key]!r} must be `name: value` lines")
    if is_policy_file(data["policy"]):
        raise ConfigError(f"policy={name!r}: {path}: policy={data['policy']!r} must be a name, not another file")
    return PolicyFile(**data)
