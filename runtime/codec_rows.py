"""One plant's telemetry to a frame, and its action to controls.

Plain functions of rows of floats, in the part of Python that numba compiles: a live training runs them as they are, a
simulation of many plants compiles them, and both give the same to the last bit. Rows are float64 arrays (a frame is
float32) or, where nothing is compiled, lists of floats, which are several times faster to read.

What the entries mean stands in `codec`, which also builds the tables.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from numpy.typing import NDArray

Row: TypeAlias = NDArray[Any] | list[float]

# Rows of a frame's table, one column an entry
FIELD = 0  #: index of the telemetry field ...
OPERATION = 1  #: ... what is done with it ...
OPERAND = 2  #: ... and with which other field
LOG2 = 3  #: 1 if the result maps by log2, 0 if linearly
CENTRE = 4  #: what becomes 0 (of log2, the logarithm)
SCALE = 5  #: 2 / (high - low)
FLAG = 6  #: where in the frame a flag says whether it was measured; 0 = no flag
TABLE_ROWS = 7

# Operations
PLAIN, RATIO, DIFFERENCE, COUNT = 0, 1, 2, 3  #: a, a / b, a - b, 1 + a

# Columns of an action's bounds, one row an entry
CONTROL = 0  #: index of the control
BOUND_LOG2 = 1  #: 1 if it maps by log2, 0 if linearly
BOUND_CENTRE = 2  #: value of action 0 (of log2, the logarithm)
HALF_RANGE = 3  #: distance from there to the value of action 1; NaN without an actuator
BOUND_COLUMNS = 4


def encode_frame(telemetry: Row, table: Any, weights: Row, raw: Row, frame: Row) -> None:
    """Write the frame of one plant's interval: entries, then flags, then weights, all within [-1, 1] and none NaN.

    Entry by entry in several short loops, of which a compiler turns the last into vector instructions.

    Args:
        telemetry: In the order of `TELEMETRY_FIELDS`; NaN = not measured.
        table: `ObservationCodec.frame_table`, shape ``(TABLE_ROWS, entries)``.
        weights: Objective weights, shape ``(k,)``; clipped to 0..1, NaN counts as 0.
        raw: Room to work in, shape ``(entries,)``, float64.
        frame: Output, shape ``(entries + flags + k,)``.
    """
    fields, operations, operands, logarithmic = table[FIELD], table[OPERATION], table[OPERAND], table[LOG2]
    centre, scale, flags = table[CENTRE], table[SCALE], table[FLAG]
    entries = len(raw)
    for i in range(entries):
        value = telemetry[int(fields[i])]
        operation = operations[i]
        if operation != PLAIN:
            if operation == COUNT:
                value = 1.0 + value
            else:
                other = telemetry[int(operands[i])]
                if operation == DIFFERENCE:
                    value = value - other
                elif other != 0.0:
                    value = value / other
                else:
                    value = value * math.inf  # 0 / 0 is unknown
        raw[i] = value
    for i in range(entries):
        if logarithmic[i] > 0.0:
            value = raw[i]
            raw[i] = math.log2(value) if value > 0.0 else -math.inf if value == 0.0 else math.nan
    end = entries
    for i in range(entries):
        if flags[i] > 0.0:
            frame[end] = 0.0 if math.isnan(raw[i]) else 1.0
            end += 1
    for i in range(entries):
        value = (raw[i] - centre[i]) * scale[i]
        value = -1.0 if value < -1.0 else value
        value = 1.0 if value > 1.0 else value
        frame[i] = value if value == value else 0.0
    for i in range(len(weights)):
        weight = weights[i]
        frame[end + i] = 1.0 if weight > 1.0 else weight if weight > 0.0 else 0.0


def decode_action(action: Row, bounds: Any, controls: Row) -> None:
    """Write the controls that one plant's action asks for; what is not acted on, or by NaN, is unset.

    Args:
        action: Shape ``(entries,)``; clipped to [-1, 1].
        bounds: `ActionCodec.bounds`, shape ``(entries, BOUND_COLUMNS)``.
        controls: Output, in the order of `CONTROL_FIELDS`; NaN = unset.
    """
    for i in range(len(controls)):
        controls[i] = math.nan
    for i in range(len(bounds)):
        bound = bounds[i]
        position = action[i]
        position = -1.0 if position < -1.0 else 1.0 if position > 1.0 else position
        value = position * bound[HALF_RANGE] + bound[BOUND_CENTRE]
        if bound[BOUND_LOG2] > 0.0 and not math.isnan(value):
            value = math.pow(2.0, value)
        controls[int(bound[CONTROL])] = value


#: What must be registered before anything here is compiled, callees first.
KERNELS = (encode_frame, decode_action)
