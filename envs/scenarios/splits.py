"""Frozen, hashed splits of scenarios, and scenarios from wherever one has them.

A split lies in a manifest (`manifests/NAME.json`): every field of each scenario, and their SHA-256. So it stays what
it is whatever becomes of defaults, and a result that names the split and its hash can be checked. Manifests are written
by

    python -m swiftcruise.envs.scenarios.splits --write DIR

from the distributions in `drawing`.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import yaml
from pydantic import ValidationError

from ...runtime.errors import ConfigError
from .drawing import COMMON, HARD, HELD_OUT, UNKNOWN, VERSION, Population, draw_scenario
from .scenario import Scenario, digest, scenario_from

MANIFESTS = Path(__file__).parent / "manifests"
SEED = 0  #: of the frozen splits
_COMMAND = "python -m swiftcruise.envs.scenarios.splits --write DIR"


@dataclass(frozen=True)
class Split:
    """A split: what it is for, and what it is drawn from."""

    description: str
    count: int
    population: Population
    seeded: bool  #: its scenarios fix the random draws, so that all policies meet the same


SPLITS: dict[str, Split] = {
    "train": Split("to train on: mild disturbances, known devices and models", 512, COMMON, False),
    "val": Split("to choose by, drawn like train", 64, COMMON, True),
    "test-id": Split("to test on, drawn like train", 96, COMMON, True),
    "test-ood": Split(
        "models, devices and data that train never holds, with disturbances that it never holds", 96, UNKNOWN, True
    ),
    "test-hard": Split(
        "known and unknown devices with bursts, a neighbour that never leaves, heat, a plant unlike its profiles, and "
        "a preview that is poor or absent",
        96,
        HARD,
        True,
    ),
}


def draw_split(name: str, count: int, seed: int) -> list[Scenario]:
    """Scenarios drawn as those of a split are; the first of them do not depend on `count`.

    Args:
        name: Of the split.
        count: How many, at least 1.
        seed: The frozen splits have `SEED`.

    Raises:
        ConfigError: unknown split, or no count.
    """
    split = SPLITS[_known(name)]
    if count < 1:
        raise ConfigError(f"count must be at least 1, not {count}")
    drawn = []
    for index in range(count):
        stream = f"{name}/{seed}/{index}"
        own = f"{name}-{index:03d}" if seed == SEED else f"{name}-seed{seed}-{index:03d}"
        scenario = draw_scenario(split.population, own, stream)
        key = int(Random(f"key of {stream}").random() * 2**53) if split.seeded else None
        drawn.append(scenario.model_copy(update={"seed": key}))
    return drawn


def frozen(scenario: Scenario) -> dict[str, Any]:
    """A scenario's data as manifests hold it: every field that is set, defaults too."""
    return scenario.model_dump(mode="json", exclude_none=True)


