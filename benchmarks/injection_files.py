"""Disks that are full, files and directories that are gone, replaced or cannot be written."""
# ruff: noqa: D102 - what the methods of a fault do is said once, in `Fault`

from __future__ import annotations

import os
import shutil
from pathlib import Path

from .injection import Fault, Injector, register

_TRACE = r"no more trace is written to .* \(the training goes on\)"
_BOARD = r"no more charts are written to .* \(the training goes on\)"


@register
class TraceDiskFull(Fault):
    """The disk of trace.jsonl is full from now on."""

    name = "trace_disk_full"
    warning = _TRACE

    def strike(self) -> None:
        self.fired()
        redirect(self.injector.output_dir / "trace.jsonl", "/dev/full", os.O_WRONLY)


@register
class TraceReadOnly(Fault):
    """The file trace.jsonl cannot be written any more."""

    name = "trace_read_only"
    warning = _TRACE

    def strike(self) -> None:
        self.fired()
        redirect(self.injector.output_dir / "trace.jsonl", "/dev/null", os.O_RDONLY)


@register
class TraceRemoved(Fault):
    """The file trace.jsonl is removed."""

    name = "trace_removed"
    warning = _TRACE

    def strike(self) -> None:
        self.fired()
        (self.injector.output_dir / "trace.jsonl").unlink()


@register
class TraceCannotBeOpened(Fault):
    """There is a directory where trace.jsonl should be made."""

    name = "trace_unopenable"
    warning = _TRACE

    def strike(self) -> None:
        self.fired()
        replace_by_directory(self.injector.output_dir / "trace.jsonl")


@register
class BoardDiskFull(Fault):
    """The disk of the TensorBoard log is full from now on."""

    name = "board_disk_full"
    warning = _BOARD

    def strike(self) -> None:
        self.fired()
        for file in board(self.injector).iterdir():
            file.unlink()
            file.symlink_to("/dev/full")


@register
class BoardReplaced(Fault):
    """The directory of the TensorBoard log is removed and a file put in its place."""

    name = "board_replaced"
    warning = _BOARD

    def strike(self) -> None:
        self.fired()
        shutil.rmtree(board(self.injector), ignore_errors=True)
        board(self.injector).parent.mkdir(parents=True, exist_ok=True)
        board(self.injector).write_text("not a directory", encoding="utf-8")


@register
class SummaryUnwritable(Fault):
    """There is a directory where the summary should be written."""

    name = "summary_unwritable"
    warning = r"the summary was not written to"

    def strike(self) -> None:
        self.fired()
        replace_by_directory(self.injector.output_dir / "swiftcruise_summary.json")


@register
class StateUnwritable(Fault):
    """The controller's state cannot be written into the next checkpoint."""

    name = "state_unwritable"
    warning = r"the controller's state was not saved to"
    warns_each_time = True

    def __init__(self, injector: Injector) -> None:
        super().__init__(injector)
        self._to_come = 0
        injector.on_saved.append(self._saved)

    def strike(self) -> None:
        self._to_come += 1

    def _saved(self, checkpoint: Path) -> None:
        if self._to_come:
            self._to_come -= 1
            self.fired()
            replace_by_directory(checkpoint / "swiftcruise_state.json")


@register
class ConfigReplaced(Fault):
    """The configuration file is replaced by something else while the training runs."""

    name = "config_replaced"

    def strike(self) -> None:
        self.fired()
        content = self.random.choice(
            [b"", b"\x00\xff\xfe garbage", b"policy: [", b"token_budget: 1\nmemory_cap: 0.01\n"]
        )
        (Path(self.injector.plan.directory) / "cruise.yaml").write_bytes(content)


@register
class ConfigDeleted(Fault):
    """The configuration file is deleted while the training runs."""

    name = "config_deleted"

    def strike(self) -> None:
        self.fired()
        (Path(self.injector.plan.directory) / "cruise.yaml").unlink(missing_ok=True)


def board(injector: Injector) -> Path:
    """Directory of the hook's TensorBoard log."""
    return injector.output_dir / "runs" / "swiftcruise"


def replace_by_directory(path: Path) -> None:
    """Put a directory (that is not empty) in the place of a file: not even root can write that."""
    path.unlink(missing_ok=True)
    path.mkdir(parents=True)
    (path / "in the way").touch()


def redirect(path: Path, target: str, flags: int) -> None:
    """Let what this process has open as `path` be `target` from now on.

    Raises:
        FileNotFoundError: it has no such file open; the injection is broken.
    """
    for entry in Path("/proc/self/fd").iterdir():
        if os.path.realpath(entry) == os.path.realpath(path):
            descriptor = os.open(target, flags)
            os.dup2(descriptor, int(entry.name))
            os.close(descriptor)
            return
    raise FileNotFoundError(f"{path} is not open")
