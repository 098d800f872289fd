"""Memory that runs out: raised in every form that torch, CUDA's libraries and the CPU raise, and genuinely."""
# ruff: noqa: D102 - what the methods of a fault do is said once, in `Fault`

from __future__ import annotations

import ctypes
import math
import resource
from pathlib import Path
from typing import ClassVar

import torch

from .injection import Fault, Injector, register

_libc = ctypes.CDLL(None)
_libc.malloc.argtypes, _libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p


def can_shrink(injector: Injector, samples: int) -> bool:
    """Whether a micro-batch could be computed in less memory; if not, an end of the training would be right."""
    return samples > 1 or not all(layer.gradient_checkpointing for layer in injector.layers)


class OutOfMemory(Fault):
    """Fails in a random layer of a random micro-batch."""

    place: ClassVar[str] = "forward"  #: or "backward", or "recomputation" (of a checkpointed layer, in backward)
    warning = r"out of memory in a micro-batch of \d+ samples x \d+ tokens -> .*computed again"
    warns_each_time = True

    def __init__(self, injector: Injector) -> None:
        super().__init__(injector)
        self._waiting: list[int] = []  # of every strike to come: how many micro-batches to let pass
        self._layer: int | None = None
        injector.on_micro_batch.append(self._before_micro_batch)
        injector.on_layer.append(self._before_layer)

    def fail(self) -> None:
        """Raise, as an allocation that fails does."""
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of")

    def suits(self, samples: int) -> bool:
        """Whether a micro-batch may fail."""
        return can_shrink(self.injector, samples)

    def strike(self) -> None:
        self._waiting.append(self.random.randrange(4))

    def _before_micro_batch(self, samples: int) -> None:
        self._layer = None
        if not self._waiting:
            return
        self._waiting[0] -= 1
        layers = [
            i
            for i, layer in enumerate(self.injector.layers)
            if self.place != "recomputation" or layer.gradient_checkpointing
        ]
        if self._waiting[0] < 0 and self.suits(samples) and layers and not self.injector.about_to_fail:
            self._layer = self.random.choice(layers)
            self.injector.about_to_fail = True

    def _before_layer(self, index: int, hidden: torch.Tensor, in_backward: bool) -> None:
        if index != self._layer or in_backward != (self.place == "recomputation"):
            return
        self._layer = None
        if self.place == "backward":
            hidden.register_hook(lambda _: self._now())
        else:
            self._now()

    def _now(self) -> None:
        self._waiting.pop(0)
        self.fired()
        self.fail()


@register
class OutOfMemoryInForward(OutOfMemory):
    """Torch.OutOfMemoryError in the forward pass."""

    name = "oom_forward"


@register
class OutOfMemoryInBackward(OutOfMemory):
    """Torch.OutOfMemoryError in the backward pass, when some gradients are already added."""

    name = "oom_backward"
    place = "backward"


@register
class OutOfMemoryInRecomputation(OutOfMemory):
    """Torch.OutOfMemoryError while a checkpointed layer is computed again in backward."""

    name = "oom_recomputation"
    place = "recomputation"


@register
class OutOfMemoryOfOneSample(OutOfMemory):
    """Torch.OutOfMemoryError in a micro-batch of one sample, not all of whose layers are checkpointed."""

    name = "oom_single_sample"

    def suits(self, samples: int) -> bool:
        return samples == 1 and can_shrink(self.injector, samples)


@register
class OutOfMemoryInEvaluation(OutOfMemory):
    """torch.OutOfMemoryError in the forward pass of a batch of evaluation."""

    name = "oom_evaluation"
    warning = r"out of memory in evaluation of .* -> "

    def __init__(self, injector: Injector) -> None:
        super().__init__(injector)
        injector.on_micro_batch.remove(self._before_micro_batch)
        injector.on_evaluation.append(self._before_micro_batch)

    def suits(self, samples: int) -> bool:
        return samples > 1


@register
class CpuAllocatorFails(OutOfMemory):
    """Torch's CPU allocator is asked for more than there is (a plain RuntimeError), in backward."""

    name = "cpu_allocator"
    place = "backward"

    def fail(self) -> None:
        torch.empty(1 << 50, dtype=torch.uint8)


@register
class PythonMemoryError(OutOfMemory):
    """Python asks for more than there is (MemoryError), in forward."""

    name = "memory_error"

    def fail(self) -> None:
        bytearray(1 << 50)


@register
class CublasCannotAllocate(OutOfMemory):
    """CuBLAS has no memory for its handle (RuntimeError), in forward."""

    name = "cublas_alloc_failed"

    def fail(self) -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


@register
class CudaErrorOutOfMemory(OutOfMemory):
    """The CUDA runtime reports that memory is out, in backward."""

    name = "cuda_error_oom"
    place = "backward"

    def fail(self) -> None:
        raise torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")


class MemoryTaken(Fault):
    """Somebody takes the memory before a micro-batch, and leaves when the step is discarded.

    A micro-batch that fits all the same is no injection; the next one is tried.
    """

    warning = OutOfMemory.warning
    warns_each_time = True

    def __init__(self, injector: Injector) -> None:
        super().__init__(injector)
        self._to_come = 0
        self._taken = False
        injector.on_micro_batch.append(self._before_micro_batch)
        injector.on_discard.append(self._discarded)
        injector.on_computed.append(self._leave)

    def strike(self) -> None:
        self._to_come += 1

    def take(self) -> None:
        """Leave the training next to nothing."""
        raise NotImplementedError

    def give_back(self) -> None:
        """Let the training have its memory again."""
        raise NotImplementedError

    def _before_micro_batch(self, samples: int) -> None:
        self._leave()
        free = not self.injector.about_to_fail
        self._taken = self._to_come > 0 and free and can_shrink(self.injector, samples)
        if self._taken:
            self.injector.about_to_fail = True
            self.take()

    def _leave(self) -> None:
        if self._taken:
            self._taken = False
            self.give_back()

    def _discarded(self) -> None:
        if self._taken:
            self._leave()
            self._to_come -= 1
            self.fired()


@register
class ResourceLimitLowered(MemoryTaken):
    """The process's memory limit is lowered in mid-run: the kernel refuses what the allocator asks for."""

    name = "rlimit_lowered"

    def take(self) -> None:
        _libc.malloc_trim(0)
        status = Path("/proc/self/status").read_text(encoding="ascii")
        in_use = 1024 * int(status.split("VmData:")[1].split()[0])
        resource.setrlimit(resource.RLIMIT_DATA, (in_use, resource.RLIM_INFINITY))
        # What the allocator has kept would still do for a small tensor.
        self._kept: list[int] = []
        for size in (1 << 22, 1 << 18, 1 << 15):
            while block := _libc.malloc(size):
                self._kept.append(block)

    def give_back(self) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        for block in self._kept:
            _libc.free(ctypes.c_void_p(block))


@register
class NeighbourTakesMemory(MemoryTaken):
    """Another process takes what the activation budget has left."""

    name = "neighbour"

    def take(self) -> None:
        meter = self.injector.run.sensors.meter
        room = math.floor(meter.limit_bytes - meter.static_bytes - meter.live_bytes)
        meter.reserved_by_others = room - self.random.randrange(1 << 20)

    def give_back(self) -> None:
        self.injector.run.sensors.meter.reserved_by_others = 0
