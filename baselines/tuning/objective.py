"""What a policy is worth on simulated trainings, and on which of them it may be tuned."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from ...envs.controlled import CompiledGuard, judge
from ...envs.objectives import Weights, fixed_weights
from ...envs.plants.profile import profile_names
from ...envs.plants.simulated import SimulatedPlant
from ...envs.scenarios.scenario import Scenario, digest
from ...envs.scenarios.splits import SPLITS, frozen, load_scenarios, load_split
from ...runtime.errors import ConfigError
from ...runtime.loop import ControlLoop
from ...runtime.policy import Policy

Array = NDArray[np.float64]

HORIZON = 120  #: decisions in an episode
TUNED_ON = "train"  #: split of the scenarios that a hardware profile stands for


def scenarios_on(hardware: str) -> list[Scenario]:
    """The scenarios of the train split on a device; none for one that is held out of it."""
    return [scenario for scenario in load_split(TUNED_ON) if scenario.hardware == hardware]


def tuning_scenarios(plant: str) -> list[Scenario]:
    """The scenarios that a policy is tuned on.

    Args:
        plant: A hardware profile (the scenarios of the train split on that device), or what `load_scenarios` takes.

    Raises:
        ConfigError: unknown; of a test split; or a device that the train split does not have.
    """
    if plant in profile_names("hardware"):
        if chosen := scenarios_on(plant):
            return chosen
        known = sorted({scenario.hardware for scenario in load_split(TUNED_ON)})
        raise ConfigError(
            f"plant={plant!r} is held out of the {TUNED_ON} split, to test on: choose {', '.join(known)}, "
            f"{TUNED_ON!r}, or a file with scenarios of your own"
        )
    if any(plant == split or plant.startswith(f"{split}-") for split in SPLITS if split.startswith("test")):
        raise ConfigError(f"plant={plant!r} is there to test on: tune on {TUNED_ON!r}, choose by 'val'")
    return load_scenarios(plant)


def scenarios_digest(scenarios: Sequence[Scenario]) -> str:
    """SHA-256 of scenarios, as manifests have it."""
    return digest([frozen(scenario) for scenario in scenarios])


class Objective:
    """The mean scalar reward an interval of a policy behind the guard, on fixed episodes.

    Every policy meets the same episodes, whatever other scenarios there are: a scenario's own key, or one drawn from
    `seed` and its name.

    Args:
        scenarios: One episode each, at least one.
        weights: Of the objectives, see `fixed_weights`; not "sampled".
        seed: Of the episodes whose scenario fixes none.
        horizon: Decisions in an episode.

    Raises:
        ConfigError: no scenarios, or weights that cannot be used.
    """

    def __init__(
        self, scenarios: Sequence[Scenario], *, weights: Weights = None, seed: int = 0, horizon: int = HORIZON
    ) -> None:
        given = fixed_weights(weights)
        if given is None:
            raise ConfigError("weights='sampled' differ from episode to episode: give fixed ones to tune for")
        self.weights = given
        self.seed = seed
        self.horizon = horizon
        self._plant = SimulatedPlant(scenarios, horizon=horizon)
        drawn = [Random(f"key of {scenario.name}, seed {seed}").getrandbits(63) for scenario in scenarios]
        own = [scenario.seed for scenario in scenarios]
        keys = [key if fixed is None else fixed for key, fixed in zip(drawn, own, strict=True)]
        self._keys = np.array(keys, dtype=np.uint64)

    def __call__(self, policy: Policy) -> Array:
        """Mean reward of each episode, shape ``(scenarios,)``.

        A job that ended by running out of memory gets the reward of its last interval for all that were to come.
        """
        plant = self._plant
        plant.start(np.arange(plant.n), self._keys, np.arange(plant.n))
        telemetry = plant.telemetry
        loop = ControlLoop(policy, CompiledGuard.of(plant))
        loop.reset(plant.n, self.seed)
        total, last = np.zeros(plant.n), np.zeros(plant.n)
        for _ in range(self.horizon):
            over = plant.state["ended"] > 0
            telemetry = plant.step(loop.decide(telemetry).controls)
            terms, _ = judge(plant)
            last = np.where(over, last, terms @ self.weights)
            total += last
        return total / self.horizon
