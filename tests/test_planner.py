"""The micro-batch plan."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftcruise.runtime.planner import pack, plain_plan

lengths_lists = st.lists(st.integers(1, 2000), min_size=1, max_size=24)


@given(
    lengths_lists,
    st.integers(1, 5000),
    st.integers(1, 30),
    st.floats(0, 1e4) | st.just(math.inf),
    st.booleans(),
)
def test_every_sample_is_planned_once_and_only_a_lone_sample_may_exceed_the_budget(lengths, budget, cap, launch, free):
    plan = pack(lengths, token_budget=budget, micro_batch_cap=cap, launch_tokens=launch, padding_free=free)
    assert sorted(i for m in plan for i in m.indices) == list(range(len(lengths)))
    for m in plan:
        assert m.samples <= cap
        assert m.length == max(lengths[i] for i in m.indices)
        assert m.tokens == (sum(lengths[i] for i in m.indices) if free else m.samples * m.length)
        assert m.tokens <= budget or m.samples == 1


@given(st.lists(st.integers(1, 300), min_size=1, max_size=7), st.integers(1, 900), st.floats(0, 500))
def test_the_plan_is_the_cheapest_of_all_contiguous_splits(lengths, budget, launch):
    ordered = sorted(lengths, reverse=True)

    def cost(parts):
        return sum(launch + max(p) * len(p) for p in parts)

    def splits(rest):
        yield [rest]
        for cut in range(1, len(rest)):
            yield from ([rest[:cut], *tail] for tail in splits(rest[cut:]))

    allowed = [s for s in splits(ordered) if all(len(p) == 1 or max(p) * len(p) <= budget for p in s)]
    plan = pack(lengths, token_budget=budget, launch_tokens=launch)
    assert sum(launch + m.tokens for m in plan) == pytest.approx(min(map(cost, allowed)))


@given(lengths_lists, st.integers(1, 5000))
def test_without_a_known_launch_cost_the_number_of_micro_batches_is_least(lengths, budget):
    few = len(pack(lengths, token_budget=budget))
    assert all(few <= len(pack(lengths, token_budget=budget, launch_tokens=t)) for t in (0, 10, 1000))


@given(lengths_lists, st.lists(st.integers(1, 3000), min_size=24, max_size=24))
def test_a_memory_ceiling_binds_each_micro_batch_by_its_longest_sample(lengths, ceilings):
    for m in pack(lengths, token_ceilings=ceilings):
        assert m.samples == 1 or m.tokens <= ceilings[m.indices[0]]


def test_a_free_launch_leaves_no_padding_and_a_dear_one_merges_all():
    lengths = [5, 50, 5, 400]
    assert sum(m.tokens for m in pack(lengths, launch_tokens=0)) == sum(lengths)
    assert len(pack(lengths)) == 1


def test_the_plain_plan_keeps_the_samplers_batches():
    plan = plain_plan([3, 9, 4], [(0, 1), (2,)])
    assert [(m.indices, m.length, m.tokens) for m in plan] == [((0, 1), 9, 18), ((2,), 4, 4)]
    assert plan[1].quadratic == 0
    assert plan[0].quadratic == 2 * 9**2


@pytest.mark.parametrize("wrong", [{"token_budget": 0}, {"micro_batch_cap": math.nan}, {"launch_tokens": -1}])
def test_an_impossible_plan_is_refused(wrong):
    with pytest.raises(ValueError, match="cannot plan"):
        pack([1, 2], **wrong)
