"""PPO from stable-baselines3 learns to control simulated trainings; TensorBoard shows how.

    python examples/train_ppo.py
    tensorboard --logdir ppo

It learns on the split "train" and is judged on "val", which it never saw, before and after.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecMonitor

from swiftcruise.envs.objectives import OBJECTIVES
from swiftcruise.envs.sb3 import TrainingVecEnv


class LogObjectives(BaseCallback):
    """Charts every objective by itself, beside the reward that weighs them."""

    def _on_step(self) -> bool:
        terms = self.training_env.get_attr("terms")
        for name, value in zip(OBJECTIVES, np.mean(terms, axis=0), strict=True):
            self.logger.record_mean(f"objectives/{name}", value)
        return True


def mean_reward(model: BaseAlgorithm, scenarios: str, episodes: int = 64) -> float:
    """Of a control interval; the same episodes for every model."""
    env = VecMonitor(TrainingVecEnv(episodes, scenarios))
    env.seed(0)
    returns, lengths = evaluate_policy(model, env, n_eval_episodes=episodes, return_episode_rewards=True)
    return float(sum(returns) / sum(lengths))


def main(
    folder: Path, steps: int = 500_000, trainings: int = 256, scenarios: str = "train", unseen: str = "val"
) -> tuple[float, float]:
    """Learn, save `ppo.zip` beside TensorBoard's files, and return the mean reward before and after."""
    env = VecMonitor(TrainingVecEnv(trainings, scenarios))
    # What a decision is worth shows within a few intervals: a short horizon (gamma) learns faster.
    model = PPO(
        "MlpPolicy",
        env,
        n_steps=16,
        batch_size=4 * trainings,
        n_epochs=5,
        gamma=0.9,
        learning_rate=1e-3,
        policy_kwargs={"log_std_init": -0.5},
        tensorboard_log=str(folder),
        seed=0,
        device="cpu",
    )
    before = mean_reward(model, unseen)
    model.learn(steps, callback=LogObjectives())
    model.save(folder / "ppo")
    after = mean_reward(model, unseen)
    print(f"mean reward on {unseen!r}: {before:.3f} before, {after:.3f} after {model.num_timesteps:,} intervals")
    return before, after


if __name__ == "__main__":
    main(Path("ppo"))
