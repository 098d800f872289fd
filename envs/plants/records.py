"""The arrays of the simulated plant: what is constant in a scenario, and what changes from interval to interval.

Structured dtypes: a record's fields read the same in interpreted and in compiled code.
"""

from __future__ import annotations

import numpy as np

from ...runtime.controls import CONTROL_FIELDS
from ..scenarios.disturbances import CONDITIONS, MEMORY, PARAMETERS
from .physics import MemoryCoefficients, PowerCurve, TimeCoefficients

#: Nodes of the tables of longest samples (equally likely steps) and of power curves.
NODES = 64


def _floats(fields: tuple[str, ...]) -> np.dtype:
    return np.dtype([(field, "f8") for field in fields])


#: Constants of a scenario, one record each.
CONSTANTS = np.dtype(
    [
        ("time", _floats(TimeCoefficients._fields)),  # the true ones, mismatch included
        ("memory", _floats(MemoryCoefficients._fields)),
        ("power", _floats(PowerCurve._fields)),
        ("disturbances", PARAMETERS),
        # The device
        ("layers", "f8"),  # of the model; checkpointing is set in whole layers
        ("capacity", "f8"),  # memory that a process can reserve, bytes
        ("usable", "f8"),  # what of it tensors can have, bytes
        ("least_fragmentation", "f8"),  # reserved / allocated transient bytes after a cache flush
        ("usual_fragmentation", "f8"),  # what it builds up to under the workload's own variety of lengths
        ("most_fragmentation", "f8"),  # what it builds up to under ever new budgets
        ("accelerator", "f8"),  # 1: NVML, power limit, temperature; 0: a CPU
        ("power_w", "f8"),  # thermal design power
        ("idle_w", "f8"),
        ("dynamic_power", "f8"),  # of a full load above the static power, in units of power_w
        ("curve", "i8"),  # of power limits
        ("thermal_resistance", "f8"),  # degrees C per W
        ("sink_seconds", "f8"),
        ("throttle_c", "f8"),
        ("ambient_c", "f8"),
        # The workload
        ("table", "i8"),  # of packing
        ("samples", "f8"),  # of an optimizer step and rank
        ("mean_length", "f8"),
        ("p95_length", "f8"),
        ("max_length", "f8"),
        ("preparation_s", "f8"),  # CPU time for one sample
        ("cores", "f8"),  # CPU cores of one rank's share
        ("ranks", "f8"),
        ("synchronisation_s", "f8"),  # of gradients, an optimizer step
        ("imbalance", "f8"),  # compute time of the slowest rank over the mean, from lengths alone
        # Costs of moving an actuator
        ("respawn_s", "f8"),  # new loader workers
        ("retune_s", "f8"),  # a token budget twice or half as large
        ("flush_s", "f8"),  # the allocator gives back its blocks
        # How it is observed and controlled
        ("interval_s", "f8"),
        ("dead_time", "f8"),
        ("noise", "f8"),
        ("dropout", "f8"),
        ("preview_share", "f8"),
        ("preview_error", "f8"),
        ("memory_error", "f8"),  # of the run's memory model at the start, logarithm
        ("energy_budget_j", "f8"),  # infinite: none
        ("temperature_limit_c", "f8"),  # NaN: none
        ("intervals", "f8"),  # of a job, the first one included
        # What rewards are relative to
        ("reference_tokens_per_s", "f8"),
        ("reference_energy", "f8"),  # J a token
        ("reference_price", "f8"),  # a token
        ("price_s", "f8"),  # of the device's time, per second
        ("price_worker_s", "f8"),  # of a loader worker's time
        ("price_j", "f8"),
        ("limits", "i8"),  # index of the control limits
        ("start", "f8", len(CONTROL_FIELDS)),  # controls at the start, NaN = no such actuator
    ],
    align=True,
)

#: State of a plant: everything that an interval depends on, besides controls and constants.
STATE = np.dtype(
    [
        ("key", "u8"),  # of the episode: all random draws follow from it
        ("scenario", "i8"),  # index of its constants
        ("interval", "i8"),  # control intervals finished
        ("time_s", "f8"),
        ("energy_j", "f8"),  # drawn so far, all ranks
        ("temperature_c", "f8"),
        ("fragmentation", "f8"),  # reserved / allocated transient bytes, see physics.reserved_bytes
        ("creep", "f8"),  # leaked memory, fraction of capacity
        ("memory_error", "f8"),  # of the run's memory model, logarithm of predicted over true activations
        ("caution", "f8"),  # factor on its predictions after an out-of-memory event
        ("ended", "f8"),  # 1 after an out-of-memory event that nothing can mend
        # Truth about the last interval, for rewards
        ("tokens_per_s", "f8"),  # real tokens, all ranks
        ("interval_j", "f8"),
        ("real_tokens", "f8"),
        ("wall_s", "f8"),
        ("ooms", "f8"),
        ("neighbour_memory", "f8"),  # of the last interval, fraction of capacity
        ("memory_share", "f8"),  # peak of all processes, fraction of capacity
        ("memory", MEMORY),
        ("now", CONDITIONS),  # of the interval to come
        ("then", CONDITIONS),  # of the one after it
    ],
    align=True,
)
