import json

import numpy as np
import pytest

from swiftcruise.runtime.errors import ConfigError
from swiftcruise.runtime.fill import FillEstimator

A, K = 0.02, 5e-5


def feed(estimator, rng, steps, slowdown=1.0, hiccups=0.0):
    """Timings of 16 micro-batches a step, 3 % noise; some are hit by a hiccup of ten times."""
    for _ in range(steps):
        tokens = rng.integers(64, 2048, 16)
        seconds = slowdown * (A + K * tokens) * (1 + 0.03 * rng.standard_normal(16))
        estimator.observe(1, tokens, np.where(rng.random(16) < hiccups, 10 * seconds, seconds))


@pytest.mark.parametrize("hiccups", [0.0, 0.1])
def test_both_costs_are_found_in_spite_of_noise_and_hiccups(hiccups):
    estimator = FillEstimator()
    feed(estimator, np.random.default_rng(0), 60, hiccups=hiccups)
    assert estimator.a == pytest.approx(A, rel=0.08)
    assert estimator.k == pytest.approx(K, rel=0.05)


def test_timings_of_whole_steps_serve_as_well():
    rng, estimator = np.random.default_rng(1), FillEstimator()
    for _ in range(60):
        micro_batches = rng.integers(2, 17)
        tokens = micro_batches * rng.integers(64, 2048)
        estimator.observe(micro_batches, tokens, A * micro_batches + K * tokens)
    assert (estimator.a, estimator.k) == (pytest.approx(A), pytest.approx(K))


def test_fill_is_the_share_of_time_that_large_micro_batches_would_have_needed():
    estimator = FillEstimator()
    feed(estimator, np.random.default_rng(2), 60)
    small, large = (estimator.fill(tokens, A + K * tokens) for tokens in (100, 10000))
    assert small == pytest.approx(0.2, abs=0.03)
    assert large == pytest.approx(0.96, abs=0.04)


def test_a_neighbour_that_halves_the_speed_halves_fill_instead_of_moving_the_yardstick():
    rng, estimator = np.random.default_rng(3), FillEstimator()
    feed(estimator, rng, 60)
    alone = estimator.fill(2000, A + K * 2000)
    feed(estimator, rng, 200, slowdown=2.0)
    assert estimator.fill(2000, 2 * (A + K * 2000)) == pytest.approx(alone / 2, rel=0.1)


def test_a_start_under_contention_is_forgotten_soon_after_it_ends():
    rng, estimator = np.random.default_rng(4), FillEstimator()
    feed(estimator, rng, 30, slowdown=2.0)
    feed(estimator, rng, 60)
    assert estimator.k == pytest.approx(K, rel=0.12)


def test_a_lasting_slowdown_is_learned_in_the_end():
    rng, estimator = np.random.default_rng(5), FillEstimator(forgetting=0.9)
    feed(estimator, rng, 10)
    feed(estimator, rng, 400, slowdown=2.0)
    assert estimator.k == pytest.approx(2 * K, rel=0.15)


def test_launch_cost_is_never_negative():
    estimator, tokens = FillEstimator(), np.linspace(100, 2000, 50)
    estimator.observe(1, tokens, 1e-6 * tokens**1.5)
    assert estimator.a == 0
    assert 1e-6 * 100**0.5 < estimator.k < 1e-6 * 2000**0.5


def test_nothing_is_claimed_before_the_costs_can_be_told_apart():
    estimator = FillEstimator()
    assert np.isnan(estimator.fill(1000, 1.0))
    estimator.observe(1, np.full(100, 512), np.full(100, A + K * 512))
    assert np.isnan(estimator.k)
    assert np.isnan(estimator.a)


def test_timings_that_make_no_sense_are_skipped_and_an_empty_interval_has_no_fill():
    estimator = FillEstimator()
    feed(estimator, np.random.default_rng(6), 20)
    before = estimator.k
    estimator.observe(1, [100, 100, 100, 0], [0.0, np.nan, -1.0, 1.0])
    assert estimator.k == before
    assert np.isnan(estimator.fill(0, 0.0))


def test_a_resumed_estimator_goes_on_alike():
    estimator, resumed = FillEstimator(), FillEstimator()
    feed(estimator, np.random.default_rng(7), 20)
    resumed.load_state_dict(json.loads(json.dumps(estimator.state_dict())))
    for each in (estimator, resumed):
        feed(each, np.random.default_rng(8), 5)
    assert (resumed.a, resumed.k) == (estimator.a, estimator.k)


def test_bad_settings_are_refused_by_name():
    with pytest.raises(ConfigError, match="forgetting"):
        FillEstimator(forgetting=0.1)
    with pytest.raises(ConfigError, match="tolerance"):
        FillEstimator(tolerance=0.0)


def test_what_is_collected_step_by_step_is_learned_in_blocks_once_the_costs_are_known():
    rng, estimator, learned = np.random.default_rng(9), FillEstimator(), []
    for _ in range(21):
        tokens = rng.integers(64, 2048, 16)
        seconds = (A + K * tokens) * (1 + 0.01 * rng.standard_normal(16))
        estimator.collect(zip(tokens.tolist(), seconds.tolist(), strict=True))
        learned.append(estimator.k)
    assert learned[0] == pytest.approx(K, rel=0.1)
    assert estimator.state_dict()["observations"] == 21 * 16
    assert len(set(learned)) == 6  # the first step, and five blocks of four
