"""A PID whose gains follow the plant's: fill answers ever less to the micro-batch, the fuller the device is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..runtime.errors import ConfigError
from .pid_policies import UtilizationPID

Array = NDArray[np.float64]

#: Fill and the factor of all gains there, linear in between.
Schedule = Sequence[Sequence[float]]

# A micro-batch of T tokens takes a + k T, so that fill = k T / (a + k T) and d(fill)/d(octave) = ln 2 fill (1 - fill):
# the reciprocals, relative to the one at the middle.
_FILLS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
SCHEDULE: tuple[tuple[float, float], ...] = tuple((fill, round(0.25 / (fill * (1.0 - fill)), 2)) for fill in _FILLS)


class GainScheduledPID(UtilizationPID):
    """Hold fill at a setpoint with gains that are scheduled on fill itself.

    The textbook loop has one set of gains, which is too timid where the device is empty or nearly full and too eager in
    between. Here gains are multiplied by a factor from a table over the filtered measurement (W. J. Rugh, J. S. Shamma,
    "Research on gain scheduling", Automatica 2000), by default the reciprocal of the plant's own gain, so that the
    closed loop is equally fast everywhere. A change of gains is bumpless.

    Args:
        setpoint: fill to hold, 0..1.
        kp: proportional gain at a fill of 0.5, octaves per percent point.
        ki: integral gain there, the same per interval.
        kd: derivative gain there, the same times an interval.
        schedule: pairs of fill and factor, by rising fill; constant beyond the ends.
        signal: see `UtilizationPID`.
        recompute: see `UtilizationPID`.
        **options: the other options of `UtilizationPID`, without ``compress``.

    Raises:
        ConfigError: a value that cannot be used.
    """

    def __init__(
        self,
        setpoint: float = 0.97,
        kp: float = 0.02,
        ki: float = 0.03,
        kd: float = 0.0,
        *,
        schedule: Schedule = SCHEDULE,
        signal: Literal["utilization", "fill"] = "fill",
        recompute: bool = False,
        **options: Any,
    ) -> None:
        self._fills, self._factors = _table(schedule)
        super().__init__(setpoint, kp, ki, kd, signal=signal, compress=False, recompute=recompute, **options)
        self._base = self._pid.kp, self._pid.ki, self._pid.kd

    _name = "fill"

    def reset(self, n: int, seed: int | None = None) -> None:
        """Forget everything and prepare for ``n`` plants; ``seed`` has no use here."""
        super().reset(n, seed)
        self._factor: Array = np.ones(n)

    def _adapt(self, measurement: Array) -> None:
        factor = np.interp(self._measured, self._fills, self._factors)
        self._factor = np.where(np.isnan(measurement), self._factor, factor)
        self._pid.set_gains(*(gain * self._factor for gain in self._base))

    def diagnostics(self) -> dict[str, Any]:
        """As of `UtilizationPID`, and the factor in force."""
        return {**super().diagnostics(), "gain_factor": self._factor}


def _table(schedule: Schedule) -> Array:
    """The schedule as an array of shape ``(2, points)``."""
    try:
        table = np.array(schedule, dtype=np.float64).T
    except (TypeError, ValueError):
        table = np.zeros(0)
    if table.ndim != 2 or table.shape[0] != 2 or not np.isfinite(table).all():
        raise ConfigError(f"schedule={schedule!r} must be pairs of fill and factor, such as [[0.5, 1], [0.9, 3]]")
    if not (np.diff(table[0]) > 0).all() or not (table[1] > 0).all():
        raise ConfigError(f"schedule={schedule!r} must have rising fills and factors above 0")
    return table
