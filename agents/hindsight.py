"""The best fixed setting in hindsight: every setting of a grid on every episode, then the best of them.

No fixed setting can be chosen like that before a run; it is the yardstick of what adapting is worth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..envs.plants.assembly import Assembly
from ..runtime.controls import CONTROL_FIELDS, Controls
from ..runtime.policy import State
from ..runtime.telemetry import Telemetry
from .episodes import run_episodes

Array = NDArray[np.float64]

_POWER = CONTROL_FIELDS.index("power_limit_w")


@dataclass(frozen=True, slots=True)
class Setting:
    """A fixed setting; checkpointing is, as under every policy, the least that keeps the memory target."""

    token_budget: float  #: tokens
    memory_target: float  #: fraction of capacity
    power: float  #: limit, fraction of the device's
    num_workers: float  #: loader processes


#: Budgets at half-octave steps up to 2^18: whatever exceeds what fits is cut to that by guard and memory model.
GRID: tuple[Setting, ...] = tuple(
    Setting(float(round(2.0 ** (exponent / 2))), target, power, workers)
    for exponent, target, power, workers in product(
        range(14, 37), (0.8, 0.9), (1.0, 0.85, 0.7, 0.55), (1.0, 2.0, 4.0, 8.0)
    )
)


def controls_of(settings: tuple[Setting, ...], assembly: Assembly, scenarios: NDArray[np.int64]) -> Controls:
    """Controls of each setting on each scenario, one after the other: ``settings x k`` plants."""
    full = assembly.constants["start"][scenarios, _POWER]  # NaN without that actuator
    columns: dict[str, Any] = {
        name: np.repeat([getattr(setting, name) for setting in settings], scenarios.size)
        for name in ("token_budget", "memory_target", "num_workers")
    }
    columns["power_limit_w"] = np.outer([setting.power for setting in settings], full).ravel()
    return Controls.of(len(settings) * scenarios.size, **columns)


def run_settings(
    settings: tuple[Setting, ...],
    assembly: Assembly,
    keys: NDArray[np.uint64],
    scenarios: NDArray[np.int64],
    *,
    horizon: int,
) -> dict[str, Array]:
    """Run every setting on every episode. Returns the figures of `run_episodes`, shape ``(settings, k)``."""
    count = len(settings)
    figures = run_episodes(
        _Held(controls_of(settings, assembly, scenarios)),
        assembly,
        np.tile(keys, count),
        np.tile(scenarios, count),
        horizon=horizon,
    )
    return {name: values.reshape(count, -1) for name, values in figures.items()}


def take(figures: Mapping[str, Array], chosen: NDArray[np.int64]) -> dict[str, Array]:
    """The figures of each episode under its chosen setting, shape ``(settings, k)`` to ``(k,)``."""
    episodes = np.arange(chosen.size)
    return {name: values[chosen, episodes] for name, values in figures.items()}


class _Held:
    """Fixed controls of each plant."""

    def __init__(self, controls: Controls) -> None:
        self._controls = controls

    def reset(self, n: int, seed: int | None = None) -> None:
        pass

    def act(self, telemetry: Telemetry) -> Controls:
        return self._controls

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None:
        pass

    def diagnostics(self) -> Mapping[str, Any]:
        return {}
