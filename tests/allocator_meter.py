"""The allocator meter of `allocator_meter.c`: compile it, preload it into a training, read and steer it meanwhile."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("allocator_meter.c")


class MeterUnavailable(RuntimeError):
    """The meter cannot be built on this machine."""


def build_meter(directory: Path) -> Path:
    """Compile the meter into `directory` and return the library.

    Raises:
        MeterUnavailable: no C compiler, or a C library other than glibc.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise MeterUnavailable("no C compiler: the allocator meter cannot be built")
    if platform.libc_ver()[0] != "glibc":
        raise MeterUnavailable("no glibc: the allocator meter stands in front of glibc's allocator only")
    library = directory / "allocator_meter.so"
    flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return library


class _Control(ctypes.Structure):
    """`struct control` of the C source."""

    _fields_ = [(name, ctypes.c_int64) for name in ("live", "peak", "budget", "neighbour", "refusals")]


class AllocatorMeter:
    """The memory of a training that is started with `environment`, as if it were a device's.

    All processes started with it share the budget, forked ones (loader workers) excepted, whose memory is the host's.

    Args:
        library: What `build_meter` made.
        file: Holds the counters; made if it is not there.
        budget_bytes: As the attribute; None leaves it as it is.
    """

    def __init__(self, library: Path, file: Path, budget_bytes: int | None = None) -> None:
        with file.open("a+b") as opened:
            opened.truncate(ctypes.sizeof(_Control))
            self._control = _Control.from_buffer(mmap.mmap(opened.fileno(), ctypes.sizeof(_Control)))
        self.environment = {"LD_PRELOAD": str(library), "ALLOCATOR_METER": str(file)}
        if budget_bytes is not None:
            self.budget_bytes = budget_bytes

    @classmethod
    def of_this_process(cls) -> AllocatorMeter:
        """The meter that this process was started with."""
        return cls(Path(os.environ["LD_PRELOAD"]), Path(os.environ["ALLOCATOR_METER"]))

    @property
    def budget_bytes(self) -> int:
        """Bytes that there are; 0 = no limit. May be set at any time, and so may `neighbour_bytes`."""
        return self._control.budget

    @budget_bytes.setter
    def budget_bytes(self, value: int) -> None:
        self._control.budget = value

    @property
    def neighbour_bytes(self) -> int:
        """Bytes of them that somebody else holds."""
        return self._control.neighbour

    @neighbour_bytes.setter
    def neighbour_bytes(self, value: int) -> None:
        self._control.neighbour = value

    @property
    def live_bytes(self) -> int:
        """Bytes of all CPU tensors' storages now."""
        return self._control.live

    @property
    def peak_bytes(self) -> int:
        """Most `live_bytes` so far."""
        return self._control.peak

    @property
    def refusals(self) -> int:
        """Allocations that failed for want of budget so far."""
        return self._control.refusals
