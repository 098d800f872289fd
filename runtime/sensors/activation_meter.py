"""Activation meter: the memory that a micro-batch's autograd graph holds, counted without a GPU.

It stands in for a device's allocator on a CPU run: exact, the same in every run, and able to enforce a limit.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.autograd.graph import saved_tensors_hooks


class _LiveStorage(weakref.ref):
    """A weak reference to a counted storage that knows what it counted for."""

    __slots__ = ("address", "nbytes")

    address: int
    nbytes: int


class ActivationMeter:
    """Counts the bytes of all tensors that autograd saves for backward, from their saving until they are freed.

    A storage counts once however many tensors and views share it, and it counts as long as it exists, whoever holds
    it. Parameters do not count. What checkpointing recomputes in backward does, as `watching` covers it as well; on a
    CPU it runs in the thread that called ``backward``. While watched, autograd does not notice a saved tensor that
    is modified in place (a limitation of saved-tensor hooks); values and gradients are the same to the last bit.

    Attributes:
        limit_bytes: what may be in use at once; None = no limit.
        static_bytes: memory that is in use all the time (weights, gradients, optimizer state).
        reserved_by_others: memory that somebody else takes from the limit.
        live_bytes: bytes of saved tensors now.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        from torch.nn import Parameter

        self.limit_bytes = limit_bytes
        self.static_bytes = 0
        self.reserved_by_others = 0
        self.live_bytes = 0
        self._peak_live_bytes = 0
        self._live: dict[int, _LiveStorage] = {}  # by address
        self._parameter = Parameter

    @property
    def peak_bytes(self) -> int:
        """Highest bytes in use since `reset_peak`: `static_bytes` and the saved tensors."""
        return self.static_bytes + self._peak_live_bytes

    def reset_peak(self) -> None:
        """Let the peak begin again at what is live now."""
        self._peak_live_bytes = self.live_bytes

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count what is saved inside the ``with`` block; forward and backward belong into it.

        Raises:
            torch.OutOfMemoryError: from the forward or backward that would exceed the limit.
        """
        from torch.autograd.graph import saved_tensors_hooks

        with saved_tensors_hooks(self._pack, _unpack), self._counting_recomputation():
            yield

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self._count(tensor)
        return tensor.detach()  # the tensor itself would be a reference cycle with the graph that saves it

    def _count(self, tensor: torch.Tensor) -> None:
        """Count the tensor's storage until it is freed. Runs for every saved tensor, so it is kept short."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # a sparse tensor has none
            return
        address = storage.data_ptr()
        if address in self._live:
            return
        base = tensor._base
        owner = tensor if base is None else base
        if owner.is_leaf and isinstance(owner, self._parameter):  # is_leaf first: it is cheap and rules most out
            return
        nbytes = storage.nbytes()
        if self.limit_bytes is not None:
            self._check_limit(nbytes, self.limit_bytes)
        # torch keeps a storage's Python object as long as the storage itself, so the reference dies with the memory
        self._live[address] = reference = _LiveStorage(storage, self._release)
        reference.address, reference.nbytes = address, nbytes
        self.live_bytes = live = self.live_bytes + nbytes
        if live > self._peak_live_bytes:
            self._peak_live_bytes = live

    def _release(self, reference: _LiveStorage) -> None:
        self.live_bytes -= reference.nbytes
        del self._live[reference.address]

    def _check_limit(self, nbytes: int, limit: int) -> None:
        used = self.static_bytes + self.live_bytes
        if used + nbytes + self.reserved_by_others <= limit:
            return
        from torch import OutOfMemoryError

        raise OutOfMemoryError(
            f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {nbytes} bytes; of {limit} bytes, "
            f"{used} are in use by this process and {self.reserved_by_others} by others"
        )

    @contextlib.contextmanager
    def _counting_recomputation(self) -> Iterator[None]:
        """Let non-reentrant checkpointing count as well what it recomputes.

        torch applies the innermost saved-tensor hooks only, and checkpointing recomputes under hooks of its own; it
        offers no way in, so its (private) hooks are wrapped for the while. Where a torch has no such hooks, the peak
        leaves out what it recomputes.
        """
        from torch.utils import checkpoint

        original = getattr(checkpoint, "_recomputation_hook", None)
        if original is None:
            yield
            return

        def counting_hook(*args: Any) -> saved_tensors_hooks:
            hook = original(*args)
            pack = hook.pack_hook

            def count_and_pack(tensor: torch.Tensor) -> Any:
                self._count(tensor)
                return pack(tensor)

            hook.pack_hook = count_and_pack
            return hook

        checkpoint._recomputation_hook = counting_hook
        try:
            yield
        finally:
            checkpoint._recomputation_hook = original


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
