import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from swiftcruise.runtime.controls import CONTROL_FIELDS, ControlLimits, Controls, Limit
from swiftcruise.runtime.errors import ConfigError
from swiftcruise.runtime.guard import SafetyGuard
from swiftcruise.runtime.memory_model import PeakMemoryModel
from swiftcruise.runtime.telemetry import Telemetry

LIMITS = ControlLimits(
    token_budget=Limit(16, 65536, rate=4.0, integer=True, multiplicative=True),
    num_workers=Limit(0, 16, dwell=3, integer=True),
    power_limit_w=Limit(100, 400, rate=50.0),
)


def measured(time: ArrayLike = 30.0, **values: ArrayLike) -> Telemetry:
    return Telemetry.of(len(np.atleast_1d(time)), time_s=time, **values)


def decide(guard, telemetry, **proposed):
    return guard.apply(Controls.of(telemetry.n, **proposed), telemetry)


def test_what_is_unset_or_not_finite_stays_in_force():
    guard = SafetyGuard(LIMITS)
    decision = decide(guard, measured(token_budget=5000, num_workers=3), token_budget=np.inf)
    assert decision.controls.plant(0) == {"token_budget": 5000, "num_workers": 3}
    assert decision.reasons == ["token_budget: not finite (asked inf, set 5000)"]


def test_an_unset_checkpoint_fraction_leaves_the_choice_to_the_plant():
    decision = decide(SafetyGuard(LIMITS), measured(checkpoint_fraction=0.37))
    assert decision.controls.plant(0) == {}


def test_bounds_and_rounding():
    controls = decide(SafetyGuard(LIMITS), measured(), token_budget=1e9, num_workers=2.6, memory_target=-1).controls
    assert controls.plant(0) == {"token_budget": 65536, "num_workers": 3, "memory_target": 0.05}


def test_changes_are_rate_limited_by_a_factor_or_a_difference():
    decision = decide(
        SafetyGuard(LIMITS), measured(token_budget=1000, power_limit_w=300), token_budget=64000, power_limit_w=100
    )
    assert decision.controls.plant(0) == {"token_budget": 4000, "power_limit_w": 250}
    assert decision.clipped["token_budget"].all()
    assert not decision.clipped["num_workers"].any()


def test_a_small_integer_can_still_move():
    limits = ControlLimits(micro_batch_cap=Limit(1, 64, rate=1.1, integer=True, multiplicative=True))
    assert decide(SafetyGuard(limits), measured(micro_batch_cap=1), micro_batch_cap=64).controls.micro_batch_cap == 2


def test_a_control_found_outside_its_bounds_goes_back_at_once():
    assert decide(SafetyGuard(LIMITS), measured(token_budget=2**24), token_budget=2**24).controls.token_budget == 65536


def test_dwell_decisions_pass_between_two_changes():
    guard, workers, history = SafetyGuard(LIMITS), 4.0, []
    for t in range(12):
        asked = 5.0 if workers == 4.0 else 4.0
        workers = decide(guard, measured(time=t, num_workers=workers), num_workers=asked).controls.num_workers[0]
        history.append(workers)
    assert history == [5, 5, 5, 5, 4, 4, 4, 4, 5, 5, 5, 5]


def test_changes_of_less_than_five_percent_are_dropped():
    telemetry = measured(token_budget=1000)
    assert decide(SafetyGuard(LIMITS), telemetry, token_budget=1049).controls.token_budget == 1000
    assert decide(SafetyGuard(LIMITS), telemetry, token_budget=1051).controls.token_budget == 1051


def test_the_budget_keeps_to_what_fits_at_the_upcoming_maximum_length():
    model = PeakMemoryModel()
    model.set_static(0.4)
    tokens = np.array([1000.0, 2000.0, 4000.0, 8000.0])
    model.observe(tokens, 0.0, 1.0, 0.4 + 2e-5 * tokens)
    guard = SafetyGuard(LIMITS, model=model)
    fits = float(model.fit_tokens(512, 1.0, 0.9))
    decision = decide(guard, measured(token_budget=20000, upcoming_max=512), token_budget=60000)
    assert decision.controls.token_budget == np.floor(fits)
    assert 0.4 + 2e-5 * fits < 0.9
    assert "memory cap" in "".join(decision.reasons)
    long = decide(guard, measured(time=60, token_budget=20000, upcoming_max=30000), token_budget=60000)
    assert long.controls.token_budget == 30000


def test_without_a_model_the_telemetry_says_what_fits():
    telemetry = measured(token_budget=20000, upcoming_max=512, fit_tokens_checkpointed=9000)
    assert decide(SafetyGuard(LIMITS), telemetry, token_budget=20000).controls.token_budget == 9000
    unknown = SafetyGuard(LIMITS, model=PeakMemoryModel())
    assert decide(unknown, telemetry, token_budget=20000).controls.token_budget == 9000


