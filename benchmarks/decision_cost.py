"""What a decision of each policy costs, on telemetry of simulated trainings.

- `NAME_us`: microseconds a decision for one training, as in a live run (median over decisions and turns).
- `NAME_per_s_4096`: decisions a second for 4096 trainings at once, as in the lab.
- `guard_us`: the safety guard that every decision passes, for one training.

Policies take turns in random order. Their decisions are not applied: what is timed is `act` alone.

    python benchmarks/decision_cost.py --json figures.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from swiftcruise.envs.plants.simulated import SimulatedPlant
from swiftcruise.envs.scenarios.splits import load_split
from swiftcruise.runtime.controls import Controls
from swiftcruise.runtime.guard import SafetyGuard
from swiftcruise.runtime.policy import REGISTRY, make_policy
from swiftcruise.runtime.telemetry import Telemetry

MANY = 4096


def course(n: int, intervals: int, seed: int) -> list[Telemetry]:
    """Telemetry of n trainings, whose token budget wanders."""
    plant = SimulatedPlant(load_split("train")[: min(n, 64)], n)
    plant.reset(seed)
    rng = np.random.default_rng(seed)
    return [plant.step(Controls.of(n, token_budget=2.0 ** rng.uniform(10, 14, n))) for _ in range(intervals)]


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write a flat object of figures here")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--policies", default=",".join(REGISTRY), help="names, separated by commas")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    names = args.policies.split(",")
    one, many = course(1, 60, args.seed), course(MANY, 4, args.seed)
    rng = np.random.default_rng(args.seed)
    alone: dict[str, list[float]] = {name: [] for name in names}
    together: dict[str, list[float]] = {name: [] for name in names}
    guarded: list[float] = []
    for _ in range(args.turns):
        for name in rng.permutation(names):
            policy = make_policy(name)
            for n, telemetry, seconds in ((1, one, alone[name]), (MANY, many, together[name])):
                policy.reset(n, args.seed)
                for each in telemetry:
                    begin = time.perf_counter()
                    policy.act(each)
                    seconds.append(time.perf_counter() - begin)
        guard = SafetyGuard()
        guard.reset(1)
        for each in one:
            begin = time.perf_counter()
            guard.apply(Controls.of(1, token_budget=4096.0, memory_target=0.85), each)
            guarded.append(time.perf_counter() - begin)

    figures = {"guard_us": 1e6 * statistics.median(guarded)}
    for name in names:
        key = name.replace("-", "_")
        figures[f"{key}_us"] = 1e6 * statistics.median(alone[name])
        figures[f"{key}_per_s_{MANY}"] = MANY / statistics.median(together[name])
    for key, value in figures.items():
        print(f"{key:34s} {value:14,.1f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
