"""Compiles the scalar physics with numba, where that is installed.

numba is optional: without it the same functions run interpreted and give the same numbers to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeVar

from . import packing, physics

Function = TypeVar("Function", bound=Callable[..., Any])

AVAILABLE = find_spec("numba") is not None  #: whether `compiled` compiles


@cache
def _known_to_numba() -> bool:
    from numba.extending import register_jitable  # pyright: ignore[reportMissingImports]

    for function in (*physics.FUNCTIONS, packing.interpolate):
        register_jitable(function)
    return True


def compiled(function: Function) -> Function:
    """`function` compiled by numba; unchanged where numba is missing.

    It may call everything in `physics.FUNCTIONS`, and `packing.interpolate`. Compilation is strict: no fast-math, so
    the order of operations is that of the source.
    """
    if not AVAILABLE:
        return function
    import numba  # pyright: ignore[reportMissingImports]

    _known_to_numba()
    return numba.njit(function)  # type: ignore[return-value]
