"""Many trainings as a stable-baselines3 `VecEnv`: PPO, SAC and the like step them in one compiled loop.

from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecMonitor

PPO("MlpPolicy", VecMonitor(TrainingVecEnv(64))).learn(200_000)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvStepReturn

from ..runtime.errors import ConfigError
from .objectives import OBJECTIVES
from .scenarios.splits import Source
from .vector_env import MOTrainingVectorEnv, TrainingVectorEnv


class TrainingVecEnv(VecEnv):
    """`TrainingVectorEnv` in the way of stable-baselines3.

    An episode that ends starts anew in the same step. Its `infos` entry then holds `terminal_observation`,
    `TimeLimit.truncated` and the name of the `scenario` that is over; all others are empty, so that a step costs no
    work for each training. `VecMonitor` adds episode returns, and with ``info_keywords=("scenario",)`` logs what they
    were reached on. Nothing is clipped or normalised here: observations are within [-1, 1] as they come.

    `set_options` fixes scenario and weights of the next `reset`, as in `TrainingEnv.reset`.

    Args:
        env: How many trainings, or a `TrainingVectorEnv` in "SameStep" mode to adapt.
        scenarios: What an episode's scenario is drawn from, by default "train"; as the other options, for an
            environment that is made here.
        options: Others of `TrainingVectorEnv`.

    Attributes:
        env: The `TrainingVectorEnv`.
        terms: (n, objectives) reward vectors of the last step, those of episodes that ended included.

    Raises:
        ConfigError: an environment that cannot be adapted, or an option out of range.
    """

    def __init__(self, env: int | TrainingVectorEnv, scenarios: Source | None = None, **options: Any) -> None:
        if scenarios is not None:
            options["scenarios"] = scenarios
        if not isinstance(env, TrainingVectorEnv):
            if not isinstance(env, int):
                raise ConfigError(f"env={env!r} must be a number of trainings or a TrainingVectorEnv without wrappers")
            options.setdefault("autoreset_mode", AutoresetMode.SAME_STEP)
            env = TrainingVectorEnv(env, **options)
        elif options:
            raise ConfigError(f"{', '.join(options)} must be given to the TrainingVectorEnv, which is made already")
        if env.autoreset_mode is not AutoresetMode.SAME_STEP:
            raise ConfigError(f"autoreset_mode={env.autoreset_mode.value!r}: stable-baselines3 needs 'SameStep'")
        if isinstance(env, MOTrainingVectorEnv):
            raise ConfigError(
                "env has a vector reward, which stable-baselines3 cannot learn from: use TrainingVectorEnv"
            )
        self.env = env
        self.spec = env.spec
        self.terms = np.zeros((env.num_envs, len(OBJECTIVES)))
        self._actions: Any = None
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)

    def reset(self) -> NDArray[np.float32]:
        """Start an episode of every training, with what `seed` and `set_options` said since the last time."""
        first = self._options[0]
        observations, _ = self.env.reset(seed=self._seeds, options=first)
        for i, options in enumerate(self._options):
            if options is first or not (options or first):
                continue
            alone = np.arange(self.num_envs) == i
            observations, _ = self.env.reset(seed=self._seeds, options=options | {"reset_mask": alone})
        self.reset_infos = [{"scenario": self._scenario(i)} for i in range(self.num_envs)]
        self._reset_seeds()
        self._reset_options()
        return observations

    def step_async(self, actions: NDArray[Any]) -> None:
        """Say what `step_wait` does; actions have shape ``(n, 4)``."""
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        """One control interval of all trainings.

        Returns:
            Observations (n, ...) float32, rewards (n,) float32, whether episodes ended (n,) bool, n dicts.
        """
        observations, rewards, terminated, truncated, info = self.env.step(self._actions)
        ended = terminated | truncated
        self.terms = np.stack([info[name] for name in OBJECTIVES], axis=1)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for i in np.flatnonzero(ended).tolist():
            infos[i]["terminal_observation"] = info["final_obs"][i]
            infos[i]["TimeLimit.truncated"] = bool(truncated[i] and not terminated[i])
            infos[i]["scenario"] = self.reset_infos[i]["scenario"]
            self.reset_infos[i] = {"scenario": self._scenario(i)}
        return observations, rewards.astype(np.float32), ended, infos

    def render(self, mode: str | None = None) -> Any:
        """As `TrainingVectorEnv.render`: the first 16 trainings, a picture or lines."""
        return self.env.render() if mode in (None, self.render_mode) else super().render(mode)

    def get_images(self) -> Sequence[NDArray[np.uint8] | None]:
        """One picture, which shows the first 16 trainings."""
        return [self.env.render()]

    def close(self) -> None:
        """Free what the environment holds."""
        self.env.close()

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Values of an attribute, one for each training asked for.

        `terms`, `weights` (of the objectives) and `scenario` (name) are each training's own; all other attributes of
        the `TrainingVectorEnv` are common to its trainings.
        """
        chosen = list(self._get_indices(indices))
        if attr_name == "terms":
            return list(self.terms[chosen])
        if attr_name == "weights":
            return list(self.env.simulation.weights[chosen])
        if attr_name == "scenario":
            return [self._scenario(i) for i in chosen]
        return [getattr(self.env, attr_name)] * len(chosen)

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Set an attribute of the `TrainingVectorEnv`, for all trainings alike.

        Raises:
            AttributeError: there is none of that name; scenario and weights are set by `set_options`.
            ValueError: only some trainings are meant.
        """
        if not hasattr(self.env, attr_name):
            raise AttributeError(f"no attribute {attr_name!r} to set; scenario and weights are set by set_options()")
        self._refuse_some(attr_name, indices)
        setattr(self.env, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list:
        """Call a method of the `TrainingVectorEnv`, once for all trainings, and repeat its result for each.

        Raises:
            ValueError: only some trainings are meant.
        """
        self._refuse_some(method_name, indices)
        return [getattr(self.env, method_name)(*method_args, **method_kwargs)] * self.num_envs

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        """False for each: there are no single environments that could be wrapped."""
        return [False for _ in self._get_indices(indices)]

    def _scenario(self, training: int) -> str:
        """Name of the scenario that a training runs."""
        plant = self.env.simulation.plant
        return plant.assembly.scenarios[plant.state["scenario"][training]].name

    def _refuse_some(self, name: str, indices: VecEnvIndices) -> None:
        if indices is not None and sorted(self._get_indices(indices)) != list(range(self.num_envs)):
            raise ValueError(f"{name!r} belongs to all trainings at once: leave indices={indices!r} out")
