"""One GPU, read and power-limited through NVML.

Every quantity fails alone: what the GPU does not offer is NaN and not asked again, what fails now and then is NaN for
that sample, and a value that cannot be true is NaN too. Nothing raises into a training once the device is open.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pynvml as _pynvml

from ..errors import SwiftcruiseError
from .visible_devices import find_handle, resolve_device

pynvml: Any = _pynvml  # the bindings are written without types

logger = logging.getLogger(__name__)

#: Errors after which the same call cannot succeed on this GPU and driver.
_UNSUPPORTED = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_DEPRECATED,
    }
)

#: Reasons for a lower clock that count as throttled: heat and a failing supply, which nobody has asked for. A power
#: limit is not among them: somebody has set it, and at the largest one a busy device runs into it all the time.
_THROTTLED = (
    pynvml.nvmlClocksThrottleReasonHwSlowdown
    | pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
    | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
    | pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
)


class NvmlUnavailableError(SwiftcruiseError):
    """There is no GPU that NVML can measure; the message says why."""


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """What one look at the device showed; NaN = not measured."""

    utilization: float  #: NVML "GPU utilisation", 0..1
    process_memory_bytes: float  #: device memory of this process
    device_memory_bytes: float  #: device memory of all processes
    memory_capacity_bytes: float  #: device memory that processes can have
    power_w: float  #: power draw, watts
    energy_j: float  #: energy counter since the driver was loaded, joules
    temperature_c: float  #: degrees Celsius
    clock_fraction: float  #: SM clock / maximum SM clock
    throttled: float  #: 1 while heat or the supply takes the clock down, else 0
    neighbours: float  #: other compute processes on the device
    power_limit_w: float  #: power limit in force, watts


class NvmlDevice:
    """One GPU (or MIG slice), read through NVML.

    Memory and processes of a MIG slice are its own; power, energy, temperature and clocks are the whole board's.
    NVML's process ids are the host's: where this process does not find its own (in a container), its memory is NaN,
    and one of the listed processes is taken to be itself. Memory counts as used what processes hold; what the driver
    reserves is taken off the capacity, except on old drivers, whose only figure includes it in the use.

    Attributes:
        faults: failed calls and impossible values so far, by quantity.
        lost: the driver reported that the GPU is gone; nothing is asked any more.
    """

    def __init__(self, handle: Any) -> None:
        """Wrap an NVML device handle; NVML must be initialised, and `close` shuts it down once."""
        self._handle = handle
        self._board, self.is_mig = _board_of(handle)
        self.faults: Counter[str] = Counter()
        self.lost = False
        self._said: set[str] = set()
        self._original_limit_w: float | None = None
        self._may_set_power = not self.is_mig
        self._closed = False
        self._calls = _driver_calls(self._handle, self._board)

    @classmethod
    def open(cls, local_ordinal: int = 0, environ: Mapping[str, str] | None = None) -> NvmlDevice:
        """Open the device that CUDA numbers `local_ordinal` in this process.

        Raises:
            NvmlUnavailableError: no driver, or no such device.
        """
        environ = os.environ if environ is None else environ
        selector = resolve_device(local_ordinal, environ)
        if selector is None:
            raise NvmlUnavailableError(
                f"no CUDA device {local_ordinal} is visible: "
                f"CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES')!r} hides it"
            )
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NvmlUnavailableError(
                f"NVML cannot be used: {error}; check that `nvidia-smi` works, or train without GPU sensors"
            ) from error
        try:
            return cls(find_handle(selector, local_ordinal))
        except BaseException as error:
            pynvml.nvmlShutdown()
            if isinstance(error, pynvml.NVMLError):
                raise NvmlUnavailableError(f"NVML has no device for {selector}: {error}") from error
            raise

    def close(self) -> None:
        """Put the power limit back and let go of NVML; may be called twice."""
        if self._closed:
            return
        self.restore()
        self._closed = True
        atexit.unregister(self.restore)
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError as error:
            logger.debug("NVML did not shut down: %s", error)

    def supports(self, quantity: str) -> bool:
        """Whether the driver may still answer for a quantity of `_driver_calls`."""
        return bool(self._calls[quantity])

    def read(self) -> DeviceSample:
        """One sample; what could not be measured is NaN. Blocks as long as the driver does."""
        used, capacity = self._ask("memory") or (math.nan, math.nan)
        capacity = self._plausible("memory", capacity, 1, math.inf)
        own, neighbours = self._processes()
        reasons = self._ask("throttle")
        clock, maximum = self._number("clock"), self._number("maximum_clock")
        return DeviceSample(
            utilization=self._plausible("utilization", self._number("utilization"), 0, 1),
            process_memory_bytes=self._plausible("process_memory", own, 0, _no_nan(1.05 * capacity)),
            device_memory_bytes=self._plausible("memory", used, 0, _no_nan(1.05 * capacity)),
            memory_capacity_bytes=capacity,
            power_w=self._plausible("power", self._number("power"), 0, 20e3),
            energy_j=self._number("energy"),
            temperature_c=self._plausible("temperature", self._number("temperature"), -100, 200),
            clock_fraction=self._plausible("clock", clock / maximum if maximum else math.nan, 0, 2),
            throttled=math.nan if reasons is None else float(reasons & _THROTTLED != 0),
            neighbours=neighbours,
            power_limit_w=self._plausible("power_limit", self._number("power_limit"), 0, 20e3),
        )

    def power_limit_range(self) -> tuple[float, float] | None:
        """Lowest and highest power limit that may be set, watts; None if this GPU (or a MIG slice) has none."""
        return None if self.is_mig else self._ask("power_limit_range")

    def set_power_limit(self, watts: float) -> bool:
        """Set the board's power limit, clipped to `power_limit_range`.

        The limit found first comes back with `restore`, with `close`, and when the interpreter exits.

        Returns:
            Whether the limit is set. False without root rights (said once, not tried again), on a MIG slice (the
            limit is every slice's), and whenever the original limit is unknown and could not be restored.
        """
        limits = self.power_limit_range()
        if not self._may_set_power or limits is None or not math.isfinite(watts):
            return False
        if self._original_limit_w is None:
            original = self._number("configured_power_limit")
            if math.isnan(original):
                return False
            self._original_limit_w = original
            atexit.register(self.restore)
        return self._write_power_limit(min(max(watts, limits[0]), limits[1]))

    def restore(self) -> None:
        """Put back the power limit that was in force before the first `set_power_limit`."""
        if self._original_limit_w is not None and not self.lost and not self._closed and self._may_set_power:
            self._write_power_limit(self._original_limit_w)

    def _write_power_limit(self, watts: float) -> bool:
        try:
            pynvml.nvmlDeviceSetPowerManagementLimit(self._board, round(watts * 1000))
        except pynvml.NVMLError as error:
            self._fault("power_limit", f"cannot be set: {error}", error.value)
            if error.value in _UNSUPPORTED | {pynvml.NVML_ERROR_NO_PERMISSION}:
                self._may_set_power = False
            return False
        return True

    def _processes(self) -> tuple[float, float]:
        """Memory of this process and the number of other processes."""
        processes = self._ask("processes")
        if processes is None:
            return math.nan, math.nan
        own = [p for p in processes if p.pid == os.getpid()]
        if not own:
            return math.nan, float(max(len(processes) - 1, 0))
        memory = own[0].usedGpuMemory
        return (math.nan if memory is None else float(memory)), float(len(processes) - len(own))

    def _number(self, quantity: str) -> float:
        value = self._ask(quantity)
        return math.nan if value is None else float(value)

    def _ask(self, quantity: str) -> Any:
        """The driver's answer, None if there is none."""
        calls = self._calls[quantity]
        while calls and not self.lost:
            try:
                return calls[0]()
            except AttributeError:  # older Python bindings lack the function
                calls.pop(0)
            except pynvml.NVMLError as error:
                if error.value not in _UNSUPPORTED:
                    self._fault(quantity, f"is not measured for now: {error}", error.value)
                    return None
                calls.pop(0)
        return None

    def _plausible(self, quantity: str, value: float, low: float, high: float) -> float:
        if math.isnan(value) or low <= value <= high:
            return value
        self._fault(quantity, f"reads {value:g}, which cannot be: ignored")
        return math.nan

    def _fault(self, quantity: str, what: str, code: int | None = None) -> None:
        self.faults[quantity] += 1
        if code == pynvml.NVML_ERROR_GPU_IS_LOST:
            self.lost = True
            quantity, what = "GPU", "is lost: it is not measured any more"
        if quantity not in self._said:
            self._said.add(quantity)
            logger.warning("GPU sensor: %s %s (said once)", quantity, what)


def _driver_calls(handle: Any, board: Any) -> dict[str, list[Callable[[], Any]]]:
    """What to ask the driver for each quantity: the preferred call first, then stand-ins on drivers that lack it."""

    def memory_v2() -> tuple[float, float]:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        return float(memory.used), float(memory.total - memory.reserved)

    def memory_v1() -> tuple[float, float]:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return float(memory.used), float(memory.total)

    def power_limit_range() -> tuple[float, float]:
        low, high = pynvml.nvmlDeviceGetPowerManagementLimitConstraints(board)
        return low / 1000, high / 1000

    return {
        "utilization": [lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100],
        "memory": [memory_v2, memory_v1],
        "processes": [
            lambda: pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle),
            lambda: pynvml.nvmlDeviceGetComputeRunningProcesses_v2(handle),
        ],
        "power": [lambda: pynvml.nvmlDeviceGetPowerUsage(board) / 1000],
        "energy": [lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(board) / 1000],
        "temperature": [
            lambda: pynvml.nvmlDeviceGetTemperature(board, pynvml.NVML_TEMPERATURE_GPU),
            lambda: pynvml.nvmlDeviceGetTemperatureV(board, pynvml.NVML_TEMPERATURE_GPU),
        ],
        "clock": [lambda: pynvml.nvmlDeviceGetClockInfo(board, pynvml.NVML_CLOCK_SM)],
        "maximum_clock": [lambda: pynvml.nvmlDeviceGetMaxClockInfo(board, pynvml.NVML_CLOCK_SM)],
        "throttle": [
            lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(board),
            lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(board),
        ],
        "power_limit": [lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(board) / 1000],
        "configured_power_limit": [lambda: pynvml.nvmlDeviceGetPowerManagementLimit(board) / 1000],
        "power_limit_range": [power_limit_range],
    }


def _board_of(handle: Any) -> tuple[Any, bool]:
    """The physical GPU of a handle, and whether the handle is a MIG slice of it."""
    try:
        if pynvml.nvmlDeviceIsMigDeviceHandle(handle):
            return pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle), True
    except pynvml.NVMLError as error:
        if error.value not in _UNSUPPORTED:
            raise
    return handle, False


def _no_nan(bound: float) -> float:
    return math.inf if math.isnan(bound) else bound
