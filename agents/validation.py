"""Results made again: what a results.json holds, and where its comparison now comes out otherwise."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..runtime.errors import ConfigError
from .cells import Cell
from .compare import SCHEMA, Comparison, Rows, checked_weights, run

#: By list of a document, what tells its rows apart.
_IDENTITIES = {"rows": ("policy", "split", "scenario", "seed"), "front": ("policy", "split", "energy_weight")}


def validate(path: Path, *, jobs: int = 1, done: Callable[[Cell], None] = lambda cell: None) -> list[str]:
    """Run the comparison of a results.json again, and tell where its rows differ.

    Args:
        path: Of results.json.
        jobs: Processes.
        done: Called after each cell.

    Returns:
        One line a difference; empty where all is as it was.

    Raises:
        ConfigError: a file that holds no results.
    """
    document = read_document(path)
    comparison = comparison_of(document, path)
    fresh = json.loads(json.dumps(run(comparison, jobs=jobs, done=done).document()))
    lines = []
    for kind in ("splits", "policies"):
        for name, told in document[kind].items():
            if told != fresh[kind].get(name):
                lines.append(f"{kind} {name}: {told} is now {fresh[kind].get(name)}")
    for kind, identity in (
        ("rows", ("policy", "split", "scenario", "seed")),
        ("front", ("policy", "split", "energy_weight")),
    ):
        lines += _differences(document[kind], fresh[kind], identity)
    return lines


def read_document(path: Path) -> dict[str, Any]:
    """What a results.json holds.

    Raises:
        ConfigError: unreadable, or no results of this version.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            raise ConfigError(f"{path}: schema {document['schema']!r} is not {SCHEMA}: compare again with this version")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: no results of a comparison ({type(error).__name__}: {error})") from None
    return document


def comparison_of(document: Mapping[str, Any], path: Path) -> Comparison:
    """The comparison that a document is of. Raises `ConfigError` if it is incomplete."""
    try:
        return Comparison(
            tuple(document["splits"]),
            tuple(document["policies"]),
            document["seeds"],
            document["horizon"],
            checked_weights(document["weights"]),
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path}: no results of a comparison ({type(error).__name__}: {error})") from None


def _differences(old: Rows, new: Rows, identity: Sequence[str]) -> list[str]:
    """Where rows of the same identity differ by more than rounding, and which are on one side only."""
    before, now = ({tuple(row.get(name) for name in identity): row for row in rows} for rows in (old, new))
    lines = [f"{'/'.join(map(str, key))}: is no longer there" for key in before.keys() - now.keys()]
    lines += [f"{'/'.join(map(str, key))}: was not there" for key in now.keys() - before.keys()]
    for key in before.keys() & now.keys():
        for name in sorted(before[key].keys() | now[key].keys()):
            told, found = before[key].get(name), now[key].get(name)
            if not _same(told, found):
                lines.append(f"{'/'.join(map(str, key))}: {name} {told!r} is now {found!r}")
    return sorted(lines)


def _same(told: Any, found: Any) -> bool:
    """Equal, but for the last digits of a number (another processor rounds its logarithms otherwise)."""
    if isinstance(told, float) and isinstance(found, float):
        return math.isclose(told, found, rel_tol=1e-9, abs_tol=1e-9)
    return told == found
