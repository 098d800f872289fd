"""What a live run makes of its sensors."""

import math

import pytest

from swiftcruise.runtime.sensors.live import CudaMeter, others_memory_fraction
from swiftcruise.runtime.sensors.nvml import DeviceReading

GIB = 2**30


def reading(device: float, others: float = math.nan, capacity: float = 80.0) -> DeviceReading:
    return DeviceReading(
        device_memory_bytes=device * GIB, others_memory_bytes=others * GIB, memory_capacity_bytes=capacity * GIB
    )


def test_a_full_allocator_cache_is_no_neighbour():
    # torch holds 70 GiB of which its tensors need a part: NVML sees a device almost full, and yet nobody else is there.
    assert others_memory_fraction(reading(72, others=0), 78 * GIB, 80 * GIB) == 0.0
    assert others_memory_fraction(reading(72), 79.5 * GIB, 80 * GIB) == 0.0  # in a container, by what is in reach


def test_a_neighbour_takes_of_the_capacity():
    assert others_memory_fraction(reading(60, others=20), 59 * GIB, 80 * GIB) == pytest.approx(0.25)
    assert others_memory_fraction(reading(60), 59.25 * GIB, 80 * GIB) == pytest.approx(0.25)


def test_room_beyond_a_configured_limit_is_the_neighbours_to_have():
    assert others_memory_fraction(reading(50, others=20), 59 * GIB, 40 * GIB) == 0.0
    assert others_memory_fraction(reading(75, others=50), 29 * GIB, 40 * GIB) == pytest.approx(0.25)


def test_what_nvml_does_not_tell_is_not_known():
    assert math.isnan(others_memory_fraction(DeviceReading(), 10 * GIB, 80 * GIB))


def test_the_optimizers_state_counts_before_it_exists():
    class Memory:
        def peak_bytes(self) -> int:
            return 100

    meter = CudaMeter(Memory())  # type: ignore[arg-type]
    meter.expected_bytes = 40
    assert meter.peak_bytes == 140
