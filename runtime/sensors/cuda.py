"""CUDA sensor: what torch's caching allocator knows about this process's device memory."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ..errors import SwiftcruiseError

if TYPE_CHECKING:
    import torch


def device_uuid(local_ordinal: int) -> str | None:
    """UUID (without ``GPU-``) of torch's CUDA device `local_ordinal`; None where torch cannot tell.

    Asks only a torch that has CUDA running in this process: it never imports torch and never creates a CUDA context.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or local_ordinal >= torch.cuda.device_count():
        return None
    uuid = getattr(torch.cuda.get_device_properties(local_ordinal), "uuid", None)
    return None if uuid is None else str(uuid)


class CudaMemory:
    """Peak and pressure of the caching allocator on one device, since the last look.

    Attributes:
        capacity_bytes: memory of the device.
    """

    def __init__(self, device: int | torch.device | None = None) -> None:
        """Watch a device, the current one by default.

        Raises:
            SwiftcruiseError: torch has no CUDA device.
        """
        import torch

        if not self.available():
            raise SwiftcruiseError(
                f"device={device!r}: torch sees no CUDA device; use ActivationMeter to meter a run without a GPU"
            )
        self._cuda = torch.cuda
        self._device = torch.cuda.current_device() if device is None else device
        self.capacity_bytes: int = torch.cuda.get_device_properties(self._device).total_memory
        self._retries = self._total_retries()

    @staticmethod
    def available() -> bool:
        """Whether torch can use a CUDA device here."""
        import torch

        return torch.cuda.is_available()

    def reset_peak(self) -> None:
        """Let the peaks begin again at what is in use now."""
        self._cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """Highest memory in tensors since `reset_peak`."""
        # The nested form is what the allocator hands out; max_memory_allocated flattens all of it for one number.
        return int(self._cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]["peak"])

    def peak_reserved_bytes(self) -> int:
        """Highest memory held by the allocator, cached blocks and fragments included, since `reset_peak`."""
        return self._cuda.max_memory_reserved(self._device)

    def reserved_bytes(self) -> int:
        """Memory held by the allocator now."""
        return self._cuda.memory_reserved(self._device)

    def room_bytes(self) -> int:
        """Memory that this process has in its allocator, or could have now."""
        return self._cuda.mem_get_info(self._device)[0] + self.reserved_bytes()

    def take_retries(self) -> int:
        """How often since the last call the allocator had to flush its cache to find memory."""
        before, self._retries = self._retries, self._total_retries()
        return self._retries - before

    def _total_retries(self) -> int:
        return int(self._cuda.memory_stats(self._device).get("num_alloc_retries", 0))
