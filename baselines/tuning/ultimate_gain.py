"""The ultimate-gain experiment: raise the gain of a proportional loop until it oscillates and goes on doing so.

J. G. Ziegler, N. B. Nichols, "Optimum settings for automatic controllers", Transactions of the ASME 64, 1942. Where
they turn a knob, here many gains are tried at once, on equal copies of the process, and the grid of gains is then drawn
closer around the smallest one that keeps the oscillation alive.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .process import Array, Process
from .rules import NoUltimateGain, Ultimate

_GRID = 32  # gains tried at once
_ROUNDS = 3
_SUSTAINED = 0.97  # amplitude ratio of the last third of the experiment to the one before it
_ABOVE_NOISE = 3.0  # an oscillation stands out of what the process does by itself by this factor
_LEAST_SHARE = 0.1  # of the first deviation; less is what an actuator's dead band keeps alive
_LEAST_CYCLES = 3


def ultimate_gain(
    process: Process,
    *,
    setpoint: float,
    bias: float,
    kick: float,
    gains: tuple[float, float],
    limits: tuple[float, float] = (-np.inf, np.inf),
    steps: int = 240,
) -> Ultimate:
    """Ku and Tu of the loop ``output = bias + gain (setpoint - measurement)``.

    The oscillation is started by an output of ``bias + kick`` for a tenth of the experiment. It counts as sustained
    when its standard deviation in the last third of the experiment is at least 97 % of that in the third before, and
    more than three times that of a process with the output held at `bias`.

    Args:
        process: What is controlled.
        setpoint: Measurement to hold; that of a process settled at `bias`, for a local answer.
        bias: Output at zero error.
        kick: Excitation, output units.
        gains: Smallest and largest gain to try, both positive.
        limits: Of the output.
        steps: Of the process; at least some ten periods, for an answer to a few percent.

    Raises:
        NoUltimateGain: no gain up to the largest keeps an oscillation alive, or the smallest does already.
    """
    low, high = gains
    found: Ultimate | None = None
    for _ in range(_ROUNDS):
        tried = np.geomspace(low, high, _GRID)
        measured = _respond(process, np.append(0.0, tried), setpoint, bias, kick, limits, steps)
        sustained, periods = _judge(measured, process.dt)
        if not sustained.any():
            if found is not None:  # the closer grid ended just below
                break
            raise NoUltimateGain(
                f"no ultimate gain: oscillations die away at every gain up to {high:.4g}, "
                f"the largest tried (the measurement stays within {measured.min():.4g} .. {measured.max():.4g})"
            )
        first = int(np.argmax(sustained))
        if first == 0 and found is None:
            raise NoUltimateGain(
                f"no ultimate gain: the loop oscillates at every gain down to {low:.4g}, the smallest tried"
            )
        found = Ultimate(float(tried[first]), float(periods[first]))
        low, high = (tried[first - 1] if first else low), tried[first]
    assert found is not None
    return found


def _respond(
    process: Process,
    gains: Array,
    setpoint: float,
    bias: float,
    kick: float,
    limits: tuple[float, float],
    steps: int,
) -> Array:
    """Measurements of the loops after the kick, shape (time, gains)."""
    measurement = process.reset(len(gains))
    record = []
    for step in range(steps):
        kicked = step < max(1, steps // 10)
        output = bias + (kick if kicked else gains * (setpoint - measurement))
        measurement = process.step(np.clip(np.broadcast_to(output, gains.shape), *limits))
        if not kicked:
            record.append(measurement)
    return np.array(record)


def _judge(measured: Array, dt: float) -> tuple[NDArray[np.bool_], Array]:
    """Whether each loop but the first, which has gain 0, keeps its oscillation; and its period."""
    third = len(measured) // 3
    before, after = _detrended(measured[-2 * third : -third]), _detrended(measured[-third:])
    amplitudes = before.std(axis=0), after.std(axis=0)
    idle = max(amplitudes[0][0], amplitudes[1][0])
    first = np.abs(measured - measured.mean(axis=0)).max(axis=0)
    alive = amplitudes[1] > np.fmax(_ABOVE_NOISE * idle, _LEAST_SHARE * first)
    whole = np.concatenate([before, after])
    periods = np.array([_period(column) for column in whole.T])
    sustained = alive & (amplitudes[1] >= _SUSTAINED * amplitudes[0]) & np.isfinite(periods)
    return sustained[1:], dt * periods[1:]


def _detrended(signal: Array) -> Array:
    """Each column less its straight line of least squares."""
    time = np.arange(len(signal)) - (len(signal) - 1) / 2
    slope = time @ signal / (time @ time)
    return signal - signal.mean(axis=0) - time[:, None] * slope


def _period(signal: Array) -> float:
    """Mean time between upward crossings of zero, in samples; NaN where there are too few."""
    up = np.flatnonzero((signal[:-1] < 0) & (signal[1:] >= 0))
    if len(up) <= _LEAST_CYCLES:
        return np.nan
    at = up + signal[up] / (signal[up] - signal[up + 1])
    return float((at[-1] - at[0]) / (len(at) - 1))