def test_memory_that_neighbours_take_lowers_the_memory_target_and_comes_back():
    guard = SafetyGuard(LIMITS)
    busy = measured(time=1, memory_target=0.9, memory_peak_fraction=0.6, memory_device_fraction=0.8)
    assert decide(guard, busy).controls.memory_target == pytest.approx(0.7)
    still = measured(time=2, memory_target=0.7, memory_peak_fraction=0.6, memory_device_fraction=0.8)
    assert decide(guard, still).controls.memory_target == pytest.approx(0.7)
    gone = measured(time=3, memory_target=0.7, memory_peak_fraction=0.6, memory_device_fraction=0.6)
    assert decide(guard, gone).controls.memory_target == pytest.approx(0.9)


def run(policy, fails_above, intervals):
    """A plant that runs out of memory above a budget; returns budgets and OOMs."""
    guard, budget, budgets, ooms = SafetyGuard(LIMITS), 32000.0, [], []
    for t in range(intervals):
        ooms.append(budget > fails_above)
        budgets.append(budget)
        telemetry = measured(time=t, token_budget=budget, oom_count=float(ooms[-1]))
        budget = decide(guard, telemetry, **policy).controls.token_budget[0]
    return np.array(budgets), np.array(ooms)


def test_an_oom_halves_the_budget_whatever_the_policy_asks():
    for policy in ({"token_budget": 65536}, {}):
        budgets, _ = run(policy, fails_above=30000, intervals=2)
        assert budgets.tolist() == [32000, 16000]


def test_after_an_oom_the_budget_recovers_to_just_below_without_failing_again_and_again():
    budgets, ooms = run({"token_budget": 65536}, fails_above=31000, intervals=60)
    assert ooms.sum() <= 3
    assert np.mean(budgets) > 0.75 * 31000


def test_what_the_policy_left_unset_returns_once_the_ceiling_has_gone():
    guard, budget = SafetyGuard(LIMITS), 32000.0
    for t in range(200):
        budget = decide(guard, measured(time=t, token_budget=budget, oom_count=float(t == 0))).controls.token_budget[0]
    assert budget == pytest.approx(32000, rel=0.05)


def test_an_oom_lowers_the_memory_target_too():
    controls = decide(SafetyGuard(LIMITS), measured(memory_target=0.9, oom_count=1), memory_target=0.9).controls
    assert controls.memory_target == pytest.approx(0.81)


def test_with_learn_the_guard_feeds_the_model():
    model = PeakMemoryModel()
    guard = SafetyGuard(LIMITS, model=model, learn=True)
    for t, budget in enumerate([2000.0, 4000.0, 20000.0, 3000.0] * 4):
        peak = 0.3 + 2e-5 * budget
        telemetry = measured(t, token_budget=budget, checkpoint_fraction=1, memory_peak_fraction=peak, upcoming_max=100)
        decide(guard, telemetry)
    assert model.observations == 16
    assert model.mean(6000, 0, 1) == pytest.approx(0.42, abs=0.02)
    decision = decide(guard, measured(99, token_budget=20000, upcoming_max=100), token_budget=65536)
    assert decision.controls.token_budget == np.floor(model.fit_tokens(100, 1, 0.9))


def test_a_plant_that_starts_over_forgets_its_ceiling():
    guard = SafetyGuard(LIMITS)
    guard.reset(2)
    decide(guard, measured(time=[1, 1], token_budget=8000, oom_count=1), token_budget=8000)
    guard.forget(np.array([True, False]))
    controls = decide(guard, measured(time=[0, 2], token_budget=4000, oom_count=0), token_budget=8000).controls
    assert controls.token_budget.tolist() == [8000, 4200]


def test_many_plants_get_counts_instead_of_values():
    guard = SafetyGuard(LIMITS)
    guard.reset(3)
    decision = decide(guard, measured(time=[1, 1, 1], token_budget=1000), token_budget=[1000, 9000, 9000])
    assert decision.reasons == ["token_budget: rate limit (2 of 3 plants)"]


def test_bad_settings_are_refused_by_name():
    with pytest.raises(ConfigError, match="memory_cap=90"):
        SafetyGuard(memory_cap=90)
    with pytest.raises(ConfigError, match="ceiling_recovery"):
        SafetyGuard(ceiling_recovery=0.9)
    with pytest.raises(ConfigError, match="needs a model"):
        SafetyGuard(learn=True)
    with pytest.raises(ConfigError, match="reset"):
        SafetyGuard().load_state_dict(_used_guard(3).state_dict())
    with pytest.raises(ValueError, match=r"reset\(n\)"):
        decide(SafetyGuard(), measured(time=[1, 2]))


