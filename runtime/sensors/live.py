"""The sensors of a live training: whatever this machine has, read once an interval."""

from __future__ import annotations

import logging
import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from .activation_meter import ActivationMeter
from .cuda import CudaMemory
from .host import HostSampler
from .nvml import DeviceReading, NvmlSampler, nvml_unavailable_reason, open_sampler

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_GIB = 2**30
_CONTEXT_BYTES = 0.75 * _GIB  #: about what a CUDA context and its libraries take beside torch's tensors


class CudaMeter:
    """Peak of torch's CUDA allocator over a micro-batch (`memory_watch.Meter`)."""

    def __init__(self, memory: CudaMemory) -> None:
        self._memory = memory
        self.expected_bytes = 0  #: memory that is not taken yet but will be, and stay: the optimizer's state

    def watching(self) -> AbstractContextManager[object]:
        """Nothing to set up: the allocator counts by itself."""
        return nullcontext()

    def reset_peak(self) -> None:
        """Let the peak begin again."""
        self._memory.reset_peak()

    @property
    def peak_bytes(self) -> int:
        """Highest memory in tensors since `reset_peak`, and what is still expected."""
        return self._memory.peak_bytes() + self.expected_bytes


class LiveSensors:
    """Sensors by telemetry field, for a CUDA or a CPU run.

    On CUDA: NVML and torch's allocator; capacity is the device's memory, or `memory_limit_gib` if that is less.
    On CPU: the activation meter stands in; with a limit it sees every micro-batch and enforces the limit, without
    one it samples, and capacity is what the host has to spare.

    Args:
        device: The training's device.
        memory_limit_gib: Memory that the training may use, GiB.
        nvml_period_s: Seconds between two NVML samples.
        model: For the memory of weights, gradients and optimizer state.
    """

    def __init__(
        self, device: torch.device, memory_limit_gib: float | None, nvml_period_s: float, model: torch.nn.Module
    ) -> None:
        self.missing: dict[str, str] = {}  #: what is not measured or not controlled, and why
        self._failed: set[str] = set()
        self.nvml: NvmlSampler | None = None
        self._cuda: CudaMemory | None = None
        self._host = HostSampler()
        self._host.take()
        limit = None if memory_limit_gib is None else memory_limit_gib * _GIB
        self.static_bytes = _static_bytes(model)
        self.meter: Any
        if device.type == "cuda":
            ordinal = device.index or 0
            self._cuda = CudaMemory(device)
            self.meter = CudaMeter(self._cuda)
            self.meter.expected_bytes = int(_optimizer_bytes(model))
            self.meter_every = 1
            self.capacity_bytes = min(float(self._cuda.capacity_bytes), limit or math.inf)
            try:
                self.nvml = open_sampler(ordinal, nvml_period_s)
                if self.nvml is None:
                    self.missing["NVML"] = nvml_unavailable_reason(ordinal) or "not available"
            except Exception as error:
                self.missing["NVML"] = repr(error)
        else:
            import psutil

            meter = ActivationMeter(None if limit is None else int(limit))
            meter.static_bytes = int(self.static_bytes)
            self.meter = meter
            self.meter_every = 1 if limit is not None else 16
            available = psutil.virtual_memory().available
            self.capacity_bytes = limit if limit is not None else float(available + self.static_bytes)
            self.missing["NVML"] = "this run computes on the CPU; host sensors, fill and the activation meter stand in"
        self.device_name = _device_name(device)

    @property
    def names(self) -> list[str]:
        """The sensors that answer."""
        names = ["NVML"] if self.nvml is not None else []
        names += (
            ["CUDA allocator"]
            if self._cuda is not None
            else [f"activation meter ({self.capacity_bytes / _GIB:.2f} GiB)"]
        )
        return [*names, "host", "fill"]

    def start(self) -> None:
        """Begin sampling."""
        if self.nvml is not None:
            self.nvml.start()

    def stop(self) -> None:
        """End sampling; may be called twice."""
        if self.nvml is not None:
            self.nvml.stop()

    def power_limit_range(self) -> tuple[float, float]:
        """Least and greatest power limit of the device, watts; NaN where unknown."""
        limits = self.nvml.power_limit_range() if self.nvml is not None else None
        return limits if limits is not None else (math.nan, math.nan)

    def readings(self) -> dict[str, float]:
        """Values since the last call, by telemetry field, and `others_memory_fraction`; unmeasured ones are left out.

        A sensor that fails is said so once; the others still answer.
        """
        values: dict[str, float] = {}
        for name, read in (("host", self._read_host), ("CUDA allocator", self._read_cuda), ("NVML", self._read_nvml)):
            try:
                values |= read()
            except Exception as error:
                if name not in self._failed:
                    logger.warning("swiftcruise: the sensor %s failed: %r", name, error, exc_info=True)
                self._failed.add(name)
        return values

    def others_memory_now(self) -> float:
        """Fraction of capacity out of this process's reach: what others hold, and what its CUDA context takes.

        By NVML's latest sample and by the device itself, whichever says more; 0 where neither does.
        """
        try:
            others = math.nan if self.nvml is None else self._others_memory(self.nvml.peek())
            room = 1.0 if self._cuda is None else self.room_now()
        except Exception:  # `readings` says what is wrong with it
            return 0.0
        return max(0.0 if math.isnan(others) else others, 1.0 - room)

    def room_now(self) -> float:
        """Fraction of capacity within this process's reach; 1 where that is not known."""
        if self._cuda is not None:
            return min(1.0, self._cuda.room_bytes() / self.capacity_bytes)
        limit = self.meter.limit_bytes
        return 1.0 if limit is None else max(0.0, limit - self.meter.reserved_by_others) / limit

    def _others_memory(self, reading: DeviceReading) -> float:
        room = math.nan if self._cuda is None else float(self._cuda.room_bytes())
        return others_memory_fraction(reading, room, self.capacity_bytes)

    def optimizer_state_exists(self) -> None:
        """Tell that the optimizer has made its state: from now on the allocator counts it."""
        if isinstance(self.meter, CudaMeter):
            self.meter.expected_bytes = 0

    def _read_host(self) -> dict[str, float]:
        host = self._host.take()
        return {
            "host_cpu_fraction": host.host_cpu_fraction,
            "neighbour_cpu_fraction": host.neighbour_cpu_fraction,
            "host_memory_fraction": host.host_memory_fraction,
        }

    def _read_cuda(self) -> dict[str, float]:
        return {} if self._cuda is None else {"allocation_retries": float(self._cuda.take_retries())}

    def _read_nvml(self) -> dict[str, float]:
        if self.nvml is None:
            return {}
        reading = self.nvml.take()
        return {
            "gpu_utilization": reading.gpu_utilization,
            "others_memory_fraction": self._others_memory(reading),
            "power_w": reading.power_w,
            "energy_j": reading.energy_j,
            "temperature_c": reading.temperature_c,
            "clock_fraction": reading.clock_fraction,
            "throttled": reading.throttled,
            "neighbours": reading.neighbours,
        }


def others_memory_fraction(reading: DeviceReading, room_bytes: float, capacity_bytes: float) -> float:
    """What other processes take of this one's capacity; NaN where that is not known.

    Args:
        reading: NVML's reading. Where it does not see this process (in a container), what is out of reach now stands
            in, with an allowance for this process's own CUDA context.
        room_bytes: Memory that torch's allocator holds or could have now.
        capacity_bytes: What this process may use. What the device has beyond it is room that others may have.
    """
    others = reading.others_memory_bytes
    if math.isnan(others):
        others = reading.memory_capacity_bytes - room_bytes - _CONTEXT_BYTES
    beyond = max(0.0, reading.memory_capacity_bytes - capacity_bytes)
    return math.nan if math.isnan(others) else max(0.0, others - beyond) / capacity_bytes


def _optimizer_bytes(model: torch.nn.Module) -> float:
    """Two optimizer moments."""
    return float(sum(2 * p.numel() * p.element_size() for p in model.parameters() if p.requires_grad))


def _static_bytes(model: torch.nn.Module) -> float:
    """Weights, gradients and the optimizer's state."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    gradients = _optimizer_bytes(model) / 2
    return float(weights) + gradients + _optimizer_bytes(model)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    import platform

    return platform.processor() or platform.machine()
