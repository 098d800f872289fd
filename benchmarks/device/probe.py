"""Runs inside the training (`--external_plugins probe.py --callbacks device_probe`): records and moves the neighbour.

Every finished optimizer step becomes a line of `steps.jsonl` in the folder that `SWIFTCRUISE_DEVICE_PROBE` (JSON)
names: when it began and ended, which samples it took, what its micro-batches were and took, which allocations failed
on the way. At the given steps the neighbour is told to leave this process so much memory and no more.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from swift.callbacks import TrainerCallback, callbacks_map

from swiftcruise.runtime.oom import is_out_of_memory

sys.path.insert(0, str(Path(__file__).resolve().parent))
from neighbour import ask
from probe_plan import NAME, VARIABLE


class DeviceProbe(TrainerCallback):
    """Records steps; gives and takes memory."""

    def __init__(self, args: Any, trainer: Any) -> None:
        super().__init__(args, trainer)
        plan = json.loads(os.environ[VARIABLE])
        self._folder = Path(plan["folder"])
        self._memory: dict[str, int] = plan.get("memory", {})  # from this step on, bytes that this process may have
        self._parent = plan["parent"]
        self._hook: Any = None
        self._held = 0
        self._begin_s = 0.0
        self._indices: list[int] = []
        self._failures: list[dict[str, str]] = []
        self._file = (self._folder / "steps.jsonl").open("a", encoding="utf-8", buffering=1)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Look on while the hook computes."""
        callbacks = self.trainer.callback_handler.callbacks
        self._hook = next((c.run for c in callbacks if hasattr(c, "run") and hasattr(c.run, "runner")), None)
        if self._hook is None:
            return
        runner = self._hook.runner
        swift, run, forward_backward = runner.trainer, runner.run, runner.trainer.forward_backward

        def recording_run(model: Any, shares: Any) -> Any:
            loss = run(model, shares)
            self._indices = [index for share, _ in shares for index in share.indices]
            return loss

        def recording_forward_backward(*args: Any, **options: Any) -> Any:
            try:
                return forward_backward(*args, **options)
            except Exception as error:
                if is_out_of_memory(error):
                    frames = traceback.extract_tb(error.__traceback__)
                    stage = "backward" if any(frame.name == "backward" for frame in frames) else "forward"
                    first_line = next(iter(str(error).splitlines()), "")
                    self._failures.append({"stage": stage, "kind": type(error).__name__, "message": first_line})
                raise

        runner.run, swift.forward_backward = recording_run, recording_forward_backward

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Move the neighbour. The step is planned already: it runs into what it does not know of."""
        try:
            os.kill(self._parent, 0)
        except ProcessLookupError:
            raise SystemExit("the process that checks this training is gone") from None
        allowed = self._memory.get(str(state.global_step + 1))
        if allowed is not None and self._hook is not None:
            self._leave(allowed)
        self._begin_s = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the step."""
        on_cuda = self.args.device.type == "cuda"
        line: dict[str, Any] = {"step": state.global_step, "begin_s": self._begin_s, "end_s": time.monotonic()}
        line["held"] = self._held
        line["reserved"] = torch.cuda.memory_reserved() if on_cuda else 0
        if self._hook is not None:
            last = self._hook.runner.last
            line |= {"indices": self._indices, "samples": last.samples, "real_tokens": last.real_tokens}
            line |= {"oom_count": last.oom_count, "redo_s": last.redo_s, "failures": self._failures}
            line["micro"] = [[m.tokens, m.quadratic, m.checkpoint_fraction, m.peak_fraction] for m in last.micro]
        self._file.write(json.dumps(line) + "\n")
        self._indices, self._failures = [], []

    def _leave(self, allowed: int) -> None:
        """Let the neighbour take all but `allowed` bytes of what torch may have in this process."""
        meter = self._hook.sensors.meter
        if self.args.device.type == "cuda":
            torch.cuda.empty_cache()  # what is only cached is there for the taking
            free, _ = torch.cuda.mem_get_info()
            self._held = ask(self._folder, max(0, self._held + free + torch.cuda.memory_reserved() - allowed))
        else:
            self._held = ask(self._folder, max(0, meter.limit_bytes - allowed))
            meter.reserved_by_others = self._held


callbacks_map[NAME] = DeviceProbe
