"""The environment: one training and many are the same, to the last bit; what goes in wrong is told."""

import hashlib
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from swiftcruise.envs import simulation
from swiftcruise.envs.objectives import DEFAULT_WEIGHTS, OBJECTIVES
from swiftcruise.envs.plants import compiling
from swiftcruise.envs.scenarios.splits import load_split
from swiftcruise.envs.simulation import ACTED_ON, Simulation
from swiftcruise.envs.training_env import TrainingEnv
from swiftcruise.runtime.codec import ObservationCodec
from swiftcruise.runtime.controls import Controls
from swiftcruise.runtime.errors import ConfigError
from swiftcruise.runtime.guard import SafetyGuard
from swiftcruise.runtime.policy import make_policy

ID = "swiftcruise.envs:SwiftCruise/Training-v0"
MANY = {"vectorization_mode": "vector_entry_point"}


def make(scenarios="val", **options):
    return gym.make(ID, scenarios=scenarios, **options)


def trajectory(env, steps: int, seed: int = 0) -> list[np.ndarray]:
    """Everything that comes out of an environment under actions drawn from a seed, episodes one after the other."""
    rng = np.random.default_rng(seed)
    observation, _ = env.reset(seed=seed)
    out = [observation]
    for _ in range(steps):
        observation, reward, terminated, truncated, info = env.step(rng.uniform(-1.2, 1.2, 4).astype(np.float32))
        out += [observation, np.array([reward, terminated, truncated, *(info[name] for name in OBJECTIVES)])]
        if terminated or truncated:
            out.append(env.reset()[0])
    return out


def packed(arrays) -> bytes:
    return b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)


