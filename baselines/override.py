"""Override control: several PID loops share one actuator, and the one that asks for least has it.

Each loop keeps one quantity from exceeding its setpoint, so any of them may lower the actuator and none may raise it
beyond what the others allow. A loop that is not selected follows the actuator, so that it takes over without a bump
and without having wound up (K. J. Astroem, T. Haegglund, "Advanced PID Control", 2006, ch. 5: selector control).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..runtime.policy import State
from .pid import PIDController

Array = NDArray[np.float64]


class OverrideControl:
    """The least output of some loops, for n plants at once.

    A loop that was never measured has no say. One that falls silent holds its output; tracking still brings it along.

    Args:
        loops: By name, loops whose outputs are in the actuator's unit.
    """

    def __init__(self, loops: Mapping[str, PIDController]) -> None:
        self.loops = dict(loops)
        self.names = tuple(self.loops)
        self.reset(1)

    def reset(self, n: int) -> None:
        """Forget everything and prepare for ``n`` plants."""
        for loop in self.loops.values():
            loop.reset(n)
        self.selected: Array = np.full(n, np.nan)  #: index in `names` of the loop that has the actuator; NaN = none

    def update(
        self, measured: Mapping[str, Array], in_force: Array, dt: Mapping[str, ArrayLike] | None = None
    ) -> Array:
        """The least output, shape ``(n,)``; infinite where no loop has a say.

        Args:
            measured: By name, what each loop controls; NaN = not measured.
            in_force: The actuator's setting, in the loops' unit: what the loops track. NaN = nothing to track.
            dt: By name, time since the last update, where it is not 1.
        """
        dt = dt or {}
        outputs = np.stack([self._output(name, measured[name], in_force, dt.get(name, 1.0)) for name in self.names])
        least = outputs.min(axis=0)
        self.selected = np.where(np.isfinite(least), outputs.argmin(axis=0), np.nan)
        return least

    def force(self, output: Array, measured: Mapping[str, Array]) -> None:
        """Put all loops at an output set by hand, as after an out-of-memory error; NaN leaves a plant alone."""
        for name, loop in self.loops.items():
            loop.manual(np.where(np.isnan(loop.error), np.nan, output), measured[name])

    def diagnostics(self) -> dict[str, Array]:
        """By loop, its error and its P, I and D terms, as ``NAME_error``, ``NAME_p`` and so on; and ``selected``."""
        values = {"selected": self.selected}
        for name, loop in self.loops.items():
            terms = zip("pid", loop.terms, strict=True)
            values |= {f"{name}_error": loop.error} | {f"{name}_{letter}": term for letter, term in terms}
        return values

    def state_dict(self) -> State:
        """Every loop's state."""
        return {name: loop.state_dict() for name, loop in self.loops.items()}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`'s state."""
        for name, loop in self.loops.items():
            loop.load_state_dict(state[name])

    def _output(self, name: str, measured: Array, in_force: Array, dt: ArrayLike) -> Array:
        loop = self.loops[name]
        fresh = np.isnan(loop.error) & np.isfinite(measured)
        loop.track(np.where(np.isnan(loop.error), np.nan, in_force), 1.0)
        # A loop's first word is the setting in force: from there it moves.
        loop.manual(np.where(fresh, in_force, np.nan), measured)
        output = loop.update(np.where(fresh, np.nan, measured), dt)
        return np.where(np.isnan(loop.error), np.inf, output)
