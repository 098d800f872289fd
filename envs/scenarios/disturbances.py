"""Disturbances: what happens to a training from outside, each a small class with its equation and its random stream.

A class holds the parameters (documented, checked, read from and written to scenario files). The function beside it
moves the disturbance on by one control interval: it reads the parameters `p` (a record with the class's fields), what
it remembers in the state `d`, and changes the conditions `x` of the coming interval. Functions run interpreted or
compiled.

All durations are in control intervals and geometrically distributed, so that a process has no memory but its state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, Literal, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..plants.random_numbers import bell, geometric, uniform

Probability = Annotated[float, Field(ge=0, le=1)]
Intervals = Annotated[float, Field(ge=1)]
Factor = Annotated[float, Field(ge=1, le=100)]
Share = Annotated[float, Field(ge=0, lt=1)]

#: Conditions of one control interval, as the disturbances make them.
CONDITIONS = np.dtype(
    [
        ("length_scale", "f8"),  # lengths relative to the workload's own
        ("preparation", "f8"),  # CPU time to prepare a sample, relative
        ("disk", "f8"),  # the same, because of storage
        ("network", "f8"),  # time of gradient synchronisation, relative
        ("straggler", "f8"),  # compute time of the slowest rank, relative
        ("ambient_c", "f8"),  # degrees C above the scenario's ambient temperature
        ("cooling", "f8"),  # thermal resistance, relative
        ("neighbours", "f8"),  # other processes on the device
        ("neighbour_memory", "f8"),  # what they hold, fraction of capacity
        ("neighbour_compute", "f8"),  # share of the device's time that they take
        ("host_load", "f8"),  # share of the host's cores that others keep busy
        ("evaluation", "f8"),  # share of the interval spent in evaluation
        ("evaluation_memory", "f8"),  # its activations, fraction of capacity
        ("creep", "f8"),  # growth of memory, fraction of capacity per 1000 micro-batches
        ("longest", "f8"),  # longest sample, tokens
        ("previewed", "f8"),  # longest sample that the preview shows, tokens
    ],
    align=True,
)

#: What the disturbances remember from interval to interval.
MEMORY = np.dtype(
    [
        ("burst", "f8"),  # this and the next six: see _phase
        ("disk", "f8"),
        ("congestion", "f8"),
        ("straggler", "f8"),
        ("fan", "f8"),
        ("host", "f8"),
        ("neighbour", "f8"),
        ("second_task", "f8"),  # 1 while the other task is trained on
        ("host_share", "f8"),
        ("neighbour_memory", "f8"),
        ("neighbour_compute", "f8"),
        ("phase", "f8"),  # of the room's temperature, 0..1
    ],
    align=True,
)


class _Disturbance(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _phase(left: float, start: float, mean: float, key: np.uint64, stream: int, interval: int) -> float:
    """Further intervals that an on/off phase lasts, -1 when it is off; it lasts `mean` intervals on average."""
    if left > 0.0:
        return left - 1.0
    if start > 0.0 and uniform(key, stream, 4 * interval) < start:
        return geometric(uniform(key, stream, 4 * interval + 1), mean) - 1.0
    return -1.0


class LongBursts(_Disturbance):
    """Now and then all samples are longer: a chapter of long documents in the data."""

    kind: Literal["long-bursts"] = "long-bursts"
    start: Probability = 0.05  #: chance an interval that a burst begins
    intervals: Intervals = 4.0  #: mean duration
    factor: Factor = 2.0  #: lengths, relative


def _long_bursts(p: Any, d: Any, x: Any, key: np.uint64, interval: int) -> None:
    d.burst = _phase(d.burst, p.start, p.intervals, key, 1, interval)
    if d.burst >= 0.0:
        x.length_scale *= p.factor


class TaskSwitches(_Disturbance):
    """Training alternates between two tasks: text, and samples of other length that cost more to prepare (images)."""

    kind: Literal["task-switches"] = "task-switches"
    intervals: Intervals = 20.0  #: mean duration of either
    factor: Annotated[float, Field(ge=0.05, le=20)] = 2.0  #: lengths of the second task, relative
    preparation: Factor = 5.0  #: CPU time a sample of the second task, relative


def _task_switches(p: Any, d: Any, x: Any, key: np.uint64, interval: int) -> None:
    if p.intervals <= 0.0:
        return
    if uniform(key, 2, interval) * p.intervals < 1.0:
        d.second_task = 1.0 - d.second_task
    if d.second_task > 0.0:
        x.length_scale *= p.factor
        x.preparation *= p.preparation


class Neighbours(_Disturbance):
    """Another process on the device comes and goes; each visit takes its own share of memory and compute."""

    kind: Literal["neighbours"] = "neighbours"
    arrival: Probability = 0.05  #: chance an interval that one comes; 1: always there, each with other demands
    intervals: Intervals = 10.0  #: mean stay
    memory: tuple[Share, Share] = (0.05, 0.3)  #: fraction of capacity, uniform between these
    compute: tuple[Share, Share] = (0.0, 0.4)  #: share of the device's time, uniform between these

    @model_validator(mode="after")
    def _ordered(self) -> Neighbours:
        for name in ("memory", "compute"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name} must be (low, high), not ({low}, {high})")
        return self


def _neighbours(p: Any, d: Any, x: Any, key: np.uint64, interval: int) -> None:
    new = d.neighbour <= 0.0
    d.neighbour = _phase(d.neighbour, p.arrival, p.intervals, key, 3, interval)
    if d.neighbour < 0.0:
        return
    if new:
        d.neighbour_memory = p.memory_low + (p.memory_high - p.memory_low) * uniform(key, 3, 4 * interval + 2)
        d.neighbour_compute = p.compute_low + (p.compute_high - p.compute_low) * uniform(key, 3, 4 * interval + 3)
    x.neighbours += 1.0
    x.neighbour_memory += d.neighbour_memory
    x.neighbour_compute += d.neighbour_compute


class HotRoom(_Disturbance):
    """The room warms up and cools down again, from the scenario's ambient temperature upwards."""

    kind: Literal["hot-room"] = "hot-room"
    degrees: Annotated[float, Field(ge=0, le=60)] = 15.0  #: highest rise, degrees C
    period: Annotated[float, Field(ge=2)] = 60.0  #: intervals from one peak to the next; the phase is random


