"""Random numbers without a generator's state: each is a function of (key, stream, counter).

A plant's draws follow from one 64-bit key an episode. Every disturbance and every sensor has a stream of its own, so
that switching one off leaves all others as they were; a snapshot of a plant holds no generator; and one plant or
thousands draw the same numbers. Counter-based generation as in Salmon, Moraes, Dror and Shaw, "Parallel random numbers:
as easy as 1, 2, 3" (SC 2011), mixed by the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).

Scalar functions for `compiling.register`; the keys and results of `mixed` are numpy uint64.
"""

from __future__ import annotations

import math

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_30, _27, _31, _11, _16, _48 = (np.uint64(shift) for shift in (30, 27, 31, 11, 16, 48))
_LOW_16 = np.uint64(0xFFFF)
_DOUBLE = 2.0**-53
_STREAMS = np.uint64(64)  # streams of a key; counters are spaced by it


def mixed(key: np.uint64, counter: np.uint64) -> np.uint64:
    """The `counter`-th 64-bit word of a key's sequence."""
    x = key + _GOLDEN * counter
    x = (x ^ (x >> _30)) * _FIRST
    x = (x ^ (x >> _27)) * _SECOND
    return x ^ (x >> _31)


def word(key: np.uint64, stream: int, counter: int) -> np.uint64:
    """The `counter`-th word of one of a key's 64 streams."""
    return mixed(key, np.uint64(counter) * _STREAMS + np.uint64(stream))


def uniform(key: np.uint64, stream: int, counter: int) -> float:
    """Uniform on the open interval (0, 1)."""
    return (np.float64(word(key, stream, counter) >> _11) + 0.5) * _DOUBLE


def bell(key: np.uint64, stream: int, counter: int) -> float:
    """Mean 0, standard deviation 1, within +-3.5: the sum of four uniforms (Irwin-Hall), which never surprises much."""
    x = word(key, stream, counter)
    total = (x & _LOW_16) + ((x >> _16) & _LOW_16) + ((x >> (_16 + _16)) & _LOW_16) + (x >> _48)
    return (np.float64(total) * (1.0 / 65536.0) - (2.0 - 2.0 / 65536.0)) * 1.7320508075688772


def geometric(chance: float, mean: float) -> float:
    """Whole intervals >= 1 with the given mean, geometrically distributed; `chance` is uniform on (0, 1)."""
    if mean <= 1.0:
        return 1.0
    return 1.0 + math.floor(math.log(chance) / math.log(1.0 - 1.0 / mean))


#: All of them, for `compiling.register`, callees before callers.
FUNCTIONS = (mixed, word, uniform, bell, geometric)
