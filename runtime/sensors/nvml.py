"""NVML sensor: a thread samples one GPU, `take` aggregates what it saw. A driver that hangs hangs only the thread."""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .nvml_device import DeviceSample, NvmlDevice, NvmlUnavailableError

logger = logging.getLogger(__name__)

_STALE_PERIODS = 5  # older than this, a sample says nothing about now
_HANGS = "the driver does not answer: until it does, the GPU is not measured, nor is its power limit put back"
_WINDOW_SAMPLES = 4096  # bounds the memory of a sampler that nobody reads


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """What the device did since the reading before; NaN = not measured."""

    gpu_utilization: float = math.nan  #: mean, 0..1
    process_memory_bytes: float = math.nan  #: highest device memory of this process
    device_memory_bytes: float = math.nan  #: highest device memory of all processes
    others_memory_bytes: float = math.nan  #: highest device memory of all other processes; NaN if this one is not seen
    memory_capacity_bytes: float = math.nan  #: device memory that processes can have
    power_w: float = math.nan  #: mean, watts
    energy_j: float = math.nan  #: joules since the reading before (or since the first sample)
    temperature_c: float = math.nan  #: highest, degrees Celsius
    clock_fraction: float = math.nan  #: mean SM clock / maximum SM clock
    throttled: float = math.nan  #: share of samples in which heat or the supply took the clock down
    neighbours: float = math.nan  #: most other compute processes at once
    power_limit_w: float = math.nan  #: power limit in force at the end, watts

    @property
    def process_memory_fraction(self) -> float:
        """Highest memory of this process / capacity."""
        return self.process_memory_bytes / self.memory_capacity_bytes

    @property
    def device_memory_fraction(self) -> float:
        """Highest memory of all processes / capacity."""
        return self.device_memory_bytes / self.memory_capacity_bytes


