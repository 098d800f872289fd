"""The safety guard's rules for one plant.

Plain functions of floats and rows of floats, in the part of Python that numba compiles: a live training runs them as
they are, a simulation of many plants compiles them, and both decide the same to the last bit. Rows are float64 arrays
or, where nothing is compiled, lists of floats, which are several times faster to read.

`SafetyGuard` says what the rules are; `KERNELS` holds what must be compiled before `apply_rules` can be.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .controls import CONTROL_FIELDS, ControlLimits
from .telemetry import TELEMETRY_FIELDS

Row: TypeAlias = NDArray[np.float64] | list[float]

#: Controls that an out-of-memory event lowers, and the factor it lowers them by; they come first in `CONTROL_FIELDS`.
#: The memory target is among them because a smaller micro-batch that is filled up to the same target with fewer
#: checkpointed layers frees nothing.
OOM_CUTS = {"token_budget": 0.5, "micro_batch_cap": 0.5, "memory_target": 0.9}

#: The rules, in the order in which they act; bit i of a control's flags tells that rule i changed it.
RULES = ("not finite", "bounds", "rate limit", "dwell", "hysteresis", "memory cap", "out of memory")
_NOT_FINITE, _BOUNDS, _RATE_LIMIT, _DWELL, _HYSTERESIS, _MEMORY_CAP, _OUT_OF_MEMORY = (1 << i for i in range(7))

CONTROLS = len(CONTROL_FIELDS)
CEILINGS = len(OOM_CUTS)

# Offsets in a row of limits; at each begins a block of values, one for each control in order
LOW = 0  #: least value; of an integer control, a whole number
HIGH = LOW + CONTROLS  #: greatest value, likewise
RISE_FACTOR = HIGH + CONTROLS  #: greatest rise an interval, relative to the control in force ...
FALL_FACTOR = RISE_FACTOR + CONTROLS  #: ... and greatest fall, ...
REACH = FALL_FACTOR + CONTROLS  #: ... and what is added to both
LEAST_REACH = REACH + CONTROLS  #: both are at least this: an integer control must be able to move, however small it is
DWELL = LEAST_REACH + CONTROLS  #: intervals without a change between two changes
INTEGER = DWELL + CONTROLS  #: 1 if rounded to whole numbers, else 0
HYSTERESIS = INTEGER + CONTROLS  #: relative change below which it is dropped
LIMIT_SIZE = HYSTERESIS + CONTROLS

# Offsets in a row of state; from IN_FORCE on, blocks of values, one for each control (or each ceiling) in order
TIME = 0  #: of the last telemetry, s
UPCOMING_MAX = 1  #: its upcoming maximum, tokens: what the interval measured next runs with
CAUTION = 2  #: by how much more slowly what failed is tried again
OTHERS = 3  #: what other processes held at the last failure, fraction of capacity
NEXT_FRACTION = 4  #: `checkpoint_fraction` as set last: telemetry only has its measured mean
IN_FORCE = 5  #: controls of the last interval
AGE = IN_FORCE + CONTROLS  #: intervals that each control has been as it is
RESTORE = AGE + CONTROLS  #: where "memory cap" and "out of memory" took a control from
NEXT_RESTORE = RESTORE + CONTROLS  #: the same, counting from the next interval on, so that deciding twice is harmless
CEILING = NEXT_RESTORE + CONTROLS  #: what a control may be after an out-of-memory event
FAILING = CEILING + CEILINGS  #: the settings that ran out of memory
STATE_SIZE = FAILING + CEILINGS

#: Name, offset, length (None: one value and no block) and initial value of all that a row of state holds.
STATE_LAYOUT: tuple[tuple[str, int, int | None, float], ...] = (
    ("time", TIME, None, math.nan),
    ("upcoming_max", UPCOMING_MAX, None, math.nan),
    ("caution", CAUTION, None, 1.0),
    ("others", OTHERS, None, math.nan),
    ("next_fraction", NEXT_FRACTION, None, math.nan),
    ("in_force", IN_FORCE, CONTROLS, math.nan),
    ("age", AGE, CONTROLS, math.inf),
    ("restore", RESTORE, CONTROLS, math.nan),
    ("next_restore", NEXT_RESTORE, CONTROLS, math.nan),
    ("ceiling", CEILING, CEILINGS, math.inf),
    ("failing", FAILING, CEILINGS, math.inf),
)

_TOKEN_BUDGET = CONTROL_FIELDS.index("token_budget")
_MEMORY_TARGET = CONTROL_FIELDS.index("memory_target")
_CHECKPOINT_FRACTION = CONTROL_FIELDS.index("checkpoint_fraction")
_TELEMETRY_CONTROLS = tuple(TELEMETRY_FIELDS.index(name) for name in CONTROL_FIELDS)
_TIME_S = TELEMETRY_FIELDS.index("time_s")
_LARGEST_MICRO_BATCH = TELEMETRY_FIELDS.index("largest_micro_batch")
_PEAK_FRACTION = TELEMETRY_FIELDS.index("memory_peak_fraction")
_DEVICE_FRACTION = TELEMETRY_FIELDS.index("memory_device_fraction")
_OOM_COUNT = TELEMETRY_FIELDS.index("oom_count")
_TELEMETRY_UPCOMING_MAX = TELEMETRY_FIELDS.index("upcoming_max")
_FIT_TOKENS = TELEMETRY_FIELDS.index("fit_tokens_checkpointed")

_OOM_FACTORS = tuple(OOM_CUTS.values())
_SIZES = 2  # of the ceilings, those on the size of a micro-batch
_JUST_BELOW = 0.95  # how close to a failing setting the ceiling rises at once
_REACHED = 0.999 * _JUST_BELOW  # from where on it has risen that far, whatever rounding did
_MORE_CAUTION, _MOST_CAUTION = 4.0, 16.0  # a setting that fails again is tried so many times later, and at most
_SAME = 0.75  # share of what failed before, below which a failure is another one
_NEIGHBOUR_LEFT = 0.05  # fraction of capacity that others give back
_ALL_WHOLE = 2.0**52  # from here on, float64 has whole numbers only


class GuardOptions(NamedTuple):
    """What the rules need to know beside limits."""

    memory_cap: float  #: most memory to plan for, fraction of capacity
    recovery: float  #: factor an interval by which the ceiling after an OOM rises to just below what failed
    relaxation: float  #: factor an interval beyond that


def limit_row(limits: ControlLimits, hysteresis: float) -> NDArray[np.float64]:
    """Limits as `apply_rules` takes them, shape ``(LIMIT_SIZE,)``.

    Args:
        limits: Bounds, rate limits and dwell times.
        hysteresis: Least relative change of a multiplicative control.
    """
    row = np.zeros(LIMIT_SIZE)
    for i, (_, limit) in enumerate(limits.items()):
        row[LOW + i] = np.ceil(limit.low) if limit.integer else limit.low
        row[HIGH + i] = np.floor(limit.high) if limit.integer else limit.high
        if limit.multiplicative:
            row[RISE_FACTOR + i], row[FALL_FACTOR + i] = limit.rate - 1.0, 1.0 - 1.0 / limit.rate
            row[HYSTERESIS + i] = hysteresis
        else:
            row[REACH + i] = limit.rate
        row[LEAST_REACH + i] = row[INTEGER + i] = float(limit.integer)
        row[DWELL + i] = limit.dwell
    return row


def initial_state() -> NDArray[np.float64]:
    """The state of a plant that nothing is known of, shape ``(STATE_SIZE,)``."""
    state = np.empty(STATE_SIZE)
    for _, offset, length, value in STATE_LAYOUT:
        state[offset : offset + (length or 1)] = value
    return state


def others_memory(telemetry: Row) -> float:
    """Memory that other processes hold, fraction of capacity; NaN where it is not measured."""
    others = telemetry[_DEVICE_FRACTION] - telemetry[_PEAK_FRACTION]
    return 0.0 if others < 0.0 else others


def available_memory(memory_cap: float, telemetry: Row) -> float:
    """Memory that this process may plan for: the cap less what others hold, fraction of capacity."""
    others = others_memory(telemetry)
    if math.isnan(others):
        return memory_cap
    return memory_cap - others if others < memory_cap else 0.0


def apply_rules(
    limits: Row,
    options: GuardOptions,
    state: Row,
    telemetry: Row,
    proposed: Row,
    fit_tokens: float,
    controls: Row,
    rules: Any,
) -> None:
    """Write the safe version of one plant's proposal, given the interval just measured.

    Calling it again with the same telemetry (the same `time_s`) changes nothing.

    Args:
        limits: From `limit_row`, shape ``(LIMIT_SIZE,)``.
        options: Memory cap and the pace of ceilings.
        state: What the guard remembers of this plant, from `initial_state`; updated. Shape ``(STATE_SIZE,)``.
        telemetry: In the order of `TELEMETRY_FIELDS`; NaN = not measured.
        proposed: In the order of `CONTROL_FIELDS`; NaN = unset.
        fit_tokens: Most tokens of a micro-batch of the longest samples at full checkpointing, as the memory model
            knows it; NaN where it does not, then the telemetry's `fit_tokens_checkpointed` stands in.
        controls: Output, in the order of `CONTROL_FIELDS`; NaN = unset.
        rules: Output, integers, shape ``(CONTROLS,)``: bit i is set where ``RULES[i]`` changed the control.
    """
    if telemetry[_TIME_S] != state[TIME]:  # always where time is not measured
        _advance(limits, options, state, telemetry)
    fits = telemetry[_FIT_TOKENS] if math.isnan(fit_tokens) else fit_tokens
    for i in range(CONTROLS):
        low, high, integer = limits[LOW + i], limits[HIGH + i], limits[INTEGER + i] > 0.0
        was, asked, restore = state[IN_FORCE + i], proposed[i], state[RESTORE + i]
        flags = 0
        wanted = math.nan
        if math.isfinite(asked):
            wanted = asked
        else:
            if not math.isnan(asked):
                flags |= _NOT_FINITE
            if restore > was and restore < math.inf:
                wanted = restore

        value = was
        if not math.isnan(wanted):
            value = _between(wanted, low, high)
            if value != wanted:
                flags |= _BOUNDS
            hold = False
            # Where the control in force is unknown or outside the bounds, these three rules do not bind.
            if low <= was <= high and was < math.inf:
                rise = was * limits[RISE_FACTOR + i] + limits[REACH + i]
                fall = was * limits[FALL_FACTOR + i] + limits[REACH + i]
                least = limits[LEAST_REACH + i]
                limited = _between(
                    value, was - (fall if fall > least else least), was + (rise if rise > least else least)
                )
                if limited != value:
                    flags |= _RATE_LIMIT
                    value = limited
                if value != was:
                    if state[AGE + i] <= limits[DWELL + i]:
                        flags |= _DWELL
                        hold = True
                    elif abs(value - was) < limits[HYSTERESIS + i] * was:
                        flags |= _HYSTERESIS
                        hold = True
            if hold:
                value = was
            elif integer:
                value = _between(_rounded(value), low, high)
        elif i == _CHECKPOINT_FRACTION:
            value = math.nan  # the plant chooses

        safe = value
        if i == _MEMORY_TARGET:
            safe = _at_most(safe, available_memory(options.memory_cap, telemetry), low, integer)
        elif i == _TOKEN_BUDGET and not math.isnan(fits):
            # A long sample runs alone whatever the budget, and checkpointing has to carry it.
            safe = _at_most(safe, _higher(fits, telemetry[_TELEMETRY_UPCOMING_MAX]), low, integer)
        if safe < value:
            flags |= _MEMORY_CAP
        if i < CEILINGS:
            below = _at_most(safe, state[CEILING + i], low, integer)
            if below < safe:
                flags |= _OUT_OF_MEMORY
                safe = below

        if safe < value:
            state[NEXT_RESTORE + i] = value if math.isnan(wanted) else wanted
        elif safe < restore and not math.isfinite(asked):
            state[NEXT_RESTORE + i] = restore  # not there yet
        else:
            state[NEXT_RESTORE + i] = math.nan
        if i == _CHECKPOINT_FRACTION:
            state[NEXT_FRACTION] = safe
        controls[i] = safe
        rules[i] = flags


def _advance(limits: Row, options: GuardOptions, state: Row, telemetry: Row) -> None:
    """Take in a new interval."""
    state[TIME] = telemetry[_TIME_S]
    for i in range(CONTROLS):
        before = state[IN_FORCE + i]
        now = state[NEXT_FRACTION] if i == _CHECKPOINT_FRACTION else telemetry[_TELEMETRY_CONTROLS[i]]
        changed = now != before and math.isfinite(now) and math.isfinite(before)
        state[AGE + i] = 1.0 if changed else state[AGE + i] + 1.0
        state[IN_FORCE + i] = now
        state[RESTORE + i] = state[NEXT_RESTORE + i]
    if telemetry[_OOM_COUNT] > 0.0:
        _lower_ceilings(state, telemetry)
    else:
        _lift_ceilings(limits, options, state, telemetry)
    state[UPCOMING_MAX] = telemetry[_TELEMETRY_UPCOMING_MAX]


def _lower_ceilings(state: Row, telemetry: Row) -> None:
    """An interval ran out of memory: set the ceilings below what was in force."""
    again = lower = False
    for i in range(CEILINGS):
        was, ceiling, failing = state[IN_FORCE + i], state[CEILING + i], state[FAILING + i]
        # The memory target, lowered by little, is back at once and tells nothing about a repetition.
        if i < _SIZES:
            again = again or (ceiling < math.inf and ceiling >= _REACHED * failing)
            lower = lower or was < _SAME * failing
        state[FAILING + i] = _lower(failing, was)
        state[CEILING + i] = _lower(ceiling, was * _OOM_FACTORS[i])
    if lower:
        # Well below what failed before, something else has taken the memory: nothing is known of how long.
        state[CAUTION] = 1.0
    elif again:
        state[CAUTION] = _lower(state[CAUTION] * _MORE_CAUTION, _MOST_CAUTION)
    state[OTHERS] = others_memory(telemetry)


def _lift_ceilings(limits: Row, options: GuardOptions, state: Row, telemetry: Row) -> None:
    """An interval passed without an out-of-memory: lift the ceilings by one interval."""
    left = state[OTHERS] - others_memory(telemetry) > _NEIGHBOUR_LEFT  # comparisons with NaN are false
    for i in range(CEILINGS):
        ceiling, failing = state[CEILING + i], state[FAILING + i]
        if ceiling == math.inf:
            continue
        carried = state[IN_FORCE + i]
        if i == _TOKEN_BUDGET:
            # A budget that no micro-batch has come near to has shown nothing.
            carried = _lower(carried, telemetry[_LARGEST_MICRO_BATCH] / _JUST_BELOW)
        if carried >= failing:
            failing = math.inf
        if failing < math.inf and ceiling >= _REACHED * failing:
            ceiling = ceiling * math.pow(options.relaxation, 1.0 / state[CAUTION])
        else:
            ceiling = _lower(ceiling * options.recovery, _JUST_BELOW * failing)
        if left or ceiling >= limits[HIGH + i]:
            ceiling = failing = math.inf
        state[CEILING + i], state[FAILING + i] = ceiling, failing
    if state[CEILING] == math.inf and state[CEILING + 1] == math.inf:
        state[CAUTION] = 1.0


def _at_most(value: float, cap: float, low: float, integer: bool) -> float:
    """The value lowered to a cap (of an integer control, to the whole number below it), but not below `low`."""
    if integer:
        whole = _rounded(cap)
        cap = whole - 1.0 if whole > cap else whole
    if cap < low:
        cap = low
    return cap if cap < value else value


def _between(value: float, low: float, high: float) -> float:
    """The value, clipped."""
    if value < low:
        value = low
    return high if value > high else value


def _rounded(value: float) -> float:
    """The nearest whole number, halves to the even one; unlike `round`, a float for every float."""
    if not abs(value) < _ALL_WHOLE:
        return value
    return (value + _ALL_WHOLE) - _ALL_WHOLE if value >= 0.0 else (value - _ALL_WHOLE) + _ALL_WHOLE


def _lower(one: float, other: float) -> float:
    """The smaller of two values, NaN being none."""
    return one if one <= other or math.isnan(other) else other


def _higher(one: float, other: float) -> float:
    """The greater of two values, NaN being none."""
    return one if one >= other or math.isnan(other) else other


#: What must be registered before anything here is compiled, callees first.
KERNELS = (
    others_memory,
    available_memory,
    _lower,
    _higher,
    _between,
    _rounded,
    _at_most,
    _lower_ceilings,
    _lift_ceilings,
    _advance,
    apply_rules,
)
