"""The oracle: no policy exceeds its bound, and what a clairvoyant policy achieves lies not far below."""

import numpy as np
import pytest

from swiftcruise.baselines.clairvoyant import clairvoyant
from swiftcruise.baselines.oracle import upper_bound
from swiftcruise.envs.objectives import DEFAULT_WEIGHTS
from swiftcruise.envs.plants.assembly import assemble
from swiftcruise.envs.scenarios.splits import load_split
from swiftcruise.envs.simulation import Simulation
from swiftcruise.runtime.errors import ConfigError

SPLITS = ("val", "test-id", "test-ood", "test-hard")
COUNT = 8
HORIZON = 60


def episodes(split: str, weights=DEFAULT_WEIGHTS):
    scenarios = load_split(split)[:COUNT]
    keys = [scenario.seed + 1 for scenario in scenarios]
    return scenarios, keys, upper_bound(assemble(scenarios, HORIZON), keys, range(COUNT), weights, HORIZON)


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("split", SPLITS)
def test_no_course_of_actions_exceeds_the_bound(split, guard):
    scenarios, keys, bound = episodes(split)
    rng = np.random.default_rng(0)
    courses = 24
    simulation = Simulation(COUNT * courses, scenarios, guard=guard, horizon=HORIZON)
    simulation.weights[:] = DEFAULT_WEIGHTS
    which = np.tile(np.arange(COUNT), courses)
    simulation.reset(np.arange(COUNT * courses), [keys[i] for i in which], which)
    # Steady courses, each with its own setting, and restless ones around it.
    centre = rng.uniform(-0.6, 1, (COUNT * courses, 4)).astype(np.float32)
    restlessness = np.repeat([0.0, 0.3], COUNT * courses // 2)[:, None]
    total = np.zeros(COUNT * courses)
    for _ in range(HORIZON):
        simulation.step((centre + restlessness * rng.normal(size=centre.shape)).astype(np.float32))
        total += simulation.rewards
    assert (total <= bound.sum(axis=1)[which]).all()


@pytest.mark.parametrize("split", SPLITS)
def test_the_clairvoyant_policy_comes_close_to_the_bound_and_beats_a_fixed_setting(split):
    scenarios, keys, bound = episodes(split)
    assembly = assemble(scenarios, HORIZON)
    achieved = clairvoyant(assembly, keys[:3], range(3), DEFAULT_WEIGHTS, HORIZON).rewards.sum(axis=1)
    assert (achieved <= bound[:3].sum(axis=1)).all()
    simulation = Simulation(3, scenarios[:3], horizon=HORIZON)
    simulation.weights[:] = DEFAULT_WEIGHTS
    simulation.reset(np.arange(3), keys[:3], np.arange(3))
    fixed = np.zeros(3)
    for _ in range(HORIZON):
        simulation.step(np.full((3, 4), 0.2, dtype=np.float32))
        fixed += simulation.rewards
    assert (achieved > fixed).all()


def test_weights_with_which_running_out_of_memory_could_pay_are_refused():
    with pytest.raises(ConfigError, match="raise the weight of safety"):
        episodes("val", (1.0, 1.0, 0.1, 0.0))
    with pytest.raises(ConfigError, match="must have 4 numbers"):
        episodes("val", (1.0, 1.0))
