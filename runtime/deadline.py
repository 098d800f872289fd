"""Calls that must not take longer than they may."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class Deadline:
    """Runs one function at a time in a thread of its own and waits no longer than `seconds` for it.

    A call that is late is left to itself: its result is thrown away, and until it ends every further call is late at
    once. The thread is a daemon, so that one which never ends does not keep the process.

    Args:
        seconds: How long a call may take.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._work: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], _Outcome] | None]
        self._work = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._running: _Outcome | None = None

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's result.

        Raises:
            TimeoutError: it is late, or an earlier one still is.
            Exception: whatever the function raises.
        """
        if self._running is not None and not self._running.done.is_set():
            raise TimeoutError(f"an earlier call has not returned (limit {self.seconds:g} s)")
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="swiftcruise-deadline", daemon=True)
            self._thread.start()
        outcome = self._running = _Outcome()
        self._work.put((function, arguments, outcome))
        if not outcome.done.wait(self.seconds):
            raise TimeoutError(f"no answer within {self.seconds:g} s")
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def close(self) -> None:
        """End the thread, after the call under way; a later call starts another."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._work.put(None)
            thread.join(self.seconds)

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            function, arguments, outcome = item
            del item
            try:
                outcome.value = function(*arguments)
            except BaseException as error:
                outcome.error = error
            outcome.done.set()
            del function, arguments, outcome  # nothing of the last call is kept alive while waiting for the next


class _Outcome:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None
