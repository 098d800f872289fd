"""Gains from the ultimate gain Ku and period Tu of a loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...runtime.errors import SwiftcruiseError


class NoUltimateGain(SwiftcruiseError):
    """The loop does not oscillate as an experiment needs it to; the message says what it does instead."""


@dataclass(frozen=True, slots=True)
class Ultimate:
    """Where a proportional loop oscillates without growing or dying away."""

    gain: float  #: Ku, output unit per measurement unit
    period: float  #: Tu, in the loop's unit of time


class Gains(NamedTuple):
    """Of a PID controller in parallel form, as `PIDController` takes them."""

    kp: float
    ki: float
    kd: float


class Rule(NamedTuple):
    """``kp = proportional Ku``, ``Ti = integral Tu``, ``Td = derivative Tu``; ``ki = kp / Ti``, ``kd = kp Td``."""

    proportional: float
    integral: float
    derivative: float
    source: str

    def gains(self, ultimate: Ultimate) -> Gains:
        """The rule's gains for a loop."""
        kp = self.proportional * ultimate.gain
        return Gains(kp, kp / (self.integral * ultimate.period), kp * self.derivative * ultimate.period)


#: By name, from the fastest to the calmest.
RULES: dict[str, Rule] = {
    "classic": Rule(0.6, 0.5, 0.125, "J. G. Ziegler, N. B. Nichols, Transactions of the ASME 64, 1942"),
    "no-overshoot": Rule(0.2, 0.5, 1 / 3, "D. E. Seborg, T. F. Edgar, D. A. Mellichamp, Process Dynamics and Control"),
    "tyreus-luyben": Rule(1 / 2.2, 2.2, 1 / 6.3, "B. D. Tyreus, W. L. Luyben, Ind. Eng. Chem. Res. 31, 1992"),
}
