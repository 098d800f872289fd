"""The NVML sensor, through the real pynvml, on a scripted driver."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path

import pynvml
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftcruise.runtime.sensors import visible_devices
from swiftcruise.runtime.sensors.nvml import NvmlSampler, nvml_unavailable_reason, open_sampler
from swiftcruise.runtime.sensors.nvml_device import NvmlDevice, NvmlUnavailableError
from swiftcruise.runtime.sensors.visible_devices import DeviceSelector, resolve_device

from .nvml_stub import NvmlStub, build_stub, installed_stub

SW_POWER_CAP, SW_THERMAL, GPU_IDLE = 0x4, 0x20, 0x1


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_stub(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def stub(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlStub]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with installed_stub(library, tmp_path / "script") as stub:
        yield stub


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A sampler without its thread, on a clock that only `poll` moves."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.sampler = NvmlSampler(NvmlDevice.open(), period_s=1.0, clock=self.clock)
        self.take = self.sampler.take

    def poll(self, after_s: float = 1.0) -> None:
        self.clock.now += after_s
        self.sampler.poll()


# ---- which device ----


@pytest.mark.parametrize(
    ("visible", "ordinal", "expected"),
    [
        (None, 2, DeviceSelector(index=2)),
        ("3,1", 1, DeviceSelector(index=1)),
        (" 3 , 1", 0, DeviceSelector(index=3)),
        ("3,1", 2, None),
        ("", 0, None),
        ("-1", 0, None),
        ("0,-1,2", 0, DeviceSelector(index=0)),
        ("0,-1,2", 1, None),
        ("1,1", 0, None),
        ("NoDevFiles", 0, None),
        ("GPU-aa,GPU-bb", 1, DeviceSelector(uuid="GPU-bb")),
        ("GPU-aa,1", 1, None),
        ("MIG-aa", 0, DeviceSelector(uuid="MIG-aa")),
        ("MIG-GPU-aa/1/0", 0, DeviceSelector(uuid="MIG-GPU-aa/1/0")),
        (None, -1, None),
    ],
)
def test_the_visible_devices_decide_what_an_ordinal_means(visible, ordinal, expected):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert resolve_device(ordinal, environ) == expected


def test_indices_are_nvml_indices_only_in_pci_order():
    environ = {"CUDA_VISIBLE_DEVICES": "2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert resolve_device(0, environ) == DeviceSelector(index=2, pci_order=True)


@given(st.text(alphabet="0123-+, GPUMIGabx/", max_size=20), st.integers(-2, 5))
@settings(max_examples=200, deadline=None)
def test_any_text_in_the_environment_means_one_device_or_none(visible, ordinal):
    selector = resolve_device(ordinal, {"CUDA_VISIBLE_DEVICES": visible})
    assert selector is None or (selector.index is None) != (selector.uuid is None)


@pytest.mark.parametrize(
    ("environ", "utilization"),
    [
        ({}, 0.10),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 0.20),
        ({"CUDA_VISIBLE_DEVICES": "GPU-00000001-0000-0000-0000-000000000000"}, 0.20),
        ({"CUDA_VISIBLE_DEVICES": "GPU-00000001"}, 0.20),
    ],
)
def test_the_selected_device_is_the_one_that_is_read(stub, environ, utilization):
    stub.set_raw({"count": 2, "0.utilization": 10, "1.utilization": 20})
    assert NvmlDevice.open(0, environ).read().utilization == pytest.approx(utilization)


def test_cuda_s_own_order_is_mapped_by_uuid(stub, monkeypatch):
    stub.set_raw({"count": 2, "0.utilization": 10, "1.utilization": 20})
    monkeypatch.setattr(
        visible_devices, "device_uuid", lambda ordinal: f"0000000{1 - ordinal}-0000-0000-0000-000000000000"
    )
    assert NvmlDevice.open(0, {}).read().utilization == pytest.approx(0.20)
    assert NvmlDevice.open(0, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).read().utilization == pytest.approx(0.10)


@pytest.mark.parametrize("uuid", ["MIG-1234-5678", "MIG-1234"])
def test_a_mig_slice_has_its_own_memory_and_the_board_s_power(stub, uuid):
    stub.set(0, power_w=300, memory_total=80e9)
    stub.set("mig0", uuid="MIG-1234-5678", memory_total=10e9, memory_used=2e9)
    stub.fail("nvmlDeviceGetUtilizationRates", pynvml.NVML_ERROR_NOT_SUPPORTED, "mig0")
    device = NvmlDevice.open(0, {"CUDA_VISIBLE_DEVICES": uuid})
    sample = device.read()
    assert (sample.memory_capacity_bytes, sample.device_memory_bytes, sample.power_w) == (10e9, 2e9, 300)
    assert math.isnan(sample.utilization)
    assert device.power_limit_range() is None
    assert not device.set_power_limit(250), "the limit is every slice's"


# ---- one sample ----


def test_a_sample_has_every_quantity_in_its_unit(stub):
    me = os.getpid()
    stub.set(utilization=87, memory_total=80e9, memory_reserved=1e9, memory_used=60e9, power_w=412.5, energy_j=1234)
    stub.set(temperature_c=71, clock_mhz=1500, maximum_clock_mhz=2000, clock_reasons=SW_POWER_CAP, power_limit_w=500)
    stub.set(processes=f"{me}:40000000000,4194000:20000000000")
    sample = NvmlDevice.open().read()
    assert astuple(sample) == (0.87, 40e9, 60e9, 79e9, 412.5, 1234, 71, 0.75, 0, 1, 500)


@pytest.mark.parametrize(("reasons", "throttled"), [(0, 0), (GPU_IDLE, 0), (SW_POWER_CAP, 0), (SW_THERMAL, 1)])
def test_heat_counts_as_throttled_and_a_power_limit_does_not(stub, reasons, throttled):
    stub.set(clock_reasons=reasons)
    assert NvmlDevice.open().read().throttled == throttled


def test_old_drivers_answer_through_their_old_functions(stub):
    stub.set(memory_used=60e9, memory_reserved=1e9, clock_reasons=SW_THERMAL)
    stub.fail("nvmlDeviceGetMemoryInfo_v2", pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
    stub.fail("nvmlDeviceGetCurrentClocksEventReasons", pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    sample = NvmlDevice.open().read()
    assert (sample.device_memory_bytes, sample.memory_capacity_bytes) == (61e9, 80e9), "v1 counts reserved as used"
    assert sample.throttled == 1


def test_in_a_container_without_host_pids_one_process_is_taken_to_be_ours(stub):
    device = NvmlDevice.open()
    for processes, neighbours in [("7:100,8:200", 1), ("7", 0), ("", 0)]:
        stub.set(processes=processes)
        sample = device.read()
        assert math.isnan(sample.process_memory_bytes)
        assert sample.neighbours == neighbours


def test_what_a_gpu_does_not_offer_is_asked_once_and_costs_only_itself(stub, caplog):
    stub.set(utilization=50, power_w=100)
    stub.fail("nvmlDeviceGetPowerUsage", pynvml.NVML_ERROR_NOT_SUPPORTED)
    device = NvmlDevice.open()
    assert math.isnan(device.read().power_w)
    stub.fail("nvmlDeviceGetPowerUsage", 0)
    sample = device.read()
    assert math.isnan(sample.power_w)
    assert sample.utilization == 0.5
    assert not device.faults
    assert not caplog.records


def test_a_passing_error_is_counted_said_once_and_passes(stub, caplog):
    stub.set(utilization=50)
    device = NvmlDevice.open()
    stub.fail("nvmlDeviceGetUtilizationRates", pynvml.NVML_ERROR_UNKNOWN)
    assert math.isnan(device.read().utilization)
    assert math.isnan(device.read().utilization)
    stub.fail("nvmlDeviceGetUtilizationRates", 0)
    assert device.read().utilization == 0.5
    assert device.faults == {"utilization": 2}
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("nonsense", "field"),
    [
        ({"power_w": -5}, "power_w"),
        ({"utilization": 101}, "utilization"),
        ({"temperature_c": 255}, "temperature_c"),
        ({"memory_used": 85e9}, "device_memory_bytes"),
        ({"memory_total": 0}, "memory_capacity_bytes"),
        ({"processes": f"{os.getpid()}:90000000000"}, "process_memory_bytes"),
    ],
)
def test_a_value_that_cannot_be_is_not_believed(stub, nonsense, field):
    stub.set(**nonsense)
    device = NvmlDevice.open()
    assert math.isnan(getattr(device.read(), field))
    assert device.faults.total() == 1


def test_a_lost_gpu_is_said_once_and_left_alone(stub, caplog):
    stub.set(utilization=50, power_w=100)
    bench = Bench()
    bench.poll()
    stub.fail("nvmlDeviceGetPowerUsage", pynvml.NVML_ERROR_GPU_IS_LOST)
    bench.poll()
    bench.poll()
    assert bench.sampler.device.lost
    assert all(map(math.isnan, astuple(bench.take())))
    assert not bench.sampler.set_power_limit(300)
    assert [r.message for r in caplog.records] == ["GPU sensor: GPU is lost: it is not measured any more (said once)"]


# ---- the power limit ----


def test_the_power_limit_is_set_within_its_range_and_comes_back(stub):
    device = NvmlDevice.open()
    stub.set(power_limit_w=600)
    assert device.power_limit_range() == (200, 700)
    assert device.set_power_limit(350)
    assert device.read().power_limit_w == 350
    assert device.set_power_limit(1000)
    assert device.read().power_limit_w == 700
    device.restore()
    assert device.read().power_limit_w == 600
    device.close()


def test_closing_restores_the_power_limit_and_shuts_nvml_down(stub):
    watcher, device = NvmlDevice.open(), NvmlDevice.open()
    device.set_power_limit(350)
    device.close()
    device.close()
    assert watcher.read().power_limit_w == 700
    assert stub.open_count() == 1


def test_without_permission_the_power_limit_stays_and_that_is_said_once(stub, caplog):
    stub.fail("nvmlDeviceSetPowerManagementLimit", pynvml.NVML_ERROR_NO_PERMISSION)
    device = NvmlDevice.open()
    assert not device.set_power_limit(300)
    assert not device.set_power_limit(300)
    device.close()
    assert len(caplog.records) == 1


@pytest.mark.parametrize("watts", [math.nan, math.inf])
def test_no_power_limit_is_made_of_what_is_no_number(stub, watts):
    device = NvmlDevice.open()
    assert not device.set_power_limit(watts)
    assert device.read().power_limit_w == 700


def test_a_limit_that_could_not_be_restored_is_not_set(stub):
    stub.fail("nvmlDeviceGetPowerManagementLimit", pynvml.NVML_ERROR_UNKNOWN)
    device = NvmlDevice.open()
    assert not device.set_power_limit(300)
    assert device.read().power_limit_w == 700


# ---- readings ----


def test_a_reading_aggregates_what_was_seen_since_the_last(stub):
    bench = Bench()
    for utilization, power, temperature, reasons in [(40, 100, 60, 0), (80, 300, 70, SW_THERMAL)]:
        stub.set(utilization=utilization, power_w=power, temperature_c=temperature, clock_reasons=reasons)
        bench.poll()
    reading = bench.take()
    assert (reading.gpu_utilization, reading.power_w) == (pytest.approx(0.6), 200)
    assert (reading.temperature_c, reading.throttled) == (70, 0.5)
    stub.set(utilization=10, temperature_c=50)
    bench.poll()
    reading = bench.take()
    assert (reading.gpu_utilization, reading.temperature_c) == (pytest.approx(0.1), 50)


def test_memory_fractions_are_peaks_over_the_memory_that_can_be_had(stub):
    bench = Bench()
    stub.set(memory_total=80e9, memory_reserved=0, memory_used=60e9, processes=f"{os.getpid()}:40000000000")
    bench.poll()
    stub.set(memory_used=20e9, processes=f"{os.getpid()}:10000000000")
    bench.poll()
    reading = bench.take()
    assert (reading.process_memory_fraction, reading.device_memory_fraction) == (0.5, 0.75)


def test_the_energies_of_successive_readings_sum_to_the_counter_s_difference(stub):
    bench = Bench()
    energies = []
    for joules in [1000, 1250, 1400, 1900, 2000]:
        stub.set(energy_j=joules)
        bench.poll()
        energies.append(bench.take().energy_j)
    assert math.isnan(energies[0])
    assert energies[1:] == [250, 150, 500, 100]


def test_a_counter_that_begins_again_is_no_negative_energy(stub):
    bench = Bench()
    energies = []
    for joules in [1000, 5, 30]:
        stub.set(energy_j=joules)
        bench.poll()
        energies.append(bench.take().energy_j)
    assert [math.isnan(e) for e in energies] == [True, True, False]
    assert energies[2] == 25


def test_without_an_energy_counter_power_is_integrated(stub):
    stub.fail("nvmlDeviceGetTotalEnergyConsumption", pynvml.NVML_ERROR_NOT_SUPPORTED)
    bench = Bench()
    for power in [100, 200, 200]:
        stub.set(power_w=power)
        bench.poll(after_s=2.0)
    assert bench.take().energy_j == pytest.approx(2 * 150 + 2 * 200)


def test_between_samples_the_latest_answers_again_without_energy(stub):
    stub.set(utilization=40, energy_j=100)
    bench = Bench()
    bench.poll()
    bench.take()
    again = bench.take()
    assert again.gpu_utilization == 0.4
    assert math.isnan(again.energy_j)


def test_a_reading_older_than_five_periods_is_not_given(stub):
    stub.set(utilization=40)
    bench = Bench()
    assert math.isnan(bench.take().gpu_utilization), "nothing was sampled yet"
    bench.poll()
    bench.clock.now += 4.9
    assert bench.take().gpu_utilization == 0.4
    bench.clock.now += 0.2
    assert all(map(math.isnan, astuple(bench.take())))


# ---- the thread ----


def wait_until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "nothing happened for 10 s"
        time.sleep(0.005)


def test_the_thread_samples_until_it_is_stopped_and_hands_the_device_back(stub):
    stub.set(utilization=40)
    sampler = open_sampler(period_s=0.01)
    assert sampler is not None
    with sampler:
        wait_until(lambda: sampler.take().gpu_utilization == 0.4)
        stub.set(utilization=90)
        wait_until(lambda: sampler.take().gpu_utilization == 0.9)
        assert sampler.set_power_limit(300)
    assert stub.open_count() == 0
    sampler.stop()


def test_a_driver_that_hangs_does_not_hold_the_training(stub):
    stub.set(utilization=40)
    sampler = NvmlSampler(NvmlDevice.open(), period_s=0.01)
    sampler.start()
    wait_until(lambda: sampler.take().gpu_utilization == 0.4)
    stub.block("nvmlDeviceGetPowerUsage", 1.5)
    time.sleep(0.2)
    began = time.monotonic()
    reading = sampler.take()
    limit_set = sampler.set_power_limit(300)
    assert time.monotonic() - began < 0.1
    assert math.isnan(reading.gpu_utilization)
    assert not limit_set
    sampler.stop()
    sampler._thread.join()
    sampler.device.close()


def test_whatever_breaks_in_the_thread_is_said_once_and_sampling_goes_on(stub, monkeypatch, caplog):
    sampler = NvmlSampler(NvmlDevice.open(), period_s=0.01)
    failures = iter([RuntimeError("first"), RuntimeError("second")])
    read = sampler.device.read

    def broken():
        if (failure := next(failures, None)) is not None:
            raise failure
        return read()

    monkeypatch.setattr(sampler.device, "read", broken)
    with sampler:
        wait_until(lambda: sampler.take().gpu_utilization == 0)
    assert len(caplog.records) == 1


def test_a_sample_is_cheap(stub):
    device = NvmlDevice.open()
    device.read()
    began = time.perf_counter()
    for _ in range(100):
        device.read()
    assert (time.perf_counter() - began) / 100 < 5e-3, "far above the usual 0.1 ms; a period is 1 s"


# ---- no GPU ----


def test_a_missing_driver_is_no_sampler_and_a_reason(monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: pynvml._nvmlCheckReturn(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))
    assert open_sampler() is None
    assert "NVML Shared Library Not Found" in (nvml_unavailable_reason() or "")


def test_a_driver_that_is_not_loaded_is_a_reason(stub):
    stub.fail("nvmlInitWithFlags", pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert open_sampler() is None
    assert "Driver Not Loaded" in (nvml_unavailable_reason() or "")


def test_a_hidden_or_absent_device_is_a_reason_and_leaves_nvml_closed(stub, monkeypatch):
    assert "no device" in (nvml_unavailable_reason(local_ordinal=5) or "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES=''" in (nvml_unavailable_reason() or "")
    assert stub.open_count() == 0
    with pytest.raises(NvmlUnavailableError):
        NvmlDevice.open(0)


def test_a_usable_device_needs_no_reason(stub, caplog):
    caplog.set_level(logging.INFO)
    assert nvml_unavailable_reason() is None
    assert stub.open_count() == 0
    assert not caplog.records


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_sampler_whose_thread_has_ended_says_so_once(stub, caplog):
    stub.set(utilization=50)
    sampler = NvmlSampler(NvmlDevice.open(), period_s=0.01)
    with sampler:
        sampler.device.read = lambda: sys.exit()  # type: ignore[method-assign]
        assert sampler._thread is not None
        sampler._thread.join(timeout=10)
        for _ in range(3):
            sampler.take()
    assert [r.message for r in caplog.records if "thread has ended" in r.message] == [
        "GPU sensor: its thread has ended: the GPU is not measured any more (said once)"
    ]


def test_a_driver_that_hangs_is_said_once_while_it_hangs(stub, caplog):
    stub.set(utilization=50)
    clock = Clock()
    sampler = NvmlSampler(NvmlDevice.open(), period_s=1.0, clock=clock)
    stub.block("nvmlDeviceGetUtilizationRates", 1.0)
    sampler.start()
    clock.now += 60.0
    for _ in range(3):
        sampler.take()
    sampler.stop()
    assert len([r for r in caplog.records if "the driver does not answer" in r.message]) == 1
