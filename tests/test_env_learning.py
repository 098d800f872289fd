"""The environment in the hands of others: the checkers, stable-baselines3, CleanRL-, RLlib- and MORL-style loops."""

import importlib
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import cloudpickle
import gymnasium as gym
import mo_gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env as check_with_gymnasium
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from mo_gymnasium.wrappers import LinearReward, MONormalizeReward, MORecordEpisodeStatistics
from stable_baselines3 import PPO, SAC
from stable_baselines3.common.env_checker import check_env as check_with_sb3
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor, VecNormalize
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from swiftcruise.envs.objectives import ENDED, OBJECTIVES
from swiftcruise.envs.rendering import HEIGHT, WIDTH
from swiftcruise.envs.sb3 import TrainingVecEnv
from swiftcruise.envs.scenarios.scenario import Scenario
from swiftcruise.envs.training_env import TrainingEnv
from swiftcruise.envs.vector_env import MOTrainingVectorEnv, TrainingVectorEnv
from swiftcruise.runtime.errors import ConfigError

SINGLE = "swiftcruise.envs:SwiftCruise/Training-v0"
MULTI = "swiftcruise.envs:SwiftCruise/MOTraining-v0"
SCENARIO = "train-001"
LEAKING = Scenario.model_validate(
    {
        "name": "leaking",
        "hardware": "rtx3090",
        "workload": {"model": "qwen-7b", "max_length": 1024},
        "disturbances": [{"kind": "memory-creep", "rate": 1.0}],
    }
)


