"""n simulated trainings behind guard and codec, stepped in one compiled loop: the core of the environments."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..runtime import codec_rows, guard_rules
from ..runtime.codec import ActionCodec, ObservationCodec
from ..runtime.codec_rows import decode_action, encode_frame
from ..runtime.controls import CONTROL_FIELDS, ControlLimits, Controls
from ..runtime.errors import ConfigError
from ..runtime.guard_rules import GuardOptions, apply_rules, initial_state, limit_row
from ..runtime.telemetry import Telemetry
from .objectives import OBJECTIVES, Weights, fixed_weights, reward_vector, sample_weights
from .plants.assembly import assemble
from .plants.compiling import compiled, register
from .plants.course import foresee
from .plants.interval import run_interval, tell_upcoming
from .plants.simulated import CONTROLS, FUNCTIONS, SCRATCH, SimulatedPlant, Snapshot, reset_plant, set_controls
from .scenarios.splits import Source, load_scenarios

#: Controls that an action sets, in its order.
ACTED_ON = ("token_budget", "memory_target", "power_limit_w", "num_workers")
GUARD = GuardOptions(memory_cap=0.90, recovery=1.05, relaxation=1.002)
HYSTERESIS = 0.05

register(*FUNCTIONS, *guard_rules.KERNELS, *codec_rows.KERNELS, reward_vector)


def _observe(row, table, weights, frame_size, raw, observation):
    """Shift the history of an observation and write the new frame at its end."""
    size = observation.shape[0]
    for j in range(size - frame_size):
        observation[j] = observation[j + frame_size]
    encode_frame(row, table, weights, raw, observation[size - frame_size :])


def _fill_history(frame_size, observation):
    """Repeat the last frame of an observation over its whole history."""
    last = observation.shape[0] - frame_size
    for j in range(last):
        observation[j] = observation[last + j % frame_size]


register(_observe, _fill_history)


#: Plants that go through a stage together: few enough for their rows to stay in the processor's cache, while each
#: stage's code stays in its instruction cache, which the whole of an interval would not.
_BLOCK = 64
_LEAST_SHARE = 512  # plants that are worth a thread of their own


def _step(
    first, last, actions, active, guarded, options, limits, bounds, horizon,
    constants, state, in_force, pending, values, caps, low, step, curves, longest, rows,
    guard, table, weights, frame_size, terms, rewards, observations, terminated, truncated,
    proposed, asked, rules, raw, work,
):  # fmt: skip
    previous, scratch = work[:CONTROLS], work[CONTROLS:]
    for start in range(first, last, _BLOCK):
        end = min(start + _BLOCK, last)
        for i in range(start, end):
            if active[i]:
                own = constants[state[i].scenario].limits
                decode_action(actions[i], bounds[own], proposed)
                if guarded:
                    apply_rules(limits[own], options, guard[i], rows[i], proposed, np.nan, asked[i - start], rules)
                else:
                    for j in range(CONTROLS):
                        asked[i - start, j] = proposed[j]
        for i in range(start, end):
            if active[i]:
                s = state[i]
                c = constants[s.scenario]
                set_controls(c, asked[i - start], in_force[i], pending[i], previous)
                run_interval(c, s, in_force[i], previous, pending[i], values, caps, low, step, curves, rows[i], scratch)
        for i in range(start, end):
            if active[i]:
                s = state[i]
                c = constants[s.scenario]
                foresee(c, s, longest[s.scenario], s.interval + 1)
                tell_upcoming(c, s, rows[i])
                reward_vector(c, s, in_force[i], terms[i])
                total = 0.0
                for k in range(terms.shape[1]):
                    total += weights[i, k] * terms[i, k]
                rewards[i] = total
                terminated[i] = s.ended > 0.0
                truncated[i] = s.interval > horizon
        for i in range(start, end):
            if active[i]:
                _observe(rows[i], table, weights[i], frame_size, raw, observations[i])


def _reset(
    chosen, keys, scenarios, guard_start,
    constants, state, in_force, pending, values, caps, low, step, curves, longest, rows,
    guard, table, weights, frame_size, raw, work, observations,
):  # fmt: skip
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
        for k in range(guard_start.shape[0]):
            guard[i, k] = guard_start[k]
        _observe(rows[i], table, weights[i], frame_size, raw, observations[i])
        _fill_history(frame_size, observations[i])


_step_compiled = compiled(_step, allocates=False)
_reset_compiled = compiled(_reset, allocates=False)


class Simulation:
    """n simulated trainings with their guards, observations and rewards.

    Args:
        n: Number of trainings.
        scenarios: What an episode's scenario is drawn from, see `load_scenarios`.
        weights: Objective weights, see `fixed_weights`; "sampled" draws them anew for each episode.
        guard: Whether controls pass the safety guard. Without it, they are only kept to what the actuators can have.
        horizon: Decisions in an episode.
        history: Frames in an observation.
        limits: Narrower bounds of controls, ``{"token_budget": (1024, 65536)}``.

    Attributes:
        plant: The `SimulatedPlant`.
        codec: The `ObservationCodec`.
        observations: (n, codec.size) float32, of the last interval.
        rewards: (n,) weighted sums of `terms`.
        terms: (n, objectives) reward vectors.
        terminated: (n,) whether the job ended by an out-of-memory event that nothing can mend.
        truncated: (n,) whether the episode's last interval is over.
        weights: (n, objectives) of the episodes.

    Raises:
        ConfigError: a value out of range, an unknown scenario, limits that leave no choice.
    """

    def __init__(
        self,
        n: int,
        scenarios: Source = "train",
        *,
        weights: Weights = None,
        guard: bool = True,
        horizon: int = 120,
        history: int = 1,
        limits: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
            raise ConfigError(f"num_envs={n!r} must be a whole number of at least 1")
        if isinstance(horizon, bool) or not isinstance(horizon, (int, np.integer)) or horizon < 1:
            raise ConfigError(f"horizon={horizon!r} must be a whole number of at least 1 control interval")
        assembly = assemble(load_scenarios(scenarios), horizon)
        self.plant = SimulatedPlant(assembly, int(n))
        self.n = int(n)
        self.horizon = int(horizon)
        self.guarded = bool(guard)
        self.fixed = fixed_weights(weights)
        self.codec = ObservationCodec(history, weights=len(OBJECTIVES))
        self.limits = tuple(_narrowed(each, limits or {}) for each in assembly.limits)
        self._action_codecs = tuple(ActionCodec(each, ACTED_ON) for each in self.limits)
        self.weights = np.zeros((n, len(OBJECTIVES)))
        self.terms = np.zeros((n, len(OBJECTIVES)))
        self.rewards = np.zeros(n)
        self.observations = np.zeros((n, self.codec.size), dtype=np.float32)
        self.terminated = np.zeros(n, dtype=np.bool_)
        self.truncated = np.zeros(n, dtype=np.bool_)
        self._start = initial_state()
        self._guard = np.tile(self._start, (n, 1))
        self._limits = np.stack([limit_row(each, HYSTERESIS) for each in self.limits])  # by constants["limits"]
        self._bounds = np.stack([codec.bounds for codec in self._action_codecs])
        self._table = self.codec.frame_table
        self._active = np.ones(n, dtype=np.bool_)
        self._shares = _shares(self.n)
        self._threads: ThreadPoolExecutor | None = None
        self._process = 0
        plant = self.plant
        # What both kernels take, made once: a call costs as much as its arguments.
        self._plants = (
            assembly.constants, plant.state, plant.in_force, plant.pending, *plant.tables, plant.rows,
            self._guard, self._table, self.weights, self.codec.frame_size,
        )  # fmt: skip
        self._before = (GUARD, self._limits, self._bounds, self.horizon)
        self._results = (self.terms, self.rewards, self.observations, self.terminated, self.truncated)
        self._scratch = [
            (
                np.empty(CONTROLS),
                np.empty((_BLOCK, CONTROLS)),
                np.empty(CONTROLS, dtype=np.int64),
                np.empty(self._table.shape[1]),
                np.empty(SCRATCH),
            )
            for _ in self._shares
        ]

    def action_codec(self, plant: int) -> ActionCodec:
        """Of a plant's present scenario."""
        return self._action_codecs[self.plant.assembly.constants["limits"][self.plant.state["scenario"][plant]]]

    def scenario_index(self, scenario: str | int) -> int:
        """Index of a scenario by name or number.

        Raises:
            ConfigError: there is none.
        """
        names = self.plant.assembly.names
        if isinstance(scenario, str) and scenario in names:
            return names[scenario]
        if isinstance(scenario, (int, np.integer)) and 0 <= scenario < len(names):
            return int(scenario)
        raise ConfigError(
            f"scenario={scenario!r} is none of the {len(names)} of this environment: use 0 to {len(names) - 1}, or a "
            f"name such as {next(iter(names))!r}"
        )

    def draw_episode(
        self, plant: int, rng: np.random.Generator, options: Mapping[str, Any] | None = None
    ) -> tuple[int, int]:
        """Draw scenario, key and weights of a plant's next episode; always the same number of draws.

        Args:
            plant: Whose weights are set.
            rng: Generator of that plant.
            options: "scenario" (name or number) and "weights" fix what is drawn otherwise.

        Returns:
            Key and index of the scenario.

        Raises:
            ConfigError: unknown options, scenario or weights.
        """
        key, chosen = rng.integers(2**63, size=2).tolist()
        scenario = chosen % len(self.plant.assembly.scenarios)
        weights = sample_weights(rng) if self.fixed is None else self.fixed
        if options:
            for name in options:
                if name not in ("scenario", "weights"):
                    raise ConfigError(f"reset option {name!r} is unknown: use 'scenario' or 'weights'")
            if "scenario" in options:
                scenario = self.scenario_index(options["scenario"])
            if "weights" in options:
                given = fixed_weights(options["weights"])
                weights = weights if given is None else given
        self.weights[plant] = weights
        fixed = self.plant.assembly.scenarios[scenario].seed
        return key if fixed is None else fixed, scenario

    def reset(self, plants: NDArray[np.int64], keys: Sequence[int], scenarios: Sequence[int]) -> None:
        """Start episodes on some plants: one interval at the scenario's starting controls, its observation."""
        _reset_compiled(
            plants,
            np.array(keys, dtype=np.uint64),
            np.array(scenarios, dtype=np.int64),
            self._start,
            *self._plants,
            *self._scratch[0][-2:],
            self.observations,
        )
        self.terminated[plants] = self.truncated[plants] = False
        self.rewards[plants] = 0.0
        self.terms[plants] = 0.0

    def step(self, actions: NDArray[Any], active: NDArray[np.bool_] | None = None) -> None:
        """One control interval of all (or the `active`) plants under actions of shape ``(n, actions)``, float32."""
        given = (actions, self._active if active is None else active, self.guarded, *self._before, *self._plants)
        if len(self._shares) == 1:
            _step_compiled(*self._shares[0], *given, *self._results, *self._scratch[0])
            return
        # Plants do not touch each other, so how they are shared between threads changes nothing but the time.
        others = [
            self._pool().submit(_step_compiled, *share, *given, *self._results, *scratch)
            for share, scratch in zip(self._shares[1:], self._scratch[1:], strict=True)
        ]
        _step_compiled(*self._shares[0], *given, *self._results, *self._scratch[0])
        for other in others:
            other.result()

    def _pool(self) -> ThreadPoolExecutor:
        """Threads of this process (a forked child has none of its parent's)."""
        if self._threads is None or self._process != os.getpid():
            self._threads = ThreadPoolExecutor(len(self._shares) - 1, "swiftcruise-envs")
            self._process = os.getpid()
        return self._threads

    def close(self) -> None:
        """End the threads; may be called twice."""
        if self._threads is not None and self._process == os.getpid():
            self._threads.shutdown()
        self._threads = None

    def checked(self, actions: Any, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Actions as a float32 array of shape ``(n, actions)``.

        Raises:
            ConfigError: another shape, or values that are no numbers.
        """
        try:
            array = np.asarray(actions, dtype=np.float32)
        except (TypeError, ValueError):
            raise ConfigError(f"action={actions!r} must be {shape} numbers between -1 and 1") from None
        if array.shape != shape:
            raise ConfigError(f"action has shape {array.shape}, not {shape}: one number each for {', '.join(ACTED_ON)}")
        return array.reshape(self.n, len(ACTED_ON))

    @property
    def telemetry(self) -> Telemetry:
        """Of the last interval; a copy."""
        return self.plant.telemetry

    @property
    def controls(self) -> Controls:
        """In force in the last interval; a copy."""
        return Controls.from_rows(self.plant.in_force.copy())

    def snapshot(self) -> Snapshot:
        """Everything that the future of the running episodes depends on."""
        own = {name: getattr(self, name).copy() for name in self._OWN}
        return self.plant.snapshot() | own

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot. Raises as `SimulatedPlant.restore`."""
        self.plant.restore({name: array for name, array in snapshot.items() if name not in self._OWN})
        for name in self._OWN:
            getattr(self, name)[...] = snapshot[name]

    _OWN = ("_guard", "weights", "terms", "rewards", "observations", "terminated", "truncated")


def _shares(n: int) -> list[tuple[int, int]]:
    """Ranges of plants, one a thread: as many as there are cores, but none with little to do."""
    count = max(1, min(os.cpu_count() or 1, n // _LEAST_SHARE))
    ends = [n * i // count for i in range(count + 1)]
    return list(pairwise(ends))


def _narrowed(limits: ControlLimits, bounds: Mapping[str, tuple[float, float]]) -> ControlLimits:
    """Limits with the user's bounds; an actuator that the plant lacks stays absent."""
    changed = {}
    for name, pair in bounds.items():
        if name not in CONTROL_FIELDS:
            raise ConfigError(f"limits has {name!r}: choose from {', '.join(CONTROL_FIELDS)}")
        try:
            low, high = (float(end) for end in pair)
        except (TypeError, ValueError):
            raise ConfigError(f"limits[{name!r}]={pair!r} must be (low, high)") from None
        own = getattr(limits, name)
        if not np.isfinite(own.high):
            continue
        if not low <= high or high < own.low or low > own.high:
            raise ConfigError(
                f"limits[{name!r}]=({low:g}, {high:g}) leaves nothing of {own.low:g} to {own.high:g}: give low <= high "
                "within these"
            )
        changed[name] = replace(own, low=max(low, own.low), high=min(high, own.high))
    return replace(limits, **changed)
