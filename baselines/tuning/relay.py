"""The relay experiment: a relay in the controller's place makes the loop oscillate at its ultimate period.

K. J. Astroem, T. Haegglund, "Automatic tuning of simple regulators with specifications on phase and amplitude margins",
Automatica 20, 1984. Nothing has to be brought to the edge of instability, and the amplitude is chosen.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from .process import Process
from .rules import NoUltimateGain, Ultimate

_LEAST_CYCLES = 4


def relay(
    process: Process, *, setpoint: float, bias: float, amplitude: float, hysteresis: float = 0.0, steps: int = 240
) -> Ultimate:
    """Ku and Tu of a loop by the describing function of a relay with hysteresis.

    The output is ``bias + d`` after the measurement fell below ``setpoint - eps`` and ``bias - d`` after it rose above
    ``setpoint + eps``. From the limit cycle's amplitude a follows ``Ku = 4 d / (pi sqrt(a^2 - eps^2))``. This takes the
    oscillation for a sine wave: exact to some percent where the process is a good low-pass filter, and some 20 % off
    where it is little more than dead time. Only the second half of the experiment is evaluated.

    Args:
        process: What is controlled.
        setpoint: Measurement around which it oscillates.
        bias: Output at which the process settles there.
        amplitude: d, output units, positive.
        hysteresis: eps, measurement units, above the noise of the measurement.
        steps: Of the process.

    Raises:
        NoUltimateGain: the loop does not oscillate, or not beyond the hysteresis.
    """
    measurement = float(process.reset(1)[0])
    on = measurement < setpoint
    record, switches = [], []
    for step in range(steps):
        if on and measurement > setpoint + hysteresis:
            on = False
        elif not on and measurement < setpoint - hysteresis:
            on = True
            switches.append(step)
        record.append(measurement)
        measurement = float(process.step(np.array([bias + amplitude if on else bias - amplitude]))[0])
    switches = [step for step in switches if step >= steps // 2]
    if len(switches) <= _LEAST_CYCLES:
        raise NoUltimateGain(
            f"no ultimate gain: under a relay of +-{amplitude:.4g} the measurement goes from {min(record):.4g} to "
            f"{max(record):.4g} and does not keep crossing the setpoint {setpoint:.4g} +-{hysteresis:.4g}"
        )
    cycles = [record[a:b] for a, b in pairwise(switches)]
    swing = float(np.mean([max(cycle) - min(cycle) for cycle in cycles])) / 2
    if swing <= hysteresis:
        raise NoUltimateGain(
            f"no ultimate gain: under a relay of +-{amplitude:.4g} the measurement swings by {swing:.4g} only, within "
            f"the hysteresis {hysteresis:.4g}"
        )
    gain = 4 * amplitude / (math.pi * math.sqrt(swing**2 - hysteresis**2))
    return Ultimate(gain, process.dt * (switches[-1] - switches[0]) / len(cycles))
