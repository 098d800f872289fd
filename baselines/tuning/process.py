"""What the tuning experiments work on: a single-input, single-output process, n copies at once."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Process(Protocol):
    """A process that answers an output of the controller with a measurement, once each step of ``dt``."""

    dt: float  #: time of a step; gains and periods are in its unit

    def reset(self, n: int) -> Array:
        """Start ``n`` equal copies over; their first measurements, shape ``(n,)``."""
        ...

    def step(self, output: Array) -> Array:
        """The measurements after one step under the outputs, both of shape ``(n,)``."""
        ...


def characteristic(process: Process, outputs: Array, settle: int, average: int) -> tuple[Array, Array]:
    """The static characteristic: what the process settles at under constant outputs.

    Args:
        process: What is asked.
        outputs: Shape ``(n,)``.
        settle: Steps before anything is counted.
        average: Steps that are.

    Returns:
        Mean and standard deviation of the measurement, shape ``(n,)`` each.
    """
    process.reset(len(outputs))
    measured = np.stack([process.step(outputs) for _ in range(settle + average)])[settle:]
    return measured.mean(axis=0), measured.std(axis=0)
