"""What a simulated run believes about its memory, as the online model of a live one does (`runtime.memory_model`).

It knows the form of the memory equations and what is always there; activations it takes for larger or smaller than they
are, by a factor that its observations correct. Scalar functions, interpreted or compiled.
"""

from __future__ import annotations

import math
from typing import Any

from . import physics

_MARGIN = 1.03  # of the run's memory model, see runtime.memory_model
MOST_CAUTION, CAUTION_FADES = 8.0, math.log(0.998)  # after an out-of-memory event; a micro-batch


def belief(s: Any) -> float:
    """What the run's memory model takes activations for, relative to the truth, its margin included."""
    return _MARGIN * s.caution * math.exp(s.memory_error)


def fitting_tokens(c: Any, s: Any, believed: float, length: float, checkpointed: float, target: float) -> float:
    """Most tokens of a micro-batch that the run's memory model expects to keep `target` (fraction of capacity)."""
    limit = c.memory.static + ((target - s.creep) * c.capacity - c.memory.static) / believed
    return physics.fitting_tokens(c.memory, length, checkpointed, c.least_fragmentation, limit)


def least_checkpointing(
    c: Any, s: Any, believed: float, tokens: float, length: float, fixed: float, target: float
) -> float:
    """Checkpointed share of layers that the run gives a micro-batch: the `fixed` one, or the least for `target`."""
    if fixed == fixed:
        return fixed
    limit = c.memory.static + ((target - s.creep) * c.capacity - c.memory.static) / believed
    return physics.least_checkpointing(c.memory, tokens, length, c.layers, c.least_fragmentation, limit)


def more_careful(c: Any, believed: float, tokens: float, length: float, checkpointed: float, available: float) -> float:
    """Factor by which the memory model's prediction falls short of what just failed, 1 to 2 (see observe_oom)."""
    activations = physics.stored_bytes(c.memory, tokens, length, checkpointed)
    activations += c.least_fragmentation * physics.transient_bytes(c.memory, tokens, length)
    predicted = activations * believed
    needed = available - c.memory.static
    return min(max(needed / predicted, 1.1), 2.0)


#: For `compiling.register`, callees before callers.
FUNCTIONS = (belief, fitting_tokens, least_checkpointing, more_careful)
