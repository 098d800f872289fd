"""Compiles scalar kernels with numba: the same source runs interpreted in a live training and compiled in the lab.

Compilation is strict (no fast-math): the order of operations is that of the source, and both ways give the same
numbers to the last bit. Interpreted code reads records by attribute: view structured arrays as ``np.recarray``.

Compiled code is kept on disk. numba looks only at the file of the function itself when it decides whether that is still
valid, so the folder is named after a digest of every source that kernels and the constants in them come from.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.extending import register_jitable

from ...runtime import planner

Function = TypeVar("Function", bound=Callable[..., Any])

_RUNTIME, _ENVS = Path(planner.__file__).parent, Path(__file__).parent.parent
SOURCES = (
    *(_RUNTIME / f"{name}.py" for name in ("codec", "codec_rows", "controls", "guard_rules", "planner", "telemetry")),
    *sorted(Path(__file__).parent.glob("*.py")),
    *(_ENVS / name for name in ("objectives.py", "simulation.py", "scenarios/disturbances.py")),
)


registered: set[Callable[..., Any]] = set()


def register(*functions: Callable[..., Any]) -> None:
    """Let compiled code call these plain functions (callees first)."""
    for function in functions:
        if function not in registered:
            registered.add(function)
            register_jitable(forceinline=True)(function)


def compiled(function: Function, *, allocates: bool = True) -> Function:
    """`function` compiled by numba at its first call; what it calls must have been given to `register`.

    It runs without Python's global lock, so that threads can share the plants between them.

    Args:
        function: To be compiled.
        allocates: Whether it makes arrays. One that does not is spared the counting of references to rows.
    """
    before = numba.config.CACHE_DIR  # type: ignore[attr-defined]  # read when a function is decorated
    numba.config.CACHE_DIR = str(cache_directory() or "")  # type: ignore[attr-defined]
    try:
        kept = bool(numba.config.CACHE_DIR)  # type: ignore[attr-defined]
        kept = kept and Path(function.__code__.co_filename).is_file()  # not typed in at a prompt
        return numba.njit(cache=kept, error_model="numpy", nogil=True, _nrt=allocates)(function)  # type: ignore[return-value]
    finally:
        numba.config.CACHE_DIR = before  # type: ignore[attr-defined]


@cache
def cache_directory() -> Path | None:
    """Where compiled code is kept: in NUMBA_CACHE_DIR or the user's cache; None where that cannot be written."""
    digest = hashlib.sha256(numba.__version__.encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(numba.config.CACHE_DIR or home / "swiftcruise" / "kernels")  # type: ignore[attr-defined]
    directory = folder / digest.hexdigest()[:16]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return directory if os.access(directory, os.W_OK) else None
