"""The PID controller against simple-pid and against what every PID must do."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simple_pid import PID

from swiftcruise.baselines.pid import PIDController
from swiftcruise.runtime.errors import ConfigError

gain = st.floats(0, 10)
value = st.floats(-100, 100)
anything = st.floats(allow_nan=True, allow_infinity=True)
anti_windup = st.sampled_from(["back-calculation", "clamping", "none"])


@given(gain, gain, gain, value, st.lists(st.tuples(value, st.floats(0.01, 10)), max_size=20), st.booleans(),
       st.sampled_from([(None, None), (-5.0, 5.0), (0.0, None)]))  # fmt: skip
@settings(max_examples=100)
def test_it_equals_simple_pid_bit_for_bit(kp, ki, kd, setpoint, samples, on_measurement, limits):
    reference = PID(
        kp, ki, kd, setpoint, sample_time=None, output_limits=limits, differential_on_measurement=on_measurement
    )
    low, high = (-np.inf if limits[0] is None else limits[0]), (np.inf if limits[1] is None else limits[1])
    pid = PIDController(
        kp, ki, kd, setpoint,
        output_limits=(low, high), derivative_on_measurement=on_measurement, anti_windup="clamping",
    )  # fmt: skip
    for measurement, dt in samples:
        assert pid.update(measurement, dt)[0] == reference(measurement, dt=dt)
        assert tuple(term[0] for term in pid.terms) == reference.components


@given(gain, gain, gain, anti_windup, st.lists(st.tuples(anything, anything), max_size=20))
@settings(max_examples=100)
def test_the_output_is_bounded_whatever_is_measured(kp, ki, kd, scheme, samples):
    pid = PIDController(
        kp, ki, kd, 1.0, output_limits=(-3.0, 7.0), derivative_time=0.5, rate_limit=2.0, anti_windup=scheme
    )
    for measurement, dt in samples:
        assert -3.0 <= pid.update(measurement, dt)[0] <= 7.0


@given(st.sampled_from(["back-calculation", "clamping"]), st.integers(1, 2000), st.floats(0.1, 2.0))
@settings(max_examples=50)
def test_no_saturation_however_long_delays_the_way_back(scheme, intervals, ki):
    pid = PIDController(0.5, ki, 0.0, 0.0, output_limits=(-1.0, 1.0), anti_windup=scheme)
    for _ in range(intervals):
        pid.update(-10.0, 1.0)
    outputs = [pid.update(10.0, 1.0)[0] for _ in range(12)]
    assert outputs[-1] == -1.0


def test_without_anti_windup_the_way_back_takes_as_long_as_the_saturation():
    pid = PIDController(0.5, 0.5, 0.0, 0.0, output_limits=(-1.0, 1.0), anti_windup="none")
    for _ in range(100):
        pid.update(-10.0, 1.0)
    assert all(pid.update(10.0, 1.0)[0] == 1.0 for _ in range(90))


@pytest.mark.parametrize(("measurement", "dt"), [(np.nan, 1.0), (np.inf, 1.0), (3.0, 0.0), (3.0, -1.0), (3.0, np.nan)])
def test_a_missing_measurement_or_time_holds_output_and_state(measurement, dt):
    pid = PIDController(1.0, 0.5, 0.2, 1.0)
    held = pid.update(0.5, 1.0)
    terms = pid.terms
    assert pid.update(measurement, dt) == held
    assert pid.terms == terms


def test_a_gap_in_the_measurements_gives_no_derivative_kick():
    whole, gappy = (PIDController(0.0, 0.0, 1.0) for _ in range(2))
    whole.update(0.0, 1.0)
    gappy.update(0.0, 1.0)
    for measurement in (1.0, 2.0, 3.0):
        whole.update(measurement, 1.0)
        gappy.update(np.nan if measurement < 3.0 else measurement, 1.0)
    assert gappy.terms.derivative == whole.terms.derivative == -1.0


@given(value, value, st.floats(0.1, 5))
@settings(max_examples=50)
def test_from_manual_it_takes_over_without_a_bump(by_hand, measurement, kp):
    pid = PIDController(kp, 0.0, 1.0, 0.0)
    pid.update(5.0, 1.0)
    pid.manual(by_hand, measurement)
    assert pid.output == by_hand
    assert pid.update(measurement, 1.0)[0] == pytest.approx(by_hand, abs=1e-9)


@given(gain, gain, value)
@settings(max_examples=50)
def test_a_change_of_gains_is_bumpless(kp, ki, measurement):
    pid = PIDController(2.0, 0.5, 1.0, 10.0, derivative_time=2.0)
    pid.update(0.0, 1.0)
    before = pid.update(measurement, 1.0)
    pid.set_gains(kp, ki, 1.0)
    assert np.sum(pid.terms) == pytest.approx(before[0], abs=1e-9)


def test_an_overridden_controller_waits_a_set_distance_above_what_is_applied():
    pid = PIDController(0.3, 0.5, 0.0, 0.0, tracking_time=1.5)
    for _ in range(50):
        pid.track(4.0, 1.0)
        pid.update(-2.0, 1.0)  # error 2
    weight = -np.expm1(-1 / 1.5)
    assert pid.output == pytest.approx(4.0 + 0.5 * 2.0 / weight)


def test_tracking_takes_up_a_saturation_outside_at_once():
    pid = PIDController(0.0, 1.0, 0.0, 0.0)
    for _ in range(100):
        pid.update(-1.0, 1.0)
        pid.track(3.0)
    assert pid.update(1.0, 1.0) == 2.0


def test_the_output_moves_no_faster_than_the_rate_limit():
    pid = PIDController(10.0, 0.0, 0.0, 1.0, rate_limit=0.25)
    assert [pid.update(0.0, 2.0)[0] for _ in range(3)] == [0.5, 1.0, 1.5]


def test_a_setpoint_step_gives_no_derivative_kick():
    pid = PIDController(0.0, 0.0, 5.0, 0.0)
    pid.update(1.0, 1.0)
    pid.setpoint = np.asarray(100.0)
    assert pid.update(1.0, 1.0) == 0.0


def test_the_derivative_filter_spreads_a_jump_and_loses_none_of_it():
    pid = PIDController(0.0, 0.0, 1.0, derivative_time=3.0)
    pid.update(0.0, 1.0)
    derivatives = [pid.update(1.0, 1.0)[0] for _ in range(200)]
    assert derivatives[0] == pytest.approx(-0.25)
    assert sum(derivatives) == pytest.approx(-1.0)


def test_without_a_time_step_the_clock_tells_it():
    now = 100.0
    pid, told = PIDController(1.0, 0.5, 0.2, 1.0, clock=lambda: now), PIDController(1.0, 0.5, 0.2, 1.0)
    for passed, measurement in ((2.0, 0.0), (0.5, 0.4), (30.0, 0.7)):
        now += passed
        assert pid.update(measurement) == told.update(measurement, passed)
    assert pid.update(0.9) == told.output  # no time has passed


@given(
    gain, gain, gain, anti_windup, st.lists(st.tuples(value, st.floats(0.01, 10)), min_size=1, max_size=10),
    st.lists(st.tuples(st.sampled_from([np.nan, np.inf, -np.inf]), anything), min_size=1, max_size=10),
)  # fmt: skip
@settings(max_examples=50)
def test_whatever_went_before_a_measurement_that_fails_holds_the_last_output(kp, ki, kd, scheme, history, silence):
    pid = PIDController(kp, ki, kd, 1.0, output_limits=(-3.0, 7.0), derivative_time=0.5, anti_windup=scheme)
    for measurement, dt in history:
        pid.update(measurement, dt)
    held, terms = pid.output.tolist(), [term.tolist() for term in pid.terms]
    for measurement, dt in silence:
        assert pid.update(measurement, dt).tolist() == held
    assert [term.tolist() for term in pid.terms] == terms


@given(value, st.floats(0.1, 5), st.floats(0, 5), anti_windup)
@settings(max_examples=50)
def test_manual_and_automatic_may_alternate_without_a_bump(measurement, kp, ki, scheme):
    pid = PIDController(kp, ki, 0.0, measurement, output_limits=(-200.0, 200.0), anti_windup=scheme)
    for by_hand in (5.0, -40.0, 0.0):  # at the setpoint nothing moves the output but the hand
        pid.manual(by_hand, measurement)
        for _ in range(3):
            assert pid.update(measurement, 1.0)[0] == pytest.approx(by_hand, abs=1e-9)


@pytest.mark.parametrize("scheme", ["back-calculation", "clamping"])
def test_it_settles_a_lagging_process_without_error(scheme):
    pid = PIDController(1.0, 0.3, 0.2, [1.0, 5.0], output_limits=(0.0, 8.0), anti_windup=scheme, n=2)
    level = np.zeros(2)
    for _ in range(100):
        level += 0.3 * (pid.update(level, 1.0) - level)
    assert level == pytest.approx([1.0, 5.0], abs=1e-3)


def test_each_loop_is_its_own():
    rng = np.random.default_rng(0)
    samples = rng.normal(size=(20, 3))
    samples[5, 1] = np.nan
    gains = [0.5, 1.0, 2.0]
    together = PIDController(gains, 0.3, 0.1, 0.5, derivative_time=1.0, output_limits=(-1, 1), n=3)
    alone = [PIDController(kp, 0.3, 0.1, 0.5, derivative_time=1.0, output_limits=(-1, 1)) for kp in gains]
    for row in samples:
        expected = [pid.update(x, 1.0)[0] for pid, x in zip(alone, row, strict=True)]
        assert together.update(row, 1.0).tolist() == expected


def test_a_saved_controller_continues_where_it_was():
    original, copy = (PIDController(1.0, 0.5, 0.2, 1.0, derivative_time=1.0) for _ in range(2))
    for measurement in (0.0, 0.4, np.nan):
        original.update(measurement, 1.0)
    copy.load_state_dict(json.loads(json.dumps(original.state_dict())))
    assert copy.update(0.7, 1.0) == original.update(0.7, 1.0)


@pytest.mark.parametrize(
    "bad",
    [{"kp": np.nan}, {"setpoint": np.inf}, {"output_limits": (1.0, 0.0)}, {"derivative_time": -1.0},
     {"rate_limit": -1.0}, {"tracking_time": -1.0}, {"anti_windup": "magic"}],
)  # fmt: skip
def test_bad_options_are_refused_by_name(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        PIDController(**bad)
