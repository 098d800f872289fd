"""Sharded training: ranks that agree on their number of micro-batches, and on a save when one runs out of memory.

Where the ranks share every layer's weights (FSDP, FSDP2, DeepSpeed ZeRO-3), each forward and backward pass gathers them
from all ranks. So all ranks must run equally many passes (`agree_on_micro_batches`), and a rank that fails in the
middle of one cannot compute its step again alone: the others wait inside a collective that it will never join, and no
backend lets them out of it before its time-out. What is left is to end well (`AgreedSave`): nothing has changed the
weights since the step began, so the ranks save them together over connections of their own, and end.

Shown with FSDP2 (`torch.distributed.fsdp.fully_shard`) of torch 2.13 under gloo on CPU, 2 and 4 processes. It needs
gloo beside the training's own backend, a store that outlives the rank that failed (torchrun's does), and a folder that
all ranks see. On CUDA nothing of it has run yet, and ms-swift's own FSDP and DeepSpeed are refused until it has.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import SwiftcruiseError
from .oom import is_out_of_memory

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

EXIT_SAVED = 75  #: exit code of a rank that ended because another one failed, once the checkpoint was complete
EXIT_NOT_SAVED = 76  #: the same where no checkpoint could be agreed on
_NOTICE = (
    "swiftcruise/out_of_memory"  #: key in the store; steps done before the failure (None: unsure), and whose it is
)


class ShardedOutOfMemory(SwiftcruiseError):
    """A rank of a sharded training ran out of memory; the message says what was saved and how to go on."""


def agree_on_micro_batches(count: int, device: torch.device | str, group: ProcessGroup | None = None) -> int:
    """The largest `count` of all ranks of `group`: one small all-reduce, which the host waits for.

    Args:
        count: Micro-batches that this rank has planned for the step.
        device: Where the group's backend wants its tensors.
        group: Ranks that share their weights; None is the whole training.
    """
    import torch
    import torch.distributed as dist

    agreed = torch.tensor(count, device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    return int(agreed.item())


def sharded_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an FSDP2 model and its optimizer hold on this rank, by reference and without communication.

    The layout is that of `torch.distributed.checkpoint.state_dict.get_state_dict`, so `set_state_dict` takes it. That
    function itself would not do: to have the state of a fresh optimizer, it lets the optimizer take a step.
    """
    weights = model.state_dict()  # first, since it shards again what an evaluation has left gathered
    weights |= {name: buffer.clone() for name, buffer in model.named_buffers() if name in weights}
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    groups = [
        {key: [names[p] for p in value] if key == "params" else value for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    state = {names[parameter]: dict(entries) for parameter, entries in optimizer.state.items()}
    return {"model": weights, "optimizer": {"state": state, "param_groups": groups}}


class AgreedSave:
    """Ends a sharded training in an agreed checkpoint when a rank runs out of memory.

    ::

        with AgreedSave(lambda: sharded_state(model, optimizer), folder, device) as rescue:
            for step, batch in enumerate(batches):
                with rescue.passes(steps_done=step):
                    ...  # all forward and backward passes of the step
                optimizer.step()

    A daemon thread on every rank looks into the store for the notice of a rank that failed. The threads then meet over
    a gloo group that nothing else uses, while the main threads may be stuck, and save the state of before the step with
    `torch.distributed.checkpoint` in `folder/rescue-<steps done>`; its `.metadata` is written last, once every shard is
    there. The rank that failed raises `ShardedOutOfMemory`; the others end with `EXIT_SAVED` or `EXIT_NOT_SAVED` by
    `os._exit`, the only way out of a stuck collective. All ranks of the training create and enter it together.

    Args:
        state: Called as `passes` begins; returns the state to save, nested dictionaries of plain values and tensors
            (references, as `passes` changes neither parameters nor optimizer state). It must not communicate.
        folder: Where checkpoints go; on a file system that all ranks share.
        device: Where the training's collectives want their tensors.
        timeout_s: How long the ranks wait for one that does not come to the meeting, seconds.
        save_timeout_s: How long they wait for each other while they write, seconds.
        poll_s: Time between two looks into the store, seconds.
    """

    def __init__(
        self,
        state: Callable[[], Mapping[str, Any]],
        folder: str | os.PathLike[str],
        device: torch.device | str,
        *,
        timeout_s: float = 60.0,
        save_timeout_s: float = 1800.0,
        poll_s: float = 0.5,
    ) -> None:
        import torch

        self.folder = Path(folder).absolute()
        self.device = torch.device(device)
        self.timeout_s = timeout_s
        self.save_timeout_s = save_timeout_s
        self.poll_s = poll_s
        self._state_of = state
        self._state: Mapping[str, Any] | None = None  #: inside `passes`
        self._steps_done = -1  #: in `_state`
        self._begun: Any = None  #: on CUDA, the event after which `_state` is complete
        self._boundary = threading.Condition()  #: told when these three are set
        self._wake, self._noticed = threading.Event(), threading.Event()
        self._closed = False
        self._warned = False
        self._failed = False  #: this rank did, and its main thread waits for the message
        self._message = ""

    # -- on the main thread ------------------------------------------------------------------------------------------

    def __enter__(self) -> AgreedSave:
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        self._group: Any = dist.new_group(timeout=datetime.timedelta(seconds=self.save_timeout_s), backend="gloo")
        store: Any = _get_default_store()
        # A connection of its own: a main thread that waits for a key would keep a shared one from answering.
        self._store = store.clone() if hasattr(store, "clone") else store
        self._thread = threading.Thread(target=self._watch, name="swiftcruise-agreed-save", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        import torch.distributed as dist

        if isinstance(error, Exception) and not isinstance(error, ShardedOutOfMemory):
            self._handle(error, None)  # perhaps in the middle of the optimizer's update
        self._closed = True
        self._wake.set()
        self._thread.join(self.timeout_s)
        if error is None and dist.is_initialized():
            dist.destroy_process_group(self._group)

    @contextlib.contextmanager
    def passes(self, steps_done: int) -> Iterator[None]:
        """Context of forward and backward passes, in which parameters and optimizer state do not change.

        It is left only when all ranks have come to its end (one small all-reduce, which the host waits for): none
        updates its weights while another may still fail in the same step. An evaluation may stand in it as well.

        Args:
            steps_done: Optimizer steps taken so far.

        Raises:
            ShardedOutOfMemory: this rank ran out of memory, and the training is over on all ranks.
        """
        import torch

        try:
            state = self._state_of()
        except Exception as error:
            state = None
            if not self._warned:
                logger.warning("swiftcruise: an out-of-memory would end this training unsaved: %r", error)
            self._warned = True
        with self._boundary:
            self._state, self._steps_done = state, steps_done
            if self.device.type == "cuda":
                self._begun = torch.cuda.current_stream(self.device).record_event()
            self._boundary.notify_all()
        try:
            yield
            agree_on_micro_batches(0, self.device)
        except Exception as error:
            self._handle(error, steps_done)
            raise
        self._state = None  # keeps nothing alive that the optimizer replaces

    def _handle(self, error: Exception, steps_done: int | None) -> None:
        """Tell the other ranks when memory ran out; whatever happened, do not end in the middle of a meeting."""
        import torch.distributed as dist

        try:
            if is_out_of_memory(error):
                self._failed = True
                # The frames that have ended still hold the activations, and saving needs memory too.
                traceback.clear_frames(error.__traceback__)
                gc.collect()
                notice = json.dumps([steps_done, f"rank {dist.get_rank()} ({_line(error)})"])
                self._store.compare_set(_NOTICE, "", notice)  # the first one stands
            # A rank that has met and left closes its connections, which wakes the others' main threads with an error.
            elif not self._noticed.is_set() and not self._store.check([_NOTICE]):
                return
        except Exception as unreachable:
            logger.warning("swiftcruise: the store of the ranks does not answer: %r", unreachable)
            return
        self._wake.set()
        if self._noticed.wait(self.timeout_s if self._thread.is_alive() else 0.0):
            self._thread.join()
            if self._failed:
                raise ShardedOutOfMemory(self._message) from None

    # -- on the daemon thread ----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            while not self._store.check([_NOTICE]):
                if self._closed:
                    return
                self._wake.wait(self.poll_s)
            steps_done, whose = json.loads(self._store.get(_NOTICE))
        except Exception as error:
            if not self._closed:
                logger.warning("swiftcruise: an out-of-memory of another rank would not be noticed: %r", error)
            return
        self._noticed.set()
        happened = f"out of memory on {whose} in a sharded training, which ends: no rank can redo its step alone."
        saved = False
        try:
            self._message = f"{happened} {self._meet(steps_done)}"
            saved = True
        except BaseException as error:  # torch's CheckpointException is no Exception
            causes = [f"rank {rank}: {_line(cause)}" for rank, (cause, _) in getattr(error, "failures", {}).items()]
            self._message = f"{happened} No checkpoint could be agreed: {', '.join(causes) or _line(error)}"
        if not self._failed:  # else the main thread waits for this one, and raises
            self._end_process(saved)

    def _meet(self, steps_done: int | None) -> str:
        """Agree with all ranks on what to save, and save it; returns where it is and how to go on."""
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        if steps_done is None:
            raise RuntimeError("it was outside the passes, perhaps in the middle of an update of the weights")
        # Over the store, since gloo's barrier with a time-out has one on rank 0 only.
        keys = [f"{_NOTICE}/{rank}" for rank in range(dist.get_world_size())]
        self._store.set(keys[dist.get_rank()], "")
        with contextlib.suppress(Exception):
            self._store.wait(keys, datetime.timedelta(seconds=self.timeout_s))
        missing = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
        if missing:
            raise TimeoutError(f"no answer from rank {', '.join(missing)} within {self.timeout_s:g} s")
        with self._boundary:
            # This rank may still be busy with the update before the step in which the other one failed.
            self._boundary.wait_for(lambda: self._state is not None and self._steps_done >= steps_done, self.timeout_s)
            state = self._state
            mine = None if state is None else self._steps_done, str(self._free_folder())
        reports: list[Any] = [None] * len(keys)
        dist.all_gather_object(reports, mine, self._group)
        if {steps for steps, _ in reports} != {steps_done} or state is None:
            raise RuntimeError(f"the ranks hold states of different steps ({', '.join(str(s) for s, _ in reports)})")
        folder = reports[0][1]
        with self._own_stream():
            dcp.save(  # pyright: ignore[reportPrivateImportUsage]
                {"steps_done": steps_done, **_on_host(state)},
                storage_writer=dcp.FileSystemWriter(folder),  # pyright: ignore[reportPrivateImportUsage]
                process_group=self._group,
            )
        return (
            f"All {steps_done} steps before it are saved in {folder}. Load it with torch.distributed.checkpoint.load, "
            "into any number of ranks, and go on with more room: a lower memory_cap, more checkpointed layers, shorter "
            "samples or more ranks."
        )

    def _end_process(self, saved: bool) -> None:
        import torch.distributed as dist

        with contextlib.suppress(Exception):
            if dist.get_rank() == 0 or not saved:
                print(f"swiftcruise: {self._message}", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(EXIT_SAVED if saved else EXIT_NOT_SAVED)

    def _free_folder(self) -> Path:
        """A folder that no earlier run has saved into."""
        folder, number = self.folder / f"rescue-{self._steps_done}", 1
        while folder.exists():
            number += 1
            folder = self.folder / f"rescue-{self._steps_done}-{number}"
        return folder

    @contextlib.contextmanager
    def _own_stream(self) -> Iterator[None]:
        """On CUDA: a stream behind the work before `passes`, but not behind the collective that is stuck."""
        if self.device.type != "cuda":
            yield
            return
        import torch

        with torch.cuda.device(self.device):
            stream = torch.cuda.Stream()
            stream.wait_event(self._begun)
            with torch.cuda.stream(stream):
                yield


def _on_host(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same with all tensors on the host, sharded ones still sharded; what is there already is not copied."""
    import torch
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu"), dict(state))


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