def _hot_room(p: Any, d: Any, x: Any, key: np.uint64, interval: int) -> None:
    if p.degrees <= 0.0:
        return
    if interval == 0:
        d.phase = uniform(key, 4, 0)
    x.ambient_c += 0.5 * p.degrees * (1.0 - math.cos(6.283185307179586 * (d.phase + interval / p.period)))


class FanFault(_Disturbance):
    """A fan fails, and after a while is mended."""

    kind: Literal["fan-fault"] = "fan-fault"
    start: Probability = 0.02  #: chance an interval that it fails
    intervals: Intervals = 30.0  #: mean duration
    factor: Factor = 1.5  #: thermal resistance, relative


def _fan_fault(p: Any, d: Any, x: Any, key: np.uint64, interval: int) -> None:
    d.fan = _phase(d.fan, p.start, p.intervals, key, 5, interval)
    if d.fan >= 0.0:
        x.cooling *= p.factor


class SlowDisk(_Disturbance):
    """Storage is slow for a while: samples take longer to load."""

    kind: Literal["slow-disk"] = "slow-disk"
    start: Probability = 0.05  #: chance an interval that it begins
    intervals: Intervals = 8.0  #: mean duration
    factor: Factor = 8.0  #: time to load a sample, relative


def _slow_disk(p: Any, d: Any, x: Any, key: np.uint64, interval: int) -> None:
    d.disk = _phase(d.disk, p.start, p.intervals, key, 6, interval)
    if d.disk >= 0.0:
        x.disk *= p.factor


class NetworkJitter(_Disturbance):
    """Gradient synchronisation between ranks takes its time, and now and then the network is congested."""

    kind: Literal["network-jitter"] = "network-jitter"
    spread: Annotated[float, Field(ge=0, le=1)] = 0.2  #: standard deviation of the logarithm of the time
    start: Probability = 0.05  #: chance an interval that congestion begins
    intervals: Intervals = 4.0  #: its mean duration
    factor: Factor = 3.0  #: time under congestion, relative


def _network_jitter(p: Any, d: Any, x: Any, key: np.uint64, interval: int) -> None:
    if p.spread > 0.0:
        x.network *= math.exp(p.spread * bell(key, 7, 4 * interval + 2))
    d.congestion = _phase(d.congestion, p.start, p.intervals, key, 7, interval)
    if d.congestion >= 0.0:
        x.network *= p.factor


class Stragglers(_Disturbance):
    """One rank is slower than the others for a while; all wait for it."""

    kind: Literal["stragglers"] = "stragglers"
    start: Probability = 0.05  #: chance an interval that it begins
    intervals: Intervals = 6.0  #: mean duration
    factor: Factor = 1.3  #: its compute time, relative


def _stragglers(p: Any, d: Any, x: Any, key: np.uint64, interval: int) -> None:
    d.straggler = _phase(d.straggler, p.start, p.intervals, key, 8, interval)
    if d.straggler >= 0.0:
        x.straggler *= p.factor


class MemoryCreep(_Disturbance):
    """Memory grows from micro-batch to micro-batch, as with a leak."""

    kind: Literal["memory-creep"] = "memory-creep"
    rate: Annotated[float, Field(ge=0, le=1)] = 0.02  #: fraction of capacity per 1000 micro-batches


def _memory_creep(p: Any, d: Any, x: Any, key: np.uint64, interval: int) -> None:
    x.creep += p.rate


class Evaluations(_Disturbance):
    """The training is evaluated at regular times."""

    kind: Literal["evaluations"] = "evaluations"
    every: Annotated[float, Field(ge=2)] = 20.0  #: intervals from one to the next
    share: Share = 0.5  #: of the interval in which it falls
    memory: Share = 0.2  #: its activations, fraction of capacity


