"""Tuning: experiments on processes whose answer is known, and the search over options."""

import math

import numpy as np
import pytest
from optuna.study import get_all_study_names, load_study
from scipy.optimize import brentq

from swiftcruise.baselines.tuning.experiment import experiment
from swiftcruise.baselines.tuning.loops import PlantProcess, loop_of, nominal_scenario
from swiftcruise.baselines.tuning.objective import Objective, tuning_scenarios
from swiftcruise.baselines.tuning.options import SPACES, default_options
from swiftcruise.baselines.tuning.relay import relay
from swiftcruise.baselines.tuning.rules import RULES, NoUltimateGain, Ultimate
from swiftcruise.baselines.tuning.search import rungs, search
from swiftcruise.baselines.tuning.ultimate_gain import ultimate_gain
from swiftcruise.envs.controlled import CompiledGuard
from swiftcruise.envs.plants.simulated import SimulatedPlant
from swiftcruise.envs.scenarios.splits import load_split
from swiftcruise.runtime.errors import ConfigError
from swiftcruise.runtime.loop import ControlLoop
from swiftcruise.runtime.policy import REGISTRY, make_policy


class FirstOrderDeadTime:
    """``K exp(-L s) / (T s + 1)``; exact for outputs that are constant in a step."""

    def __init__(self, gain: float, time_constant: float, dead_time: float, steps_of_dead_time: int = 50):
        self.gain, self.time_constant, self.dead_time = gain, time_constant, dead_time
        self.dt = dead_time / steps_of_dead_time
        self._delay = steps_of_dead_time

    def reset(self, n: int):
        self._y, self._pending = np.zeros(n), [np.zeros(n)] * self._delay
        return self._y

    def step(self, output):
        self._pending = [*self._pending[1:], output]
        self._y = self._y + (1 - math.exp(-self.dt / self.time_constant)) * (self.gain * self._pending[0] - self._y)
        return self._y

    @property
    def ultimate(self) -> Ultimate:
        """Where the phase is -180 degrees: ``atan(w T) + w L = pi``."""
        w = brentq(lambda w: math.atan(w * self.time_constant) + w * self.dead_time - math.pi, 1e-9, 4 / self.dead_time)
        assert isinstance(w, float)
        return Ultimate(math.hypot(1, w * self.time_constant) / self.gain, 2 * math.pi / w)


class FirstOrder(FirstOrderDeadTime):
    """Without dead time: stable under every proportional gain (as far as the steps resolve it)."""

    def __init__(self):
        super().__init__(1.0, 10.0, 1.0)
        self._delay = 1


PROCESSES = [FirstOrderDeadTime(2, 10, 2), FirstOrderDeadTime(1, 5, 5), FirstOrderDeadTime(0.5, 2, 8)]


@pytest.mark.parametrize("process", PROCESSES, ids=["lag", "balanced", "dead-time"])
def test_the_ultimate_gain_and_period_of_a_known_process_are_found(process):
    known = process.ultimate
    found = ultimate_gain(
        process, setpoint=0.0, bias=0.0, kick=1.0, gains=(0.01 * known.gain, 20 * known.gain), limits=(-99.0, 99.0),
        steps=int(30 * known.period / process.dt),
    )  # fmt: skip
    assert found.gain == pytest.approx(known.gain, rel=0.03)
    assert found.period == pytest.approx(known.period, rel=0.03)


@pytest.mark.parametrize("process", PROCESSES, ids=["lag", "balanced", "dead-time"])
def test_the_relay_finds_the_limit_cycle_of_a_known_process(process):
    # The cycle of first order and dead time is known exactly; to a sine wave's Ku it is as close as can be expected.
    share = process.dead_time / process.time_constant
    swing = process.gain * (1 - math.exp(-share))
    found = relay(process, setpoint=0.0, bias=0.0, amplitude=1.0, steps=int(30 * process.ultimate.period / process.dt))
    assert found.gain == pytest.approx(4 / math.pi / swing, rel=0.03)
    assert found.period == pytest.approx(2 * process.time_constant * math.log(2 * math.exp(share) - 1), rel=0.03)
    assert found.gain == pytest.approx(process.ultimate.gain, rel=0.25)
    assert found.period == pytest.approx(process.ultimate.period, rel=0.1)


