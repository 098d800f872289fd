"""What ends a training: signals in the middle of a step or of a checkpoint, and the death of a loader's worker."""
# ruff: noqa: D102 - what the methods of a fault do is said once, in `Fault`

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import ClassVar

import psutil

from .injection import Fault, Injector, register


class Kill(Fault):
    """Sends a signal in the middle of a random micro-batch."""

    kills = True
    number: ClassVar[signal.Signals]

    def __init__(self, injector: Injector) -> None:
        super().__init__(injector)
        self._to_pass: int | None = None
        injector.on_micro_batch.append(self._before_micro_batch)

    def strike(self) -> None:
        self._to_pass = self.random.randrange(3)

    def _before_micro_batch(self, samples: int) -> None:
        if self._to_pass is None:
            return
        self._to_pass -= 1
        if self._to_pass < 0:
            self._to_pass = None
            self.fired()
            self.send()

    def send(self) -> None:
        """Send the signal as a user does: to the command that was typed. This process waits for it."""
        chain = [psutil.Process(), *psutil.Process().parents()]
        typed = next(p for p in reversed(chain) if any(Path(w).name == "swiftcruise" for w in p.cmdline()[:2]))
        typed.send_signal(self.number)
        time.sleep(30)
        raise TimeoutError(f"{self.number.name} to process {typed.pid} did not reach the training")


@register
class Interrupted(Kill):
    """Ctrl-C in the middle of a step."""

    name = "sigint"
    number = signal.SIGINT


@register
class Terminated(Kill):
    """SIGTERM to `swiftcruise run` in the middle of a step."""

    name = "sigterm"
    number = signal.SIGTERM


@register
class Killed(Kill):
    """SIGKILL of the training (of one rank, if the plan says so) in the middle of a step."""

    name = "sigkill"
    number = signal.SIGKILL

    def send(self) -> None:
        os.kill(os.getpid(), self.number)


@register
class WorkerKilled(Kill):
    """SIGKILL of a loader's worker, which ends plain ms-swift as well."""

    name = "worker_killed"
    number = signal.SIGKILL

    def send(self) -> None:
        for child in psutil.Process().children():
            child.send_signal(self.number)


@register
class KilledWhileSaving(Fault):
    """SIGKILL when a checkpoint is saved, before the controller's state is in it."""

    name = "sigkill_saving"
    kills = True

    def __init__(self, injector: Injector) -> None:
        super().__init__(injector)
        self._armed = False
        injector.on_saved.append(self._saved)

    def strike(self) -> None:
        self._armed = True

    def _saved(self, checkpoint: Path) -> None:
        if self._armed:
            self.fired()
            os.kill(os.getpid(), signal.SIGKILL)
