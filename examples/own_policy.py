"""A policy of one's own: climb tokens per second by perturb and observe.

    PYTHONPATH=examples swiftcruise run --policy own_policy:PerturbAndObserve --interval-steps 5 -- swift sft ...

This is the hill climb of solar chargers: move by a fixed step, and turn round when the last move made things worse. It
is short, and that is all that speaks for it: it never comes to rest, and noise turns it round as readily as a summit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftcruise.runtime.controls import Controls
from swiftcruise.runtime.errors import ConfigError
from swiftcruise.runtime.policy import State
from swiftcruise.runtime.telemetry import Telemetry

Array = NDArray[np.float64]


class PerturbAndObserve:
    """Moves the token budget up or down by a fixed step, whichever way made training faster.

    The guard sees to memory; only after an out-of-memory error does the policy turn downwards by itself.

    Args:
        step: size of a move, octaves (0.5 multiplies or divides the budget by 1.41).

    Raises:
        ConfigError: a step that is not above zero.
    """

    def __init__(self, step: float = 0.5) -> None:
        if not step > 0:
            raise ConfigError(f"step={step} must be > 0, such as 0.5")
        self.step = step
        self.reset(1)

    def reset(self, n: int, seed: int | None = None) -> None:
        """Forget everything and prepare for ``n`` trainings; nothing here is random."""
        self._direction: Array = np.ones(n)  # +1 up, -1 down
        self._speed: Array = np.full(n, np.nan)  # tokens/s of the interval before

    def act(self, telemetry: Telemetry) -> Controls:
        """The next token budget. NaN means *not measured* on the way in and *leave it* on the way out."""
        speed = telemetry.tokens_per_s
        worse = speed < self._speed  # False where either is NaN
        self._direction = np.where(worse, -self._direction, self._direction)
        self._direction = np.where(telemetry.oom_count > 0, -1.0, self._direction)
        self._speed = np.where(np.isnan(speed), self._speed, speed)

        # While no budget is set, begin where the longest sample to come would fit.
        unset = np.isnan(telemetry.token_budget)
        budget = telemetry.token_budget * np.exp2(self.step * self._direction)
        return Controls.of(telemetry.n, token_budget=np.where(unset, telemetry.upcoming_max, budget))

    def state_dict(self) -> State:
        """What a checkpoint has to remember, as plain numbers."""
        return {"direction": self._direction.tolist(), "speed": self._speed.tolist()}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`'s state."""
        self._direction = np.array(state["direction"], dtype=np.float64)
        self._speed = np.array(state["speed"], dtype=np.float64)

    def diagnostics(self) -> Mapping[str, Any]:
        """Charted in TensorBoard under ``swiftcruise/controller/``."""
        return {"direction": self._direction}
