"""A policy of the live run controls one simulated training; the picture shows what it did.

python examples/watch_policy.py cruise --scenario test-hard-002 --picture episode.png
"""

from __future__ import annotations

import argparse

from matplotlib.image import imsave

from swiftcruise.envs.training_env import TrainingEnv
from swiftcruise.runtime.policy import make_policy


def main() -> None:
    """Run one episode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", help="name of a policy, or package.module:Class")
    parser.add_argument("--scenario", default="test-hard-002", help="see `swiftcruise scenarios`")
    parser.add_argument("--picture", default="episode.png")
    args = parser.parse_args()

    env = TrainingEnv(args.scenario, render_mode="rgb_array")
    policy = make_policy(args.policy)
    policy.reset(1)
    env.reset(seed=0)
    total, running = 0.0, True
    while running:
        # Policies decide from telemetry, as in a live run; the environment wants their controls as an action.
        action = env.action_of(policy.act(env.telemetry))
        _, reward, terminated, truncated, _ = env.step(action)
        total += reward
        running = not (terminated or truncated)
    imsave(args.picture, env.render())
    print(f"{args.policy} on {args.scenario}: reward {total:.2f}, picture in {args.picture}")


if __name__ == "__main__":
    main()
