import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from swiftcruise.envs.plants import compiling
from swiftcruise.runtime import codec_rows
from swiftcruise.runtime.codec import ActionCodec, ObservationCodec
from swiftcruise.runtime.codec_rows import decode_action, encode_frame
from swiftcruise.runtime.controls import CONTROL_FIELDS, ControlLimits, Controls, Limit
from swiftcruise.runtime.errors import ConfigError
from swiftcruise.runtime.telemetry import TELEMETRY_FIELDS, Telemetry

LIMITS = ControlLimits(power_limit_w=Limit(100, 400))

compiling.register(*codec_rows.KERNELS)
COMPILED_ENCODE, COMPILED_DECODE = compiling.compiled(encode_frame), compiling.compiled(decode_action)
any_float = st.one_of(
    st.sampled_from([np.nan, np.inf, -np.inf, 0.0, -0.0]), st.floats(0, 1), st.floats(0, 1e6), st.floats()
)


def index_of(codec, name):
    return next(row.index for row in codec.table() if row.name == name)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(TELEMETRY_FIELDS), st.floats(width=32)))
def test_an_observation_is_finite_and_in_range_whatever_was_measured(values):
    frame = ObservationCodec().encode(Telemetry.of(2, **values))
    assert frame.dtype == np.float32
    assert frame.shape == (2, ObservationCodec().size)
    assert np.abs(frame).max() <= 1


def test_the_table_says_what_each_entry_encodes():
    codec = ObservationCodec()
    for row in codec.table():
        if row.name not in TELEMETRY_FIELDS or row.name in ("allocation_retries", "oom_count"):
            continue
        middle = np.sqrt(row.low * row.high) if row.scale == "log2" else (row.low + row.high) / 2
        values = codec.encode(Telemetry.of(3, **{row.name: [row.low, middle, row.high]}))[:, row.index]
        assert values == pytest.approx([-1, 0, 1], abs=1e-6), row.name
    assert [row.index for row in codec.table()] == list(range(codec.size))
    assert len({row.name for row in codec.table()}) == codec.size


def test_entries_made_of_several_measurements():
    codec = ObservationCodec()
    frame = codec.encode(
        Telemetry.of(
            real_tokens=750,
            padded_tokens=1000,
            energy_j=750 * 2**-3,
            memory_device_fraction=0.75,
            memory_peak_fraction=0.5,
            oom_count=3,
        )
    )[0]
    assert frame[index_of(codec, "padding_efficiency")] == pytest.approx(0.5)
    assert frame[index_of(codec, "others_memory_fraction")] == pytest.approx(-0.5)
    assert frame[index_of(codec, "energy_per_token")] == pytest.approx(0.0)
    assert frame[index_of(codec, "oom_count")] == pytest.approx(0.0)


def test_a_missing_sensor_reads_as_the_middle_with_its_flag_down():
    codec = ObservationCodec()
    frame = codec.encode(Telemetry.of(2, gpu_utilization=[np.nan, 0.5]))
    assert frame[:, index_of(codec, "gpu_utilization")].tolist() == [0, 0]
    assert frame[:, index_of(codec, "gpu_utilization_measured")].tolist() == [0, 1]


def test_the_loss_is_not_observed():
    codec = ObservationCodec()
    assert (codec.encode(Telemetry.of(loss=9.0)) == codec.encode(Telemetry.of())).all()


def test_weights_end_each_frame_for_all_plants_or_each():
    codec = ObservationCodec(weights=2)
    telemetry = Telemetry.of(2, fill=0.7)
    assert codec.encode(telemetry, [0.25, 0.75])[:, -2:].tolist() == [[0.25, 0.75]] * 2
    assert codec.encode(telemetry, [[1, 0], [0, 1]])[:, -2:].tolist() == [[1, 0], [0, 1]]
    assert codec.encode(telemetry, [-1.0, np.nan])[:, -2:].tolist() == [[0, 0]] * 2
    for wrong in (None, [1.0], [1.0, 0.0, 0.0]):
        with pytest.raises(ConfigError, match="weights"):
            codec.encode(telemetry, wrong)


