"""The host sensor, on the machine at hand, and the CUDA sensor where there is no CUDA."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftcruise.runtime.errors import SwiftcruiseError
from swiftcruise.runtime.sensors.cuda import CudaMemory, device_uuid
from swiftcruise.runtime.sensors.host import CpuTimes, HostSampler, available_cores, cgroup_cpu_quota, cpu_fractions

BURN = "import time\nwhile time.process_time() < 0.3: pass\nprint('burnt', flush=True)\ninput()"


def test_a_reading_is_made_of_fractions_and_bytes():
    sampler = HostSampler()
    time.sleep(0.1)
    reading = sampler.take()
    assert 0 <= reading.neighbour_cpu_fraction <= reading.host_cpu_fraction <= 1
    assert 0 < reading.host_memory_fraction < 1
    assert reading.rss_bytes > 1e6


def test_the_work_of_children_is_our_own_while_they_live_and_after():
    sampler = HostSampler()
    before = sampler.cpu_times().own_s
    child = subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "burnt\n"
    alive = sampler.cpu_times().own_s
    child.communicate("\n")
    ended = sampler.cpu_times().own_s
    assert alive - before >= 0.25
    assert ended >= alive


def test_a_busy_neighbour_is_told_from_our_own_work():
    before = CpuTimes(total_s=0, busy_s=0, own_s=0)
    assert cpu_fractions(before, CpuTimes(total_s=40, busy_s=30, own_s=10)) == (0.75, 0.5)
    assert all(map(math.isnan, cpu_fractions(before, before))), "no time passed"


@given(st.lists(st.floats(0, 1e6), min_size=6, max_size=6))
@settings(max_examples=100, deadline=None)
def test_cpu_fractions_stay_between_0_and_1_whatever_the_clocks_say(times):
    host, neighbours = cpu_fractions(CpuTimes(*times[:3]), CpuTimes(*times[3:]))
    assert math.isnan(host) or 0 <= neighbours <= host <= 1


def test_reading_the_host_costs_little():
    sampler = HostSampler()
    children = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(3)]
    sampler.take()
    began = time.perf_counter()
    for _ in range(20):
        sampler.take()
    seconds = (time.perf_counter() - began) / 20
    for child in children:
        child.communicate(b"\n")
    assert seconds < 0.03, "a thousandth of a 30 s interval"


# ---- cores ----


def test_the_cores_to_use_are_those_of_the_affinity():
    allowed = os.sched_getaffinity(0)
    assert 1 <= available_cores() <= len(allowed)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert available_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_quota_of_less_than_a_core_still_leaves_one(monkeypatch):
    monkeypatch.setattr("swiftcruise.runtime.sensors.host.cgroup_cpu_quota", lambda: 0.5)
    assert available_cores() == 1


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/job\n", {"job/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/job/step\n", {"job/step/cpu.max": "max 100000", "job/cpu.max": "400000 100000"}, 4),
        ("0::/not/visible/here\n", {"cpu.max": "200000 100000"}, 2),
        ("0::/\n", {"cpu.max": "max 100000"}, math.inf),
        ("0::/\n", {"cpu.max": "garbage"}, math.inf),
        (
            "3:cpu,cpuacct:/job\n0::/\n",
            {"cpu,cpuacct/job/cpu.cfs_quota_us": "300000", "cpu,cpuacct/job/cpu.cfs_period_us": "100000"},
            3,
        ),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
        ("4:memory:/job\n", {"memory/job/cpu.max": "100000 100000"}, math.inf),
    ],
)
def test_the_tightest_quota_on_the_way_up_counts(tmp_path: Path, membership, files, cores):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    listing = tmp_path / "membership"
    listing.write_text(membership)
    assert cgroup_cpu_quota(tmp_path, listing) == cores


def test_without_cgroups_there_is_no_quota(tmp_path: Path):
    assert cgroup_cpu_quota(tmp_path, tmp_path / "absent") == math.inf


# ---- CUDA ----


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_without_cuda_its_memory_sensor_says_so():
    assert not CudaMemory.available()
    assert device_uuid(0) is None
    with pytest.raises(SwiftcruiseError, match="no CUDA device"):
        CudaMemory(0)


def test_allocator_retries_are_counted_since_the_last_look(monkeypatch):
    stats = {"num_alloc_retries": 5}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    memory = CudaMemory(0)
    assert memory.capacity_bytes == 80
    stats["num_alloc_retries"] = 8
    assert [memory.take_retries(), memory.take_retries()] == [3, 0]
