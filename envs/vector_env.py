"""Many trainings at once as Gymnasium's native vector environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from ..runtime.errors import ConfigError
from ..runtime.telemetry import Telemetry
from .objectives import OBJECTIVES, Weights
from .rendering import Recorder, tiled
from .scenarios.splits import Source
from .simulation import ACTED_ON, Simulation
from .training_env import reward_space

Observations = NDArray[np.float32]


class TrainingVectorEnv(VectorEnv):
    """`TrainingEnv` n times in one compiled loop; equal to n single environments to the last bit.

    Everything is as in `TrainingEnv`, with a first axis of `num_envs`. Each training has its own random numbers: a seed
    s gives training i those of a single environment with seed s + i. `info` holds the reward terms as arrays of shape
    ``(n,)``.

    Args:
        num_envs: Number of trainings.
        autoreset_mode: What happens at the end of an episode: "NextStep" (default: the next `step` starts a new one,
            with reward 0), "SameStep" (at once; the last observation is in ``info["final_obs"]``), or "Disabled"
            (`reset` with ``options={"reset_mask": ...}`` does).
        render_mode: As in `TrainingEnv`; `render` returns the first 16 trainings.

    The other arguments are those of `TrainingEnv`.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012
        "render_modes": ["rgb_array", "ansi"],
        "render_fps": 4,
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }
    _vector_reward = False
    _rendered = 16

    def __init__(
        self,
        num_envs: int = 1,
        scenarios: Source = "train",
        *,
        weights: Weights = None,
        guard: bool = True,
        horizon: int = 120,
        history: int = 1,
        limits: Mapping[str, tuple[float, float]] | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        render_mode: str | None = None,
    ) -> None:
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ConfigError(f"render_mode={render_mode!r}: use {', '.join(self.metadata['render_modes'])}, or None")
        try:
            self.autoreset_mode = AutoresetMode(autoreset_mode)
        except ValueError:
            known = ", ".join(repr(mode.value) for mode in AutoresetMode)
            raise ConfigError(f"autoreset_mode={autoreset_mode!r}: use one of {known}") from None
        self.simulation = Simulation(
            num_envs, scenarios, weights=weights, guard=guard, horizon=horizon, history=history, limits=limits
        )
        self.num_envs = self.simulation.n
        self.render_mode = render_mode
        self.metadata = self.metadata | {"autoreset_mode": self.autoreset_mode}
        self.single_observation_space = spaces.Box(-1.0, 1.0, (self.simulation.codec.size,), np.float32)
        self.single_action_space = spaces.Box(-1.0, 1.0, (len(ACTED_ON),), np.float32)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        if self._vector_reward:
            self.reward_space = reward_space()
            self.reward_dim = len(OBJECTIVES)
        count = min(self._rendered, self.num_envs) if render_mode else 0
        self._recorders = [Recorder() for _ in range(count)]
        self._generators: list[np.random.Generator] = []
        self._ended = np.zeros(self.num_envs, dtype=np.bool_)
        self._all = np.arange(self.num_envs)
        self._measured = {f"_{name}": np.ones(self.num_envs, dtype=np.bool_) for name in OBJECTIVES}

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """Start an episode of all trainings, or of those in ``options["reset_mask"]``.

        Args:
            seed: One number (training i gets seed + i), one for each training, or None to go on.
            options: As in `TrainingEnv.reset`, for all trainings alike; and "reset_mask", bool of shape ``(n,)``.

        Raises:
            ConfigError: a wrong number of seeds, a mask that does not suit, unknown options.
        """
        options = dict(options or {})
        mask = options.pop("reset_mask", None)
        chosen = self._all if mask is None else np.flatnonzero(self._checked_mask(mask))
        self._seed(seed, chosen)
        self._begin(chosen, options)
        names = np.empty(self.num_envs, dtype=object)
        for i in chosen:
            names[i] = self.simulation.plant.assembly.scenarios[self.simulation.plant.state["scenario"][i]].name
        present = np.zeros(self.num_envs, dtype=np.bool_)
        present[chosen] = True
        return self.simulation.observations.copy(), {"scenario": names, "_scenario": present}

    def step(self, actions: Any) -> tuple[Observations, Any, NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """One control interval of all trainings; `actions` has shape ``(n, 4)``."""
        simulation = self.simulation
        if not self._generators:
            raise gym.error.ResetNeeded("step() before reset(): call reset() first")
        actions = simulation.checked(actions, (self.num_envs, len(ACTED_ON)))
        if self._ended.any():
            return self._step_after_ends(actions)
        simulation.step(actions)
        return self._results()

    def _step_after_ends(self, actions: NDArray[np.float32]) -> Any:
        """A step in which some trainings start anew (or, without autoreset, must have been)."""
        if self.autoreset_mode is AutoresetMode.DISABLED:
            raise gym.error.ResetNeeded(
                f"{np.count_nonzero(self._ended)} episodes are over: reset(options={{'reset_mask': ...}}) them first"
            )
        ended = self._ended.copy()
        self.simulation.step(actions, ~ended)
        self._begin(np.flatnonzero(ended), {})
        observations, rewards, terminated, truncated, info = self._results()
        for name in OBJECTIVES:
            info[f"_{name}"] = ~ended
        return observations, rewards, terminated, truncated, info

    def _results(self) -> tuple[Observations, Any, NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        simulation = self.simulation
        terminated, truncated = simulation.terminated.copy(), simulation.truncated.copy()
        rewards = simulation.terms.astype(np.float32) if self._vector_reward else simulation.rewards.copy()
        terms = simulation.terms.T.copy()
        info: dict[str, Any] = {name: terms[k] for k, name in enumerate(OBJECTIVES)}
        info.update(self._measured)
        self._ended = terminated | truncated
        for i, recorder in enumerate(self._recorders):
            recorder.add(simulation, i)
        if self.autoreset_mode is AutoresetMode.SAME_STEP and self._ended.any():
            ended = self._ended
            final = {name: info[name].copy() for name in OBJECTIVES} | {f"_{name}": ended.copy() for name in OBJECTIVES}
            info |= {"final_obs": simulation.observations.copy(), "_final_obs": ended.copy()}
            info |= {"final_info": final, "_final_info": ended.copy()}
            self._begin(np.flatnonzero(ended), {})
        return simulation.observations.copy(), rewards, terminated, truncated, info

    def _begin(self, plants: NDArray[np.int64], options: Mapping[str, Any]) -> None:
        """Draw and start an episode of these trainings."""
        drawn = [self.simulation.draw_episode(int(i), self._generators[i], options) for i in plants]
        self.simulation.reset(plants, [key for key, _ in drawn], [scenario for _, scenario in drawn])
        self._ended[plants] = False
        for i in plants[plants < len(self._recorders)]:
            self._recorders[i].begin(self.simulation, int(i))

    def _seed(self, seed: int | Sequence[int | None] | None, chosen: NDArray[np.int64]) -> None:
        if isinstance(seed, (int, np.integer)):
            seeds: list[int | None] = [int(seed) + i for i in range(self.num_envs)]
        elif seed is None:
            seeds = [None] * self.num_envs
        else:
            seeds = list(seed)
            if len(seeds) != self.num_envs:
                raise ConfigError(f"seed has {len(seeds)} numbers, not {self.num_envs}: give one for each training")
        if not self._generators:
            self._generators = [seeding.np_random(one)[0] for one in seeds]
            return
        for i in chosen:
            if seeds[i] is not None:
                self._generators[i] = seeding.np_random(seeds[i])[0]

    def _checked_mask(self, mask: Any) -> NDArray[np.bool_]:
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (self.num_envs,):
            raise ConfigError(f"reset_mask must be a bool array of shape ({self.num_envs},), not {mask!r}")
        if not mask.any():
            raise ConfigError("reset_mask chooses no training: at least one entry must be True")
        if not self._generators and not mask.all():
            raise ConfigError("the first reset must be of all trainings: leave reset_mask out")
        return mask

    @property
    def telemetry(self) -> Telemetry:
        """Of the last interval, for policies that decide from telemetry."""
        return self.simulation.telemetry

    def close_extras(self, **kwargs: Any) -> None:
        """End the threads."""
        self.simulation.close()

    def render(self) -> Any:
        """The first 16 trainings: pictures side by side (`rgb_array`), or lines (`ansi`)."""
        if not self._recorders:
            gym.logger.warn(f"render() without a render_mode: gym.make_vec(..., render_mode={'rgb_array'!r})")
            return None
        if not self._generators:
            raise gym.error.ResetNeeded("render() before reset(): call reset() first")
        if self.render_mode == "ansi":
            return tuple(recorder.line() for recorder in self._recorders)
        return tiled([recorder.picture() for recorder in self._recorders])


class MOTrainingVectorEnv(TrainingVectorEnv):
    """`MOTrainingEnv` n times; rewards are float32 of shape ``(n, 4)``."""

    _vector_reward = True
