"""The simulated plant: n trainings at once, each under its own scenario."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...runtime.controls import CONTROL_FIELDS, Controls
from ...runtime.errors import ConfigError
from ...runtime.telemetry import TELEMETRY_FIELDS, Telemetry
from ..scenarios import disturbances
from ..scenarios.scenario import Scenario
from . import course, heat, interval, memory_belief, packing, physics, random_numbers
from .assembly import Assembly, assemble
from .compiling import compiled, register
from .course import foresee
from .interval import begin, run_interval, tell_upcoming
from .records import STATE

Snapshot = dict[str, np.ndarray]

_BUDGET = CONTROL_FIELDS.index("token_budget")
_CAP = CONTROL_FIELDS.index("micro_batch_cap")
_TARGET = CONTROL_FIELDS.index("memory_target")
_FRACTION = CONTROL_FIELDS.index("checkpoint_fraction")
_WORKERS = CONTROL_FIELDS.index("num_workers")
_POWER = CONTROL_FIELDS.index("power_limit_w")
_THREADS = CONTROL_FIELDS.index("cpu_threads")
CONTROLS = len(CONTROL_FIELDS)
SCRATCH = CONTROLS + len(packing.COLUMNS) + 3  #: floats that `step_plant` works in


def possible(c: Any, name: int, value: float) -> float:
    """What an actuator makes of a value: the nearest one that it can have.

    Args:
        c: Constants of the scenario.
        name: Index of the control.
        value: Finite.
    """
    if name in (_BUDGET, _CAP, _THREADS):
        return min(max(value, 1.0), 1e12)
    if name == _WORKERS:
        return min(max(math.floor(value + 0.5), 0.0), 1024.0)
    if name == _POWER:
        return min(max(value, 0.05 * c.power_w), c.power_w)
    return min(max(value, 0.0), 1.0)


def set_controls(c: Any, asked: np.ndarray, in_force: np.ndarray, pending: np.ndarray, previous: np.ndarray) -> None:
    """Put controls into force, after the scenario's dead time.

    Without dead time, `pending` afterwards equals `in_force`; with it, it is what comes into force an interval later.

    Args:
        c: Constants of the scenario; a control that is NaN at the start has no actuator.
        asked: (controls,) NaN leaves a control as it is (an unset `checkpoint_fraction` leaves it to the plant).
        in_force: (controls,) moved on.
        pending: (controls,) moved on.
        previous: (controls,) written: what was in force.
    """
    for i in range(CONTROLS):
        previous[i] = in_force[i]
        if c.dead_time > 0.0:
            in_force[i] = pending[i]
        value = asked[i]
        if i == _FRACTION:
            pending[i] = possible(c, i, value) if math.isfinite(value) else math.nan
        elif math.isfinite(value) and math.isfinite(c.start[i]):
            pending[i] = possible(c, i, value)
        if c.dead_time == 0.0:
            in_force[i] = pending[i]


def step_plant(
    c: Any,
    s: Any,
    asked: np.ndarray,
    in_force: np.ndarray,
    pending: np.ndarray,
    values: np.ndarray,
    caps: np.ndarray,
    low: np.ndarray,
    step: float,
    curves: np.ndarray,
    longest: np.ndarray,
    row: np.ndarray,
    work: np.ndarray,
) -> None:
    """One control interval of one plant. See `set_controls`, `run_interval`, `foresee` for the arguments."""
    previous = work[:CONTROLS]
    set_controls(c, asked, in_force, pending, previous)
    run_interval(c, s, in_force, previous, pending, values, caps, low, step, curves, row, work[CONTROLS:])
    foresee(c, s, longest[s.scenario], s.interval + 1)
    tell_upcoming(c, s, row)


def reset_plant(
    c: Any,
    s: Any,
    key: np.uint64,
    scenario: int,
    in_force: np.ndarray,
    pending: np.ndarray,
    values: np.ndarray,
    caps: np.ndarray,
    low: np.ndarray,
    step: float,
    curves: np.ndarray,
    longest: np.ndarray,
    row: np.ndarray,
    work: np.ndarray,
) -> None:
    """Start an episode and train for one interval at the scenario's starting controls, so that there is telemetry."""
    begin(c, s, longest[scenario], key, scenario)
    for i in range(CONTROLS):
        in_force[i] = pending[i] = c.start[i]
    step_plant(c, s, c.start, in_force, pending, values, caps, low, step, curves, longest, row, work)


#: For `compiling.register`, callees before callers.
FUNCTIONS = (
    *physics.FUNCTIONS,
    packing.read_all,
    *random_numbers.FUNCTIONS,
    *disturbances.FUNCTIONS,
    *course.FUNCTIONS,
    *memory_belief.FUNCTIONS,
    *heat.FUNCTIONS,
    *interval.FUNCTIONS,
    possible,
    set_controls,
    step_plant,
    reset_plant,
)
register(*FUNCTIONS)


def _reset_plants(
    constants, chosen, keys, scenarios, state, in_force, pending, values, caps, low, step, curves, longest, rows, work
):
    for j in range(chosen.shape[0]):
        i = chosen[j]
        c = constants[scenarios[j]]
        reset_plant(
            c,
            state[i],
            keys[j],
            scenarios[j],
            in_force[i],
            pending[i],
            values,
            caps,
            low,
            step,
            curves,
            longest,
            rows[i],
            work,
        )


