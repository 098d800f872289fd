"""One optimizer step as a macro-batch: plain whatever the micro-batches are, and unchanged by an out-of-memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftcruise.runtime.macro_batch import MacroBatchRunner, SampleDoesNotFit, Settings
from swiftcruise.runtime.memory_model import PeakMemoryModel
from swiftcruise.runtime.memory_watch import MemoryWatch

from .small_trainer import OUT_OF_MEMORY, Model, SmallTrainer, layers_of, plain_step, rows_of, twins

ACCUMULATION = 4
LENGTHS = [9, 3, 14, 5, 2, 11, 7, 4, 6, 12]


def make_runner(trainer: SmallTrainer, model: Model, controls: Settings | None = None) -> MacroBatchRunner:
    runner = MacroBatchRunner(trainer, ACCUMULATION)
    runner.memory = MemoryWatch(PeakMemoryModel(1), None, 1.0, layers_of(model))
    runner.settings = Settings() if controls is None else controls
    return runner


def run_step(runner: MacroBatchRunner, model: Model, lengths: Sequence[int] = LENGTHS, batch: int = 3) -> torch.Tensor:
    macro = rows_of(lengths, batch)
    items = runner.trainer.count_items(runner.prepare(macro))
    return runner.run(model, [(macro, items)])


def assert_close(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def fail_once(at: int, stage: str, error: type[Exception] = torch.OutOfMemoryError) -> Callable[[int, str], None]:
    def fail(call: int, now: str) -> None:
        if (call, now) == (at, stage):
            raise error(OUT_OF_MEMORY)

    return fail


controls_in_force = st.builds(
    Settings,
    token_budget=st.none() | st.integers(1, 60).map(float),
    micro_batch_cap=st.none() | st.integers(1, 12).map(float),
    checkpoint_fraction=st.none() | st.floats(0, 1),
)


@settings(max_examples=40, deadline=None)
@given(
    loss=st.sampled_from(["tokens", "mean", "nominal"]),
    lengths=st.lists(st.integers(1, 15), min_size=1, max_size=12),
    batch=st.integers(1, 4),
    controls=controls_in_force,
    launch=st.sampled_from([0.0, 5.0, float("inf")]),
)
def test_a_step_is_the_plain_one_whatever_the_micro_batches(loss, lengths, batch, controls, launch):
    trainer = SmallTrainer(loss)
    plain, ours = twins()
    lengths = lengths[: batch * ACCUMULATION]
    runner = make_runner(trainer, ours, controls)
    runner.launch_tokens = launch
    total = run_step(runner, ours, lengths, batch)
    assert_close([total], [plain_step(plain, trainer, rows_of(lengths, batch), ACCUMULATION)])
    assert_close(ours.gradients(), plain.gradients())
    assert sum(trainer.metrics) == len(lengths)
    groups = rows_of(lengths, batch).groups
    assert sum(trainer.weights) == pytest.approx(len(groups))


def test_without_controls_the_step_is_plain_to_the_last_bit():
    trainer = SmallTrainer("mean")
    plain, ours = twins(dropout=0.3)
    torch.manual_seed(1)
    total = run_step(make_runner(trainer, ours), ours)
    torch.manual_seed(1)
    assert torch.equal(total, plain_step(plain, trainer, rows_of(LENGTHS, 3), ACCUMULATION))
    assert all(map(torch.equal, ours.gradients(), plain.gradients()))


@pytest.mark.parametrize("loss", ["tokens", "mean", "nominal"])
@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.parametrize("at", range(4))
def test_out_of_memory_at_any_moment_changes_neither_gradients_nor_metrics(loss: str, stage: str, at: int):
    trainer = SmallTrainer(loss)
    plain, ours = twins()
    runner = make_runner(trainer, ours)
    trainer.fail = fail_once(at, stage)
    # The last batch is a single sample: it cannot be split and is computed again with every layer checkpointed.
    total = run_step(runner, ours)
    assert_close([total], [plain_step(plain, trainer, rows_of(LENGTHS, 3), ACCUMULATION)])
    assert_close(ours.gradients(), plain.gradients())
    assert sum(trainer.metrics) == runner.last.samples == len(LENGTHS)
    assert (runner.last.oom_count, trainer.steps_ended) == (1, 1)
    assert runner.last.padded_tokens == sum(micro.tokens for micro in runner.last.micro)


def test_a_redone_step_draws_the_dropout_that_it_would_have_drawn_without_the_failure():
    trainer, again = SmallTrainer(), SmallTrainer()
    ours, undisturbed = twins(dropout=0.4)
    runner = make_runner(trainer, ours)
    trainer.fail = fail_once(2, "backward")
    torch.manual_seed(5)
    run_step(runner, ours)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    run_step(make_runner(again, undisturbed, Settings(token_budget=runner.settings.token_budget)), undisturbed)
    assert all(map(torch.equal, ours.gradients(), undisturbed.gradients()))
    assert torch.equal(after, torch.get_rng_state())


def test_each_failure_halves_what_failed_until_it_fits():
    trainer = SmallTrainer()
    plain, ours = twins()
    runner = make_runner(trainer, ours, Settings(token_budget=1000.0))
    said: list[int] = []
    runner._on_event = lambda kind, line, details: said.append(details["tokens"])
    trainer.fits = 20
    run_step(runner, ours)
    assert max(micro.tokens for micro in runner.last.micro) <= trainer.fits
    assert len(said) == runner.last.oom_count > 1
    assert said == sorted(said, reverse=True)
    assert (runner.failed_tokens, runner.settings.token_budget) == (said[-1], said[-1] // 2)
    plain_step(plain, trainer, rows_of(LENGTHS, 3), ACCUMULATION)
    assert_close(ours.gradients(), plain.gradients())


def test_a_single_sample_gets_every_layer_checkpointed_before_the_run_is_given_up():
    trainer = SmallTrainer()
    model, _ = twins()
    runner = make_runner(trainer, model)

    def fail(call: int, stage: str) -> None:
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    trainer.fail = fail
    with pytest.raises(SampleDoesNotFit, match=r"length 9 tokens does not fit, even with every layer checkpointed"):
        run_step(runner, model, [9], 1)
    assert all(layer.gradient_checkpointing for layer in model.layers)
    assert trainer.calls == 2


def test_what_may_not_be_split_says_why_when_it_does_not_fit():
    trainer = SmallTrainer()
    trainer.fixed_composition = "the loss couples the samples of a batch"
    model, _ = twins()
    runner = make_runner(trainer, model, Settings(checkpoint_fraction=1.0))
    trainer.fail = fail_once(0, "backward")
    with pytest.raises(SampleDoesNotFit, match="cannot be split: the loss couples the samples of a batch"):
        run_step(runner, model)


@pytest.mark.parametrize(
    ("error", "cannot_redo"), [(ValueError, None), (torch.OutOfMemoryError, "ranks wait for each other")]
)
def test_other_errors_and_steps_that_cannot_be_redone_end_the_training_as_ever(error, cannot_redo):
    trainer = SmallTrainer()
    trainer.cannot_redo = cannot_redo
    model, _ = twins()
    trainer.fail = fail_once(1, "backward", error)
    with pytest.raises(error):
        run_step(make_runner(trainer, model), model)
    assert trainer.steps_ended == 0


def test_a_failure_while_ranks_average_their_gradients_is_not_repeated():
    trainer = SmallTrainer()
    model, _ = twins()

    def end_step(model: Any) -> None:
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    trainer.end_step = end_step  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        run_step(make_runner(trainer, model), model)
    assert trainer.calls == 4


def test_samples_that_a_stream_owes_are_normalised_by_their_own_count():
    trainer = SmallTrainer()
    plain, ours = twins()
    runner = make_runner(trainer, ours, Settings(token_budget=30.0))
    owed, macro = rows_of([4, 8, 5], 2), rows_of(LENGTHS, 3)
    shares = [(share, trainer.count_items(runner.prepare(share))) for share in (owed, macro)]
    trainer.fail = fail_once(2, "backward")
    runner.run(ours, shares)
    for share in (owed, macro):
        plain_step(plain, trainer, share, ACCUMULATION)
    assert_close(ours.gradients(), plain.gradients())
    assert runner.last.samples == 13


@pytest.mark.parametrize("loss", ["tokens", "mean", "nominal"])
def test_a_sample_that_fits_in_no_way_is_left_out_if_asked_and_all_others_count_as_ever(loss: str):
    trainer = SmallTrainer(loss)
    plain, ours = twins()
    said: list[tuple[str, Any]] = []
    runner = make_runner(trainer, ours, Settings(token_budget=30.0))
    runner.skip_oversized = True
    runner._on_event = lambda kind, line, details: said.append((kind, details.get("indices")))
    trainer.fits = 13  # of LENGTHS only the 14 is longer
    macro = rows_of(LENGTHS, 2)
    macro.indices = list(range(100, 110))
    items = trainer.count_items(runner.prepare(macro))
    runner.run(ours, [(macro, items)])
    assert [indices for kind, indices in said if kind == "skipped"] == [[102]]
    assert (runner.last.skipped, runner.last.samples) == (1, len(LENGTHS) - 1)
    assert 14 not in runner.last.lengths
    whole = rows_of(LENGTHS, 2)
    for group in whole.groups:
        ids = trainer.collate([whole.rows[i] for i in group])["input_ids"]
        mask = torch.tensor([[i != 2] for i in group])
        values = plain(ids)
        losses = (values.square() + values) * (ids != 0) * mask
        if loss == "tokens":
            (losses.sum() / sum(LENGTHS)).backward()
        else:
            divisor = ACCUMULATION if loss == "nominal" else len(whole.groups)
            ((losses.sum(1) / (ids != 0).sum(1)).mean() / divisor).backward()
    assert_close(ours.gradients(), plain.gradients())


def test_a_step_whose_every_sample_is_left_out_has_a_loss_of_zero_and_no_gradients():
    trainer = SmallTrainer()
    _, ours = twins()
    runner = make_runner(trainer, ours)
    runner.skip_oversized = True
    trainer.fits = 0
    assert run_step(runner, ours, [4, 7], 1).item() == 0.0
    assert all(p.grad is None for p in ours.parameters())
    assert (runner.last.skipped, runner.last.samples, trainer.steps_ended) == (2, 0, 1)


def test_ranks_that_must_run_equally_many_micro_batches_add_dummies_that_count_for_nothing():
    trainer = SmallTrainer("mean")
    plain, ours = twins()
    trainer.agreed_micro_batches = lambda count: count + 3  # type: ignore[method-assign]
    total = run_step(make_runner(trainer, ours, Settings(token_budget=25.0)), ours)
    assert trainer.calls == len(trainer.weights) + 3
    assert_close([total], [plain_step(plain, SmallTrainer("mean"), rows_of(LENGTHS, 3), ACCUMULATION)])
    assert_close(ours.gradients(), plain.gradients())


def test_a_host_without_memory_for_collating_is_freed_and_asked_again():
    trainer = SmallTrainer()
    _, ours = twins()
    runner = make_runner(trainer, ours)
    collate, failures = trainer.collate, [MemoryError(), RuntimeError("can't allocate memory")]

    def short_of_memory(rows: list[Any]) -> Any:
        if failures:
            raise failures.pop()
        return collate(rows)

    trainer.collate = short_of_memory  # type: ignore[method-assign]
    run_step(runner, ours)
    assert not failures
    assert runner.last.samples == len(LENGTHS)
