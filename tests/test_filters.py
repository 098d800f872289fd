"""Filters and the change detector."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftcruise.runtime.errors import ConfigError
from swiftcruise.runtime.filters import ChangeDetector, ExponentialFilter, MovingAverage, signed_exp, signed_log

finite = st.floats(-1e6, 1e6)


def test_an_exponential_filter_reaches_63_percent_after_its_time_constant():
    low_pass = ExponentialFilter(time_constant=10.0)
    low_pass.update(0.0)
    for _ in range(10):
        value = low_pass.update(1.0, dt=1.0)
    assert value == pytest.approx(1 - np.exp(-1))


def test_the_response_does_not_depend_on_how_time_is_cut():
    coarse, fine = ExponentialFilter(time_constant=30.0), ExponentialFilter(time_constant=30.0)
    coarse.update(0.0)
    fine.update(0.0)
    coarse.update(1.0, dt=20.0)
    fine.update(1.0, dt=5.0)
    fine.update(1.0, dt=15.0)
    assert coarse.value == pytest.approx(fine.value)


@pytest.mark.parametrize("dt", [0.0, -5.0, np.nan])
def test_a_clock_that_stands_still_gives_a_measurement_no_weight(dt):
    low_pass = ExponentialFilter(time_constant=10.0)
    low_pass.update(1.0)
    assert low_pass.update(100.0, dt=dt) == 1.0


@pytest.mark.parametrize("make", [lambda n: ExponentialFilter(alpha=0.5, n=n), lambda n: MovingAverage(3, n=n)])
def test_a_missing_measurement_holds_only_its_own_plant(make):
    low_pass = make(2)
    low_pass.update([1.0, 1.0])
    value = low_pass.update([np.nan, 3.0])
    assert value.tolist() == [1.0, 2.0]


@given(st.lists(finite, min_size=1, max_size=12), st.integers(1, 5))
@settings(max_examples=50)
def test_a_moving_average_is_the_mean_of_the_last_measurements(values, window):
    average = MovingAverage(window)
    for value in values:
        average.update(value)
    assert average.value[0] == pytest.approx(np.mean(values[-window:]), abs=1e-6)


@given(finite)
def test_signed_log_is_odd_and_has_an_inverse(u):
    assert signed_log(-u) == -signed_log(u)
    assert signed_exp(signed_log(u)) == pytest.approx(u, rel=1e-9, abs=1e-9)


def test_a_detector_finds_a_shift_of_the_mean_within_a_few_measurements():
    rng = np.random.default_rng(0)
    detector = ChangeDetector(0.1, n=200)
    before = np.array([detector.update(rng.normal(1.0, 0.1, 200)) for _ in range(20)])
    after = np.array([detector.update(rng.normal(1.3, 0.1, 200)) for _ in range(6)])
    assert before.mean() < 1 / 200
    assert after.any(axis=0).mean() > 0.95


def test_a_detector_adapts_to_the_new_mean():
    rng = np.random.default_rng(1)
    detector = ChangeDetector(0.1)
    for mean in [1.0] * 20 + [2.0] * 20:
        detector.update(rng.normal(mean, 0.1, 1))
    assert detector.mean == pytest.approx(2.0, abs=0.1)


def test_one_wild_outlier_is_no_change():
    detector = ChangeDetector(0.1)
    for _ in range(10):
        detector.update(1.0)
    assert not detector.update(1e9).any()
    assert detector.mean == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    "make", [lambda: ExponentialFilter(alpha=0.3), lambda: MovingAverage(4), lambda: ChangeDetector(0.2)]
)
def test_a_saved_filter_continues_where_it_was(make):
    original, copy = make(), make()
    for value in [1.0, np.nan, 2.0, 1.5]:
        original.update(value)
    copy.load_state_dict(json.loads(json.dumps(original.state_dict())))
    original.update(3.0)
    copy.update(3.0)
    assert copy.state_dict() == original.state_dict()


def test_a_foreign_state_is_refused_by_name():
    with pytest.raises(ConfigError, match="ExponentialFilter lacks"):
        ExponentialFilter(alpha=0.5).load_state_dict({"something": [1.0]})


@pytest.mark.parametrize(
    "bad", [{}, {"alpha": 0.5, "time_constant": 1.0}, {"alpha": 0.0}, {"alpha": 1.5}, {"time_constant": -1.0}]
)
def test_bad_filter_options_are_refused(bad):
    with pytest.raises(ConfigError):
        ExponentialFilter(**bad)
