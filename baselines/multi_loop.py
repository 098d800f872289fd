"""Several PID loops at once: utilisation, recomputation and memory by the token budget, heat and energy by power."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..runtime.controls import Controls
from ..runtime.errors import ConfigError
from ..runtime.filters import ArrayState, ExponentialFilter
from ..runtime.policy import State
from ..runtime.telemetry import Telemetry
from .budget import positive, present_budget
from .override import OverrideControl
from .pid import PIDController
from .pid_policies import computing_fill
from .power_loops import PowerGovernor
from .workers import WorkerRule

Array = NDArray[np.float64]

_PADDING_PAYS = 0.5  # share of the padding overhead by which a full device is not worth filling further
_OOM_MARGIN = 0.10  # by which an out-of-memory error lowers the memory target, fraction of capacity ...
_MOST_MARGIN = 0.40  # ... and several at most ...
_MARGIN_FADES = 0.98  # ... and what is left of it an interval later


class MultiLoopPID(ArrayState):
    """Override control: every limit has a loop of its own, and the one that asks for least has the actuator.

    On the token budget, in octaves:

    - **Utilisation.** PI on ``fill`` of the time that was not spent waiting for data (``gpu_utilization`` where there
      is no fill): the budget grows until the device is full. Filling is not optimising: as padding grows with the
      budget, the setpoint falls by half of the overhead ``padded / real - 1``.
    - **Recomputation.** PI on ``log2(budget / fit_tokens_uncheckpointed)``: the budget grows until layers would have to
      be checkpointed. So checkpointing is the second actuator of memory (*mid-ranging*): it answers to
      ``memory_target`` within a micro-batch, and the budget brings it back to nothing within some intervals.
    - **Memory.** PI on ``log2(peak / memory_target)``, or on what the memory model finds with every layer checkpointed,
      where that is more room. A peak above ``memory_cap`` cuts the budget at once.

    `PowerGovernor` has the power limit (temperature, mean power, energy) and `WorkerRule` the loader workers. An
    out-of-memory error halves the budget, and lowers the memory target for some time: who has met a neighbour may
    meet it again.

    Args:
        utilization: setpoint of the first loop, 0..1.
        recomputation: setpoint of the second, octaves above what fits uncheckpointed.
        memory_target: fraction of capacity that micro-batches are planned for; setpoint of the third.
        memory_cap: peak above which the budget is cut at once.
        temperature_c: temperature to stay below, degrees C, see `PowerGovernor`.
        margin_c: distance kept from a temperature limit and from throttling, degrees C.
        power_w: mean power to stay below, watts; unset = no such loop.
        max_workers: most loader workers.

    Raises:
        ConfigError: a value that cannot be used.
    """

    _state = ("_margin",)

    def __init__(
        self,
        utilization: float = 0.98,
        recomputation: float = 0.0,
        memory_target: float = 0.88,
        memory_cap: float = 0.93,
        *,
        temperature_c: float | None = 84.0,
        margin_c: float = 2.0,
        power_w: float | None = None,
        max_workers: int = 8,
    ) -> None:
        if not 0 < utilization < 1:
            raise ConfigError(f"utilization={utilization} must lie between 0 and 1, such as 0.98")
        if not -8 <= recomputation <= 8:
            raise ConfigError(f"recomputation={recomputation} must lie between -8 and 8 octaves, such as 0")
        if not 0 < memory_target < 1:
            raise ConfigError(f"memory_target={memory_target} must lie between 0 and 1, such as 0.88")
        if not memory_target <= memory_cap <= 1:
            raise ConfigError(f"memory_cap={memory_cap} must lie between memory_target={memory_target} and 1")
        self.utilization, self.memory_target, self.memory_cap = utilization, memory_target, memory_cap

        def loop(kp: float, ki: float, setpoint: float) -> PIDController:
            return PIDController(kp, ki, 0.0, setpoint, output_limits=(0.0, 24.0), tracking_time=1.5)

        # Time unit: one interval. The plant of the last two answers at once and in proportion: they close half of what
        # is left in each interval. That of the first is flat where the device is full, and steep nowhere.
        self._budget = OverrideControl(
            {
                "utilisation": loop(1.0, 1.5, utilization),
                "recomputation": loop(0.3, 0.5, recomputation),
                "memory": loop(0.3, 0.5, 0.0),
            }
        )
        self._fill = ExponentialFilter(alpha=0.5)
        self._efficiency = ExponentialFilter(alpha=0.5)
        self._power = PowerGovernor(temperature_c=temperature_c, margin_c=margin_c, power_w=power_w)
        self._workers = WorkerRule(max_workers)
        self.reset(1)

    def reset(self, n: int, seed: int | None = None) -> None:
        """Forget everything and prepare for ``n`` plants; ``seed`` has no use, nothing here is random."""
        for part in self._parts().values():
            part.reset(n)
        self._margin: Array = np.zeros(n)  # by which the memory target is lowered

    def act(self, telemetry: Telemetry) -> Controls:
        """Budget, memory target, power limit and workers for the next interval."""
        octave = np.log2(present_budget(telemetry))
        oom = telemetry.oom_count > 0
        self._margin = np.fmin(_MARGIN_FADES * self._margin + np.where(oom, _OOM_MARGIN, 0.0), _MOST_MARGIN)
        target = np.fmax(self.memory_target - self._margin, 0.05)

        peak = positive(np.fmax(telemetry.memory_peak_fraction, telemetry.memory_device_fraction))
        measured = self._measure(telemetry, octave, peak)
        least = self._budget.update(measured, octave)
        over = np.where(peak > self.memory_cap, octave + np.log2(self.memory_target / peak), np.inf)
        cut = np.fmin(over, np.where(oom, octave - 1.0, np.inf))
        self._budget.force(np.where(cut < least, cut, np.nan), measured)
        asked = np.fmin(least, cut)
        return Controls.of(
            telemetry.n,
            token_budget=np.exp2(np.where(np.isfinite(asked), asked, np.nan)),
            memory_target=target,
            power_limit_w=self._power.update(telemetry),
            num_workers=self._workers.update(telemetry.num_workers, telemetry.data_wait_fraction),
        )

    def state_dict(self) -> State:
        """Every loop's state."""
        return {**super().state_dict(), **{name: part.state_dict() for name, part in self._parts().items()}}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`'s state."""
        super().load_state_dict(state)
        for name, part in self._parts().items():
            part.load_state_dict(state[name])

    def diagnostics(self) -> Mapping[str, Any]:
        """By loop, its error and its P, I and D terms; ``selected`` and ``power_selected`` tell which loop decides.

        Loops of the budget are numbered in the order above, those of power: temperature, power, energy.
        """
        return {**self._budget.diagnostics(), **self._power.diagnostics()}

    def explain(self) -> str:
        """Which loops decide for the first plant, for the console."""
        selected = self._budget.selected[0]
        words = [] if np.isnan(selected) else [f"budget held by {self._budget.names[int(selected)]}"]
        return ", ".join(filter(None, [*words, self._power.explain()]))

    def _measure(self, telemetry: Telemetry, octave: Array, peak: Array) -> dict[str, Array]:
        """What the loops of the budget control; moves the first one's setpoint."""
        raw = computing_fill(telemetry)
        raw = np.where(np.isnan(raw), telemetry.gpu_utilization, raw)
        fill = np.where(np.isnan(raw), np.nan, self._fill.update(raw))
        efficiency = positive(self._efficiency.update(telemetry.real_tokens / positive(telemetry.padded_tokens)))
        worthwhile = 1.0 - _PADDING_PAYS * (1.0 / efficiency - 1.0)
        self._budget.loops["utilisation"].setpoint = np.fmin(self.utilization, worthwhile)

        over = np.log2(peak / self.memory_target)
        modelled = octave - np.log2(positive(telemetry.fit_tokens_checkpointed))
        return {
            "utilisation": fill,
            "recomputation": octave - np.log2(positive(telemetry.fit_tokens_uncheckpointed)),
            "memory": np.where(peak > self.memory_cap, over, np.fmin(over, modelled)),
        }

    def _parts(self) -> dict[str, Any]:
        return {
            "budget": self._budget,
            "fill": self._fill,
            "efficiency": self._efficiency,
            "power": self._power,
            "workers": self._workers,
        }