class Cubed(FirstOrderDeadTime):
    """``1 / (s + 1)^3``, which leaves little but a sine wave of what a relay puts in: Ku = 8, Tu = 2 pi / sqrt(3)."""

    dt = 0.01

    def __init__(self):
        pass

    def reset(self, n: int):
        self._x = np.zeros((3, n))
        return self._x[2]

    def step(self, output):
        x, weight = self._x, 1 - math.exp(-self.dt)
        for i in range(3):
            x[i] += weight * ((output if i == 0 else x[i - 1]) - x[i])
        return x[2].copy()


@pytest.mark.parametrize("hysteresis", [0.0, 0.01])
def test_the_relay_is_right_to_a_few_percent_where_the_process_is_a_low_pass(hysteresis):
    found = relay(Cubed(), setpoint=0.0, bias=0.0, amplitude=1.0, hysteresis=hysteresis, steps=6000)
    assert found.gain == pytest.approx(8.0, rel=0.12)
    assert found.period == pytest.approx(2 * math.pi / math.sqrt(3), rel=0.12)


def test_a_process_without_an_ultimate_gain_is_called_one():
    for gain in (0.5, 5.0):
        with pytest.raises(NoUltimateGain, match="die away at every gain"):
            ultimate_gain(FirstOrder(), setpoint=0.0, bias=0.0, kick=1.0, gains=(0.01, gain), steps=3000)
    with pytest.raises(NoUltimateGain, match="does not keep crossing"):
        relay(FirstOrder(), setpoint=5.0, bias=0.0, amplitude=1.0, steps=3000)


def test_the_rules_are_those_of_their_sources():
    ultimate = Ultimate(10.0, 8.0)
    assert RULES["classic"].gains(ultimate) == pytest.approx((6.0, 1.5, 6.0))  # Ti = Tu / 2, Td = Tu / 8
    assert RULES["no-overshoot"].gains(ultimate) == pytest.approx((2.0, 0.5, 16 / 3))  # Tu / 2, Tu / 3
    assert RULES["tyreus-luyben"].gains(ultimate) == pytest.approx((10 / 2.2, 10 / 2.2 / 17.6, 10 / 2.2 * 8 / 6.3))


# -- on simulated trainings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ziegler-nichols", "relay"])
def test_the_memory_loop_of_a_training_has_an_ultimate_gain(method):
    loop = loop_of("pid-memory", {"setpoint": 0.6})
    found = experiment(loop, nominal_scenario("a40"), method)
    # A sampled loop turns round within two intervals at the earliest; filter and guard make it slower.
    assert 2 <= found.period < 10
    assert 1 < found.gain < 10


def test_a_saturated_measurement_is_said_to_have_no_ultimate_gain():
    with pytest.raises(NoUltimateGain, match=r"utilisation in percent stays within .* above the setpoint 70"):
        experiment(loop_of("pid"), nominal_scenario("a40"), "relay")
    with pytest.raises(NoUltimateGain, match="below the setpoint"):
        experiment(loop_of("pid-memory", {"setpoint": 0.85}), nominal_scenario("cpu"), "ziegler-nichols")


@pytest.mark.parametrize(
    ("policy", "options", "unit"),
    [("pid", {"signal": "fill", "kp": 0.02}, 100.0), ("pid-memory", {"kp": 2.0}, 1.0)],
)
def test_a_bare_loop_under_a_proportional_gain_is_the_policy_with_that_gain(policy, options, unit):
    options = {"setpoint": 0.6, "ki": 0.0, "kd": 0.0} | options
    scenario, loop = nominal_scenario("a40"), loop_of(policy, options)
    process = PlantProcess(loop, scenario)
    bare = [process.reset(1)]
    for _ in range(12):
        bare.append(process.step(options["kp"] * (loop.setpoint - bare[-1])))

    plant = SimulatedPlant(scenario)
    plant.start(np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.uint64), np.zeros(1, dtype=np.int64))
    whole = make_policy(policy, None, **options)
    control = ControlLoop(whole, CompiledGuard.of(plant))
    control.reset(1)
    telemetry, measured = plant.telemetry, []
    for _ in range(13):
        decision = control.decide(telemetry)
        measured.append(unit * whole.diagnostics()["measurement"])
        telemetry = plant.step(decision.controls)
    assert np.ptp(measured) > 0.01 * unit
    np.testing.assert_allclose(measured, bare, rtol=1e-9)


