"""The equations of the simulated plant, over all profiles and settings."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftcruise.envs.plants import compiling, physics, setting
from swiftcruise.envs.plants.calibration import Probe, calibrate
from swiftcruise.envs.plants.profile import GIB, load_framework, load_hardware, load_model, profile_names
from swiftcruise.envs.plants.setting import TrainingSetting, coefficients, power_curve
from swiftcruise.runtime.errors import ConfigError

hardware = st.sampled_from(profile_names("hardware")).map(load_hardware)
models = st.sampled_from(profile_names("models")).map(load_model)
trainings = st.one_of(
    st.builds(TrainingSetting, tuner=st.sampled_from(["full", "zero"]), flash_attention=st.booleans()),
    st.builds(
        TrainingSetting,
        quantization=st.sampled_from(["none", "gptq4", "gptq8", "bnb4"]),
        lora_rank=st.sampled_from([1, 8, 64, 512]),
        lora_targets=st.sampled_from(["attention", "all-linear"]),
        train_embeddings=st.booleans(),
        flash_attention=st.booleans(),
        sharded_engine=st.booleans(),
    ),
)
runs = st.builds(coefficients, hardware, models, trainings)
lengths = st.integers(1, 65536).map(float)
batches = st.integers(1, 128).map(float)
shares = st.floats(0, 1)
factors = st.floats(1, 8)


@given(runs, batches, lengths, shares)
def test_nothing_is_ever_nan_and_everything_takes_time_and_memory(run, batch, length, share):
    time, memory = run
    assert all(math.isfinite(value) and value >= 0 for value in (*time, *memory))
    assert 0 < physics.micro_batch_seconds(time, batch * length, length, share) < math.inf
    assert 0 < physics.allocated_bytes(memory, batch * length, length, share) < math.inf


@given(runs, batches, lengths, shares, factors, factors)
def test_more_padding_never_speeds_up_nor_saves_memory(run, batch, length, share, more_tokens, longer):
    time, memory = run
    tokens = batch * length
    for use in (
        lambda t, s: physics.micro_batch_seconds(time, t, s, share),
        lambda t, s: physics.allocated_bytes(memory, t, s, share),
        lambda t, s: physics.reserved_bytes(memory, t, s, share, 2.5, 1e15),
    ):
        assert use(tokens, length) <= use(tokens * more_tokens, length) * (1 + 1e-12)
        assert use(tokens, length) <= use(tokens, length * longer) * (1 + 1e-12)


@given(runs, batches, lengths, shares, shares)
def test_checkpointing_costs_time_and_saves_memory(run, batch, length, one, other):
    time, memory = run
    less, more = sorted((one, other))
    tokens = batch * length
    assert physics.micro_batch_seconds(time, tokens, length, less) <= physics.micro_batch_seconds(
        time, tokens, length, more
    ) * (1 + 1e-12)
    assert physics.allocated_bytes(memory, tokens, length, more) <= physics.allocated_bytes(
        memory, tokens, length, less
    ) * (1 + 1e-12)


@given(runs, batches, lengths, shares, st.floats(1, 4), st.floats(0.5, 140))
def test_reserved_memory_lies_between_allocated_and_capacity(run, batch, length, share, fragmentation, gib):
    _, memory = run
    tokens, capacity = batch * length, gib * GIB
    reserved = physics.reserved_bytes(memory, tokens, length, share, fragmentation, capacity)
    allocated = physics.allocated_bytes(memory, tokens, length, share)
    assert min(allocated, capacity) * (1 - 1e-12) <= reserved <= capacity


@given(runs, batches, lengths, shares, factors)
def test_what_is_larger_than_what_fails_fails(run, batch, length, share, factor):
    _, memory = run
    capacity = memory.static + 8 * GIB

    def fails(tokens, longest, checkpointed):
        return physics.runs_out_of_memory(memory, tokens, longest, checkpointed, 1.15, capacity)

    if fails(batch * length, length, share):
        assert fails(batch * length * factor, length, share)
        assert fails(batch * length * factor, length * factor, share)
        assert fails(batch * length, length, 0.0)


@given(runs, batches, lengths, shares, st.integers(1, 100))
def test_the_least_checkpointing_is_enough_and_no_layer_more(run, batch, length, room, layers):
    _, memory = run
    tokens = batch * length
    memory = memory._replace(step=0.0)

    def peak(share):
        return physics.allocated_bytes(memory, tokens, length, share)

    limit = peak(1.0) + room * (peak(0.0) - peak(1.0))
    share = physics.least_checkpointing(memory, tokens, length, layers, 1.0, limit)
    assert 0 <= share <= 1
    assert share * layers == pytest.approx(round(share * layers))
    assert peak(share) <= limit * (1 + 1e-6)
    if share * layers >= 1:
        assert peak(share - 1 / layers) > limit * (1 - 1e-6)
    assert physics.least_checkpointing(memory, tokens, length, layers, 1.0, 0.5 * peak(1.0)) == 1.0 or peak(0.0) == 0


@given(hardware, st.floats(0.05, 1.3), st.floats(0.05, 1.0), st.floats(1, 4))
def test_a_tighter_limit_draws_less_and_takes_longer(device, uncapped, limit, factor):
    curve = power_curve(device)
    loose, tight = (physics.limited_share(curve, uncapped, at) for at in (limit, limit / factor))
    assert 0 < tight <= loose <= 1
    assert 1 <= physics.slowdown(curve, loose) <= physics.slowdown(curve, tight) < math.inf
    assert 0 < physics.busy_power(curve, uncapped, tight) <= physics.busy_power(curve, uncapped, loose)
    assert physics.busy_power(curve, uncapped, loose) <= uncapped * (1 + 1e-12)


def test_energy_has_its_optimum_below_the_full_power_limit():
    """Zeus's A40 traces: BERT at 200 instead of 300 W takes 22 % less energy for 11 % more time."""
    curve = power_curve(load_hardware("a40"))

    def time_and_energy(limit):
        share = physics.limited_share(curve, 0.92, limit)
        return physics.slowdown(curve, share), physics.slowdown(curve, share) * physics.busy_power(curve, 0.92, share)

    time, energy = (at_200 / at_300 for at_200, at_300 in zip(time_and_energy(2 / 3), time_and_energy(1), strict=True))
    assert 1.05 < time < 1.2
    assert 0.72 < energy < 0.86
    assert time_and_energy(1 / 3)[1] > time_and_energy(1 / 2)[1]  # and it rises again


