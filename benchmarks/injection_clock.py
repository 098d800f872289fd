"""Clocks that jump. Imports nothing of swiftcruise, so that it can be installed before that."""

from __future__ import annotations

import time

_NAMES = ("time", "monotonic", "perf_counter")
_REAL = {name: getattr(time, name) for name in _NAMES}
_offset_s = 0.0


def install() -> None:
    """Put the clocks of this module in the place of `time`'s, for everybody who asks for them from now on."""
    for name in _NAMES:
        setattr(time, name, lambda real=_REAL[name]: real() + _offset_s)


def uninstall() -> None:
    """Give `time` its own clocks back."""
    for name in _NAMES:
        setattr(time, name, _REAL[name])


def jump(seconds: float) -> None:
    """Let all clocks jump."""
    global _offset_s
    _offset_s += seconds
