"""Calls that must not take longer than they may."""

import threading

import pytest

from swiftcruise.runtime.deadline import Deadline


def test_a_call_in_time_gives_its_result_or_its_error():
    deadline = Deadline(10.0)
    assert deadline.call(lambda a, b: a + b, 1, 2) == 3
    with pytest.raises(ZeroDivisionError):
        deadline.call(lambda: 1 / 0)
    assert deadline.call(threading.current_thread).daemon


def test_a_late_call_is_left_to_itself_and_holds_up_nobody():
    deadline, release = Deadline(0.05), threading.Event()
    with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        deadline.call(release.wait)
    with pytest.raises(TimeoutError, match="earlier call"):
        deadline.call(lambda: 1)
    release.set()
    deadline._running.done.wait(5)
    deadline.seconds = 10.0
    assert deadline.call(lambda: 2) == 2
