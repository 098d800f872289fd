"""Telemetry: what one control interval measured, for n plants at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from operator import attrgetter

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .columns import nan_columns

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Telemetry:
    """Measurements of one control interval; every field is a float64 array of shape ``(n,)``.

    One entry a plant: ``n = 1`` in a live run, thousands in the vector environment. NaN means *not measured*
    (the sensor is absent, failed, or the quantity does not exist on this plant); a policy must expect it in any
    field. Flags are 0 or 1. Lengths and token counts are tokens of the micro-batch's longest input, summed over
    samples where a total is meant.
    """

    # The interval
    time_s: Array  #: seconds since the run began, at the end of the interval (monotonic clock)
    interval_s: Array  #: wall-clock length of the interval, seconds
    optimizer_steps: Array  #: optimizer steps finished in the interval
    samples: Array  #: samples trained on in the interval, this rank
    real_tokens: Array  #: tokens without padding, this rank
    padded_tokens: Array  #: tokens as computed, padding included, this rank
    tokens_per_s: Array  #: real tokens per second of the interval, this rank
    step_time_s: Array  #: mean seconds an optimizer step, data wait included
    data_wait_fraction: Array  #: share of the interval spent waiting for the loader, 0..1
    micro_batches_per_step: Array  #: mean number of forward/backward passes an optimizer step
    largest_micro_batch: Array  #: padded tokens of the largest micro-batch of the interval

    # The device
    gpu_utilization: Array  #: NVML "GPU utilisation", 0..1, mean over the interval
    fill: Array  #: useful share of wall time, k x padded tokens / wall (see runtime.fill), about 0..1
    memory_peak_fraction: Array  #: highest memory of this process in the interval / capacity
    memory_device_fraction: (
        Array  #: the same plus what other processes hold (this one's allocator cache is not counted)
    )
    memory_creep: Array  #: growth of the peak at equal micro-batches, fraction of capacity per 1000 micro-batches
    allocation_retries: Array  #: allocator retries (cache flushes under pressure) in the interval
    oom_count: Array  #: out-of-memory events in the interval
    power_w: Array  #: mean power draw, watts
    energy_j: Array  #: energy drawn in the interval, joules
    temperature_c: Array  #: highest temperature in the interval, degrees Celsius
    clock_fraction: Array  #: mean SM clock / maximum SM clock
    throttled: Array  #: share of the interval in which heat (or a failing supply) took the clock down, 0..1
    neighbours: Array  #: other processes that use the device
    host_cpu_fraction: Array  #: busy share of all host cores, 0..1
    neighbour_cpu_fraction: Array  #: share of all host cores busy with other processes, 0..1
    host_memory_fraction: Array  #: used share of host memory, 0..1

    # What comes next (the sampler knows it)
    upcoming_mean: Array  #: mean length of the samples already fetched for the next optimizer steps, tokens
    upcoming_p95: Array  #: their 95th percentile, tokens
    upcoming_max: Array  #: their maximum, tokens
    fit_tokens_uncheckpointed: Array  #: most tokens a micro-batch may have with no layer checkpointed (memory model)
    fit_tokens_checkpointed: Array  #: the same with every layer checkpointed

    # The training
    job_progress: Array  #: share of the training that is done, 0..1
    energy_budget_used: Array  #: energy drawn so far / energy that the whole job may draw (NaN = no such budget)
    temperature_limit_c: Array  #: temperature that the job must not exceed, degrees Celsius (NaN = no such limit)
    loss: Array  #: mean training loss of the interval

    # Controls in force (where they act after a dead time, those that have been set)
    token_budget: Array  #: most padded tokens in a micro-batch
    micro_batch_cap: Array  #: most samples in a micro-batch
    memory_target: Array  #: fraction of capacity that a micro-batch's predicted peak may reach
    checkpoint_fraction: Array  #: share of layers checkpointed, token-weighted mean over the interval, 0..1
    num_workers: Array  #: loader worker processes
    power_limit_w: Array  #: power limit, watts
    cpu_threads: Array  #: intra-op threads of a CPU run

    @classmethod
    def of(cls, n: int = 1, **values: ArrayLike) -> Telemetry:
        """Telemetry of ``n`` plants with the given fields; all others are NaN.

        Raises:
            TypeError: a name that is no field.
            ValueError: a value that does not broadcast to ``(n,)``.
        """
        return cls(**nan_columns("Telemetry", TELEMETRY_FIELDS, n, values))

    @classmethod
    def from_rows(cls, matrix: ArrayLike) -> Telemetry:
        """Telemetry whose fields are views of a float64 matrix's columns, without copying (the inverse of `rows`).

        Args:
            matrix: Shape ``(n, len(TELEMETRY_FIELDS))``, one row a plant, in the order of `TELEMETRY_FIELDS`.

        Raises:
            ValueError: another shape.
        """
        matrix = np.asarray(matrix, dtype=np.float64)
        if matrix.ndim != 2 or matrix.shape[1] != len(TELEMETRY_FIELDS):
            raise ValueError(f"expected rows of {len(TELEMETRY_FIELDS)} telemetry fields, got shape {matrix.shape}")
        return cls(*matrix.T)

    def rows(self) -> Array:
        """A new C-contiguous matrix of shape ``(n, len(TELEMETRY_FIELDS))``, one row a plant."""
        columns = np.concatenate(_COLUMNS(self), dtype=np.float64).reshape(len(TELEMETRY_FIELDS), self.n)
        return np.ascontiguousarray(columns.T)

    @classmethod
    def stack(cls, parts: Iterable[Telemetry]) -> Telemetry:
        """The plants of several telemetries one after the other."""
        parts = list(parts)
        return cls(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in TELEMETRY_FIELDS})

    @property
    def n(self) -> int:
        """Number of plants."""
        return self.time_s.shape[0]

    def plant(self, index: int) -> dict[str, float]:
        """One plant's measurements as plain floats, by field name."""
        return {name: float(getattr(self, name)[index]) for name in TELEMETRY_FIELDS}

    def replace(self, **values: ArrayLike) -> Telemetry:
        """A copy with some fields replaced."""
        columns: dict[str, ArrayLike] = {name: getattr(self, name) for name in TELEMETRY_FIELDS}
        return Telemetry.of(self.n, **(columns | values))

    @classmethod
    def from_plants(cls, rows: Iterable[Mapping[str, float]]) -> Telemetry:
        """Telemetry from one mapping a plant (the inverse of `plant`); missing fields are NaN."""
        rows = list(rows)
        names = set().union(*rows) if rows else set()
        return cls.of(len(rows), **{k: [float(row.get(k, np.nan)) for row in rows] for k in names})


TELEMETRY_FIELDS: tuple[str, ...] = tuple(f.name for f in fields(Telemetry))
_COLUMNS = attrgetter(*TELEMETRY_FIELDS)
