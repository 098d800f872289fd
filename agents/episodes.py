"""Episodes of a policy on scenarios: run in the control loop, behind the guard, and added up."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..envs.controlled import CompiledGuard, judge
from ..envs.objectives import OBJECTIVES, WORST
from ..envs.plants.assembly import Assembly
from ..envs.plants.simulated import SimulatedPlant
from ..envs.scenarios.scenario import Scenario
from ..runtime.controls import Controls
from ..runtime.loop import ControlLoop
from ..runtime.policy import Policy, State
from ..runtime.telemetry import Telemetry

Array = NDArray[np.float64]

#: What `run_episodes` adds up over the intervals of an episode.
FIGURES = {
    **{name: f"sum of the intervals' {name}, see `envs.objectives`" for name in OBJECTIVES},
    "tokens": "real tokens, all ranks",
    "seconds": "wall-clock seconds",
    "joules": "energy, all ranks",
    "ooms": "out-of-memory events",
    "violated": "intervals in which a limit was broken",
    "unrecovered": "1 if an out-of-memory event ended the job",
    "failures": "decisions in which the policy raised an error",
}

_AFTER_THE_END = tuple(0.0 if name == "safety" else WORST for name in OBJECTIVES)


def episode_keys(scenarios: Sequence[Scenario], seed: int) -> NDArray[np.uint64]:
    """Keys of the random draws of one episode a scenario, the same for every policy; shape ``(scenarios,)``.

    Args:
        scenarios: The scenarios.
        seed: 0 takes the keys that frozen splits fix; others, and scenarios without one, derive it from name and seed.
    """
    keys = []
    for scenario in scenarios:
        digest = hashlib.sha256(f"{scenario.name}/{seed}".encode()).digest()
        derived = int.from_bytes(digest[:8], "big") >> 1
        keys.append(derived if seed or scenario.seed is None else scenario.seed)
    return np.array(keys, dtype=np.uint64)


def run_episodes(
    policy: Policy,
    assembly: Assembly,
    keys: NDArray[np.uint64],
    scenarios: NDArray[np.int64],
    *,
    horizon: int,
    seed: int = 0,
) -> dict[str, Array]:
    """Run a policy through episodes, all at once, and add up what they were worth.

    As everywhere, an episode begins with an interval at the scenario's starting controls, which is not counted. When an
    out-of-memory event has ended a job, its time goes on and nothing is trained: throughput, energy and cost are as bad
    as they can be in each interval that is left.

    Args:
        policy: Decides; failures are handled as in a live run.
        assembly: Of the scenarios.
        keys: Of the random draws, shape ``(k,)``.
        scenarios: Indices in the assembly, shape ``(k,)``.
        horizon: Decisions.
        seed: Of the policy, should it draw random numbers.

    Returns:
        By name of `FIGURES`, shape ``(k,)``.
    """
    n = keys.size
    plant = SimulatedPlant(assembly, n)
    plant.start(np.arange(n), keys, np.asarray(scenarios, dtype=np.int64))
    watched = _Watched(policy)
    loop = ControlLoop(watched, CompiledGuard.of(plant))
    loop.reset(n, seed)
    sums = {name: np.zeros(n) for name in FIGURES}
    alive = np.ones(n, dtype=np.bool_)
    interval_s = assembly.constants["interval_s"][scenarios]
    for _ in range(horizon):
        plant.step(loop.decide(plant.telemetry).controls)
        terms, violations = judge(plant)
        state = plant.state
        for k, name in enumerate(OBJECTIVES):
            sums[name] += np.where(alive, terms[:, k], _AFTER_THE_END[k])
        sums["tokens"] += alive * state["real_tokens"]
        sums["seconds"] += np.where(alive, state["wall_s"], interval_s)
        sums["joules"] += alive * state["interval_j"]
        sums["ooms"] += alive * state["ooms"]
        sums["violated"] += alive & (violations > 0.0)
        alive &= state["ended"] == 0.0
    sums["unrecovered"] += ~alive
    sums["failures"] += watched.failures
    return sums


def weighted_return(figures: Mapping[str, Array], weights: Array) -> Array:
    """Scalar objective, summed over the intervals of each episode: the terms' sums times the weights."""
    return sum((weight * figures[name] for name, weight in zip(OBJECTIVES, weights, strict=True)), np.zeros(()))


class _Watched:
    """A policy, and how often it raised."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.failures = 0

    def reset(self, n: int, seed: int | None = None) -> None:
        self._policy.reset(n, seed)
        self.failures = 0

    def act(self, telemetry: Telemetry) -> Controls:
        try:
            return self._policy.act(telemetry)
        except Exception:
            self.failures += 1
            raise

    def state_dict(self) -> State:
        return self._policy.state_dict()

    def load_state_dict(self, state: State) -> None:
        self._policy.load_state_dict(state)

    def diagnostics(self) -> Mapping[str, Any]:
        return self._policy.diagnostics()