any_number = st.one_of(st.just(np.nan), st.just(np.inf), st.floats(-1e6, 1e6))
proposals = st.fixed_dictionaries(dict.fromkeys(CONTROL_FIELDS, any_number))
in_force_within_limits = st.fixed_dictionaries(
    {
        "token_budget": st.integers(16, 65536),
        "micro_batch_cap": st.integers(1, 4096),
        "memory_target": st.floats(0.05, 0.95),
        "num_workers": st.integers(0, 16),
        "power_limit_w": st.one_of(st.just(np.nan), st.floats(100, 400)),
        "cpu_threads": st.one_of(st.just(np.nan), st.integers(1, 256)),
    }
)
situations = st.fixed_dictionaries(
    {
        "oom_count": st.sampled_from([np.nan, 0.0, 1.0]),
        "upcoming_max": st.one_of(st.just(np.nan), st.integers(1, 100000)),
        "fit_tokens_checkpointed": st.one_of(st.just(np.nan), st.floats(0, 1e6)),
        "memory_peak_fraction": st.one_of(st.just(np.nan), st.floats(0, 1)),
        "memory_device_fraction": st.one_of(st.just(np.nan), st.floats(0, 1)),
    }
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(proposals, in_force_within_limits, situations), min_size=1, max_size=4))
def test_controls_are_always_within_limits_and_applying_twice_changes_nothing(intervals):
    guard = SafetyGuard(LIMITS)
    for t, (proposed, in_force, situation) in enumerate(intervals):
        telemetry = measured(time=t, **in_force, **situation)
        controls = decide(guard, telemetry, **proposed).controls
        again = decide(guard, telemetry, **proposed).controls
        for (name, value), (_, limit) in zip(controls.items(), LIMITS.items(), strict=True):
            assert np.array_equal(value, getattr(again, name), equal_nan=True)
            known = name != "checkpoint_fraction" and np.isfinite(in_force[name])
            if np.isfinite(proposed[name]) or known:
                assert limit.low <= value[0] <= limit.high
                assert not limit.integer or value[0] == np.floor(value[0])
            else:
                assert np.isnan(value[0])


@settings(max_examples=100, deadline=None)
@given(proposals, in_force_within_limits, situations)
def test_an_oom_only_ever_lowers_what_would_have_been_set(proposed, in_force, situation):
    lower, usual = (
        decide(SafetyGuard(LIMITS), measured(**in_force, **(situation | {"oom_count": count})), **proposed).controls
        for count in (1.0, 0.0)
    )
    for name in ("token_budget", "micro_batch_cap", "memory_target"):
        assert getattr(lower, name) <= getattr(usual, name)
    assert lower.token_budget <= max(in_force["token_budget"] / 2, 16)


def _used_guard(n):
    guard = SafetyGuard(LIMITS)
    guard.reset(n)
    for t in range(3):
        telemetry = measured(time=np.full(n, float(t)), token_budget=np.arange(1, n + 1) * 500.0, oom_count=t == 1)
        decide(guard, telemetry, token_budget=9000, num_workers=t, checkpoint_fraction=0.5)
    return guard


def test_n_plants_are_decided_as_each_alone():
    guard = _used_guard(3)
    telemetry = measured(time=[3.0] * 3, token_budget=[250, 500, 750], num_workers=2, upcoming_max=[100, 900, np.nan])
    together = decide(guard, telemetry, token_budget=9000, num_workers=7).controls
    for i in range(3):
        alone = SafetyGuard(LIMITS)
        for t in range(3):
            decide(
                alone,
                measured(time=float(t), token_budget=(i + 1) * 500.0, oom_count=t == 1),
                token_budget=9000,
                num_workers=t,
                checkpoint_fraction=0.5,
            )
        single = decide(alone, Telemetry.from_plants([telemetry.plant(i)]), token_budget=9000, num_workers=7)
        assert single.controls.plant(0) == together.plant(i)


def test_a_resumed_guard_decides_the_same():
    guard, resumed = _used_guard(2), SafetyGuard(LIMITS)
    resumed.reset(2)
    resumed.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    telemetry = measured(time=[3.0, 3.0], token_budget=[250, 500], num_workers=2)
    first, second = (decide(g, telemetry, token_budget=9000, num_workers=7).controls for g in (guard, resumed))
    assert [first.plant(i) for i in range(2)] == [second.plant(i) for i in range(2)]


def test_a_state_with_more_in_it_than_is_needed_is_taken_over():
    guard, resumed = _used_guard(1), SafetyGuard(LIMITS)
    resumed.load_state_dict(guard.state_dict() | {"fraction": [0.5]})
    assert json.dumps(resumed.state_dict()) == json.dumps(guard.state_dict())