def write_manifest(name: str, folder: Path) -> Path:
    """Draw a split anew and write its manifest. Returns the path."""
    split = SPLITS[name]
    scenarios = [frozen(scenario) for scenario in draw_split(name, split.count, SEED)]
    head = {
        "split": name,
        "description": split.description,
        "held_out": HELD_OUT,
        "generator": {"command": _COMMAND, "seed": SEED, "version": VERSION},
        "sha256": digest(scenarios),
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    rows = ",\n".join(json.dumps(scenario, separators=(",", ":")) for scenario in scenarios)
    path = folder / f"{name}.json"
    path.write_text("{\n" + ",\n".join(lines) + f',\n"scenarios": [\n{rows}\n]\n}}\n', encoding="utf-8")
    return path


@dataclass(frozen=True)
class Manifest:
    """A frozen split, its hash verified."""

    split: str
    description: str
    held_out: Mapping[str, Sequence[str]]
    sha256: str
    scenarios: tuple[Scenario, ...]


def read_manifest(path: Path) -> Manifest:
    """A manifest, if it holds what its hash says.

    Raises:
        ConfigError: unreadable, or changed.
    """
    remedy = (
        "restore it (reinstall the package, or git checkout), or load a copy as a file of your own: "
        f"load_scenarios('my-{path.name}')"
    )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        rows, sha256 = data["scenarios"], data["sha256"]
        found = digest(rows)
        if found != sha256:
            hashes = f"its scenarios hash to {found[:12]}, not {sha256[:12]}"
            raise ConfigError(f"{path}: the frozen split was changed ({hashes}); {remedy}")
        scenarios = tuple(map(Scenario.model_validate, rows))
        return Manifest(data["split"], data["description"], data["held_out"], sha256, scenarios)
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise ConfigError(f"{path}: not a manifest of a split ({type(error).__name__}: {error}); {remedy}") from None


@cache
def manifest(name: str) -> Manifest:
    """The frozen split of that name.

    Raises:
        ConfigError: unknown name, or a manifest that was changed.
    """
    return read_manifest(MANIFESTS / f"{_known(name)}.json")


def load_split(name: str) -> list[Scenario]:
    """The scenarios of a frozen split. Raises as `manifest`."""
    return list(manifest(name).scenarios)


def _known(name: str) -> str:
    if name not in SPLITS:
        close = difflib.get_close_matches(name, SPLITS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"unknown split {name!r}; {hint}Known: {', '.join(SPLITS)}")
    return name


Source = str | Path | Scenario | Sequence["Source"]


def load_scenarios(source: Source) -> list[Scenario]:
    """Scenarios by name, from a file, or as they are.

    Args:
        source: A split's name, the name of one of its scenarios (`test-id-017`), the path of a YAML or JSON file with
            a scenario, a list of them or a manifest (whose hash is not asked for), a scenario, or a sequence of
            any of these.

    Raises:
        ConfigError: a name that is unknown, or a file that is unreadable, empty or holds a bad scenario.
    """
    if isinstance(source, Scenario):
        return [source]
    if isinstance(source, Path):
        return _read_own(source)
    if not isinstance(source, str):
        if isinstance(source, Mapping) or not isinstance(source, Sequence):
            raise ConfigError(
                f"scenarios must be a name, a path, a Scenario or a sequence of these, not {type(source).__name__}; "
                "Scenario.model_validate makes a scenario of a mapping"
            )
        if not source:
            raise ConfigError("no scenarios: name a split, for example 'test-id', or give at least one scenario")
        return [scenario for part in source for scenario in load_scenarios(part)]
    if source in SPLITS:
        return load_split(source)
    split = source.rpartition("-")[0]
    if split in SPLITS:
        named = [scenario for scenario in manifest(split).scenarios if scenario.name == source]
        if named:
            return named
    if Path(source).suffix in (".yaml", ".yml", ".json") or Path(source).is_file():
        return _read_own(Path(source).expanduser())
    raise _unknown(source)


def _unknown(name: str) -> ConfigError:
    split = name.rpartition("-")[0]
    if split in SPLITS:
        scenarios = manifest(split).scenarios
        return ConfigError(f"unknown scenario {name!r}; {split} has {scenarios[0].name} to {scenarios[-1].name}")
    close = difflib.get_close_matches(name, SPLITS, n=1) or difflib.get_close_matches(
        name, [scenario.name for split in SPLITS for scenario in manifest(split).scenarios], n=1
    )
    hint = f"did you mean {close[0]!r}? " if close else ""
    return ConfigError(
        f"unknown scenarios {name!r}; {hint}Known: {', '.join(SPLITS)}; one of theirs, for example 'test-id-017'; "
        "or the path of your own YAML or JSON file"
    )


def _read_own(path: Path) -> list[Scenario]:
    """Scenarios in a user's file."""
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the scenarios {path}: {error}") from None
    except (yaml.YAMLError, json.JSONDecodeError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise ConfigError(f"{path}: not valid {kind}: {error}") from None
    if isinstance(data, Mapping) and "scenarios" in data:
        data = data["scenarios"]
    if isinstance(data, Mapping):
        return [scenario_from(data, str(path))]
    if not isinstance(data, list) or not data or not all(isinstance(part, Mapping) for part in data):
        raise ConfigError(f"{path}: expected a scenario (name, hardware, workload, ...) or a list of at least one")
    scenarios = [scenario_from(part, f"{path}, scenario {i} ({part.get('name')})") for i, part in enumerate(data)]
    names = [scenario.name for scenario in scenarios]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{path}: name {name!r} occurs more than once: give each scenario a name of its own")
    return scenarios


def main() -> None:
    """Write the manifests of all splits."""
    parser = argparse.ArgumentParser(prog="python -m swiftcruise.envs.scenarios.splits", description=main.__doc__)
    parser.add_argument("--write", metavar="DIR", type=Path, required=True, help="folder for the manifests")
    folder = parser.parse_args().write
    folder.mkdir(parents=True, exist_ok=True)
    for name in SPLITS:
        path = write_manifest(name, folder)
        print(f"{path}: {len(read_manifest(path).scenarios)} scenarios, sha256 {read_manifest(path).sha256}")


if __name__ == "__main__":
    main()
