"""Averaging gradients over data-parallel ranks at the end of a macro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.nn.parallel import DistributedDataParallel


def all_reduce_gradients(model: DistributedDataParallel, bucket_bytes: int = 32 << 20) -> None:
    """Average the gradients over the ranks in buckets, once every rank has finished its backward passes.

    DDP's own overlapped reduction would start inside the last backward pass; a rank that fails there and computes
    its step again would then be out of step with the others.
    """
    import torch
    import torch.distributed as dist
    from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

    world = dist.get_world_size()
    parameters = [p for p in model.parameters() if p.requires_grad]
    used = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX)
    bucket: list[torch.Tensor] = []

    def flush() -> None:
        if bucket:
            flat = _flatten_dense_tensors(bucket)
            dist.all_reduce(flat)
            flat /= world
            for grad, value in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
                grad.copy_(value)
            bucket.clear()

    size = 0
    for parameter, is_used in zip(parameters, used.tolist(), strict=True):
        if not is_used:
            continue  # no rank has a gradient: leave it None, so that the optimizer skips it as plain DDP would
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if bucket and (bucket[0].dtype != parameter.grad.dtype or size > bucket_bytes):
            flush()
            size = 0
        bucket.append(parameter.grad)
        size += parameter.grad.numel() * parameter.grad.element_size()
    flush()