def _step_plants(constants, asked, state, in_force, pending, values, caps, low, step, curves, longest, rows, work):
    for i in range(state.shape[0]):
        s = state[i]
        c = constants[s.scenario]
        step_plant(c, s, asked[i], in_force[i], pending[i], values, caps, low, step, curves, longest, rows[i], work)


_reset_compiled = compiled(_reset_plants, allocates=False)
_step_compiled = compiled(_step_plants, allocates=False)


class SimulatedPlant:
    """n trainings at once, stepped together; implements `runtime.plant.Plant`.

    Everything random follows from each plant's scenario and key (see `random_numbers`), so equal seeds give equal
    trajectories, whatever else is simulated beside.

    Args:
        scenarios: One for each plant, or one for all; or an `Assembly` of them.
        n: Number of plants; by default one for each scenario. Plant i runs scenario ``i % len(scenarios)``.
        horizon: Control intervals of a job, on which its budgets count.

    Attributes:
        state: (n,) records of `STATE`.
        rows: (n, telemetry fields) telemetry of the last interval.
        in_force: (n, controls) controls in force.

    Raises:
        ConfigError: no scenario, or a number of plants below 1.
    """

    def __init__(
        self, scenarios: Sequence[Scenario] | Scenario | Assembly, n: int | None = None, *, horizon: int = 120
    ) -> None:
        if not isinstance(scenarios, Assembly):
            scenarios = [scenarios] if isinstance(scenarios, Scenario) else list(scenarios)
            if not scenarios:
                raise ConfigError("scenarios is empty: give at least one")
            scenarios = assemble(scenarios, horizon)
        n = len(scenarios.scenarios) if n is None else n
        if n < 1:
            raise ConfigError(f"n={n!r} must be at least 1")
        self.assembly = scenarios
        self.n = n
        self.state = np.zeros(n, STATE)
        self.rows = np.full((n, len(TELEMETRY_FIELDS)), np.nan)
        self.in_force = np.full((n, len(CONTROL_FIELDS)), np.nan)
        self.pending = np.full((n, len(CONTROL_FIELDS)), np.nan)
        self.work = np.zeros(SCRATCH)
        packed = scenarios.packing
        self.tables = (packed.values, packed.caps, packed.low, packed.step, scenarios.curves, scenarios.longest)

    def reset(self, seed: int | None = None) -> Telemetry:
        """Start all plants anew and return the first interval's telemetry.

        Plant i gets the key of its scenario's `seed`, or else one drawn from `seed` and i.
        """
        drawn = np.random.default_rng(seed).integers(2**63, size=self.n)
        scenarios = np.arange(self.n) % len(self.assembly.scenarios)
        fixed = [self.assembly.scenarios[i].seed for i in scenarios]
        keys = [drawn[i] if key is None else key for i, key in enumerate(fixed)]
        self.start(np.arange(self.n), np.array(keys, dtype=np.uint64), scenarios)
        return self.telemetry

    def start(self, plants: NDArray[np.int64], keys: NDArray[np.uint64], scenarios: NDArray[np.int64]) -> None:
        """Start an episode on some plants.

        Args:
            plants: Their indices, shape ``(k,)``.
            keys: Of the episodes, shape ``(k,)``.
            scenarios: Indices of the scenarios, shape ``(k,)``.
        """
        _reset_compiled(
            self.assembly.constants,
            plants,
            keys,
            scenarios,
            self.state,
            self.in_force,
            self.pending,
            *self.tables,
            self.rows,
            self.work,
        )

    def step(self, controls: Controls) -> Telemetry:
        """Train all plants for one control interval under these controls, and return its telemetry.

        Values that an actuator cannot have are moved to the nearest that it can (there is no guard here); NaN and
        infinite ones leave a control as it is.

        Raises:
            ValueError: controls for another number of plants.
        """
        asked = controls.rows()
        if asked.shape[0] != self.n:
            raise ValueError(f"controls are for {asked.shape[0]} plants, not {self.n}")
        _step_compiled(
            self.assembly.constants,
            asked,
            self.state,
            self.in_force,
            self.pending,
            *self.tables,
            self.rows,
            self.work,
        )
        return self.telemetry

    @property
    def telemetry(self) -> Telemetry:
        """Of the last interval; a copy."""
        return Telemetry.from_rows(self.rows.copy())

    def snapshot(self) -> Snapshot:
        """Everything that the future depends on, as arrays; for planners that look ahead, and for debugging."""
        return {name: getattr(self, name).copy() for name in ("state", "rows", "in_force", "pending")}

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot; from there on all is as it was then.

        Raises:
            ConfigError: a snapshot of another number of plants.
        """
        if snapshot["state"].shape != self.state.shape:
            raise ConfigError(f"the snapshot is of {snapshot['state'].size} plants, not {self.n}")
        for name, array in snapshot.items():
            getattr(self, name)[...] = array

    def close(self) -> None:
        """Nothing to free."""
