"""Which exceptions mean that memory ran out."""

from __future__ import annotations

#: Parts of messages with which torch, CUDA libraries and CPU allocators report a failed allocation, lower case.
_MESSAGES = (
    "out of memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cudnn_status_not_initialized",  # of a handle that found no memory
    "cublascreate(handle)",
    "cusolver_status_alloc_failed",
    "cusparse_status_alloc_failed",
    "can't allocate memory",
    "cannot allocate memory",
    "failed to allocate",
    "std::bad_alloc",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is a failed allocation in any form that torch, CUDA libraries or the CPU allocator raise.

    `torch.OutOfMemoryError` is a RuntimeError that says "out of memory"; the CPU allocator raises a plain
    RuntimeError ("can't allocate memory"), Python a MemoryError.
    """
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(message in text for message in _MESSAGES)
