"""How fast the environment steps, beside Gymnasium's CartPole: one training, and many in the native vector environment.

Everything is on: noise, disturbances, guard, a history of frames, reward. Scenarios are those of the training split and
actions are drawn beforehand. Arms take turns in one run, episode ends included; figures are medians over the turns.

- `single_steps_per_s`, `cartpole_single_steps_per_s`, `single_ratio_to_cartpole`: through `gym.make`.
- `vector_steps_per_s_N`, `cartpole_vector_steps_per_s_N`, `vector_ratio_to_cartpole_N`: `gym.make_vec` with the native
  vector environment of either, N trainings (steps are trainings x intervals). Large N share the cores between threads.
- `vector_over_sync_64`: the native one against `SyncVectorEnv`, 64 trainings.
- `us_per_env_N` up to `--largest`: cost of one training's interval, which must not grow with N.
- `first_use_s`: import, assembly of the split and compilation (or loading what was compiled before).

    python benchmarks/env_speed.py --json figures.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

ID = "swiftcruise.envs:SwiftCruise/Training-v0"
SIZES = (64, 1024, 4096, 16384)
COMPARED = (64, 1024, 4096)


def single(env: gym.Env, seed: int) -> Callable[[int], None]:
    """Steps of one environment, starting anew where an episode ends."""
    env.action_space.seed(seed)
    actions = [env.action_space.sample() for _ in range(64)]
    env.reset(seed=seed)

    def steps(count: int) -> None:
        for i in range(count):
            _, _, terminated, truncated, _ = env.step(actions[i % 64])
            if terminated or truncated:
                env.reset()

    return steps


def vector(env: Any, seed: int) -> Callable[[int], None]:
    """Steps of a vector environment, which starts episodes anew by itself."""
    env.action_space.seed(seed)
    actions = [env.action_space.sample() for _ in range(8)]
    env.reset(seed=seed)

    def steps(count: int) -> None:
        for i in range(count):
            env.step(actions[i % 8])

    return steps


def make_vector(name: str, n: int, mode: str = "vector_entry_point", **options: Any) -> Any:
    """A vector environment by name."""
    return gym.make_vec(name, num_envs=n, vectorization_mode=mode, **options)


def measured(arms: dict[str, tuple[Callable[[int], None], int, int]], turns: int, rng: np.random.Generator) -> dict:
    """Median steps a second of each arm.

    Args:
        arms: By name: what steps, how often a turn, and how many trainings a step moves.
        turns: How often each arm comes, in turns of random order; one more warms up.
        rng: Of the order.
    """
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(turns + 1):
        for name in rng.permutation(list(arms)):
            steps, count, n = arms[name]
            begin = time.perf_counter()
            steps(count)
            if turn:
                rates[name].append(count * n / (time.perf_counter() - begin))
    return {name: statistics.median(values) for name, values in rates.items()}


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write a flat object of figures here")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--history", type=int, default=2)
    parser.add_argument("--largest", type=int, default=SIZES[-1])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    options = {"scenarios": "train", "history": args.history}

    begin = time.perf_counter()
    first = gym.make(ID, **options)
    first.reset(seed=0)
    first.step(first.action_space.sample())
    figures: dict[str, float] = {"first_use_s": time.perf_counter() - begin}

    arms = {
        "single": (single(first, args.seed), 4000, 1),
        "cartpole_single": (single(gym.make("CartPole-v1"), args.seed), 8000, 1),
        "sync_64": (vector(make_vector(ID, 64, "sync", **options), args.seed), 60, 64),
    }
    for n in [size for size in SIZES if size <= args.largest]:
        count = max(10, 200_000 // n)
        arms[f"vector_{n}"] = (vector(make_vector(ID, n, **options), args.seed), count, n)
        if n in COMPARED:
            arms[f"cartpole_vector_{n}"] = (vector(make_vector("CartPole-v1", n), args.seed), 4 * count, n)
    rates = measured(arms, args.turns, rng)

    figures["single_steps_per_s"] = rates["single"]
    figures["cartpole_single_steps_per_s"] = rates["cartpole_single"]
    figures["single_ratio_to_cartpole"] = rates["single"] / rates["cartpole_single"]
    for n in [size for size in SIZES if size <= args.largest]:
        figures[f"vector_steps_per_s_{n}"] = rates[f"vector_{n}"]
        figures[f"us_per_env_{n}"] = 1e6 / rates[f"vector_{n}"]
        if n in COMPARED:
            figures[f"cartpole_vector_steps_per_s_{n}"] = rates[f"cartpole_vector_{n}"]
            figures[f"vector_ratio_to_cartpole_{n}"] = rates[f"vector_{n}"] / rates[f"cartpole_vector_{n}"]
    figures["vector_over_sync_64"] = rates["vector_64"] / rates["sync_64"]
    for name, value in figures.items():
        print(f"{name:34s} {value:14,.3f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
