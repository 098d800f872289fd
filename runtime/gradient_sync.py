"""Averaging gradients over data-parallel ranks, during the step's last backward pass or after it.

DDP's own reduction starts inside the last backward pass and cannot be begun anew, so a rank that runs out of memory
there takes the others down. Here a rank may fail at any moment before `GradientSync.finish` and compute its step
again, while the others only wait. Why that is safe:

1. What goes over the wire is fixed: every bucket of a plan that all ranks make alike, once a step, in the plan's
   order; then one number a bucket; then those buckets again that some rank asked for. When a rank sends a bucket, and
   how often it computes its step, changes none of this.
2. What is sent are copies. A rank's own gradients stay its own until `finish`, when it can no longer fail.
3. What a copy missed is made good. A rank may have sent a bucket and then get another gradient there: it discarded
   the step, or a parameter got gradient once more (a shared layer under reentrant checkpointing, a second backward
   call). It keeps what it had sent and asks for the bucket again, in which every rank sends its difference to what it
   had sent before: zeros, but for those who asked. So the result is always the average of the gradients that the ranks
   hold in the end, and a rank that has written back a bucket already has nothing to undo.
4. All ranks add the same received numbers to the same received numbers, so they end with equal bits.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from .oom import is_out_of_memory

if TYPE_CHECKING:
    import torch
    from torch.nn.parallel import DistributedDataParallel


def plan_buckets(sizes: Sequence[int], kinds: Sequence[Hashable], bucket_bytes: int) -> list[list[int]]:
    """Share parameters out to buckets, in the order in which a backward pass is expected to complete the buckets.

    Args:
        sizes: Bytes of each parameter, in the order of the forward pass.
        kinds: What may not mix in a bucket (data type and device), of each parameter.
        bucket_bytes: Most bytes of a bucket; a larger parameter has one of its own.

    Returns:
        Indices of the parameters of each bucket.
    """
    buckets: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    room: dict[Hashable, int] = {}
    for index in reversed(range(len(sizes))):
        kind, size = kinds[index], sizes[index]
        if size > room.get(kind, -1):
            buckets.append([])
            filling[kind], room[kind] = buckets[-1], bucket_bytes
        filling[kind].append(index)
        room[kind] -= size
    return sorted(buckets, key=lambda bucket: -bucket[-1])


@contextlib.contextmanager
def without_sync(model: DistributedDataParallel) -> Iterator[None]:
    """Let forward and backward passes involve no other rank, so that a rank may fail and compute them again.

    DDP's `no_sync` alone leaves the first forward's broadcast of buffers, for which the others would wait for ever.
    """
    model.require_forward_param_sync = False
    with model.no_sync():
        yield


class GradientSync:
    """The gradients of a model, averaged over its ranks once an optimizer step.

        with sync.accumulating(last=False):
            loss(micro_batch_1).backward()
        with sync.accumulating(last=True, overlap=True):
            loss(micro_batch_2).backward()  # any failure up to here: sync.discard(), and begin the step anew
        sync.finish()

    Ranks may differ in the number of micro-batches, in `overlap` and in what they discard.

    Args:
        model: The wrapped model. Nothing else may use its process group between a step's last backward pass and the
            end of `finish`: ranks would differ in the order.
        bucket_bytes: Most bytes of gradient that travel together (DDP's default).
    """

    def __init__(self, model: DistributedDataParallel, bucket_bytes: int = 25 << 20) -> None:
        import torch.distributed as dist

        self.model = model
        self._bucket_bytes = bucket_bytes
        self._ranks = dist.get_world_size(model.process_group)
        self._managed = [p for name, p in model.module.named_parameters() if name not in model.parameters_to_ignore]
        self._parameters: list[torch.nn.Parameter] = []  # those to train
        self._buckets: list[list[int]] = []
        self._bucket_of: list[int] = []
        # How often a parameter is known to get gradient in one last micro-batch, and how often it got it in the present
        # one; of how many of its parameters a bucket waits for more. The first step only learns: nothing is sent early.
        self._expected: list[int] | None = None
        self._seen: list[int] = []
        self._waiting_for: list[int] = []
        # Of the present step: buckets sent, those of them whose result is not written back, and what was sent of
        # parameters whose gradient has changed since.
        self._sent = 0
        self._in_flight: dict[int, tuple[torch.Tensor, dist.Work]] = {}
        self._outdated: dict[int, torch.Tensor | None] = {}
        self._may_send = False
        self._lock = threading.Lock()  # autograd has a thread for each device

    @property
    def buckets(self) -> int:
        """Buckets of the present step; 0 before the first one."""
        return len(self._buckets)

    @property
    def buckets_sent(self) -> int:
        """Buckets sent so far in the present step."""
        return self._sent

    @property
    def copy_bytes(self) -> int:
        """Most bytes that the copies of an overlapped backward pass take beside the gradients."""
        return sum(p.numel() * p.element_size() for p in self._managed if p.requires_grad)

    @contextlib.contextmanager
    def accumulating(self, *, last: bool, overlap: bool = False) -> Iterator[None]:
        """Context of a micro-batch's forward and backward pass, in which no rank waits for another.

        Args:
            last: Whether it is the step's last micro-batch.
            overlap: In the last one, send buckets as soon as their gradients are final. Their copies take up to
                `copy_bytes` of memory, instead of two buckets'. One that cannot be allocated costs the overlap only.
        """
        early = last and overlap and self._ranks > 1
        with without_sync(self.model), self._sending() if early else contextlib.nullcontext():
            yield

    def discard(self) -> None:
        """Forget the gradients of the step, to compute it again."""
        for bucket in self._buckets[: self._sent]:
            for index in bucket:
                if index not in self._outdated:
                    grad = self._parameters[index].grad
                    # in host memory: most often it is the device's that has run out
                    self._outdated[index] = None if grad is None else grad.detach().cpu()
        self.model.zero_grad(set_to_none=True)

    def finish(self) -> None:
        """Replace every gradient by its average over the ranks; returns when all ranks are done with their step.

        A parameter that only some ranks used gets its share; one that no rank used keeps None.
        """
        import torch
        import torch.distributed as dist

        self._update_plan()
        if self._ranks == 1 or not self._buckets:
            return
        with torch.no_grad():
            used = [p.grad is not None for p in self._parameters]
            known = self._expected or [0] * len(used)
            self._expected = [max(of) for of in zip(known, self._seen, map(int, used), strict=True)]
            changes = {index: self._change(index) for index in self._outdated}
            for number in range(len(self._buckets)):
                if self._sent == number:
                    self._send(self._copy(number))
                if self._sent == number + 1 < len(self._buckets):
                    self._send_if_it_fits()  # travels while this one is written back
                self._write_back(number)
            again = torch.zeros(len(self._buckets), device=self._parameters[0].device)
            for index in changes:
                again[self._bucket_of[index]] = 1.0
            dist.all_reduce(again, op=dist.ReduceOp.MAX, group=self.model.process_group)
            for number in again.nonzero().flatten().tolist():
                self._correct(number, changes, used)
        self._sent = 0
        self._outdated = {}
        self._seen = [0] * len(self._parameters)

    # -- during the last backward pass -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _sending(self) -> Iterator[None]:
        """Watch the gradients and send buckets as they become final."""
        self._update_plan()
        self._seen = [0] * len(self._parameters)
        expected = self._expected or []
        self._waiting_for = [sum(expected[i] > 0 for i in bucket) if expected else 0 for bucket in self._buckets]
        self._may_send = bool(expected)
        handles = []
        try:
            for index, parameter in enumerate(self._parameters):
                handles.append(parameter.register_hook(partial(self._before, index)))
                handles.append(parameter.register_post_accumulate_grad_hook(partial(self._after, index)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, index: int, _: torch.Tensor) -> None:
        """A parameter is about to get gradient: too late for a copy that is sent."""
        with self._lock:
            if self._bucket_of[index] < self._sent and index not in self._outdated:
                grad = self._parameters[index].grad
                self._outdated[index] = None if grad is None else grad.detach().clone()

    def _after(self, index: int, _: torch.Tensor) -> None:
        """A parameter got gradient: perhaps the last that its bucket has waited for."""
        with self._lock:
            self._seen[index] += 1
            if self._expected is None:
                return
            if self._seen[index] == self._expected[index]:
                self._waiting_for[self._bucket_of[index]] -= 1
            while self._may_send and self._sent < len(self._buckets) and not self._waiting_for[self._sent]:
                self._may_send = self._send_if_it_fits()

    # -- buckets ---------------------------------------------------------------------------------------------------

    def _update_plan(self) -> None:
        """Plan the buckets anew if other parameters are trained than in the step before."""
        if self._sent:
            return
        parameters = [p for p in self._managed if p.requires_grad]
        if list(map(id, parameters)) == list(map(id, self._parameters)):
            return
        self._parameters = parameters
        sizes = [p.numel() * p.element_size() for p in parameters]
        self._buckets = plan_buckets(sizes, [(p.dtype, p.device) for p in parameters], self._bucket_bytes)
        number_of = {index: number for number, bucket in enumerate(self._buckets) for index in bucket}
        self._bucket_of = [number_of[index] for index in range(len(parameters))]
        self._expected = None
        self._seen = [0] * len(parameters)

    def _copy(self, number: int) -> torch.Tensor:
        """This rank's share of a bucket."""
        grads = [self._parameters[index].grad for index in self._buckets[number]]
        return self._flat(number, grads, [grad is not None for grad in grads])

    def _flat(self, number: int, values: Sequence[torch.Tensor | None], used: Sequence[bool]) -> torch.Tensor:
        """Values of a bucket's parameters divided by the number of ranks, and after them for each whether it is used.

        Divided before the sum, as DDP does: half-precision gradients do not overflow.
        """
        import torch

        parameters = [self._parameters[index] for index in self._buckets[number]]
        size = sum(p.numel() for p in parameters)
        with torch.no_grad():
            flat = parameters[0].new_empty(size + len(parameters))
            slots, flags = self._parts(number, flat)
            for slot, value in zip(slots, values, strict=True):
                if value is None:
                    slot.zero_()
                else:
                    torch.mul(value, 1 / self._ranks, out=slot)
            flags.fill_(1.0)
            for position, is_used in enumerate(used):
                if not is_used:
                    flags[position] = 0.0
        return flat

    def _send_if_it_fits(self) -> bool:
        """Start to reduce the next bucket; False if there is no memory for its copy."""
        try:
            flat = self._copy(self._sent)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        self._send(flat)
        return True

    def _send(self, flat: torch.Tensor) -> None:
        """Start to reduce the next bucket."""
        import torch.distributed as dist

        work = dist.all_reduce(flat, group=self.model.process_group, async_op=True)
        assert work is not None
        self._in_flight[self._sent] = flat, work
        self._sent += 1

    def _parts(self, number: int, flat: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Views of a bucket: the values of its parameters, and for each how many ranks use it."""
        parameters = [self._parameters[index] for index in self._buckets[number]]
        *values, used = flat.split([*(p.numel() for p in parameters), len(parameters)])
        return [v.view_as(p) for v, p in zip(values, parameters, strict=True)], used

    def _write_back(self, number: int) -> None:
        """Wait for a bucket and put its averages in the place of this rank's gradients."""
        import torch

        flat, work = self._in_flight.pop(number)
        work.wait()
        values, used = self._parts(number, flat)
        parameters = [self._parameters[index] for index in self._buckets[number]]
        if any(p.grad is None for p in parameters):  # only then it is worth waiting for the device
            for parameter, users in zip(parameters, used.tolist(), strict=True):
                if parameter.grad is None and users:
                    parameter.grad = torch.zeros_like(parameter)
        for parameter, value in zip(parameters, values, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(value)

    # -- what the copies missed ------------------------------------------------------------------------------------

    def _change(self, index: int) -> torch.Tensor:
        """A parameter's gradient minus what was sent of it."""
        import torch

        parameter, sent = self._parameters[index], self._outdated[index]
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return grad.clone() if sent is None else grad - sent.to(grad.device)

    def _correct(self, number: int, changes: dict[int, torch.Tensor], used: list[bool]) -> None:
        """Add to a bucket's averages what the ranks' copies missed."""
        import torch
        import torch.distributed as dist

        bucket = self._buckets[number]
        flat = self._flat(number, [changes.get(index) for index in bucket], [used[index] for index in bucket])
        dist.all_reduce(flat, group=self.model.process_group)
        values, users = self._parts(number, flat)
        for index, value, is_used in zip(bucket, values, users.tolist(), strict=True):
            parameter = self._parameters[index]
            if not is_used:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad += value
