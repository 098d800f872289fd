"""Faults of what decides and of what it decides on: policy, GPU sensor, clock."""
# ruff: noqa: D102 - what the methods of a fault do is said once, in `Fault`

from __future__ import annotations

import atexit
import math
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pynvml

from swiftcruise.runtime.controls import Controls
from swiftcruise.runtime.sensors.nvml import NvmlSampler
from swiftcruise.runtime.sensors.nvml_device import NvmlDevice
from swiftcruise.runtime.telemetry import Telemetry
from tests.nvml_stub import NvmlStub, build_stub, installed_stub

from . import injection_clock
from .injection import Fault, Injector, register


class RestlessPolicy:
    """Other controls at every decision, and the faults of a policy when an injector wants them."""

    def __init__(self, low: float = 200.0, high: float = 1500.0) -> None:
        self._range = math.log(low), math.log(high)
        self._random = np.random.default_rng()

    def reset(self, n: int, seed: int | None = None) -> None:
        self._random = np.random.default_rng(seed)

    def act(self, telemetry: Telemetry) -> Controls:
        proposed = Controls.of(
            telemetry.n,
            token_budget=np.exp(self._random.uniform(*self._range)),
            micro_batch_cap=self._random.integers(3, 32),
            # Seldom all layers: a single sample that fails with all of them rightly ends the training.
            checkpoint_fraction=self._random.choice([0.0, 0.5, 0.75, np.nan], p=[0.3, 0.3, 0.3, 0.1]),
        )
        injector = Injector.current
        if injector is None or not PolicyFault.waiting:
            return proposed
        return PolicyFault.waiting.pop(0).misbehave(proposed)

    def state_dict(self) -> dict[str, Any]:
        return {"random": self._random.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._random.bit_generator.state = state["random"]

    def diagnostics(self) -> Mapping[str, Any]:
        return {}


class PolicyFault(Fault):
    """A decision that goes wrong."""

    #: A policy's first failure is told, of whatever kind.
    FAILED: ClassVar[str] = r"swiftcruise: the policy (failed, the last controls are held|proposed impossible values)"

    waiting: ClassVar[list[PolicyFault]] = []

    def strike(self) -> None:
        PolicyFault.waiting.append(self)

    def misbehave(self, proposed: Controls) -> Any:
        """What `act` does instead of returning `proposed`."""
        self.fired()
        return self.decide(proposed)

    def decide(self, proposed: Controls) -> Any:
        raise NotImplementedError


@register
class PolicyRaises(PolicyFault):
    """The policy raises an exception."""

    name = "policy_raises"
    warning = PolicyFault.FAILED

    def decide(self, proposed: Controls) -> Any:
        raise self.random.choice([ZeroDivisionError("division by zero"), KeyError("gain"), MemoryError()])


@register
class PolicyReturnsNan(PolicyFault):
    """The policy returns NaN for every control (which means: leave it)."""

    name = "policy_nan"

    def decide(self, proposed: Controls) -> Any:
        return Controls.of(1)


@register
class PolicyReturnsTheImpossible(PolicyFault):
    """The policy returns infinite or negative values."""

    name = "policy_impossible"
    warning = PolicyFault.FAILED

    def decide(self, proposed: Controls) -> Any:
        value = self.random.choice([math.inf, -math.inf, -1.0, -1e300])
        return proposed.replace(token_budget=value, checkpoint_fraction=value)


@register
class PolicyReturnsGarbage(PolicyFault):
    """The policy returns something that is no decision, or one for other plants."""

    name = "policy_garbage"
    warning = PolicyFault.FAILED

    def decide(self, proposed: Controls) -> Any:
        return self.random.choice([None, "512", {"token_budget": 512}, Controls.of(3), np.zeros(7)])


@register
class PolicyHangs(PolicyFault):
    """A decision takes half as long again as it may."""

    name = "policy_hangs"
    warning = PolicyFault.FAILED

    def decide(self, proposed: Controls) -> Any:
        time.sleep(1.5 * self.injector.run.config.decision_timeout_s)
        return proposed


class GpuSensorFault(Fault):
    """A healthy GPU sensor (the real bindings on a scripted driver) comes to the run and then breaks."""

    warns_each_time = True  # every sensor for itself: each injection brings a new one
    PERIOD_S: ClassVar[float] = 0.05
    _library: ClassVar[Path | None] = None
    _installed: ClassVar[Any] = None  # what puts the stub behind the bindings, for as long as the process lives

    def strike(self) -> None:
        sensors = self.injector.run.sensors
        if sensors.nvml is not None:
            sensors.nvml.stop()
        script = self._library_built().with_name("script")
        self.stub = NvmlStub(self._library_built(), script)
        self.stub.set(utilization=70, memory_total=80e9, memory_used=30e9, power_w=300, temperature_c=60)
        self.sampler = sensors.nvml = NvmlSampler(NvmlDevice.open(environ={}), self.PERIOD_S)
        self.sampler.start()
        wait_until(lambda: not math.isnan(self.sampler.take().gpu_utilization), "the sensor to answer")
        self.fired()
        self.break_it()

    def break_it(self) -> None:
        raise NotImplementedError

    @classmethod
    def _library_built(cls) -> Path:
        if GpuSensorFault._library is None:
            folder = Path(tempfile.mkdtemp())
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            GpuSensorFault._library = build_stub(folder)
            GpuSensorFault._installed = installed_stub(GpuSensorFault._library, folder / "script")
            GpuSensorFault._installed.__enter__()
        return GpuSensorFault._library


@register
class GpuLost(GpuSensorFault):
    """NVML reports that the GPU has fallen off the bus."""

    name = "gpu_lost"
    warning = r"GPU sensor: GPU is lost"

    def break_it(self) -> None:
        self.stub.fail("nvmlDeviceGetUtilizationRates", pynvml.NVML_ERROR_GPU_IS_LOST)
        wait_until(lambda: self.sampler.device.lost, "the loss to be seen")


@register
class GpuNonsense(GpuSensorFault):
    """NVML returns a utilisation of 4e9 %, more memory used than there is, a negative power."""

    name = "gpu_nonsense"
    warning = r"GPU sensor: utilization reads .* ignored"

    def break_it(self) -> None:
        self.stub.set(utilization=4e9, memory_used=9e18, power_w=-1, temperature_c=4e9)
        wait_until(lambda: self.sampler.device.faults["utilization"] > 0, "the nonsense to be read")


@register
class GpuSensorRaises(GpuSensorFault):
    """An exception nobody thought of in the sampler's thread, at every sample."""

    name = "gpu_sensor_raises"
    warning = r"GPU sensor: a sample failed"

    def break_it(self) -> None:
        read = threading.Event()

        def fail() -> None:
            read.set()
            raise struct_error()

        self.sampler.device.read = fail
        wait_until(read.is_set, "the sample to fail")


@register
class GpuSensorDies(GpuSensorFault):
    """The sampler's thread ends."""

    name = "gpu_sensor_dies"
    warning = r"GPU sensor: its thread has ended"

    def break_it(self) -> None:
        def end() -> None:
            raise SystemExit

        self.sampler.device.read = end
        wait_until(lambda: not self.sampler._thread.is_alive(), "the thread to end")


@register
class GpuDriverHangs(GpuSensorFault):
    """A call to the driver does not return."""

    name = "gpu_driver_hangs"
    warning = r"GPU sensor: the driver does not answer"

    def break_it(self) -> None:
        self.stub.block("nvmlDeviceGetUtilizationRates", 3600)
        wait_until(lambda: self.sampler._is_stale(), "the last sample to be too old")


def struct_error() -> Exception:
    """What ctypes bindings raise when a driver answers in another version's layout."""
    return ValueError("Procedure called with not enough arguments (4 bytes missing)")


class ClockJumps(Fault):
    """All clocks of Python (`time`, `monotonic`, `perf_counter`) jump."""

    direction: ClassVar[int]

    def strike(self) -> None:
        self.fired()
        injection_clock.jump(self.direction * self.random.choice([1.5, 600.0, 86400.0 * 3]))


@register
class ClockJumpsForward(ClockJumps):
    """The clock jumps forward by seconds, minutes or days."""

    name = "clock_forward"
    direction = 1


@register
class ClockJumpsBackward(ClockJumps):
    """The clock jumps backward by seconds, minutes or days."""

    name = "clock_backward"
    direction = -1


@register
class ProcessPaused(Fault):
    """The process is stopped (SIGSTOP) for half a second and continued."""

    name = "paused"

    def strike(self) -> None:
        self.fired()
        pid = os.getpid()
        subprocess.Popen(["sh", "-c", f"kill -STOP {pid}; sleep 0.5; kill -CONT {pid}"])
        time.sleep(0.05)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Wait for another thread.

    Raises:
        TimeoutError: in vain; the injection is broken.
    """
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        threading.Event().wait(0.005)
    raise TimeoutError(f"waited {seconds:g} s for {what}")
