"""Length distributions, and the table of what packing costs against the planner itself."""

import functools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftcruise.envs.plants import assembly, compiling, kept_tables, physics
from swiftcruise.envs.plants.kept_tables import kept_table
from swiftcruise.envs.plants.lengths import Gamma, Lengths, Lognormal, Uniform
from swiftcruise.envs.plants.packing import BUDGETS, CAPS, CLASSES, COLUMNS, STEP, PackingTable, read_all
from swiftcruise.envs.plants.profile import load_hardware, load_model
from swiftcruise.envs.plants.setting import TrainingSetting, coefficients
from swiftcruise.runtime.errors import ConfigError
from swiftcruise.runtime.fill import FillEstimator
from swiftcruise.runtime.planner import pack

CHAT = Lengths.mixture([Lognormal(3.75, 1.0)])
BURSTS = Lengths.mixture([Lognormal(3.75, 1.0, 0.9), Lognormal(6.6, 0.25, 0.1)])
samples_of_lengths = st.lists(st.integers(1, 20000), min_size=1, max_size=50)


@pytest.mark.parametrize(
    ("component", "mean", "deviation"),
    [
        (Uniform(91, 575), 333, 484 / math.sqrt(12)),
        (Gamma(3449, 2458), 3449, 2458),
        (Gamma(100, 200), 100, 200),
        (Lognormal(3.75, 0.5), math.exp(3.875), math.exp(3.875) * math.sqrt(math.expm1(0.25))),
    ],
)
def test_a_distribution_has_its_mean_and_deviation(component, mean, deviation):
    values = Lengths.mixture([component]).values
    assert np.mean(values) == pytest.approx(mean, rel=0.01)
    assert np.std(values) == pytest.approx(deviation, rel=0.03)


def test_a_mixture_holds_its_parts_in_their_weights():
    both = Lengths.mixture([Uniform(10, 20, 3), Uniform(1000, 2000, 1)])
    assert np.mean(both.values <= 20) == pytest.approx(0.75, abs=0.002)
    assert both.mean == pytest.approx(0.75 * 15 + 0.25 * 1500, rel=0.01)


@given(samples_of_lengths, st.integers(1, 64))
def test_the_longest_of_many_lies_between_mean_and_maximum(data, many):
    lengths = Lengths.empirical(data)
    assert lengths.expected_longest(1) == pytest.approx(np.mean(data))
    assert lengths.mean * (1 - 1e-9) <= lengths.expected_longest(many) <= lengths.longest * (1 + 1e-9)
    assert lengths.expected_longest(many) <= lengths.expected_longest(2 * many) * (1 + 1e-9)


@pytest.mark.parametrize("many", [1, 2, 8, 32])
def test_the_longest_of_many_is_that_of_draws(many):
    draws = CHAT.draw(40000 * many, np.random.default_rng(1)).reshape(-1, many).max(axis=1)
    nodes, weights = CHAT.limited(2000).longest_nodes(many)
    assert CHAT.expected_longest(many) == pytest.approx(draws.mean(), rel=0.03)
    assert weights.sum() == pytest.approx(1)
    assert nodes @ weights == pytest.approx(CHAT.limited(2000).expected_longest(many), rel=0.02)


@given(samples_of_lengths, st.integers(1, 20000))
def test_a_limit_deletes_or_truncates_what_is_longer(data, limit):
    lengths = Lengths.empirical(data)
    assert lengths.limited(limit, "truncate").longest == min(limit, max(data))
    if min(data) > limit:
        with pytest.raises(ConfigError, match="max_length"):
            lengths.limited(limit)
    else:
        assert lengths.limited(limit).values.tolist() == [x for x in sorted(data) if x <= limit]


@given(samples_of_lengths, st.floats(1, 5))
def test_fragmentation_builds_up_only_while_longer_samples_still_come(data, built_up):
    lengths = Lengths.empirical(data)
    assert 1 <= lengths.fragmentation(built_up) <= built_up
    assert Lengths.fixed(512).fragmentation(built_up) == 1
    assert lengths.limited(min(data), "truncate").fragmentation(built_up) == 1


@pytest.mark.parametrize("bad", [[], [0], [5, float("nan")]])
def test_what_is_no_length_is_refused(bad):
    with pytest.raises(ConfigError, match="1 token"):
        Lengths.empirical(bad)


@pytest.mark.parametrize("bad", [Uniform(5, 5), Gamma(10, float("inf")), Lognormal(1, 1, weight=0)])
def test_what_is_no_distribution_is_refused(bad):
    with pytest.raises(ConfigError, match="not a distribution"):
        Lengths.mixture([bad])


