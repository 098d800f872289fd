"""The runtime hook: a trainer callback that puts an ms-swift training under control.

`swiftcruise run` adds it to any ms-swift command; from Python, `callbacks_map["swiftcruise"] = CruiseCallback` and
`--callbacks swiftcruise` do the same. Configuration: `runtime.config`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from swift.callbacks import TrainerCallback

from .config import CruiseConfig, load_config
from .console import say, show_warnings
from .errors import SwiftcruiseError, UnsupportedTraining
from .live import LiveRun
from .swift_patch import SwiftTrainer, refusals
from .versions import check_versions

logger = logging.getLogger(__name__)

STATE_FILE = "swiftcruise_state.json"  #: the controller's state inside a checkpoint


class CruiseCallback(TrainerCallback):
    """Controls a running ms-swift training (or, with `observe`, only watches it).

    Args:
        args: The training arguments; `gradient_accumulation_steps` becomes 1 (the macro-batch replaces it).
        trainer: The ms-swift trainer under construction.

    Raises:
        UnsupportedTraining: what this training does cannot be controlled safely; the message says what and why.
        ConfigError: a setting that cannot be used.
    """

    def __init__(self, args: Any, trainer: Any, config: CruiseConfig | None = None) -> None:
        super().__init__(args, trainer)
        check_versions()
        show_warnings()
        self.config = load_config() if config is None else config
        reasons = refusals(args, trainer, self.config.skip_oversized)
        if reasons and not self.config.observe:
            raise UnsupportedTraining("; ".join(reasons) + ". Or run with --observe to watch without control.")
        self.swift = SwiftTrainer(args, trainer, observe=self.config.observe)
        self.run = LiveRun(self.config, self.swift, Path(args.output_dir))
        self._step_begin: float | None = None
        self._faulty = False

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Put the macro-batch in the trainer's way, now that it is built."""
        self.swift.after_init()
        self.swift.install(self.run.runner, self._begin_step, on_exit=self.run.close, on_event=self.run.event)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Open sensors and logs; continue with a checkpoint's controller."""
        checkpoint = args.resume_from_checkpoint
        saved = None
        if isinstance(checkpoint, (str, os.PathLike)) and self.config.resume_controller:
            saved = _read_state(Path(checkpoint) / STATE_FILE)
        self.run.begin(args, state, saved)

    def _begin_step(self) -> None:
        self._step_begin = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the step, and decide when the control interval is over."""
        now = time.perf_counter()
        with self._harmless():
            epoch = self.swift.epoch_now(state)
            if epoch is not None:
                state.epoch = epoch
        if self._step_begin is not None:
            with self._harmless():
                self.run.end_step(state.global_step, max(0.0, now - self._step_begin))  # clocks are set back
            self._step_begin = None
        self.run.hook_s += time.perf_counter() - now

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the controller's state into the checkpoint."""
        directory = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and self.run.live and not self.config.observe and directory.is_dir():
            with self._harmless():
                _write_state(directory / STATE_FILE, self.run.state_dict())

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Summary; put everything back."""
        with self._harmless():
            self.run.end(state.global_step)

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        """A fault of the controller's own side (not of the training) is said once; the last setting holds."""
        try:
            yield
        except Exception as error:
            if not self._faulty:
                logger.warning("swiftcruise: the controller failed, its last setting holds: %r", error, exc_info=True)
            self._faulty = True


def print_refusals_as_one_line() -> None:
    """Let an error of swiftcruise that ends the process show as one line instead of a traceback."""
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, SwiftcruiseError):
            say(f"swiftcruise: {error}")
        else:
            previous(kind, error, traceback)

    sys.excepthook = excepthook


def _read_state(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        say(f"swiftcruise: {path} cannot be read ({error}); the controller starts afresh")
        return None


def _write_state(path: Path, state: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(json.dumps(state), encoding="utf-8")
        temporary.replace(path)
    except (OSError, TypeError, ValueError) as error:
        say(f"swiftcruise: the controller's state was not saved to {path}: {error}")
        with contextlib.suppress(OSError):
            temporary.unlink()
