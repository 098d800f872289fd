"""Fuzzy gain scheduling of a PID: gains from rules on the error and on its change.

Z.-Y. Zhao, M. Tomizuka, S. Isaka, "Fuzzy gain scheduling of PID controllers", IEEE Transactions on Systems, Man, and
Cybernetics 23(5), 1993. Where the error is large, gains are those of a fast response (high P, little D, strong I);
near the setpoint those of a damped one.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..runtime.errors import ConfigError
from .pid_policies import UtilizationPID

Array = NDArray[np.float64]

#: Of the error and of its change, normalised to -1..1: negative big, ..., zero, ..., positive big.
SETS = ("NB", "NM", "NS", "ZO", "PS", "PM", "PB")
CENTRES = np.linspace(-1.0, 1.0, len(SETS))

# Rules: a row for each set of the error, a column for each of its change. S = small, B = big; the third table holds the
# ratio alpha of integral to derivative time.
_KP = """
    B B B B B B B
    S B B B B B S
    S S B B B S S
    S S S B S S S
    S S B B B S S
    S B B B B B S
    B B B B B B B
"""
_KD = """
    S S S S S S S
    B B S S S B B
    B B B S B B B
    B B B B B B B
    B B B S B B B
    B B S S S B B
    S S S S S S S
"""
_ALPHA = """
    2 2 2 2 2 2 2
    3 3 2 2 2 3 3
    4 3 3 2 3 3 4
    5 4 3 3 3 4 5
    4 3 3 2 3 3 4
    3 3 2 2 2 3 3
    2 2 2 2 2 2 2
"""


def _rules(table: str) -> NDArray[np.str_]:
    return np.array([line.split() for line in table.strip().splitlines()])


KP_BIG, KD_BIG = _rules(_KP) == "B", _rules(_KD) == "B"
ALPHA = _rules(_ALPHA).astype(np.float64)


class Inferred(NamedTuple):
    """What the rules say, each of shape ``(n,)``."""

    kp: Array  #: 0..1, within the range of the proportional gain
    kd: Array  #: 0..1, within the range of the derivative gain
    alpha: Array  #: integral time / derivative time, 2..5


def memberships(values: ArrayLike) -> Array:
    """Triangular membership of each value in each of `SETS`, shape ``(n, 7)``; every row sums to 1.

    Args:
        values: normalised, shape ``(n,)``; beyond -1 and 1 the outer sets have all of it.
    """
    values = np.clip(np.asarray(values, dtype=np.float64), -1.0, 1.0)
    return np.fmax(0.0, 1.0 - np.abs(values[..., None] - CENTRES) / (CENTRES[1] - CENTRES[0]))


def infer(error: ArrayLike, change: ArrayLike) -> Inferred:
    """Gains by product inference.

    A rule's truth ``m`` is the product of its two memberships. "Small" is the fuzzy set with membership
    ``-ln(x) / 4`` and "big" the one with ``-ln(1 - x) / 4``; a rule says the x that has membership ``m``, and what the
    rules say is averaged, weighted by their truth.

    Args:
        error: normalised error, shape ``(n,)``.
        change: normalised change of the error, shape ``(n,)``.
    """
    truth = memberships(error)[:, :, None] * memberships(change)[:, None, :]
    small = np.exp(-4.0 * truth)

    def mean(words: Array) -> Array:
        return (truth * words).sum(axis=(1, 2))

    kp, kd = (np.where(big, 1.0 - small, small) for big in (KP_BIG, KD_BIG))
    return Inferred(mean(kp), mean(kd), mean(ALPHA))


class FuzzyPID(UtilizationPID):
    """Hold fill at a setpoint with gains from fuzzy rules on the error and its change.

    The rules need the plant's ultimate gain Ku and period Tu: gains lie in ``0.32 Ku <= kp <= 0.6 Ku`` and
    ``0.08 Ku Tu <= kd <= 0.15 Ku Tu``, with ``ki = kp^2 / (alpha kd)``. A change of gains is bumpless.

    Args:
        setpoint: fill to hold, 0..1.
        ultimate_gain: gain at which a proportional loop oscillates; octaves per percent point.
        ultimate_period: period of that oscillation, intervals.
        error_span: error that counts as big, percent points.
        change_span: change of the error in an interval that counts as big, percent points.
        signal: see `UtilizationPID`.
        recompute: see `UtilizationPID`.
        **options: the other options of `UtilizationPID`, without gains and ``compress``.

    Raises:
        ConfigError: a value that cannot be used.
    """

    _state = (*UtilizationPID._state, "_error")

    def __init__(
        self,
        setpoint: float = 0.97,
        *,
        ultimate_gain: float = 0.15,
        ultimate_period: float = 2.0,
        error_span: float = 20.0,
        change_span: float = 10.0,
        signal: Literal["utilization", "fill"] = "fill",
        recompute: bool = False,
        **options: Any,
    ) -> None:
        for name, value in (
            ("ultimate_gain", ultimate_gain),
            ("ultimate_period", ultimate_period),
            ("error_span", error_span),
            ("change_span", change_span),
        ):
            if not 0 < value < np.inf:
                raise ConfigError(f"{name}={value} must be a number above 0")
        for name in ("kp", "ki", "kd"):
            if name in options:
                raise ConfigError(f"{name}={options[name]} is what the rules decide: give ultimate_gain instead")
        self.ultimate_gain, self.ultimate_period = ultimate_gain, ultimate_period
        self.error_span, self.change_span = error_span, change_span
        super().__init__(setpoint, 0.0, 0.0, 0.0, signal=signal, compress=False, recompute=recompute, **options)

    _name = "fill"

    def reset(self, n: int, seed: int | None = None) -> None:
        """Forget everything and prepare for ``n`` plants; ``seed`` has no use here."""
        super().reset(n, seed)
        self._error: Array = np.full(n, np.nan)  # of the last interval, percent points

    def _adapt(self, measurement: Array) -> None:
        error = self._pid.setpoint - measurement
        known = np.isfinite(error)
        change = np.where(known & np.isfinite(self._error), error - self._error, 0.0)
        said = infer(np.where(known, error, 0.0) / self.error_span, change / self.change_span)
        gain, period = self.ultimate_gain, self.ultimate_period
        kp = gain * (0.32 + (0.6 - 0.32) * said.kp)
        kd = gain * period * (0.08 + (0.15 - 0.08) * said.kd)
        self._error = np.where(known, error, self._error)
        self._pid.set_gains(kp, kp**2 / (said.alpha * kd), kd)

    def diagnostics(self) -> dict[str, Any]:
        """As of `UtilizationPID`, and the gains in force."""
        n = self._measured.shape
        gains = {name: np.broadcast_to(getattr(self._pid, name), n) for name in ("kp", "ki", "kd")}
        return {**super().diagnostics(), **gains}