@pytest.mark.parametrize("lengths", [CHAT.limited(2048), BURSTS.limited(2048)], ids=["chat", "bursts"])
@pytest.mark.parametrize("launch_tokens", [20, 500, math.inf])
@pytest.mark.parametrize("samples", [1, 3, 16, 40])
def test_the_packing_table_agrees_with_the_planner(lengths, samples, launch_tokens):
    table = PackingTable.build(lengths, samples, launch_tokens)
    rng = np.random.default_rng(7)
    steps = [lengths.draw(samples, rng).tolist() for _ in range(400)]
    errors = []
    for budget in (300, 3000, 30000):
        for cap in (1, 2, 5, math.inf):
            plans = [
                pack(step, token_budget=budget, micro_batch_cap=cap, launch_tokens=launch_tokens) for step in steps
            ]
            count = sum(len(plan) for plan in plans)
            padding = sum(batch.tokens for plan in plans for batch in plan) / sum(map(sum, steps))
            found = table.at(budget, cap)
            errors.append(found["micro_batches"] / (count / len(steps)) - 1)
            errors.append(found["padded_tokens"] / found["real_tokens"] / padding - 1)
    assert math.sqrt(np.mean(np.square(errors))) < 0.04
    assert np.max(np.abs(errors)) < 0.12


def test_outside_its_grid_the_packing_table_gives_its_edge():
    table = PackingTable.build(CHAT.limited(500), 4, draws=8)
    assert table.at(1e-3) == table.at(1)
    assert table.at(math.inf, math.inf) == table.at(1e12, 4) == table.at(math.nan, math.nan)
    assert table.at(math.inf)["micro_batches"] == 1
    assert table.at(1)["padded_tokens"] == table.at(1)["real_tokens"]


@st.composite
def optimizer_steps(draw):
    samples, count = draw(st.integers(1, 30)), draw(st.integers(1, 3))
    of_a_step = st.lists(st.integers(1, 5000), min_size=samples, max_size=samples)
    return draw(st.lists(of_a_step, min_size=count, max_size=count))


@settings(deadline=None)  # the first one compiles
@given(optimizer_steps(), st.sampled_from([0, math.inf]) | st.floats(0, 10000), st.data())
def test_on_its_grid_the_packing_table_is_what_the_planner_does(steps, launch_tokens, data):
    table = PackingTable.of_steps(np.array(steps), launch_tokens)
    cap = data.draw(st.sampled_from(table.caps.tolist()))
    budget = 2.0 ** (table.low + STEP * data.draw(st.integers(max(0, math.ceil(-table.low / STEP)), BUDGETS - 1)))
    limits = {"token_budget": budget, "micro_batch_cap": cap, "launch_tokens": launch_tokens}
    plans = [pack(step, **limits) for step in steps]
    batches = sorted((batch for plan in plans for batch in plan), key=lambda batch: (batch.tokens, -batch.length))
    found = table.at(budget, cap)

    def mean(values):
        return pytest.approx(sum(values) / len(steps), rel=1e-6)  # the table is float32

    assert found["micro_batches"] == mean([len(batches)])
    assert found["real_tokens"] == mean(map(sum, steps))
    assert found["padded_tokens"] == mean(batch.tokens for batch in batches)
    assert found["token_lengths"] == mean(batch.tokens * batch.length for batch in batches)
    assert found["largest_tokens"] == mean(max(batch.tokens for batch in plan) for plan in plans)
    assert found["longest"] == mean(map(max, steps))
    edges = np.linspace(0, len(batches), CLASSES + 1)
    for name, values in (
        ("class_tokens", [batch.tokens for batch in batches]),
        ("class_token_lengths", [batch.tokens * batch.length for batch in batches]),
    ):
        up_to_edge = np.interp(edges, np.arange(len(batches) + 1), np.cumsum([0, *values]))
        classes = [found[f"{name}_{group}"] for group in range(CLASSES)]
        assert classes == pytest.approx(np.diff(up_to_edge) * CLASSES / len(batches), rel=1e-6)


@functools.cache
def tables():
    return [PackingTable.build(CHAT.limited(500), samples, draws=8) for samples in (1, 5, CAPS + 20)]


which_table = st.integers(0, 2)
unlimited = st.sampled_from([math.inf, math.nan])
budgets, caps = st.floats(0.1, 1e6) | unlimited, st.floats(1, 50) | unlimited


