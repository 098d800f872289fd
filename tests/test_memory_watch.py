"""Memory of a live training: measured, learnt, kept; and what is left when the meter fails."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest

from swiftcruise.runtime.macro_batch import MicroResult, Settings
from swiftcruise.runtime.memory_model import PeakMemoryModel
from swiftcruise.runtime.memory_watch import MemoryWatch
from swiftcruise.runtime.planner import MicroBatch

from .small_trainer import Model, layers_of

CAPACITY = 1000.0


class Meter:
    """A device whose peak is 100 + 0.5 T (1 - fraction) + 0.1 T bytes."""

    def __init__(self) -> None:
        self.peak = 0.0
        self.watched = 0
        self.broken = False

    def run(self, tokens: int, fraction: float) -> None:
        self.peak = 100 + 0.5 * tokens * (1 - fraction) + 0.1 * tokens

    def watching(self) -> AbstractContextManager[object]:
        self.watched += 1
        return nullcontext()

    def reset_peak(self) -> None:
        if self.broken:
            raise RuntimeError("the driver is gone")
        self.peak = 0.0

    @property
    def peak_bytes(self) -> int:
        if self.broken:
            raise RuntimeError("the driver is gone")
        return int(self.peak)


def micro(tokens: int, samples: int = 1) -> MicroBatch:
    return MicroBatch(tuple(range(samples)), tokens // samples, tokens)


def watch_of(meter: Meter | None, *, layers: bool = True, every: int = 1) -> MemoryWatch:
    control = layers_of(Model(layers=4)) if layers else None
    return MemoryWatch(PeakMemoryModel(1), meter, CAPACITY, control, every=every)


def run_one(watch: MemoryWatch, meter: Meter, tokens: int, fraction: float) -> MicroResult:
    with watch.watch(micro(tokens), fraction):
        meter.run(tokens, fraction if fraction == fraction else 0.0)
    return MicroResult(tokens, 0.0, 1, tokens, 0.1, fraction, watch.peak_fraction())


def learn(watch: MemoryWatch, meter: Meter, fractions: tuple[float, ...] = (0.0, 0.5, 1.0)) -> None:
    for tokens in range(100, 900, 40):
        for fraction in fractions:
            watch.record([run_one(watch, meter, tokens, fraction)])


def test_each_micro_batch_is_checkpointed_no_more_than_its_own_peak_needs():
    meter = Meter()
    watch = watch_of(meter)
    learn(watch, meter)
    short, middle, long = watch.choose_checkpointing(
        [micro(200), micro(1600), micro(4000)], Settings(memory_target=0.7)
    )
    assert short == 0.0
    assert 0 < middle < 1
    assert long == 1.0
    assert set(watch.choose_checkpointing([micro(200), micro(4000)], Settings(checkpoint_fraction=0.25))) == {0.25}


def test_ceilings_ask_no_more_of_checkpointing_than_it_will_do():
    meter = Meter()
    controlled, left_alone = watch_of(meter), watch_of(meter, layers=False)
    learn(controlled, meter)
    learn(left_alone, meter, (math.nan,))
    lengths = [10]
    (most,) = controlled.token_ceilings(lengths, Settings())
    (half,) = controlled.token_ceilings(lengths, Settings(checkpoint_fraction=0.5))
    (alone,) = left_alone.token_ceilings(lengths, Settings())
    assert 100 + 0.1 * most <= 900
    assert 100 + 0.35 * half <= 900
    assert 100 + 0.6 * alone <= 900
    assert min(most / 8000, half / 2286, alone / 1333) > 0.6  # nor much less


def test_nothing_is_known_before_the_first_micro_batch():
    watch = watch_of(Meter())
    assert not watch.known
    assert watch.token_ceilings([100], Settings()) is None


def test_layers_are_left_as_they_were_where_nothing_measures_or_nothing_may_be_changed():
    plans = [micro(100), micro(100_000)]
    assert watch_of(None).choose_checkpointing(plans, Settings()) == [0.0, 0.0]
    assert np.isnan(watch_of(Meter(), layers=False).choose_checkpointing(plans, Settings())).all()


def test_a_meter_that_costs_time_is_asked_while_learning_then_for_new_extremes_and_now_and_then():
    meter = Meter()
    watch = watch_of(meter, every=16)
    for _ in range(MemoryWatch.LEARNING):
        assert not math.isnan(run_one(watch, meter, 500, 0.0).peak_fraction)
    routine = [run_one(watch, meter, 400, 0.0).peak_fraction for _ in range(32)]
    assert sum(not math.isnan(peak) for peak in routine) == 2
    assert run_one(watch, meter, 600, 0.0).peak_fraction == pytest.approx(0.46)
    assert math.isnan(run_one(watch, meter, 600, 1.0).peak_fraction)  # larger, but checkpointed


def test_what_did_not_fit_is_not_tried_again_as_it_was():
    meter = Meter()
    watch = watch_of(meter)
    learn(watch, meter)
    before = watch.token_ceilings([10], Settings())
    for _ in range(3):
        watch.record_oom(micro(3000, 300), 1.0)
    after = watch.token_ceilings([10], Settings())
    assert before is not None
    assert after is not None
    assert after[0] < 3000 < before[0]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_meter_that_fails_costs_the_training_nothing(when: str, caplog: pytest.LogCaptureFixture):
    meter = Meter()
    watch = watch_of(meter)
    learn(watch, meter)
    meter.broken = when == "before"
    with watch.watch(micro(100), 0.0):
        meter.broken = True
    assert math.isnan(watch.peak_fraction())
    with watch.watch(micro(100), 0.0):
        pass
    assert watch.choose_checkpointing([micro(4000)], Settings()) == [0.0]
    assert len(caplog.records) == 1


def test_a_neighbour_is_made_room_for_at_the_very_next_macro_batch():
    meter, others = Meter(), [0.0]
    control = layers_of(Model(layers=4))
    watch = MemoryWatch(PeakMemoryModel(1), meter, CAPACITY, control, 0.9, others=lambda: others[0])
    for _ in range(20):
        watch.record([run_one(watch, meter, tokens, fraction) for tokens in (200, 400) for fraction in (0.0, 1.0)])
    free = watch.token_ceilings([10], Settings()), watch.choose_checkpointing([micro(1000)], Settings())
    others[0] = 0.5
    crowded = watch.token_ceilings([10], Settings()), watch.choose_checkpointing([micro(1000)], Settings())
    assert crowded[0] < 0.5 * free[0]  # (0.9 - 0.5 - 0.1) / (0.9 - 0.1) of the room is left
    assert crowded[1] > free[1]
    others[0] = 0.0
    assert watch.token_ceilings([10], Settings()) == free[0]


def test_micro_batches_that_fit_unmeasured_let_the_caution_after_an_out_of_memory_fade_as_well():
    meter = Meter()
    watch = watch_of(meter)
    for _ in range(20):
        watch.record([run_one(watch, meter, 200, 1.0)])
    before = watch.model.fit_tokens(100.0, 1.0, 0.9)
    watch.record_oom(micro(200), 1.0)
    cautious = watch.model.fit_tokens(100.0, 1.0, 0.9)
    unmeasured = [MicroResult(200, 0.0, 1, 200, 0.1, 1.0, math.nan)] * 15
    for _ in range(400):
        watch.record([run_one(watch, meter, 200, 1.0), *unmeasured])
    assert cautious < 0.5 * before
    assert watch.model.fit_tokens(100.0, 1.0, 0.9) > 0.8 * before
