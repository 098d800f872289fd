"""The policy that never moves: the yardstick of every other one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..runtime.controls import CONTROL_FIELDS, Controls
from ..runtime.errors import ConfigError
from ..runtime.policy import State
from ..runtime.telemetry import Telemetry


class StaticPolicy:
    """Constant controls; with none given it leaves everything as it is.

    Args:
        **controls: any of the fields of `Controls`, a number each; the others stay unset.

    Raises:
        ConfigError: a name that is no control, or a value that is no finite number >= 0.
    """

    def __init__(self, **controls: float) -> None:
        for name, value in controls.items():
            if name not in CONTROL_FIELDS:
                raise ConfigError(f"static policy: {name}={value!r} is no control: use {', '.join(CONTROL_FIELDS)}")
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < np.inf:
                raise ConfigError(f"static policy: {name}={value!r} must be a finite number >= 0")
        self.controls = dict(controls)

    def reset(self, n: int, seed: int | None = None) -> None:
        """Nothing to forget."""

    def act(self, telemetry: Telemetry) -> Controls:
        """The constant controls."""
        return Controls.of(telemetry.n, **self.controls)

    def state_dict(self) -> State:
        """Empty: nothing is remembered."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Nothing to restore."""

    def diagnostics(self) -> Mapping[str, Any]:
        """Empty: a constant needs no chart."""
        return {}
