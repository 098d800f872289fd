"""What counts as out of memory."""

from __future__ import annotations

import pytest
import torch

from swiftcruise.runtime.oom import is_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
        RuntimeError("NPU out of memory. Tried to allocate 1.00 GiB"),
        RuntimeError("std::bad_alloc"),
        MemoryError(),
    ],
)
def test_every_allocators_complaint_is_understood(error: Exception):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. workers are out of shared memory"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("out of memory"),  # nothing that allocates raises this
        KeyboardInterrupt(),
    ],
)
def test_other_errors_are_left_alone(error: BaseException):
    assert not is_out_of_memory(error)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks the CPU's allocator")
def test_the_cpu_allocator_says_so_in_words_that_are_understood():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55)
    assert is_out_of_memory(caught.value)
