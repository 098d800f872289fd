"""Actuators: what a live training can set, and setting it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .controls import Controls
from .macro_batch import Settings

if TYPE_CHECKING:
    from .macro_loader import MacroLoader
    from .sensors.nvml import NvmlSampler


class Actuators:
    """Carries controls out in a running training and remembers what is in force.

    Args:
        settings: The macro-batch runner's settings, changed in place.
        loader: Gives the loader that delivers at present, None where there is none.
        workers: Whether the number of loader workers may change.
        threads: Whether torch's intra-op threads may change (CPU runs).
        checkpointing: Whether layers may be checkpointed at will.
        power: The GPU whose power limit may change, if any.
    """

    def __init__(
        self,
        settings: Settings,
        loader: Callable[[], MacroLoader | None] = lambda: None,
        *,
        workers: bool = False,
        threads: bool = False,
        checkpointing: bool = False,
        power: NvmlSampler | None = None,
    ) -> None:
        self.settings = settings
        self._loader = loader
        self._workers = workers
        self._checkpointing = checkpointing
        self._threads = threads
        self._power = power
        self._power_limit_w = np.nan
        self._fixed_fraction: float | None = None
        self._original_threads: int | None = None  # known once they were changed

    @property
    def names(self) -> list[str]:
        """The controls that this training has an actuator for."""
        names = ["token_budget", "micro_batch_cap"]
        names += ["memory_target", "checkpoint_fraction"] if self._checkpointing else []
        names += ["num_workers"] if self._controlled_loader() is not None else []
        names += ["cpu_threads"] if self._threads else []
        return names + (["power_limit_w"] if self._power is not None else [])

    def in_force(self) -> Controls:
        """The controls as they are now; NaN where there is no actuator or plain ms-swift decides."""
        settings, loader = self.settings, self._controlled_loader()
        values: dict[str, float | None] = {
            "token_budget": settings.token_budget,
            "micro_batch_cap": settings.micro_batch_cap,
            "memory_target": settings.memory_target if self._checkpointing else None,
            "checkpoint_fraction": settings.checkpoint_fraction if self._checkpointing else None,
            "num_workers": loader.num_workers if loader is not None else None,
            "cpu_threads": self._current_threads() if self._threads else None,
            "power_limit_w": self._power_limit_w if self._power is not None else None,
        }
        return Controls.of(1, **{k: np.nan if v is None else v for k, v in values.items()})

    def start(self, controls: Controls) -> Controls:
        """Set what the run begins with, workers and threads also where no policy may change them afterwards.

        A checkpointed fraction given here holds until a policy asks for another, and again when it leaves that unset.
        """
        wanted = controls.plant(0)
        self._fixed_fraction = wanted.get("checkpoint_fraction")
        loader = self._loader()
        if "num_workers" in wanted and loader is not None and loader.workers_can_change:
            loader.num_workers = int(wanted["num_workers"])
        if "cpu_threads" in wanted:
            self._set_threads(int(wanted["cpu_threads"]))
        return self.apply(controls)

    def apply(self, controls: Controls) -> Controls:
        """Set what is given (NaN: leave as it is) and return the controls now in force."""
        wanted = controls.plant(0)
        settings = self.settings
        settings.token_budget = wanted.get("token_budget", settings.token_budget)
        settings.micro_batch_cap = wanted.get("micro_batch_cap", settings.micro_batch_cap)
        if self._checkpointing:
            settings.memory_target = wanted.get("memory_target", settings.memory_target)
            # Unset means that the memory model chooses per micro-batch, so a fixed share does not outlive its order.
            settings.checkpoint_fraction = wanted.get("checkpoint_fraction", self._fixed_fraction)
        loader = self._controlled_loader()
        if loader is not None and "num_workers" in wanted:
            loader.num_workers = int(wanted["num_workers"])
        if self._threads and "cpu_threads" in wanted:
            self._set_threads(int(wanted["cpu_threads"]))
        if self._power is not None and "power_limit_w" in wanted:
            watts = wanted["power_limit_w"]
            if watts != self._power_limit_w and self._power.set_power_limit(watts):
                self._power_limit_w = watts
        return self.in_force()

    def restore(self) -> None:
        """Put back what outlives the training: threads and the power limit."""
        if self._original_threads is not None:
            self._set_threads(self._original_threads)
            self._original_threads = None
        if self._power is not None:
            self._power.restore()

    def _controlled_loader(self) -> MacroLoader | None:
        loader = self._loader() if self._workers else None
        return loader if loader is not None and loader.workers_can_change else None

    @staticmethod
    def _current_threads() -> int:
        import torch

        return torch.get_num_threads()

    def _set_threads(self, count: int) -> None:
        import torch

        current = torch.get_num_threads()
        if count != current:
            if self._original_threads is None:
                self._original_threads = current
            torch.set_num_threads(count)