@pytest.fixture(autouse=True)
def one_thread():
    """Small networks are faster so, and equal from run to run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# -- the checkers ------------------------------------------------------------------------------------------------------


def test_gymnasiums_checker_finds_nothing():
    env = gym.make(SINGLE, scenarios=SCENARIO, render_mode="ansi").unwrapped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_with_gymnasium(env)


def test_gymnasiums_checker_finds_nothing_but_the_vector_reward():
    env = gym.make(MULTI, scenarios=SCENARIO, render_mode="ansi").unwrapped
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_with_gymnasium(env)
    assert all("reward" in str(warning.message) for warning in caught)


def test_stable_baselines_checker_finds_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_with_sb3(gym.make(SINGLE, scenarios=SCENARIO, render_mode="rgb_array"))


# -- stable-baselines3 -------------------------------------------------------------------------------------------------


def test_the_vec_env_is_what_stable_baselines_makes_of_single_environments():
    def single():
        return TrainingEnv(["train-001", "train-002"], horizon=4, weights="sampled")

    reference = DummyVecEnv([single] * 3)
    env = TrainingVecEnv(3, ["train-001", "train-002"], horizon=4, weights="sampled")
    for each in (reference, env):
        each.seed(5)
    np.testing.assert_array_equal(reference.reset(), env.reset())
    assert [info["scenario"] for info in reference.reset_infos] == [info["scenario"] for info in env.reset_infos]
    rng = np.random.default_rng(0)
    for step in range(1, 10):
        actions = rng.uniform(-1, 1, (3, 4)).astype(np.float32)
        expected, got = reference.step(actions), env.step(actions)
        for wanted, given in zip(expected[:3], got[:3], strict=True):
            np.testing.assert_array_equal(wanted, given)
            assert wanted.dtype == given.dtype
        for wanted, given, terms in zip(expected[3], got[3], env.get_attr("terms"), strict=True):
            assert given.get("TimeLimit.truncated", False) == wanted["TimeLimit.truncated"] == (step % 4 == 0)
            np.testing.assert_array_equal(terms, [wanted[name] for name in OBJECTIVES])
            if "terminal_observation" in wanted:
                np.testing.assert_array_equal(given["terminal_observation"], wanted["terminal_observation"])
            else:
                assert given == {}
        assert [info["scenario"] for info in reference.reset_infos] == env.get_attr("scenario")


def test_a_job_that_ends_is_no_time_limit():
    env = TrainingVecEnv(2, LEAKING, guard=False)
    env.reset()
    steps, dones = 0, np.zeros(2, dtype=bool)
    while not dones.any():
        _, _, dones, infos = env.step(np.zeros((2, 4)))
        steps += 1
    assert 1 < steps < env.env.simulation.horizon
    assert infos[int(dones.argmax())]["TimeLimit.truncated"] is False
    assert env.terms[dones.argmax(), OBJECTIVES.index("safety")] < -ENDED


def test_vec_monitor_reports_episodes_with_their_scenario(tmp_path):
    env = VecMonitor(TrainingVecEnv(2, horizon=3, scenarios=SCENARIO), str(tmp_path / "log"), ("scenario",))
    env.seed(0)
    env.reset()
    rewards = []
    for _ in range(3):
        _, reward, dones, infos = env.step(np.zeros((2, 4)))
        rewards.append(reward)
    assert dones.all()
    for i, info in enumerate(infos):
        assert info["episode"]["l"] == 3
        assert info["episode"]["r"] == pytest.approx(np.sum(rewards, axis=0)[i], rel=1e-5)
        assert info["episode"]["scenario"] == SCENARIO


def test_vec_normalize_normalises_the_last_observation_too():
    env = VecNormalize(TrainingVecEnv(2, SCENARIO, horizon=2))
    env.reset()
    for _ in range(2):
        *_, infos = env.step(np.zeros((2, 4)))
    raw, own = env.get_original_obs(), infos[0]["terminal_observation"]
    assert own.shape == raw[0].shape
    assert np.abs(own).max() > 1.0  # no longer within the space


def test_options_reach_the_trainings_they_are_for():
    env = TrainingVecEnv(3, ["train-001", "train-002"])
    env.seed(1)
    env.set_options({"scenario": "train-002"})
    env.reset()
    assert env.get_attr("scenario") == ["train-002"] * 3
    env.seed(1)
    env.set_options([{"scenario": 0}, {"scenario": 1}, {"scenario": 0, "weights": {"energy": 1.0}}])
    observations = env.reset()
    assert env.get_attr("scenario") == ["train-001", "train-002", "train-001"]
    assert env.get_attr("weights", 2)[0].tolist() == [0, 1, 0, 0]
    alone = TrainingEnv(["train-001", "train-002"])
    np.testing.assert_array_equal(observations[1], alone.reset(seed=2, options={"scenario": 1})[0])


def test_attributes_and_methods_are_each_trainings_or_all_trainings():
    env = TrainingVecEnv(3, SCENARIO)
    env.reset()
    assert env.get_attr("num_envs", [0, 2]) == [3, 3]
    assert env.has_attr("simulation")
    assert not env.has_attr("gravity")
    assert env.env_is_wrapped(Monitor) == [False] * 3
    assert env.env_method("close") == [None] * 3
    with pytest.raises(ValueError, match="all trainings at once"):
        env.env_method("close", indices=1)
    with pytest.raises(ValueError, match="all trainings at once"):
        env.set_attr("render_mode", None, indices=[0])
    with pytest.raises(AttributeError, match="set_options"):
        env.set_attr("weights", [1, 0, 0, 0])
    env.set_attr("autoreset_mode", env.env.autoreset_mode)


def test_the_vec_env_renders():
    env = TrainingVecEnv(TrainingVectorEnv(2, SCENARIO, autoreset_mode="SameStep", render_mode="rgb_array"))
    env.reset()
    assert env.render_mode == "rgb_array"
    assert env.render().shape == (HEIGHT, 2 * WIDTH, 3)
    assert [picture.shape for picture in env.get_images()] == [(HEIGHT, 2 * WIDTH, 3)]
    lines = TrainingVecEnv(2, SCENARIO, render_mode="ansi")
    lines.reset()
    assert [SCENARIO in line for line in lines.render()] == [True, True]


def test_what_cannot_be_adapted_is_refused():
    with pytest.raises(ConfigError, match="SameStep"):
        TrainingVecEnv(TrainingVectorEnv(2, SCENARIO))
    with pytest.raises(ConfigError, match="vector reward"):
        TrainingVecEnv(MOTrainingVectorEnv(2, SCENARIO, autoreset_mode="SameStep"))
    with pytest.raises(ConfigError, match="without wrappers"):
        TrainingVecEnv(RecordEpisodeStatistics(TrainingVectorEnv(2, SCENARIO, autoreset_mode="SameStep")))
    with pytest.raises(ConfigError, match="made already"):
        TrainingVecEnv(TrainingVectorEnv(2, SCENARIO, autoreset_mode="SameStep"), horizon=4)


def mean_reward(model):
    """Of an interval, over 32 episodes that are the same for every policy."""
    env = VecMonitor(TrainingVecEnv(32, SCENARIO, horizon=30))
    env.seed(7)
    returns, lengths = evaluate_policy(model, env, n_eval_episodes=32, return_episode_rewards=True)
    return sum(returns) / sum(lengths)


def test_ppo_learns():
    env = VecMonitor(TrainingVecEnv(64, SCENARIO, horizon=30))
    sizes = {"n_steps": 16, "batch_size": 256, "n_epochs": 6}
    model = PPO("MlpPolicy", env, gamma=0.9, learning_rate=1e-3, seed=0, device="cpu", **sizes)
    before = mean_reward(model)
    model.learn(20_000)
    assert mean_reward(model) > before + 0.1


def test_sac_learns():
    env = TrainingVecEnv(16, SCENARIO, horizon=30)
    sizes = {"batch_size": 128, "train_freq": 4, "gradient_steps": 16, "policy_kwargs": {"net_arch": [64, 64]}}
    model = SAC("MlpPolicy", env, gamma=0.9, learning_rate=1e-3, learning_starts=256, seed=0, device="cpu", **sizes)
    before = mean_reward(model)
    model.learn(6_144)
    assert mean_reward(model) > before + 0.1


def test_the_example_learns_logs_and_saves(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "examples")
    example = importlib.import_module("train_ppo")
    before, after = example.main(tmp_path, steps=1024, trainings=8, scenarios=SCENARIO, unseen="train-002")
    assert before != after
    (run,) = tmp_path.glob("PPO_*")
    charts = EventAccumulator(str(run)).Reload()
    assert {f"objectives/{name}" for name in OBJECTIVES} < set(charts.Tags()["scalars"])
    loaded = PPO.load(tmp_path / "ppo", device="cpu")
    assert example.mean_reward(loaded, "train-002") == pytest.approx(after)


# -- loops of others ---------------------------------------------------------------------------------------------------


def test_a_cleanrl_style_loop_learns():
    """Policy gradient with a baseline, over `gym.make_vec` and its "NextStep" autoreset."""
    torch.manual_seed(0)
    make = {"vectorization_mode": "vector_entry_point", "scenarios": SCENARIO, "horizon": 16}
    envs = RecordEpisodeStatistics(gym.make_vec(SINGLE, num_envs=64, **make))
    mean = torch.nn.Sequential(
        torch.nn.Linear(envs.single_observation_space.shape[0], 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, envs.single_action_space.shape[0]),
    )
    log_std = torch.nn.Parameter(torch.full((4,), -0.7))
    optimizer = torch.optim.Adam([*mean.parameters(), log_std], lr=5e-3)

    returns = []
    observation, _ = envs.reset(seed=0)
    over = np.zeros(envs.num_envs, dtype=bool)
    for _ in range(60):
        log_probabilities, rewards, counted = [], [], []
        for _ in range(17):  # an episode, and the step that starts the next
            distribution = torch.distributions.Normal(mean(torch.as_tensor(observation)), log_std.exp())
            action = distribution.sample()
            counted.append(~over)  # an action on an episode that is over does nothing
            observation, reward, terminated, truncated, info = envs.step(action.clamp(-1, 1).numpy())
            log_probabilities.append(distribution.log_prob(action).sum(1))
            rewards.append(reward)
            over = terminated | truncated
            if "episode" in info:
                returns.append(info["episode"]["r"][info["_episode"]].mean() / 16)
        gain = np.array(rewards, dtype=np.float32)
        advantage = torch.as_tensor((gain - gain.mean()) / gain.std() * np.array(counted))
        loss = -(torch.stack(log_probabilities) * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert len(returns) >= 59
    assert np.mean(returns[-5:]) > np.mean(returns[:5]) + 0.1


def create(config):
    """What RLlib calls on its workers: the environment from a mapping."""
    return gym.make(SINGLE, **config)


def rollout(env, steps=12):
    """Observations and rewards under a fixed sequence of actions, through an episode's end."""
    rng = np.random.default_rng(3)
    observation, _ = env.reset(seed=11)
    seen = [(observation, 0.0)]
    for _ in range(steps):
        assert env.observation_space.contains(observation)
        observation, reward, terminated, truncated, _ = env.step(rng.uniform(-1, 1, 4).astype(np.float32))
        seen.append((observation, reward))
        if terminated or truncated:
            observation, _ = env.reset()
            seen.append((observation, 0.0))
    return seen


