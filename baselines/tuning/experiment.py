"""The tuning experiments on a simulated training: where its loop comes to rest, then its ultimate gain and period."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...envs.scenarios.scenario import Scenario
from .loops import Loop, PlantProcess
from .process import characteristic
from .relay import relay
from .rules import NoUltimateGain, Ultimate
from .ultimate_gain import ultimate_gain

_STEPS = 240  # control intervals of an experiment
_SETTLE, _AVERAGE = 16, 16  # control intervals at each point of the characteristic
_POINTS = 65


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """Where the static characteristic crosses the setpoint."""

    output: float
    slope: float  #: measurement units per output unit
    noise: float  #: standard deviation of the measurement at rest


def operating_point(process: PlantProcess) -> OperatingPoint:
    """Where the loop comes to rest: the output at which the measurement rises through the setpoint.

    Raises:
        NoUltimateGain: it does so nowhere; the message says what the measurement does instead.
    """
    loop = process.loop
    outputs = np.linspace(*loop.limits, _POINTS)
    measured, noise = characteristic(process, outputs, _SETTLE, _AVERAGE)
    if np.isnan(measured).all():
        raise NoUltimateGain(f"no ultimate gain: {loop.measured} is not measured on this plant")
    rising = np.flatnonzero((measured[:-1] < loop.setpoint) & (measured[1:] >= loop.setpoint))
    if not len(rising):
        side = "above" if np.nanmin(measured) >= loop.setpoint else "below"
        raise NoUltimateGain(
            f"no ultimate gain: over the whole range of the {loop.moved}, {loop.measured} stays within "
            f"{np.nanmin(measured):.3g} .. {np.nanmax(measured):.3g}, {side} the setpoint {loop.setpoint:.3g}: the "
            "loop goes to its limit and rests there"
        )
    i = int(rising[0])
    slope = (measured[i + 1] - measured[i]) / (outputs[i + 1] - outputs[i])
    output = outputs[i] + (loop.setpoint - measured[i]) / slope
    return OperatingPoint(float(output), float(slope), float(max(noise[i], noise[i + 1])))


def experiment(loop: Loop, scenario: Scenario, method: str) -> Ultimate:
    """Ku and Tu of a loop on a simulated training, in control intervals.

    Args:
        loop: See `loop_of`.
        scenario: The training; disturbances and noise blur the answer.
        method: "ziegler-nichols" or "relay".

    Raises:
        NoUltimateGain: there is none here, see the message.
    """
    process = PlantProcess(loop, scenario)
    rest = operating_point(process)
    if method == "relay":
        return relay(
            process,
            setpoint=loop.setpoint,
            bias=rest.output,
            amplitude=loop.amplitude,
            hysteresis=2.0 * rest.noise,
            steps=_STEPS,
        )
    return ultimate_gain(
        process,
        setpoint=loop.setpoint,
        bias=rest.output,
        kick=loop.amplitude,
        gains=(0.05 / rest.slope, 100.0 / rest.slope),
        limits=loop.limits,
        steps=_STEPS,
    )