def test_a_seed_gives_the_same_trajectory_again_and_in_another_process():
    first = packed(trajectory(make(horizon=20, weights="sampled"), 60))
    assert packed(trajectory(make(horizon=20, weights="sampled"), 60)) == first
    assert packed(trajectory(make(horizon=20, weights="sampled"), 60, seed=1)) != first
    script = (
        "import hashlib\nfrom tests.test_training_env import *\n"
        "print(hashlib.sha256(packed(trajectory(make(horizon=20, weights='sampled'), 60))).hexdigest())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == hashlib.sha256(first).hexdigest()


def test_random_numbers_go_on_when_a_reset_gives_no_seed():
    env = make()
    names = [env.reset(seed=3)[1]["scenario"], *(env.reset()[1]["scenario"] for _ in range(5))]
    assert len(set(names)) > 1
    assert names == [env.reset(seed=3)[1]["scenario"], *(env.reset()[1]["scenario"] for _ in range(5))]


@pytest.mark.parametrize("scenarios", ["test-hard", "train"])
@pytest.mark.parametrize("options", [{}, {"history": 3, "weights": "sampled", "guard": False}])
def test_many_trainings_equal_single_ones_to_the_last_bit_episode_ends_included(scenarios, options):
    n, horizon = 9, 13
    options = {"scenarios": scenarios, "horizon": horizon, **options}
    native = gym.make_vec(ID, num_envs=n, **MANY, **options)
    single = gym.make_vec(ID, num_envs=n, vectorization_mode="sync", **options)
    rng = np.random.default_rng(0)
    (a, native_info), (b, single_info) = native.reset(seed=5), single.reset(seed=5)
    assert a.tobytes() == b.tobytes()
    assert list(native_info["scenario"]) == list(single_info["scenario"])
    ends = 0
    for _ in range(3 * horizon):
        actions = rng.uniform(-1.1, 1.1, (n, 4)).astype(np.float32)
        ours, theirs = native.step(actions), single.step(actions)
        for one, other in zip(ours[:4], theirs[:4], strict=True):
            assert one.tobytes() == other.tobytes()
        for name in OBJECTIVES:
            known = theirs[4].get(f"_{name}", np.zeros(n, dtype=bool))
            assert (ours[4][f"_{name}"] == known).all()
            assert (ours[4][name][known] == theirs[4][name][known]).all() if known.any() else True
        ends += int((ours[2] | ours[3]).sum())
    assert ends >= 2 * n


def test_autoreset_in_the_same_step_keeps_the_last_observation():
    next_step = gym.make_vec(ID, num_envs=5, **MANY, scenarios="val", horizon=4)
    same_step = gym.make_vec(ID, num_envs=5, **MANY, scenarios="val", horizon=4, autoreset_mode="SameStep")
    next_step.reset(seed=1)
    same_step.reset(seed=1)
    actions = np.zeros((5, 4), dtype=np.float32)
    for _ in range(4):
        last = next_step.step(actions)
        first, reward, _, truncated, info = same_step.step(actions)
    assert truncated.all()
    assert info["final_obs"].tobytes() == last[0].tobytes()
    assert reward.tobytes() == last[1].tobytes()
    assert (info["final_info"]["throughput"] == last[4]["throughput"]).all()
    anew = next_step.step(actions)
    assert anew[0].tobytes() == first.tobytes()
    assert not anew[1].any()
    assert not anew[4]["_throughput"].any()


def test_without_autoreset_the_user_resets_those_that_ended():
    env = gym.make_vec(ID, num_envs=3, **MANY, scenarios="val", horizon=2, autoreset_mode=AutoresetMode.DISABLED)
    actions = np.zeros((3, 4), dtype=np.float32)
    env.reset(seed=0)
    env.step(actions)
    assert env.step(actions)[3].all()
    with pytest.raises(gym.error.ResetNeeded, match="3 episodes are over"):
        env.step(actions)
    env.reset(options={"reset_mask": np.array([True, True, False])})
    with pytest.raises(gym.error.ResetNeeded, match="1 episodes are over"):
        env.step(actions)
    env.reset(options={"reset_mask": np.array([False, False, True])})
    assert not env.step(actions)[3].any()
    with pytest.raises(ConfigError, match="chooses no training"):
        env.reset(options={"reset_mask": np.zeros(3, dtype=bool)})
    with pytest.raises(ConfigError, match="seed has 2 numbers, not 3"):
        env.reset(seed=[1, 2])


def test_threads_share_the_plants_without_a_trace():
    shared, alone = Simulation(1100, "val"), Simulation(1100, "val")
    shared._shares, alone._shares = [(0, 400), (400, 1100)], [(0, 1100)]
    shared._scratch = (alone._scratch + shared._scratch * 2)[:2]
    shared._scratch[1] = tuple(array.copy() for array in shared._scratch[0])
    rng = np.random.default_rng(0)
    for each in (shared, alone):
        each.reset(np.arange(1100), list(range(1100)), [i % 64 for i in range(1100)])
    for _ in range(5):
        actions = rng.uniform(-1, 1, (1100, 4)).astype(np.float32)
        shared.step(actions)
        alone.step(actions)
    assert shared.observations.tobytes() == alone.observations.tobytes()
    assert shared.plant.rows.tobytes() == alone.plant.rows.tobytes()
    shared.close()


def test_interpreted_and_compiled_steps_agree_to_the_last_bit(monkeypatch):
    def run() -> list[np.ndarray]:
        each = Simulation(12, "test-hard", history=2)
        for name in ("state", "rows"):
            assert getattr(each.plant, name).shape[0] == 12
        if simulation._step_compiled is simulation._step:  # records are read by attribute
            views = tuple(a.view(np.recarray) if a.dtype.names else a for a in each._plants[:2])
            each._plants = (*views, *each._plants[2:])
        rng = np.random.default_rng(1)
        each.reset(np.arange(12), list(range(12)), list(range(40, 52)))
        out = [each.observations.copy()]
        for _ in range(12):
            each.step(rng.uniform(-1, 1, (12, 4)).astype(np.float32))
            out += [each.observations.copy(), each.plant.rows.copy(), each.rewards.copy()]
        return out

    compiled = packed(run())
    monkeypatch.setattr(simulation, "_step_compiled", simulation._step)
    monkeypatch.setattr(simulation, "_reset_compiled", simulation._reset)
    with np.errstate(over="ignore"):  # of random numbers, which wrap around
        assert packed(run()) == compiled


def test_a_snapshot_brings_an_environment_back_random_numbers_included():
    env = make(horizon=6, history=2, weights="sampled").unwrapped
    env.reset(seed=0)
    env.step(np.zeros(4))
    kept = env.snapshot()
    rng = np.random.default_rng(4)
    actions = rng.uniform(-1, 1, (20, 4))

    def onwards():
        out = []
        for action in actions:
            observation, reward, terminated, truncated, _ = env.step(action)
            out += [observation, np.array(reward)]
            if terminated or truncated:
                out.append(env.reset()[0])
        return packed(out)

    first = onwards()
    env.restore(kept)
    assert onwards() == first


# ---------------------------------------------------------------- spaces, actions, rewards


def test_observations_are_the_codecs_and_hold_the_weights():
    env = make(history=2).unwrapped
    observation, _ = env.reset(seed=0)
    codec = ObservationCodec(2, weights=4)
    frame = codec.encode(env.telemetry, np.array(DEFAULT_WEIGHTS))
    assert observation.tobytes() == codec.stack(None, frame)[0].tobytes()
    after = env.step(np.zeros(4))[0]
    assert after.tobytes() == codec.stack(observation[None], codec.encode(env.telemetry, DEFAULT_WEIGHTS))[0].tobytes()
    assert env.observation_space.contains(after)


def test_the_guard_inside_decides_as_the_guard_of_a_live_run():
    env = make("test-hard").unwrapped
    env.reset(seed=2)
    which = env.simulation.plant.assembly.constants["limits"][env.simulation.plant.state["scenario"][0]]
    guard = SafetyGuard(env.simulation.limits[which])
    rng = np.random.default_rng(0)
    for _ in range(60):
        action = rng.uniform(-1, 1, (1, 4)).astype(np.float32)
        expected = guard.apply(env.simulation.action_codec(0).decode(action), env.telemetry).controls
        dead_time = env.simulation.plant.assembly.scenarios[env.simulation.plant.state["scenario"][0]].dead_time
        env.step(action[0])
        if not dead_time:
            assert env.controls.token_budget == expected.token_budget
            assert env.controls.memory_target == expected.memory_target


@pytest.mark.parametrize("dead_time", [0, 1])
def test_a_nan_action_leaves_the_control_as_it_is(dead_time):
    scenario = load_split("val")[0].model_copy(update={"dead_time": dead_time, "disturbances": ()})
    env = make([scenario]).unwrapped
    env.reset(seed=0)
    env.step(np.full(4, -0.2))
    env.step(np.full(4, np.nan))
    before = env.controls
    for _ in range(4):
        observation, reward, *_ = env.step(np.full(4, np.nan))
        assert env.controls.rows().tobytes() == before.rows().tobytes()
        assert np.isfinite(observation).all()
        assert np.isfinite(reward)


def test_an_action_out_of_range_is_clipped():
    env = make().unwrapped
    ends = []
    for value in (1.0, 1e30, np.inf):
        env.reset(seed=0)
        for _ in range(3):
            observation, *_ = env.step(np.full(4, value))
        ends.append(env.controls.rows().tobytes())
        assert np.isfinite(observation).all()
    assert len(set(ends)) == 1


def test_the_reward_is_the_weighted_sum_of_its_terms():
    env = make(weights={"throughput": 1.0, "energy": 0.5}).unwrapped
    env.reset(seed=0)
    _, reward, _, _, info = env.step(np.zeros(4))
    assert reward == info["throughput"] + 0.5 * info["energy"]
    env.reset(options={"weights": [0, 0, 1, 0]})
    _, reward, _, _, info = env.step(np.zeros(4))
    assert reward == info["safety"]


def test_rewards_are_relative_to_the_best_fixed_budget_undisturbed():
    """A sensible fixed setting in a steady scenario comes close to 0, and to no more than a little above."""
    env = make("train").unwrapped
    steady = [s.name for s in env.simulation.plant.assembly.scenarios if not s.disturbances][:20]
    for name in steady:
        env.reset(options={"scenario": name})
        fit = env.telemetry.fit_tokens_uncheckpointed[0]
        action = env.action_of(
            Controls.of(token_budget=max(fit, 256.0), memory_target=0.9, power_limit_w=1e4, num_workers=4)
        )
        for _ in range(20):
            info = env.step(action)[4]
        assert -1.2 < info["throughput"] < 0.35, name


def test_a_policy_of_the_live_run_acts_in_the_environment():
    env = make().unwrapped
    env.reset(seed=0)
    policy = make_policy("pid-memory")
    policy.reset(1)
    for _ in range(30):
        action = env.action_of(policy.act(env.telemetry))
        assert env.action_space.contains(np.nan_to_num(action))
        env.step(action)


def test_the_vector_reward_environment_gives_the_terms():
    single, vector = make(), gym.make("swiftcruise.envs:SwiftCruise/MOTraining-v0", scenarios="val")
    single.reset(seed=0)
    vector.reset(seed=0)
    info = single.step(np.zeros(4, dtype=np.float32))[4]
    reward = vector.step(np.zeros(4, dtype=np.float32))[1]
    assert reward.dtype == np.float32
    assert reward.tolist() == pytest.approx([info[name] for name in OBJECTIVES])
    assert vector.unwrapped.reward_space.contains(reward)
    many = gym.make_vec("swiftcruise.envs:SwiftCruise/MOTraining-v0", num_envs=3, scenarios="val", **MANY)
    many.reset(seed=0)
    assert many.step(np.zeros((3, 4), dtype=np.float32))[1].shape == (3, 4)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scenarios": "test-od"}, "did you mean 'test-ood'"),
        ({"scenarios": "no-such-file.yaml"}, "no-such-file.yaml"),
        ({"horizon": 0}, "horizon=0"),
        ({"horizon": 2.5}, "horizon=2.5"),
        ({"history": 0}, "history=0"),
        ({"weights": [1, 1]}, "must have 4 numbers"),
        ({"weights": [1, 1, -1, 0]}, "between 0 and 1"),
        ({"weights": "random"}, "'sampled'"),
        ({"weights": {"speed": 1}}, "the objectives are"),
        ({"limits": {"token_budget": (9, 1)}}, "leaves nothing"),
        ({"limits": {"token_budget": (2.0**30, 2.0**31)}}, "leaves nothing"),
        ({"limits": {"tokens": (1, 9)}}, "limits has 'tokens'"),
        ({"limits": {"num_workers": 3}}, r"must be \(low, high\)"),
    ],
)
def test_bad_options_are_refused_with_the_remedy(options, message):
    with pytest.raises(ConfigError, match=message):
        make(**{"scenarios": "val", **options}, disable_env_checker=True)