@settings(deadline=None)
@given(which_table, budgets, caps)
def test_the_classes_of_micro_batches_ascend_and_make_up_all_of_them_anywhere(which, budget, cap):
    found = tables()[which].at(budget, cap)
    sizes = [found[f"class_tokens_{group}"] for group in range(CLASSES)]
    attention = [found[f"class_token_lengths_{group}"] for group in range(CLASSES)]
    assert sizes == sorted(sizes)
    assert np.mean(sizes) * found["micro_batches"] == pytest.approx(found["padded_tokens"])
    assert np.mean(attention) * found["micro_batches"] == pytest.approx(found["token_lengths"])


@settings(deadline=None)
@given(st.integers(40, BUDGETS - 2), st.integers(0, CAPS - 2), st.floats(0, 1), st.floats(0, 1))
def test_between_its_grid_points_the_packing_table_is_linear_in_log_budget_and_in_cap(i, j, u, v):
    table = tables()[2]

    def padded_tokens(u, v):
        cap = table.caps[j] * (1 - v) + table.caps[j + 1] * v
        return table.at(2 ** (table.low + STEP * (i + u)), cap)["padded_tokens"]

    few, many = (padded_tokens(0, k) * (1 - u) + padded_tokens(1, k) * u for k in (0, 1))
    assert padded_tokens(u, v) == pytest.approx(few * (1 - v) + many * v)


@settings(deadline=None)
@given(which_table, budgets, caps)
def test_stacked_and_compiled_packing_tables_read_the_same_to_the_last_bit(which, budget, cap):
    stack, out = PackingTable.stack(tables()), np.empty(len(COLUMNS))
    COMPILED_READ(stack.values, stack.caps, stack.low, stack.step, which, budget, cap, out)
    assert dict(zip(COLUMNS, out.tolist(), strict=True)) == tables()[which].at(budget, cap)


COMPILED_READ = compiling.compiled(read_all)


def test_equal_lengths_of_more_samples_than_caps_make_a_table():
    table = PackingTable.build(Lengths.fixed(100), CAPS + 13, draws=2)
    assert table.at(math.inf)["micro_batches"] == 1
    assert table.at(math.inf, 4)["micro_batches"] == math.ceil((CAPS + 13) / 4)
    assert table.at(100)["padded_tokens"] == table.at(100)["real_tokens"]


def same(a, b):
    return a.low == b.low and a.caps.tolist() == b.caps.tolist() and a.values.tobytes() == b.values.tobytes()


def test_a_table_is_read_from_disk_where_it_was_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_tables, "_directory", lambda: tmp_path)
    built = kept_table(CHAT, 5, 64.0)
    assert same(built, PackingTable.build(CHAT, 5, 64.0))
    monkeypatch.setattr(PackingTable, "build", None)
    assert same(kept_table(CHAT, 5, 64), built)
    monkeypatch.undo()
    monkeypatch.setattr(kept_tables, "_directory", lambda: tmp_path)
    for other in (kept_table(BURSTS, 5, 64.0), kept_table(CHAT, 6, 64.0), kept_table(CHAT, 5, 128.0)):
        assert not same(other, built)
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("damage", [lambda b: b[:-5], lambda b: b"", lambda b: b[:999] + b"!!" + b[1001:]])
def test_a_damaged_table_on_disk_is_built_anew(tmp_path, monkeypatch, damage):
    monkeypatch.setattr(kept_tables, "_directory", lambda: tmp_path)
    built = kept_table(CHAT, 3)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert same(kept_table(CHAT, 3), built)
    assert file.read_bytes() == whole


@pytest.mark.parametrize("directory", [None, "/nowhere"])
def test_where_nothing_can_be_kept_tables_are_built(monkeypatch, directory):
    monkeypatch.setattr(kept_tables, "_directory", lambda: directory and Path(directory))
    assert same(kept_table(CHAT, 3), PackingTable.build(CHAT, 3))


@pytest.mark.parametrize("model", ["qwen-7b", "qwen-1.8b"])
@pytest.mark.parametrize("hardware", ["a100-80g", "rtx3090"])
def test_the_lab_plans_with_the_launch_cost_that_the_hook_would_learn(hardware, model):
    lengths = CHAT.scaled(4)
    time, _ = coefficients(load_hardware(hardware), load_model(model), TrainingSetting())
    hook = FillEstimator()
    tokens = np.random.default_rng(3).uniform(lengths.mean, 8 * lengths.mean, 2000)
    seconds = [physics.micro_batch_seconds(time, each, lengths.mean, 0.5) for each in tokens]
    hook.observe(1, tokens, seconds)
    launch = assembly._launch_tokens(time, lengths, 32)
    assert math.log2(launch) == int(math.log2(launch))
    assert 0.5 <= launch / hook.launch_tokens <= 2
    assert assembly._launch_tokens(time, Lengths.fixed(500), 32) == math.inf  # no padding to save