def test_a_pickled_creator_makes_the_same_environment_on_a_worker():
    config = {"scenarios": ["train-001", "train-002"], "horizon": 5, "history": 2, "weights": {"throughput": 1.0}}
    code = (
        "import pickle, sys\n"
        "create, rollout, config = pickle.load(sys.stdin.buffer)\n"
        "sys.stdout.buffer.write(pickle.dumps(rollout(create(config))))\n"
    )
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        sent = cloudpickle.dumps((create, rollout, config))
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    worker = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True)
    here, there = rollout(create(config)), pickle.loads(worker.stdout)
    assert len(here) == len(there) == 15
    for (observation, reward), (other, its_reward) in zip(here, there, strict=True):
        np.testing.assert_array_equal(observation, other)
        assert reward == its_reward


# -- several objectives ------------------------------------------------------------------------------------------------


def test_mo_gymnasiums_wrappers_work():
    actions = np.random.default_rng(0).uniform(-1, 1, (6, 4)).astype(np.float32)

    def run(env):
        env.reset(seed=4)
        return [env.step(action) for action in actions]

    vectors = run(mo_gymnasium.make(MULTI, scenarios=SCENARIO, horizon=6))
    assert all(step[1].shape == (4,) and step[1].dtype == np.float32 for step in vectors)
    env = mo_gymnasium.make(MULTI, scenarios=SCENARIO, horizon=6)
    assert all(env.unwrapped.reward_space.contains(step[1]) for step in vectors)

    weight = np.array([1.0, 0.3, 1.0, 0.1])
    scalars = run(LinearReward(mo_gymnasium.make(MULTI, scenarios=SCENARIO, horizon=6), weight))
    of_single = run(gym.make(SINGLE, scenarios=SCENARIO, horizon=6, weights=weight))
    for (_, vector, *_), (_, scalar, *_), (_, reward, *_) in zip(vectors, scalars, of_single, strict=True):
        assert scalar == pytest.approx(float(vector @ weight), rel=1e-6)
        assert scalar == pytest.approx(reward, rel=1e-5)

    normalised = run(MONormalizeReward(mo_gymnasium.make(MULTI, scenarios=SCENARIO, horizon=6), idx=0))
    for (_, vector, *_), (_, other, *_) in zip(vectors, normalised, strict=True):
        np.testing.assert_array_equal(vector[1:], other[1:])
    assert any(vector[0] != other[0] for (_, vector, *_), (_, other, *_) in zip(vectors, normalised, strict=True))

    *_, (*_, info) = run(MORecordEpisodeStatistics(mo_gymnasium.make(MULTI, scenarios=SCENARIO, horizon=6)))
    np.testing.assert_allclose(info["episode"]["r"], np.sum([step[1] for step in vectors], axis=0), rtol=1e-5)
    assert info["episode"]["l"] == 6


