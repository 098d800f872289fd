"""Controls: the manipulated variables of a training, and the limits they must keep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from operator import attrgetter

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .columns import nan_columns
from .errors import ConfigError

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Controls:
    """Settings for n plants; every field is a float64 array of shape ``(n,)``, NaN = leave as it is.

    A plant ignores a control it has no actuator for. `checkpoint_fraction` fixes the share of checkpointed
    layers; while it is NaN the plant chooses, per micro-batch, the least that keeps `memory_target`.
    """

    token_budget: Array  #: most padded tokens in a micro-batch (one longer sample still runs alone)
    micro_batch_cap: Array  #: most samples in a micro-batch
    memory_target: Array  #: fraction of capacity that a micro-batch's predicted peak may reach, 0..1
    checkpoint_fraction: Array  #: share of layers checkpointed, 0..1
    num_workers: Array  #: loader worker processes
    power_limit_w: Array  #: GPU power limit, watts
    cpu_threads: Array  #: intra-op threads of a CPU run

    @classmethod
    def of(cls, n: int = 1, **values: ArrayLike) -> Controls:
        """Controls of ``n`` plants with the given fields; all others are unset (NaN)."""
        return cls(**nan_columns("Controls", CONTROL_FIELDS, n, values))

    @classmethod
    def from_rows(cls, matrix: ArrayLike) -> Controls:
        """Controls whose fields are views of a float64 matrix's columns, without copying (the inverse of `rows`).

        Args:
            matrix: Shape ``(n, len(CONTROL_FIELDS))``, one row a plant, in the order of `CONTROL_FIELDS`.

        Raises:
            ValueError: another shape.
        """
        matrix = np.asarray(matrix, dtype=np.float64)
        if matrix.ndim != 2 or matrix.shape[1] != len(CONTROL_FIELDS):
            raise ValueError(f"expected rows of {len(CONTROL_FIELDS)} controls, got shape {matrix.shape}")
        return cls(*matrix.T)

    def rows(self) -> Array:
        """A new C-contiguous matrix of shape ``(n, len(CONTROL_FIELDS))``, one row a plant."""
        columns = np.concatenate(_COLUMNS(self), dtype=np.float64).reshape(len(CONTROL_FIELDS), self.n)
        return np.ascontiguousarray(columns.T)

    @property
    def n(self) -> int:
        """Number of plants."""
        return self.token_budget.shape[0]

    def items(self) -> Iterator[tuple[str, Array]]:
        """Name and values of every control."""
        return ((name, getattr(self, name)) for name in CONTROL_FIELDS)

    def plant(self, index: int) -> dict[str, float]:
        """One plant's controls as plain floats, unset ones left out."""
        return {name: float(v[index]) for name, v in self.items() if not np.isnan(v[index])}

    def replace(self, **values: ArrayLike) -> Controls:
        """A copy with some controls replaced."""
        columns: dict[str, ArrayLike] = dict(self.items())
        return Controls.of(self.n, **(columns | values))

    def or_else(self, other: Controls) -> Controls:
        """These controls, with `other`'s wherever one is unset."""
        return Controls(**{name: np.where(np.isnan(v), getattr(other, name), v) for name, v in self.items()})


CONTROL_FIELDS: tuple[str, ...] = tuple(f.name for f in fields(Controls))
_COLUMNS = attrgetter(*CONTROL_FIELDS)


@dataclass(frozen=True, slots=True)
class Limit:
    """Bounds of one control.

    `rate` is the largest change an interval: a factor for multiplicative controls (token budget, micro-batch cap),
    a difference for the others. `dwell` is the least number of intervals between two changes.
    """

    low: float
    high: float
    rate: float = np.inf
    dwell: int = 0
    integer: bool = False
    multiplicative: bool = False

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ConfigError(f"limit low={self.low} is above high={self.high}: swap them or widen the range")
        if self.multiplicative and (self.low <= 0 or self.rate <= 1):
            raise ConfigError(
                f"a multiplicative limit needs low > 0 and rate > 1, got low={self.low}, rate={self.rate}"
            )
        if self.rate <= 0 or self.dwell < 0:
            raise ConfigError(f"rate must be > 0 and dwell >= 0, got rate={self.rate}, dwell={self.dwell}")


@dataclass(frozen=True, slots=True)
class ControlLimits:
    """Limits of every control. The defaults suit one GPU; `runtime.config` narrows them for the run at hand."""

    token_budget: Limit = field(default_factory=lambda: Limit(16, 2**20, rate=4.0, integer=True, multiplicative=True))
    micro_batch_cap: Limit = field(default_factory=lambda: Limit(1, 4096, rate=4.0, integer=True, multiplicative=True))
    memory_target: Limit = field(default_factory=lambda: Limit(0.05, 0.95))
    checkpoint_fraction: Limit = field(default_factory=lambda: Limit(0.0, 1.0))
    num_workers: Limit = field(default_factory=lambda: Limit(0, 16, dwell=4, integer=True))
    power_limit_w: Limit = field(default_factory=lambda: Limit(0.0, np.inf, dwell=1))
    cpu_threads: Limit = field(default_factory=lambda: Limit(1, 256, integer=True))

    def items(self) -> Iterator[tuple[str, Limit]]:
        """Name and limit of every control."""
        return ((name, getattr(self, name)) for name in CONTROL_FIELDS)