def test_history_holds_the_last_frames_oldest_first():
    codec = ObservationCodec(history=3)
    frames = [codec.encode(Telemetry.of(2, fill=x)) for x in (0.1, 0.2, 0.3, 0.4)]
    observation = None
    for frame in frames:
        observation = codec.stack(observation, frame)
    assert (observation == np.concatenate(frames[1:], axis=1)).all()
    assert codec.stack(None, frames[0]).shape == (2, codec.size)


@settings(max_examples=100, deadline=None)
@given(arrays(np.float32, (3, 4), elements=st.one_of(st.just(np.nan), st.floats(-1, 1, width=32))))
def test_encoding_a_decoded_action_gives_it_back(action):
    codec = ActionCodec(LIMITS)
    back = codec.encode(codec.decode(action))
    assert back.dtype == np.float32
    assert np.allclose(back, action, atol=1e-5, equal_nan=True)


def test_actions_span_the_limits():
    codec = ActionCodec(LIMITS)
    low, middle, high, beyond = (codec.decode(np.full((1, 4), x)).plant(0) for x in (-1, 0, 1, 7))
    assert low == pytest.approx({"token_budget": 16, "memory_target": 0.05, "power_limit_w": 100, "num_workers": 0})
    assert middle == pytest.approx({"token_budget": 4096, "memory_target": 0.5, "power_limit_w": 250, "num_workers": 8})
    assert high == beyond
    assert high == pytest.approx(
        {"token_budget": 2**20, "memory_target": 0.95, "power_limit_w": 400, "num_workers": 16}
    )


def test_a_nan_action_and_an_absent_actuator_leave_the_control_alone():
    codec = ActionCodec(ControlLimits(num_workers=Limit(4, 4)))  # the power limit's bounds are infinite
    controls = codec.decode([[np.nan, 0.0, 0.5, 0.5]])
    assert controls.plant(0) == pytest.approx({"memory_target": 0.5})
    assert codec.encode(controls)[0] == pytest.approx([np.nan, 0.0, 0.0, 0.0], nan_ok=True)


def test_an_infinite_action_is_clipped():
    codec = ActionCodec(LIMITS)
    for infinite, end in ((np.inf, 1.0), (-np.inf, -1.0)):
        assert codec.decode([[infinite] * 4]).plant(0) == codec.decode([[end] * 4]).plant(0)


def test_controls_outside_the_limits_encode_as_the_nearest_action():
    assert ActionCodec(LIMITS).encode(Controls.of(token_budget=1, memory_target=2.0))[0, :2].tolist() == [-1, 1]


def same_bits(one, other):
    """Whether two arrays are equal to the last bit, every NaN being the same."""
    one, other = (np.where(np.isnan(x), np.nan, x).tobytes() for x in (one, other))
    return one == other


@settings(max_examples=300, deadline=None)
@given(arrays(np.float64, len(TELEMETRY_FIELDS), elements=any_float), arrays(np.float64, 2, elements=any_float))
def test_compiled_and_interpreted_frames_agree_to_the_last_bit(row, weights):
    codec = ObservationCodec(weights=2)
    compiled = np.full(codec.frame_size, np.nan, dtype=np.float32)
    COMPILED_ENCODE(row, codec.frame_table, weights, np.empty(codec.frame_table.shape[1]), compiled)
    assert same_bits(compiled, codec.encode(Telemetry.from_rows(row[None]), weights)[0])
    assert np.abs(compiled).max() <= 1


@settings(max_examples=300, deadline=None)
@given(arrays(np.float64, 4, elements=st.one_of(any_float, st.floats(-1, 1))))
def test_compiled_and_interpreted_actions_agree_to_the_last_bit(action):
    for limits in (LIMITS, ControlLimits()):  # with and without a power limit
        codec, compiled = ActionCodec(limits), np.zeros(len(CONTROL_FIELDS))
        COMPILED_DECODE(action, codec.bounds, compiled)
        assert same_bits(compiled, codec.decode(action[None]).rows()[0])


def test_bad_settings_are_refused_by_name():
    with pytest.raises(ConfigError, match="history=0"):
        ObservationCodec(history=0)
    with pytest.raises(ConfigError, match="token_bugdet"):
        ActionCodec(controls=("token_bugdet",))
    with pytest.raises(ValueError, match=r"\(n, 4\)"):
        ActionCodec().decode([0.0, 0.0, 0.0, 0.0])