def _evaluations(p: Any, d: Any, x: Any, key: np.uint64, interval: int) -> None:
    if p.every > 0.0 and interval % p.every >= p.every - 1.0:
        x.evaluation = p.share
        x.evaluation_memory = p.memory


class HostLoad(_Disturbance):
    """Other programs keep a share of the host's cores busy for a while."""

    kind: Literal["host-load"] = "host-load"
    start: Probability = 0.05  #: chance an interval that it begins
    intervals: Intervals = 8.0  #: mean duration
    share: tuple[Share, Share] = (0.2, 0.7)  #: of all cores, uniform between these

    @model_validator(mode="after")
    def _ordered(self) -> HostLoad:
        if self.share[0] > self.share[1]:
            raise ValueError(f"share must be (low, high), not ({self.share[0]}, {self.share[1]})")
        return self


def _host_load(p: Any, d: Any, x: Any, key: np.uint64, interval: int) -> None:
    new = d.host <= 0.0
    d.host = _phase(d.host, p.start, p.intervals, key, 11, interval)
    if d.host < 0.0:
        return
    if new:
        d.host_share = p.share_low + (p.share_high - p.share_low) * uniform(key, 11, 4 * interval + 2)
    x.host_load += d.host_share


Disturbance = Annotated[
    LongBursts
    | TaskSwitches
    | Neighbours
    | HotRoom
    | FanFault
    | SlowDisk
    | NetworkJitter
    | Stragglers
    | MemoryCreep
    | Evaluations
    | HostLoad,
    Field(discriminator="kind"),
]
#: By the name of their record, in the order in which they act.
KINDS: dict[str, type[_Disturbance]] = {
    kind.model_fields["kind"].default.replace("-", "_"): kind for kind in get_args(get_args(Disturbance)[0])
}


def _columns(kind: type[_Disturbance]) -> list[tuple[str, str]]:
    """Fields of a class as columns of a record; a pair becomes two."""
    columns = []
    for name, field in kind.model_fields.items():
        if name != "kind":
            pair = isinstance(field.default, tuple)
            columns += [(f"{name}_low", "f8"), (f"{name}_high", "f8")] if pair else [(name, "f8")]
    return columns


#: Parameters of all disturbances; one that is absent is all zeros.
PARAMETERS = np.dtype([(name, np.dtype(_columns(kind))) for name, kind in KINDS.items()], align=True)


def fill(record: Any, disturbances: Iterable[_Disturbance]) -> None:
    """Write disturbances into a record of `PARAMETERS`."""
    for disturbance in disturbances:
        columns = record[disturbance.kind.replace("-", "_")]  # type: ignore[attr-defined]
        for name, value in disturbance:
            if isinstance(value, tuple):
                columns[f"{name}_low"], columns[f"{name}_high"] = value
            elif name != "kind":
                columns[name] = value


def calm(d: Any) -> None:
    """Set what disturbances remember to the start of an episode."""
    d.burst = d.disk = d.congestion = d.straggler = d.fan = d.host = d.neighbour = -1.0
    d.second_task = d.host_share = d.neighbour_memory = d.neighbour_compute = d.phase = 0.0


def advance(p: Any, d: Any, x: Any, key: np.uint64, interval: int) -> None:
    """Conditions `x` of an interval (but for its longest sample), from parameters `p` and memory `d`.

    Args:
        p: Record of `PARAMETERS`.
        d: Record of `MEMORY`, moved on.
        x: Record of `CONDITIONS`, written.
        key: Of the episode.
        interval: Counted from 0.
    """
    x.length_scale = x.preparation = x.disk = x.network = x.straggler = x.cooling = 1.0
    x.ambient_c = x.neighbours = x.neighbour_memory = x.neighbour_compute = x.host_load = 0.0
    x.evaluation = x.evaluation_memory = x.creep = 0.0
    _long_bursts(p.long_bursts, d, x, key, interval)
    _task_switches(p.task_switches, d, x, key, interval)
    _neighbours(p.neighbours, d, x, key, interval)
    _hot_room(p.hot_room, d, x, key, interval)
    _fan_fault(p.fan_fault, d, x, key, interval)
    _slow_disk(p.slow_disk, d, x, key, interval)
    _network_jitter(p.network_jitter, d, x, key, interval)
    _stragglers(p.stragglers, d, x, key, interval)
    _memory_creep(p.memory_creep, d, x, key, interval)
    _evaluations(p.evaluations, d, x, key, interval)
    _host_load(p.host_load, d, x, key, interval)


#: For `compiling.register`, callees before callers.
FUNCTIONS = (
    _phase,
    _long_bursts,
    _task_switches,
    _neighbours,
    _hot_room,
    _fan_fault,
    _slow_disk,
    _network_jitter,
    _stragglers,
    _memory_creep,
    _evaluations,
    _host_load,
    calm,
    advance,
)