def test_experiments_and_searches_keep_to_the_scenarios_that_are_there_to_tune_on():
    assert len(tuning_scenarios("train")) == 512
    assert {s.hardware for s in tuning_scenarios("v100")} == {"v100"}
    for plant in ("test-id", "test-ood-003", "h100"):
        with pytest.raises(ConfigError, match="to test on"):
            tuning_scenarios(plant)


def test_every_range_holds_the_default_and_only_what_the_policy_takes():
    for policy in SPACES.keys() & REGISTRY.keys():
        defaults = default_options(policy)
        for name, distribution in SPACES[policy].items():
            if name in defaults:
                assert distribution._contains(distribution.to_internal_repr(defaults[name])), (policy, name)
        ends = [
            {k: d.choices[i] if hasattr(d, "choices") else (d.low, d.high)[i] for k, d in SPACES[policy].items()}  # type: ignore[attr-defined]
            for i in (0, 1)
        ]
        for options in ends:
            make_policy(policy, None, **options)


def test_the_objective_of_a_policy_is_the_mean_reward_of_the_same_episodes_each_time():
    objective = Objective(load_split("train")[:8], horizon=10)
    first, other, again = (objective(make_policy(name)) for name in ("cruise", "static", "cruise"))
    assert first.shape == (8,)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_rungs_cover_all_scenarios_once():
    for count in (1, 32, 33, 500):
        parts = rungs(count)
        assert [i for part in parts for i in range(count)[part]] == list(range(count))
        assert parts[0].stop == min(32, count)


SOME = load_split("train")[:40]


def test_a_search_scores_what_it_found_and_gives_up_poor_trials_early():
    found = search("static", SOME, trials=25)
    assert found.trials == 25
    assert 0 < found.pruned < 25
    objective = Objective(SOME)
    assert objective(make_policy("static", None, **found.options)).mean() == pytest.approx(found.score)


def test_an_interrupted_search_goes_on_as_if_it_had_not_been(tmp_path):
    whole = search("static", SOME[:20], trials=14)

    class Killed(Exception):
        pass

    def kill(done: int, best: float) -> None:
        if done == 6:
            raise Killed

    storage = tmp_path / "study.db"
    with pytest.raises(Killed):
        search("static", SOME[:20], trials=14, storage=storage, progress=kill)
    (name,) = get_all_study_names(f"sqlite:///{storage}")
    study = load_study(study_name=name, storage=f"sqlite:///{storage}")
    study.ask()  # a trial that never came to an end
    assert search("static", SOME[:20], trials=14, storage=storage) == whole


def test_a_search_begins_with_the_defaults_and_so_ends_no_worse():
    found = search("cruise", SOME[:4], trials=1)
    assert found.options == found.defaults
    assert found.score == found.default_score


def test_fixed_options_are_not_searched_over_and_other_mistakes_are_named():
    found = search("cruise", SOME[:2], trials=2, fixed={"noise": 0.05})
    assert found.options["noise"] == 0.05
    with pytest.raises(ConfigError, match="nothing"):
        search("pid-thermal", SOME[:2], trials=2, fixed={"temperature_c": 80.0, "margin_c": 2.0})
    with pytest.raises(ConfigError, match="trials=0"):
        search("cruise", SOME[:2], trials=0)
    with pytest.raises(ConfigError, match="no options to search over"):
        search("pid-power", SOME[:2], trials=1)
    with pytest.raises(ConfigError, match="no single loop"):
        loop_of("cruise")
