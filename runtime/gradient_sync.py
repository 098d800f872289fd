"""Averaging gradients over data-parallel ranks at the end of a macro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.nn.parallel import DistributedDataParallel


@contextlib.contextmanager
def without_sync(model: DistributedDataParallel) -> Iterator[None]:
    """Let forward and backward passes involve no other rank, so that a rank may fail and compute them again.

    DDP's `no_sync` alone leaves the first forward's broadcast of buffers, for which the others would wait for ever.
    """
    model.require_forward_param_sync = False
    with model.no_sync():
        yield


def all_reduce_gradients(model: DistributedDataParallel, bucket_bytes: int = 32 << 20) -> None:
    """Average the gradients over the model's ranks in buckets, once every rank has finished its backward passes.

    DDP's own overlapped reduction would start inside the last backward pass; a rank that fails there and computes
    its step again would then be out of step with the others.
    """
    import torch
    import torch.distributed as dist
    from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

    group = model.process_group
    world = dist.get_world_size(group)
    parameters = [p for p in model.parameters() if p.requires_grad]
    used = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    bucket: list[torch.Tensor] = []

    def flush() -> None:
        if bucket:
            flat = _flatten_dense_tensors(bucket)
            flat /= world  # before the sum, as DDP does: half-precision gradients do not overflow
            dist.all_reduce(flat, group=group)
            for grad, value in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
                grad.copy_(value)
            bucket.clear()

    size = 0
    for parameter, is_used in zip(parameters, used.tolist(), strict=True):
        if not is_used:
            continue  # no rank has a gradient: leave it None, so that the optimizer skips it as plain DDP would
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad
        if bucket and (bucket[0].dtype != grad.dtype or bucket[0].device != grad.device or size > bucket_bytes):
            flush()
            size = 0
        bucket.append(grad)
        size += grad.numel() * grad.element_size()
    flush()