def test_a_morl_style_loop_finds_that_weights_choose_actions():
    """Episodes under sampled weights, which the policy sees; afterwards the best power limit depends on them."""
    env = mo_gymnasium.make(MULTI, scenarios=SCENARIO, horizon=12)
    rng = np.random.default_rng(0)
    powers = np.linspace(-1, 1, 5)
    seen, gained = [], []
    for episode in range(40):
        weights = rng.dirichlet(np.ones(env.unwrapped.reward_dim))
        observation, _ = env.reset(seed=episode % 2, options={"weights": weights})
        np.testing.assert_allclose(observation[-4:], weights, atol=1e-6)
        power, total, over = powers[episode % 5], np.zeros(4), False
        while not over:
            observation, vector, terminated, truncated, _ = env.step(np.array([0, 0.2, power, 0], dtype=np.float32))
            total += vector
            over = terminated or truncated
        seen.append(power)
        gained.append(total)
    fronts = {power: np.mean([g for p, g in zip(seen, gained, strict=True) if p == power], axis=0) for power in powers}

    def best(**weights):
        return max(powers, key=lambda power: fronts[power] @ [weights.get(name, 0.0) for name in OBJECTIVES])

    assert best(energy=1.0) < best(throughput=0.5, energy=0.5) <= best(throughput=1.0)
    assert best(throughput=1.0) == 1.0