def test_bad_calls_are_refused_with_the_remedy():
    env = make().unwrapped
    with pytest.raises(gym.error.ResetNeeded, match="call reset"):
        env.step(np.zeros(4))
    env.reset(seed=0)
    with pytest.raises(ConfigError, match=r"shape \(3,\), not \(4,\): one number each for token_budget"):
        env.step(np.zeros(3))
    with pytest.raises(ConfigError, match=r"must be \(4,\) numbers"):
        env.step(["a", "b", "c", "d"])
    with pytest.raises(ConfigError, match="scenario='val-999'"):
        env.reset(options={"scenario": "val-999"})
    with pytest.raises(ConfigError, match="'scenarios' is unknown"):
        env.reset(options={"scenarios": "val-001"})
    with pytest.raises(ConfigError, match="render_mode='human'"):
        TrainingEnv("val", render_mode="human")
    with pytest.raises(ConfigError, match="num_envs=0"):
        gym.make_vec(ID, num_envs=0, **MANY)
    with pytest.raises(ConfigError, match="autoreset_mode='now'"):
        gym.make_vec(ID, num_envs=1, autoreset_mode="now", **MANY)


def test_limits_narrow_what_an_action_can_ask_for():
    env = make(limits={"token_budget": (1000, 2000)}).unwrapped
    env.reset(seed=0)
    for _ in range(20):
        env.step(np.ones(4))
    assert env.controls.token_budget[0] <= 2000
    assert ACTED_ON[0] == "token_budget"


def test_kept_kernels_are_compiled_anew_when_any_of_their_sources_changes():
    own = {Path(function.__code__.co_filename) for function in compiling.registered}
    package = Path(simulation.__file__).parent.parent
    # What is compiled in its own file numba looks after itself; these two floors call each other's functions.
    floors = (package / "runtime", package / "envs")
    assert {path for path in own if any(path.is_relative_to(floor) for floor in floors)} <= set(compiling.SOURCES)
    assert own