@given(st.floats(1e-4, 10), st.floats(1e-5, 1), st.floats(1, 4))
def test_step_time_saturates_over_the_batch(fixed, per_sample, sharpness):
    small, large = (physics.saturating_seconds(fixed, per_sample, batch, sharpness) for batch in (1, 1e6))
    assert small <= large
    assert large == pytest.approx(1e6 * per_sample, rel=0.2) or fixed > 1e5 * per_sample


@settings(max_examples=200, deadline=None)
@given(runs, batches, lengths, shares, st.floats(1, 4), hardware, st.floats(0.05, 1.2), st.floats(0.05, 1))
def test_compiled_and_interpreted_physics_agree_to_the_last_bit(
    run, batch, length, share, fragmentation, device, uncapped, limit
):
    time, memory = run
    arguments = (time, memory, power_curve(device), batch * length, length, share, fragmentation, uncapped, limit)
    assert every_equation(*arguments) == COMPILED(*arguments)


def every_equation(time, memory, curve, tokens, length, share, fragmentation, uncapped, limit):
    limited = physics.limited_share(curve, uncapped, limit)
    return (
        physics.micro_batch_seconds(time, tokens, length, share),
        physics.allocated_bytes(memory, tokens, length, share),
        physics.reserved_bytes(memory, tokens, length, share, fragmentation, 8e10),
        1.0 if physics.runs_out_of_memory(memory, tokens, length, share, 1.15, 8e10) else 0.0,
        physics.least_checkpointing(memory, tokens, length, 32.0, fragmentation, 8e10),
        limited,
        physics.slowdown(curve, limited),
        physics.busy_power(curve, uncapped, limited),
        physics.saturating_seconds(uncapped, limit, tokens, 2.0),
    )


compiling.register(*physics.FUNCTIONS)
COMPILED = compiling.compiled(every_equation)


@settings(max_examples=50, deadline=None)
@given(hardware, models, trainings)
def test_compiled_and_interpreted_coefficients_agree_to_the_last_bit(device, model, training):
    framework = load_framework()
    parts = (
        setting.architecture(model),
        setting.implementation(model, training, framework),
        setting.tuning(model, training, framework),
        setting.hardware_constants(device),
        setting.framework_constants(framework),
    )
    assert COMPILED_TIME(*parts) == physics.time_coefficients(*parts)
    assert COMPILED_MEMORY(*parts) == physics.memory_coefficients(*parts)


COMPILED_TIME = compiling.compiled(physics.time_coefficients)
COMPILED_MEMORY = compiling.compiled(physics.memory_coefficients)


@given(hardware, models, trainings, lengths, st.floats(0.2, 5), shares)
def test_a_calibrated_plant_reproduces_its_probe(device, model, training, length, factor, share):
    time, memory = coefficients(device, model, training)
    truth = factor * physics.micro_batch_seconds(time, length, length, share)
    found = calibrate(device, model, training, Probe(length, length, share, seconds=truth))
    again, _ = coefficients(found, model, training)
    assert physics.micro_batch_seconds(again, length, length, share) == pytest.approx(truth, rel=1e-9)

    device = device.replace({"memory_gib": 1e6}, "test")
    truth = physics.reserved_bytes(memory, length, length, share, 1.0, 1e18) * 1.1
    probe = Probe(length, length, share, reserved_gib=truth / GIB)
    _, again = coefficients(calibrate(device, model, training, probe), model, training)
    assert physics.reserved_bytes(again, length, length, share, 1.0, 1e18) == pytest.approx(truth, rel=1e-6)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({}, "seconds or reserved_gib"), ({"seconds": -1.0}, "seconds"), ({"seconds": 1.0, "checkpointed": 2}, "checkpo")],
)
def test_a_probe_that_cannot_be_is_refused(wrong, named):
    with pytest.raises(ConfigError, match=named):
        Probe(100, 100, **wrong)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"tuner": "dora"}, "tuner"),
        ({"tuner": "full", "quantization": "bnb4"}, "bnb4|quantised"),
        ({"lora_rank": 0}, "rank"),
    ],
)
def test_a_training_that_cannot_be_is_refused(wrong, named):
    with pytest.raises(ConfigError, match=named):
        TrainingSetting(**wrong)
