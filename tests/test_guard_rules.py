"""The guard's rules decide the same interpreted, as in a live training, and compiled, as in a simulation."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftcruise.envs.plants import compiling
from swiftcruise.runtime import guard_rules
from swiftcruise.runtime.controls import CONTROL_FIELDS, ControlLimits, Controls, Limit
from swiftcruise.runtime.guard import SafetyGuard
from swiftcruise.runtime.guard_rules import CONTROLS, RULES, GuardOptions, apply_rules, initial_state, limit_row
from swiftcruise.runtime.telemetry import Telemetry

compiling.register(*guard_rules.KERNELS)
COMPILED = compiling.compiled(apply_rules)

LIMITS = ControlLimits(
    token_budget=Limit(16.5, 65536.5, rate=4.0, integer=True, multiplicative=True),
    num_workers=Limit(0, 16, dwell=3, integer=True),
    power_limit_w=Limit(100, 400, rate=50.0),
    cpu_threads=Limit(1, np.inf, rate=0.5, integer=True),
)
OPTIONS = GuardOptions(memory_cap=0.9, recovery=1.05, relaxation=1.002)

#: Ranges that contain both what is usual and what is not.
RANGES = {
    "time_s": (0, 3),
    "largest_micro_batch": (1, 70_000),
    "memory_peak_fraction": (0, 1.2),
    "memory_device_fraction": (0, 1.2),
    "oom_count": (0, 2),
    "upcoming_max": (1, 4_000),
    "fit_tokens_checkpointed": (0, 100_000),
    "token_budget": (8, 70_000),
    "micro_batch_cap": (0, 5_000),
    "memory_target": (0, 1.2),
    "num_workers": (-2, 20),
    "power_limit_w": (50, 450),
    "cpu_threads": (0, 20),
}


def values(name):
    low, high = RANGES.get(name, (-1, 2))
    whole = st.integers(math.ceil(low), math.floor(high)).map(float)
    return st.one_of(st.just(math.nan), whole, st.floats(low, high), st.floats())


measurements = st.fixed_dictionaries({name: values(name) for name in RANGES}).map(
    lambda drawn: Telemetry.of(1, **drawn).rows()[0]
)
proposals = st.tuples(*map(values, CONTROL_FIELDS)).map(np.array)


def decided(apply, intervals):
    """Controls, flags and state after each interval, as bytes in which every NaN is the same."""
    limits, state = limit_row(LIMITS, 0.05), initial_state()
    history = []
    for telemetry, proposed, fit_tokens in intervals:
        controls, flags = np.empty(CONTROLS), np.empty(CONTROLS, dtype=np.uint8)
        apply(limits, OPTIONS, state, telemetry, proposed, fit_tokens, controls, flags)
        history.append((controls, flags, state.copy()))
    return history


def same_bits(history, other):
    return all(
        np.where(np.isnan(one), np.nan, one).tobytes() == np.where(np.isnan(two), np.nan, two).tobytes()
        for step, other_step in zip(history, other, strict=True)
        for one, two in zip(step, other_step, strict=True)
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(measurements, proposals, values("upcoming_max")), min_size=1, max_size=5))
def test_compiled_and_interpreted_rules_agree_to_the_last_bit_whatever_was_measured(intervals):
    with np.errstate(all="ignore"):  # an array's numbers warn where a list's do not
        assert same_bits(decided(apply_rules, intervals), decided(COMPILED, intervals))


def course(seed, intervals=400):
    """Intervals of a run in which much happens, each with a proposal and what the memory model says."""
    rng = np.random.default_rng(seed)
    for t in range(intervals):
        drawn = {name: rng.uniform(*ends) for name, ends in RANGES.items()}
        drawn |= {"time_s": float(t), "oom_count": float(rng.random() < 0.05)}
        if rng.random() < 0.9:
            drawn |= {"token_budget": 8000.0, "micro_batch_cap": 16.0, "memory_target": 0.8, "num_workers": 4.0}
        telemetry = Telemetry.of(1, **drawn).replace(power_limit_w=np.nan if t % 3 else 200.0).rows()[0]
        proposed = np.array([rng.uniform(*RANGES.get(name, (0, 1))) for name in CONTROL_FIELDS])
        proposed[rng.random(CONTROLS) < 0.2] = np.nan
        proposed[rng.random(CONTROLS) < 0.02] = np.inf
        proposed[0] = rng.choice([proposed[0], 8100.0])
        yield telemetry, proposed, rng.choice([np.nan, 5000.0])


@pytest.mark.parametrize("seed", range(3))
def test_they_agree_over_a_long_run_in_which_every_rule_acts(seed):
    intervals = list(course(seed))
    interpreted = decided(apply_rules, intervals)
    assert np.bitwise_or.reduce([flags for _, flags, _ in interpreted], axis=None) == (1 << len(RULES)) - 1
    assert same_bits(interpreted, decided(COMPILED, intervals))


def test_the_safety_guard_is_these_rules_plant_by_plant():
    guard, intervals = SafetyGuard(LIMITS), [list(course(seed, 50)) for seed in range(3)]
    guard.reset(3)
    alone = [
        decided(COMPILED, [(telemetry, proposed, math.nan) for telemetry, proposed, _ in run]) for run in intervals
    ]
    for t, plants in enumerate(zip(*intervals, strict=True)):
        telemetry, proposed = (np.array([plant[part] for plant in plants]) for part in (0, 1))
        decision = guard.apply(Controls.from_rows(proposed), Telemetry.from_rows(telemetry))
        for i, run in enumerate(alone):
            assert same_bits([(decision.controls.rows()[i], decision.flags[i])], [run[t][:2]])


def test_what_an_out_of_memory_event_lowers_comes_first_among_the_controls():
    assert tuple(guard_rules.OOM_CUTS) == CONTROL_FIELDS[: guard_rules.CEILINGS]


def test_the_layout_of_the_state_leaves_no_gap():
    ends = [offset + (length or 1) for _, offset, length, _ in guard_rules.STATE_LAYOUT]
    assert [offset for _, offset, _, _ in guard_rules.STATE_LAYOUT] == [0, *ends[:-1]]
    assert ends[-1] == guard_rules.STATE_SIZE
