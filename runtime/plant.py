"""What every plant offers: simulated, replayed and live training alike."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from .controls import Controls
from .telemetry import Telemetry


@runtime_checkable
class Plant(Protocol):
    """A training (or n of them) that takes controls and gives back what the interval measured."""

    def reset(self, seed: int | None = None) -> Telemetry:
        """Start over and return the first interval's telemetry."""
        ...

    def step(self, controls: Controls) -> Telemetry:
        """Apply the controls, run one control interval, return its telemetry."""
        ...

    def close(self) -> None:
        """Free everything the plant holds; may be called twice."""
        ...
