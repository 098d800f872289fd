"""Loops through the power limit: temperature below a setpoint, power at a setpoint, energy within a job's budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..runtime.controls import Controls
from ..runtime.errors import ConfigError
from ..runtime.filters import ArrayState
from ..runtime.policy import State
from ..runtime.telemetry import Telemetry
from .budget import positive
from .override import OverrideControl
from .pid import PIDController

Array = NDArray[np.float64]

_LEAST_SHARE = 0.2  # of the power limit at the start, below which no loop goes; the guard knows the device's own bound
_LEAST_SHARE_FOR_ENERGY = 0.4  # a device slower than that draws more for the same work (Zeus, NSDI 2023: 40-60 %)
_SHORT = 1 / 120  # progress an interval up to which the energy loop has its full gain
_SAME = np.log(1.02)  # settings closer than this are the same
_THROTTLED = 0.05  # share of an interval that counts as throttling ...
_HOT_C = 70.0  # ... by heat, from this temperature on


class PowerGovernor(ArrayState):
    """Power limit from up to three loops, the lowest of which is applied (`OverrideControl`).

    Outputs are logarithms of the limit relative to the one found at the start, which is never exceeded.

    - **Temperature.** PI on ``temperature_c``. The setpoint is lowered to ``margin_c`` below ``temperature_limit_c``,
      where the job has such a limit, and below a temperature at which the device was throttled.
    - **Power.** PI on ``power_w``, as a logarithm. Unlike a limit it holds the mean, waiting included.
    - **Energy.** PI on the pace: ``energy_budget_used - job_progress``. Its time is the job's progress, so that gains
      suit jobs of any length: power in excess of the budget's mean integrates to what the job is ahead.

    Args:
        temperature_c: temperature to stay below, degrees C; unset = no such loop, whatever the job's limit.
        margin_c: distance kept from a temperature limit and from throttling, degrees C.
        power_w: mean power to stay below, watts; unset = no such loop.
        energy: whether to keep the job's energy budget, where it has one.

    Raises:
        ConfigError: a value that cannot be used.
    """

    _state = ("_most", "_asked", "_apart", "_throttles_c", "_progress")

    def __init__(
        self,
        *,
        temperature_c: float | None = 84.0,
        margin_c: float = 2.0,
        power_w: float | None = None,
        energy: bool = True,
    ) -> None:
        if temperature_c is not None and not 30 <= temperature_c <= 110:
            raise ConfigError(f"temperature_c={temperature_c} must lie between 30 and 110 degrees C, such as 80")
        if not 0 <= margin_c <= 30:
            raise ConfigError(f"margin_c={margin_c} must lie between 0 and 30 degrees C, such as 2")
        if power_w is not None and not 0 < power_w < np.inf:
            raise ConfigError(f"power_w={power_w} must be a number of watts above 0, or unset")
        self.margin_c = margin_c
        self._highest_c = np.inf if temperature_c is None else temperature_c
        limits = (np.log(_LEAST_SHARE), 0.0)
        loops: dict[str, PIDController] = {}
        if temperature_c is not None:
            # About 40 degrees a neper of the limit on every device (R P = 0.1 K/W x 400 W), with a lag of an interval
            # or two; the guard lets the limit move every other interval.
            loops["temperature"] = PIDController(
                0.03, 0.015, 0.0, temperature_c, output_limits=limits, tracking_time=2.0
            )
        if power_w is not None:
            loops["power"] = PIDController(0.1, 0.25, 0.0, np.log(power_w), output_limits=limits, tracking_time=2.0)
        if energy:
            # A fortieth of the job to get back to the pace, five times as long for what must stay lower for good.
            # Nothing is saved up for later: a job that is behind its pace runs at full power, and no integral grows.
            limits = (np.log(_LEAST_SHARE_FOR_ENERGY), 0.0)
            loops["energy"] = PIDController(40.0, 200.0, 0.0, 0.0, output_limits=limits, anti_windup="clamping")
        self._override = OverrideControl(loops)
        self.reset(1)

    def reset(self, n: int) -> None:
        """Forget everything and prepare for ``n`` plants."""
        self._override.reset(n)
        self._most: Array = np.full(n, np.nan)  # limit at the start, watts
        self._asked: Array = np.zeros(n)  # last output
        self._apart: Array = np.zeros(n)  # intervals in a row in which another limit was in force than asked for
        self._throttles_c: Array = np.full(n, np.inf)  # lowest temperature seen while throttled
        self._progress: Array = np.full(n, np.nan)

    @property
    def selected(self) -> Array:
        """Which loop has lowered the limit, counted among those in use; NaN = none."""
        return np.where(self._asked < 0, self._override.selected, np.nan)

    def update(self, telemetry: Telemetry) -> Array:
        """Power limit for the next interval, watts; NaN where there is none in force."""
        limit = positive(telemetry.power_limit_w)
        self._most = np.where(np.isnan(self._most), limit, self._most)
        in_force = np.log(limit / self._most)
        # The guard lets a limit rest for an interval: only one that stays away from what was asked is out of reach.
        apart = np.abs(in_force - self._asked) > _SAME
        self._apart = np.where(apart, self._apart + 1, 0.0)
        applied = np.where(self._apart >= 2, in_force, self._asked)
        passed = self._passed(telemetry)
        lowest = self._override.update(self._measure(telemetry, passed), applied, {"energy": passed})
        self._asked = np.where(np.isfinite(lowest), lowest, 0.0)
        return self._most * np.exp(self._asked)

    def state_dict(self) -> State:
        """Every loop's state."""
        return {**super().state_dict(), "loops": self._override.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`'s state."""
        super().load_state_dict(state)
        self._override.load_state_dict(state["loops"])

    def diagnostics(self) -> dict[str, Array]:
        """As of `OverrideControl` (logarithms of the limit), but with ``power_selected``."""
        values = self._override.diagnostics()
        del values["selected"]
        return {**values, "power_selected": self.selected}

    def explain(self) -> str:
        """Why the first plant's power limit is as it is, for the console; empty where it is not lowered."""
        selected = self.selected[0]
        return "" if np.isnan(selected) else f"power held by {self._override.names[int(selected)]}"

    def _measure(self, telemetry: Telemetry, passed: Array) -> dict[str, Array]:
        measured = {}
        if (loop := self._override.loops.get("temperature")) is not None:
            # A clock that is held down at less than this suffers from something else, such as its power supply.
            hot = (telemetry.throttled > _THROTTLED) & (telemetry.temperature_c >= _HOT_C)
            self._throttles_c = np.fmin(self._throttles_c, np.where(hot, telemetry.temperature_c, np.inf))
            bound = np.fmin(telemetry.temperature_limit_c, self._throttles_c) - self.margin_c
            loop.setpoint = np.fmin(bound, self._highest_c)
            measured["temperature"] = telemetry.temperature_c
        if "power" in self._override.loops:
            measured["power"] = np.log(positive(telemetry.power_w))
        if "energy" in self._override.loops:
            # A short job must not close more than a third of the distance in an interval, or it would swing.
            share = np.fmin(1.0, _SHORT / positive(passed))
            measured["energy"] = share * (telemetry.energy_budget_used - telemetry.job_progress)
        return measured

    def _passed(self, telemetry: Telemetry) -> Array:
        """Progress since the last interval; NaN holds the loop."""
        passed = telemetry.job_progress - self._progress
        self._progress = np.where(np.isnan(telemetry.job_progress), self._progress, telemetry.job_progress)
        return passed


class _PowerPolicy:
    """A policy that moves the power limit alone."""

    def __init__(self, governor: PowerGovernor) -> None:
        self._governor = governor

    def reset(self, n: int, seed: int | None = None) -> None:
        """Forget everything and prepare for ``n`` plants; ``seed`` has no use here."""
        self._governor.reset(n)

    def act(self, telemetry: Telemetry) -> Controls:
        """Power limit for the next interval."""
        return Controls.of(telemetry.n, power_limit_w=self._governor.update(telemetry))

    def state_dict(self) -> State:
        """Every loop's state."""
        return self._governor.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`'s state."""
        self._governor.load_state_dict(state)

    def diagnostics(self) -> Mapping[str, Any]:
        """See `PowerGovernor.diagnostics`."""
        return self._governor.diagnostics()

    def explain(self) -> str:
        """Why the first plant's power limit is as it is, for the console."""
        return self._governor.explain()


class ThermalPID(_PowerPolicy):
    """Hold the temperature below a setpoint by the power limit; see `PowerGovernor`.

    Args:
        temperature_c: temperature to stay below, degrees C.
        margin_c: distance kept from the job's temperature limit and from throttling, degrees C.

    Raises:
        ConfigError: a value that cannot be used.
    """

    def __init__(self, temperature_c: float = 84.0, margin_c: float = 2.0) -> None:
        super().__init__(PowerGovernor(temperature_c=temperature_c, margin_c=margin_c, energy=False))


class PowerPID(_PowerPolicy):
    """Keep the job's energy budget, and a mean power where one is given, by the power limit; see `PowerGovernor`.

    Args:
        power_w: mean power to stay below, watts; unset = only the energy budget counts.

    Raises:
        ConfigError: a value that cannot be used.
    """

    def __init__(self, power_w: float | None = None) -> None:
        super().__init__(PowerGovernor(temperature_c=None, power_w=power_w))
