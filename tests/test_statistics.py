"""Statistics of scores: they are what they say, and their intervals cover what they promise."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from scipy import stats

from swiftcruise.agents.statistics import (
    bootstrap_interval,
    interquartile_mean,
    mean,
    optimality_gap,
    percentile_interval,
    performance_profile,
    probability_of_improvement,
    student_t_quantile,
    zero_events_bound,
)
from swiftcruise.runtime.errors import ConfigError

SAMPLES = npst.arrays(np.float64, st.tuples(st.integers(1, 12), st.integers(1, 4)), elements=st.floats(-5, 5))


@given(SAMPLES)
def test_the_interquartile_mean_is_the_mean_without_the_outer_quarters(scores):
    assert interquartile_mean(scores) == pytest.approx(stats.trim_mean(scores.ravel(), 0.25))


@given(SAMPLES)
def test_statistics_of_many_resamples_at_once_are_those_of_each(scores):
    many = np.stack([scores, scores[::-1] + 1.0, 2.0 * scores])
    for statistic in (interquartile_mean, mean, optimality_gap):
        assert statistic(many) == pytest.approx([statistic(one) for one in many])


@given(SAMPLES, st.integers(0, 99))
def test_who_improves_on_whom_adds_up_to_one(scores, seed):
    others = np.random.default_rng(seed).permuted(scores, axis=0)
    there = probability_of_improvement(scores, others)
    assert 0 <= there <= 1
    assert there + probability_of_improvement(others, scores) == pytest.approx(1)
    assert probability_of_improvement(scores, scores) == 0.5


def test_improvement_is_counted_pair_by_pair():
    """Of two scenarios that differ more than the policies, each pair still tells who was better."""
    assert probability_of_improvement([[1.1], [9.1]], [[1.0], [9.0]]) == 1.0
    assert probability_of_improvement([[1.1], [9.0]], [[1.0], [9.0]]) == 0.75


def test_what_exceeds_the_target_makes_up_for_nothing():
    assert optimality_gap([[0.5], [2.0]]) == 0.25
    assert optimality_gap([[-1.0]]) == 2.0


def test_a_profile_is_the_share_of_episodes_above():
    assert performance_profile([[0.0, 0.5], [0.5, 1.0]], [-1.0, 0.0, 0.5, 1.0]).tolist() == [1.0, 0.75, 0.25, 0.0]


@pytest.mark.parametrize("degrees", [1, 2, 3, 5, 9, 30, 95])
def test_the_t_quantile_is_students(degrees):
    assert student_t_quantile(0.975, degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=2e-3)


@pytest.mark.parametrize("trials", [1, 5, 96, 10_000])
def test_no_event_in_n_trials_is_compatible_with_three_in_n(trials):
    exact = 1.0 - 0.05 ** (1.0 / trials)  # were it likelier, no event would be rarer than 5 %
    assert exact <= zero_events_bound(trials) <= 1.4 * exact


# ---------------------------------------------------------------- coverage


def covered(draw, statistic, truth, trials=400, cells=False):
    """Share of synthetic experiments whose 95 % interval holds the truth; `cells` resamples every cell instead."""
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(trials):
        samples = draw(rng)
        if cells:
            samples = [sample.reshape(-1, 1) for sample in samples]
        low, high = bootstrap_interval(statistic, *samples, resamples=400, seed=trial)
        hits += low <= truth <= high
    return hits / trials


def scenarios(rng, units=96):
    """Scores of a classical policy: scenarios differ, with a tail to the bad side."""
    return [(0.8 - 0.1 * rng.standard_exponential((units, 1)) + 0.02 * rng.standard_normal((units, 1)))]


def trainings(rng, units=10):
    """Scores of a learned policy: 10 trainings that differ, each on the same 50 scenarios."""
    return [0.8 + 0.05 * rng.standard_normal((units, 1)) + 0.05 * rng.standard_normal((units, 50))]


def difference(ours, theirs):
    return interquartile_mean(ours) - interquartile_mean(theirs)


def pairs(rng):
    """Two policies that share what scenarios are like."""
    common = rng.standard_normal((60, 1))
    return [common + 0.1 + 0.1 * rng.standard_normal((60, 1)), common + 0.1 * rng.standard_normal((60, 1))]


def learned_and_classical(rng):
    """A learned policy's trainings against a classical policy's scenarios: resampled each by its own units."""
    return [trainings(rng)[0] + 0.1, 0.8 + 0.1 * rng.standard_normal((96, 1))]


def test_intervals_over_scenarios_cover_what_they_promise():
    truth = interquartile_mean(scenarios(np.random.default_rng(1), units=400_000)[0])
    assert 0.90 <= covered(scenarios, interquartile_mean, truth) <= 0.98


def test_intervals_over_whole_trainings_cover_what_they_promise_and_those_over_cells_do_not():
    assert 0.90 <= covered(trainings, interquartile_mean, 0.8) <= 0.98
    assert covered(trainings, interquartile_mean, 0.8, cells=True) < 0.5


@pytest.mark.parametrize("draw", [pairs, learned_and_classical])
def test_intervals_of_differences_cover_what_they_promise(draw):
    assert 0.90 <= covered(draw, difference, 0.1) <= 0.98


def test_pairs_tell_apart_what_scenarios_would_hide():
    ours, theirs = pairs(np.random.default_rng(0))
    low, high = bootstrap_interval(difference, ours, theirs)
    assert 0 < low < high < 0.3
    low, high = bootstrap_interval(difference, ours, theirs[1:])  # another number of units: not paired
    assert low < 0 < high


def test_an_interval_is_the_same_again():
    sample = scenarios(np.random.default_rng(0))
    assert bootstrap_interval(mean, *sample) == bootstrap_interval(mean, *sample)


@pytest.mark.parametrize("sample", [[[0.5, 0.6]], [0.5, 0.6], []])
def test_less_than_two_units_tell_nothing_of_their_spread(sample):
    with pytest.raises(ConfigError, match="at least 2 units"):
        bootstrap_interval(mean, sample)
    assert math.isnan(percentile_interval([1.0], units=1)[0])
