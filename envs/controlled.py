"""Simulated trainings under the control loop: the safety guard for many plants at once, and what intervals were worth.

`ControlLoop(policy, CompiledGuard.of(plant))` decides for thousands of simulated plants as `ControlLoop(policy,
SafetyGuard(limits))` does for a live one, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..runtime.controls import ControlLimits, Controls
from ..runtime.guard import GuardDecision, SafetyGuard
from ..runtime.guard_rules import CONTROLS, apply_rules, initial_state, limit_row
from ..runtime.policy import State
from ..runtime.telemetry import Telemetry
from .objectives import OBJECTIVES, reward_vector
from .plants.compiling import compiled
from .plants.interval import violation
from .plants.simulated import SimulatedPlant
from .simulation import GUARD, HYSTERESIS

Array = NDArray[np.float64]


def _apply(limits, which, options, states, rows, proposed, controls, flags):
    for i in range(proposed.shape[0]):
        apply_rules(limits[which[i]], options, states[i], rows[i], proposed[i], np.nan, controls[i], flags[i])


def _judge(constants, state, in_force, terms, violations):
    for i in range(state.shape[0]):
        s = state[i]
        c = constants[s.scenario]
        reward_vector(c, s, in_force[i], terms[i])
        violations[i] = violation(c, s)


_apply_compiled = compiled(_apply, allocates=False)
_judge_compiled = compiled(_judge, allocates=False)


class CompiledGuard(SafetyGuard):
    """`SafetyGuard` for many simulated plants in one compiled loop, each within its own limits.

    Args:
        limits: Different limits.
        which: Of each plant its index in `limits`, shape ``(n,)``.
    """

    def __init__(self, limits: Sequence[ControlLimits], which: NDArray[np.int64]) -> None:
        self._rows = np.stack([limit_row(each, HYSTERESIS) for each in limits])
        self._which = np.array(which, dtype=np.int64)
        super().__init__(memory_cap=GUARD.memory_cap, hysteresis=HYSTERESIS)

    @classmethod
    def of(cls, plant: SimulatedPlant) -> CompiledGuard:
        """The guard of a plant's episodes; to be made once they have begun, as they fix the scenarios."""
        assembly = plant.assembly
        return cls(assembly.limits, assembly.constants["limits"][plant.state["scenario"]])

    def reset(self, n: int) -> None:
        """Forget everything and prepare for `n` plants."""
        self._states: Any = np.tile(initial_state(), (n, 1))

    def apply(self, proposed: Controls, telemetry: Telemetry) -> GuardDecision:
        """The safe version of `proposed`, given the interval just measured.

        Raises:
            ValueError: the number of plants differs from that of the guard.
        """
        n = self._which.size
        if not proposed.n == telemetry.n == len(self._states) == n:
            sizes = f"proposed.n={proposed.n}, telemetry.n={telemetry.n}, reset for {len(self._states)}"
            raise ValueError(f"the guard is of {n} plants, got {sizes}: call reset({n}) first")
        controls, flags = np.empty((n, CONTROLS)), np.empty((n, CONTROLS), dtype=np.uint8)
        rows = telemetry.rows(), proposed.rows()
        _apply_compiled(self._rows, self._which, GUARD, self._states, *rows, controls, flags)
        return GuardDecision(Controls.from_rows(controls), proposed, flags)

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`'s state. Raises as `SafetyGuard.load_state_dict`."""
        super().load_state_dict(state)
        self._states = np.array(self._states)


def judge(plant: SimulatedPlant) -> tuple[Array, Array]:
    """What the last interval of each plant was worth.

    Returns:
        Reward vectors, shape ``(n, objectives)``, see `objectives.reward_vector`; and how badly a limit was broken,
        shape ``(n,)``, 0 (kept all) to 1.
    """
    terms, violations = np.empty((plant.n, len(OBJECTIVES))), np.empty(plant.n)
    _judge_compiled(plant.assembly.constants, plant.state, plant.in_force, terms, violations)
    return terms, violations
