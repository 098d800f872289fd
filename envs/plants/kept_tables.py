"""Packing tables on disk, in the user's cache: hundreds of them take seconds to build and a moment to read."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import tempfile
import zlib
from functools import cache
from pathlib import Path

import numpy as np

from ...runtime import planner
from . import compiling, packing
from .lengths import Lengths
from .packing import BUDGETS, CAPS, COLUMNS, PackingTable


def kept_table(lengths: Lengths, samples: int, launch_tokens: float = math.inf) -> PackingTable:
    """As `PackingTable.build`, read from disk if a table of these lengths was built before."""
    directory = _directory()
    if directory is None:
        return PackingTable.build(lengths, samples, launch_tokens)
    key = hashlib.sha256(lengths.values.tobytes())
    key.update(repr((np.__version__, samples, float(launch_tokens))).encode())
    path = directory / f"{key.hexdigest()[:24]}.table"
    table = _read(path)
    if table is None:
        table = PackingTable.build(lengths, samples, launch_tokens)
        _write(path, table)
    return table


@cache
def _directory() -> Path | None:
    """Where tables are kept, named after a digest of the sources that make them; None where that cannot be written."""
    kernels = compiling.cache_directory()
    if kernels is None:
        return None
    digest = hashlib.sha256()
    for module in (packing, planner):
        digest.update(Path(str(module.__file__)).read_bytes())
    directory = kernels.parent.parent / "packing" / digest.hexdigest()[:16]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return directory


def _read(path: Path) -> PackingTable | None:
    """The table in a file; None where there is no whole one."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    head, body = 8 * (1 + CAPS), 4 * CAPS * BUDGETS * len(COLUMNS)
    if len(data) != head + body + 4 or zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
        return None
    grid = np.frombuffer(data, np.float64, 1 + CAPS)
    values = np.frombuffer(data, np.float32, body // 4, head)
    return PackingTable(float(grid[0]), grid[1:], values.reshape(CAPS, BUDGETS, len(COLUMNS)))


def _write(path: Path, table: PackingTable) -> None:
    """Keep a table in a file: its grid, its values and a check sum. Where the disk has no room it is not kept."""
    data = np.append(table.low, table.caps).tobytes() + table.values.tobytes()
    with contextlib.suppress(OSError):
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with open(handle, "wb") as file:
                file.write(data + zlib.crc32(data).to_bytes(4, "little"))
            os.replace(temporary, path)  # whole or not at all, whoever else writes it too
        except OSError:
            os.unlink(temporary)
