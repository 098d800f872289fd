"""Host sensor: how busy the machine's cores and memory are, and how much of that is other processes' doing."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class HostReading:
    """What the host did since the reading before; NaN = not measured."""

    host_cpu_fraction: float  #: busy share of all cores, 0..1
    neighbour_cpu_fraction: float  #: share of all cores busy with other processes, 0..1
    host_memory_fraction: float  #: used share of host memory, 0..1
    rss_bytes: float  #: resident memory of this process


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU seconds so far, summed over all cores.

    Attributes:
        total_s: all time, idle included.
        busy_s: time neither idle nor waiting for a disk; what a hypervisor gave to other machines counts as busy.
        own_s: time of this process and its descendants, finished ones included.
    """

    total_s: float
    busy_s: float
    own_s: float


def cpu_fractions(before: CpuTimes, after: CpuTimes) -> tuple[float, float]:
    """Busy share of all cores between two moments, and the part of it that is not our own, each 0..1.

    NaN if no time passed. The host's and the process's clocks tick apart (10 ms), hence the clipping.
    """
    total = after.total_s - before.total_s
    if total <= 0:
        return math.nan, math.nan
    host = min(max((after.busy_s - before.busy_s) / total, 0.0), 1.0)
    own = max((after.own_s - before.own_s) / total, 0.0)
    return host, max(host - own, 0.0)


class HostSampler:
    """Measures the host since its construction, then since the last `take`; meant for once a control interval.

    Descendants (loader workers) count as this process: a worker that ends hands its CPU time to the process that
    waits for it, so the sum never loses any.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._descendants: dict[int, psutil.Process] = {}
        self._before = self.cpu_times()

    def take(self) -> HostReading:
        """What the host did since the last call."""
        before, self._before = self._before, self.cpu_times()
        host, neighbours = cpu_fractions(before, self._before)
        memory = psutil.virtual_memory()
        return HostReading(
            host_cpu_fraction=host,
            neighbour_cpu_fraction=neighbours,
            host_memory_fraction=1.0 - memory.available / memory.total,
            rss_bytes=float(self._process.memory_info().rss),
        )

    def cpu_times(self) -> CpuTimes:
        """CPU seconds up to now."""
        times = psutil.cpu_times()
        # Linux counts a guest's time in `user` as well
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        return CpuTimes(
            total_s=total,
            busy_s=total - times.idle - getattr(times, "iowait", 0.0),
            own_s=_cpu_seconds(self._process) + sum(map(_cpu_seconds, self._find_descendants())),
        )

    def _find_descendants(self) -> Iterable[psutil.Process]:
        known = self._descendants
        try:
            pids = list(_descendant_pids(self._process.pid))
        except OSError:  # kernels without CONFIG_PROC_CHILDREN, and other systems: walk through all processes
            self._descendants = {p.pid: known.get(p.pid, p) for p in self._process.children(recursive=True)}
        else:
            self._descendants = {}
            for pid in pids:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._descendants[pid] = known[pid] if pid in known else psutil.Process(pid)
        return self._descendants.values()


def available_cores() -> int:
    """Cores this process may use: its CPU affinity, cut to the cgroup's quota; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(cores, cgroup_cpu_quota())))


def cgroup_cpu_quota(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float:
    """CPU quota of this process in cores: the least of its cgroup and all above it; infinite if there is none.

    Args:
        root: where cgroup v2, or the controllers of v1, are mounted.
        membership: the kernel's list of this process's cgroups, lines ``id:controllers:path``.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return math.inf
    quota = math.inf
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / controllers  # v2's line names no controllers
        group = mount / path.strip("/")
        # Inside a container the path is often the host's, of which only the mount's root is visible
        for folder in (group, *group.parents):
            quota = min(quota, _quota_of(folder))
            if folder == mount:
                break
    return quota


def _quota_of(group: Path) -> float:
    """Quota of one cgroup folder in cores, infinite if it sets none."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = " ".join((group / name).read_text().strip() for name in names).split()
            if quota not in ("max", "-1"):
                return int(quota) / int(period)
    return math.inf


def _cpu_seconds(process: psutil.Process) -> float:
    """CPU time of a process and of its children that ended; 0 if it is gone."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system + getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)


def _descendant_pids(pid: int) -> Iterator[int]:
    """Process ids of all descendants, from the kernel's own lists.

    Raises:
        OSError: this kernel keeps no such lists.
    """
    for task in os.listdir(f"/proc/{pid}/task"):
        children = Path(f"/proc/{pid}/task/{task}/children").read_text().split()
        for child in map(int, children):
            yield child
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it ended meanwhile
                yield from _descendant_pids(child)
