"""What a power limit and heat do to a device: tables of the power curve, throttling. Interpreted or compiled."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .records import NODES

_THROTTLING_COST = 0.5  # further time where heat takes all dynamic power away, relative (assumed)


def under_limit(c: Any, curves: np.ndarray, activity: float, limit: float) -> tuple[float, float]:
    """What a power limit does: share of the dynamic power that is drawn, and time relative to no limit.

    Read from a table of `physics.limited_share` and `physics.slowdown` for a busy device. One that is less active draws
    less dynamic power; what the limit leaves above the static power then counts for more.

    Args:
        c: Constants.
        curves: (curves, 3, NODES), see `Assembly`; share and time at equal steps of `limit` from 0 to 1.
        activity: Dynamic power relative to a busy device, 0..1.
        limit: In units of the thermal design power.
    """
    static = c.power.static
    y = min(max(static + (limit - static) / activity, 0.0), 1.0) * (NODES - 1.0)
    i = min(int(y), NODES - 2)
    shares, times = curves[c.curve, 0], curves[c.curve, 1]
    part = y - i
    return shares[i] + (shares[i + 1] - shares[i]) * part, times[i] + (times[i + 1] - times[i]) * part


def when_drawing(c: Any, curves: np.ndarray, share: float) -> float:
    """Time relative to no limit of a device that draws a share of its dynamic power, from the same table."""
    y = min(max(share, 0.0), 1.0) * (NODES - 1.0)
    i = min(int(y), NODES - 2)
    times = curves[c.curve, 2]
    return times[i] + (times[i + 1] - times[i]) * (y - i)


def activity_of(occupancy: float) -> float:
    """Dynamic power relative to a full load, where the device computes this share of a micro-batch's time (assumed)."""
    return 0.35 + 0.65 * occupancy


def powered(
    c: Any,
    curves: np.ndarray,
    activity: float,
    limit: float,
    compute: float,
    loading: float,
    workers: float,
    temperature: float,
    ambient: float,
    resistance: float,
) -> tuple[float, float, float]:
    """What power limit and heat make of an interval.

    Heat takes the clock down until the mean power is what the sink carries off. A hot device's clock swings around what
    it needs: the deeper it is cut, the more that costs.

    Args:
        c: Constants.
        curves: See `under_limit`.
        activity: See `activity_of`.
        limit: Power limit, in units of the thermal design power.
        compute: Computing time of an optimizer step without a limit, s.
        loading: Time to load its samples, s.
        workers: Loader workers; without any the device waits for all of the loading.
        temperature: At the start, degrees C.
        ambient: Degrees C.
        resistance: Degrees C per W.

    Returns:
        Time relative to no limit, power while computing (W), share of the interval that is throttled.
    """
    drawn, slow = under_limit(c, curves, activity, limit)
    busy = compute * slow / (max(compute * slow, loading) if workers > 0.0 else compute * slow + loading)
    dynamic = c.dynamic_power * activity
    watts = c.power_w * (c.power.static + dynamic * drawn)
    settled = ambient + resistance * (c.idle_w + (watts - c.idle_w) * busy)
    if settled <= c.throttle_c:
        return slow, watts, 0.0
    throttled = 1.0
    if temperature < c.throttle_c:
        cool = c.sink_seconds * math.log((settled - temperature) / (settled - c.throttle_c))
        throttled = max(0.0, 1.0 - cool / c.interval_s)
    carried = ((c.throttle_c - ambient) / resistance - c.idle_w * (1.0 - busy)) / busy / c.power_w
    held = min(max((carried - c.power.static) / dynamic, 0.02), drawn)
    slowest = when_drawing(c, curves, held) * (1.0 + _THROTTLING_COST * (1.0 - held / drawn))
    slow *= 1.0 + throttled * (max(slowest / slow, 1.0) - 1.0)
    watts += throttled * c.power_w * dynamic * (held - drawn)
    return slow, watts, throttled


#: For `compiling.register`, callees before callers.
FUNCTIONS = (under_limit, when_drawing, activity_of, powered)