class NvmlSampler:
    """Samples a device once a period in a daemon thread.

    A context manager: entering starts the thread, leaving stops it, puts the power limit back and closes the device.
    """

    def __init__(self, device: NvmlDevice, period_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        """Sample `device`, which the sampler owns from now on, every `period_s` seconds of `clock`."""
        self.device = device
        self.period_s = period_s
        self._clock = clock
        self._lock = threading.Lock()  # never held during a call to the driver, so that take() cannot hang with it
        self._window: deque[DeviceSample] = deque(maxlen=_WINDOW_SAMPLES)
        self._latest: DeviceSample | None = None
        self._latest_s = math.nan
        self._energy_j = math.nan  # energy counter at the end of the reading before
        self._integral_j = 0.0  # integral of power, for GPUs without an energy counter
        self._stopping = threading.Event()
        self._said_silent = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> NvmlSampler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the thread; does nothing if it was started before."""
        if self._thread is None:
            self._latest_s = self._clock()
            self._thread = threading.Thread(target=self._run, name="swiftcruise-nvml", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread and close the device; may be called twice.

        A driver that hangs is given one second, then left alone: touching NVML again would hang the training as well.
        """
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)
            if self._thread.is_alive():
                self._say_silent(_HANGS)
                atexit.unregister(self.device.restore)
                return
        self.device.close()

    def poll(self) -> None:
        """Take one sample now, in the calling thread. The sampler's own thread does nothing else."""
        sample = self.device.read()
        now = self._clock()
        with self._lock:
            if not self.device.supports("energy"):
                sample = self._with_integrated_energy(sample, now)
            self._latest, self._latest_s = sample, now
            self._window.append(sample)

    def take(self) -> DeviceReading:
        """What was seen since the `take` before. Never waits for the driver.

        Between two samples the latest one answers again, without energy. All NaN if the latest sample is older than
        five periods (the driver hangs) or the GPU is lost.
        """
        with self._lock:
            samples = list(self._window)
            self._window.clear()
            latest = self._latest
            self._say_if_silent()
            if latest is None or self.device.lost or self._is_stale():
                self._energy_j = math.nan
                return DeviceReading()
            energy_j = self._energy_since_last(samples)
        return _reading(samples or [latest], energy_j)

    def peek(self) -> DeviceReading:
        """The latest sample by itself, without its energy; `take` is not affected. All NaN where `take` would be."""
        with self._lock:
            latest = self._latest
            if latest is None or self.device.lost or self._is_stale():
                return DeviceReading()
        return _reading([latest], math.nan)

    def power_limit_range(self) -> tuple[float, float] | None:
        """See `NvmlDevice.power_limit_range`; None while the driver hangs."""
        return None if self._hangs() else self.device.power_limit_range()

    def set_power_limit(self, watts: float) -> bool:
        """See `NvmlDevice.set_power_limit`; False while the driver hangs."""
        return not self._hangs() and self.device.set_power_limit(watts)

    def restore(self) -> None:
        """See `NvmlDevice.restore`; nothing while the driver hangs."""
        if not self._hangs():
            self.device.restore()

    def _run(self) -> None:
        while not self._stopping.is_set() and not self.device.lost:
            try:
                self.poll()
            except Exception:  # whatever it is, the training must not notice
                if not self._said_silent:
                    logger.warning("GPU sensor: a sample failed (said once)", exc_info=True)
                self._said_silent = True
            self._stopping.wait(self.period_s)

    def _say_if_silent(self) -> None:
        if self._thread is None or self._stopping.is_set() or self.device.lost:
            return
        if not self._thread.is_alive():
            self._say_silent("its thread has ended: the GPU is not measured any more")
        elif self._is_stale():
            self._say_silent(_HANGS)

    def _say_silent(self, why: str) -> None:
        if not self._said_silent:
            logger.warning("GPU sensor: %s (said once)", why)
        self._said_silent = True

    def _is_stale(self) -> bool:
        return self._clock() - self._latest_s > _STALE_PERIODS * self.period_s

    def _hangs(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and self._is_stale()

    def _with_integrated_energy(self, sample: DeviceSample, now: float) -> DeviceSample:
        """The sample with the integral of power (trapezoidal rule) as its energy counter."""
        before = self._latest
        if before is not None and now - self._latest_s <= _STALE_PERIODS * self.period_s:  # power in a gap is unknown
            step_j = (before.power_w + sample.power_w) / 2 * (now - self._latest_s)
            self._integral_j += 0.0 if math.isnan(step_j) else step_j
        energy_j = math.nan if math.isnan(sample.power_w) else self._integral_j
        return replace(sample, energy_j=energy_j)

    def _energy_since_last(self, samples: Sequence[DeviceSample]) -> float:
        counters = [j for j in (self._energy_j, *(s.energy_j for s in samples)) if not math.isnan(j)]
        if not samples or not counters:
            return math.nan
        self._energy_j = counters[-1]
        if len(counters) < 2:
            return math.nan
        if counters[-1] < counters[0]:  # the driver was reloaded: the counter began again
            self.device.faults["energy"] += 1
            return math.nan
        return counters[-1] - counters[0]


def open_sampler(local_ordinal: int = 0, period_s: float = 1.0) -> NvmlSampler | None:
    """A sampler (not started yet) of the device that CUDA numbers `local_ordinal` here; None if there is none."""
    try:
        return NvmlSampler(NvmlDevice.open(local_ordinal), period_s)
    except NvmlUnavailableError as reason:
        logger.info("GPU sensor: %s", reason)
        return None


def nvml_unavailable_reason(local_ordinal: int = 0) -> str | None:
    """Why `open_sampler` returns None, in one line; None if it does not."""
    try:
        NvmlDevice.open(local_ordinal).close()
    except NvmlUnavailableError as reason:
        return str(reason)
    return None


def _reading(samples: Sequence[DeviceSample], energy_j: float) -> DeviceReading:
    """What some samples (at least one) say together."""
    return DeviceReading(
        gpu_utilization=_mean([s.utilization for s in samples]),
        process_memory_bytes=_highest([s.process_memory_bytes for s in samples]),
        device_memory_bytes=_highest([s.device_memory_bytes for s in samples]),
        # Sample by sample: this process may give back what a neighbour takes.
        others_memory_bytes=_highest(
            [s.device_memory_bytes - s.process_memory_bytes for s in samples if s.process_memory_bytes > 0]
        ),
        memory_capacity_bytes=_highest([s.memory_capacity_bytes for s in samples]),
        power_w=_mean([s.power_w for s in samples]),
        energy_j=energy_j,
        temperature_c=_highest([s.temperature_c for s in samples]),
        clock_fraction=_mean([s.clock_fraction for s in samples]),
        throttled=_mean([s.throttled for s in samples]),
        neighbours=_highest([s.neighbours for s in samples]),
        power_limit_w=samples[-1].power_limit_w,
    )


def _mean(values: Sequence[float]) -> float:
    measured = [v for v in values if not math.isnan(v)]
    return sum(measured) / len(measured) if measured else math.nan


def _highest(values: Sequence[float]) -> float:
    return max((v for v in values if not math.isnan(v)), default=math.nan)
