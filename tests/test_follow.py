"""Ranks that follow rank 0: they come to its controls, and nothing that happens to it holds them up."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swiftcruise.runtime.controls import CONTROL_FIELDS, Controls
from swiftcruise.runtime.errors import ConfigError
from swiftcruise.runtime.follow import KEY, Follower, FollowPolicy, Leader, Message, default_store
from swiftcruise.runtime.telemetry import Telemetry

LIMIT_S = 60.0  #: longest wait for anything


def wait_until(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + LIMIT_S
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return value


def budget(follower: Follower) -> float | None:
    latest = follower.latest()
    return None if latest is None else latest.token_budget[0]


@pytest.fixture
def store() -> Any:
    return torch.distributed.HashStore()


@contextlib.contextmanager
def closing(*parts: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for part in parts:
            part.close()


# -- real processes ----------------------------------------------------------------------------------------------------


def _rank(rank: int, ranks: int, port: int, pipe: Any) -> None:
    """Answers questions until it is told to end."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("swiftcruise").addHandler(handler)
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", None, datetime.timedelta(seconds=600), ranks, rank)
    part = Leader(default_store()) if rank == 0 else Follower(default_store())
    policy = None if isinstance(part, Leader) else FollowPolicy(part, patience=3, patience_s=0.0)
    while True:
        question, *arguments = pipe.recv()
        if question == "publish":
            for value in arguments:
                part.publish(Controls.of(1, token_budget=value))  # type: ignore[union-attr]
            pipe.send(os.getpid())
        elif question == "heard":
            pipe.send(budget(part))  # type: ignore[arg-type]
        elif question == "act":
            pipe.send(policy.act(Telemetry.of(1)).plant(0).get("token_budget"))  # type: ignore[union-attr]
        elif question == "log":
            pipe.send(list(lines))
        elif question == "connected":
            pipe.send(part.connected)
        else:
            part.close()
            pipe.send(None)
            if question == "end":
                return


class Rank:
    """A process of the group."""

    def __init__(self, rank: int, ranks: int, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_rank, args=(rank, ranks, port, other), daemon=True)
        self.process.start()

    def ask(self, *question: Any) -> Any:
        self.pipe.send(question)
        assert self.pipe.poll(LIMIT_S), f"{question[0]} does not return"
        return self.pipe.recv()

    def send(self, what: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, what)

    def end(self) -> int | None:
        with contextlib.suppress(BrokenPipeError, EOFError):
            self.ask("end")
        self.process.join(LIMIT_S)
        return self.process.exitcode


@contextlib.contextmanager
def processes(ranks: int) -> Iterator[list[Rank]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = [Rank(rank, ranks, port) for rank in range(ranks)]
    try:
        yield group
    finally:
        for rank in group:
            rank.process.kill()
            rank.process.join(LIMIT_S)


def follow(followers: list[Rank], expected: float) -> None:
    for rank in followers:
        wait_until(lambda rank=rank: rank.ask("heard") == expected)
        assert rank.ask("act") == expected


def test_ranks_follow_a_leader_that_is_stopped_comes_back_and_ends_first(capfd: pytest.CaptureFixture[str]):
    with processes(4) as (leader, *followers):
        assert [rank.ask("act") for rank in followers] == [None] * 3
        leader.ask("publish", *range(100, 200))
        follow(followers, 199)
        leader.send(signal.SIGSTOP)  # and with it the store, which it serves
        for rank in followers:
            assert [rank.ask("act") for _ in range(10)] == [199] * 10
        leader.send(signal.SIGCONT)
        leader.ask("publish", 300)
        follow(followers, 300)
        for lost, found in (rank.ask("log") for rank in followers):
            assert "has not been heard of" in lost
            assert "is heard of again" in found
        leader.ask("close")
        for rank in followers:
            wait_until(lambda rank=rank: not rank.ask("connected"))
        assert leader.end() == 0
        assert [rank.ask("act") for rank in followers] == [300] * 3
        assert [rank.end() for rank in followers] == [0] * 3
        assert capfd.readouterr().err == ""


def test_a_leader_that_stops_and_dies_leaves_the_others_with_its_last_controls_and_keeps_nobody_from_ending():
    with processes(3) as (leader, one, two):
        leader.ask("publish", 100)
        follow([one, two], 100)
        leader.send(signal.SIGSTOP)
        assert [one.ask("act") for _ in range(10)] == [100] * 10
        assert one.end() == 0
        leader.send(signal.SIGKILL)
        wait_until(lambda: two.ask("log"))
        assert [two.ask("act") for _ in range(10)] == [100] * 10
        (line,) = two.ask("log")
        assert "the last ones stay" in line
        assert two.end() == 0


# -- the parts ---------------------------------------------------------------------------------------------------------


class Jammed:
    """A store that answers only when it is released, and remembers what was written."""

    def __init__(self) -> None:
        self.released, self.entered = threading.Event(), threading.Event()
        self.written: list[str] = []

    def clone(self) -> Jammed:
        return self

    def set(self, key: str, value: str, /) -> None:
        self.entered.set()
        self.released.wait()
        self.written.append(value)

    def get(self, key: str, /) -> bytes:
        return b""

    def check(self, keys: list[str], /) -> bool:
        self.entered.set()
        self.released.wait()
        return False


def test_publishing_never_waits_and_only_the_newest_proposal_is_sent_when_the_store_is_back():
    store = Jammed()
    leader = Leader(store)
    leader.publish(Controls.of(1, token_budget=1))
    assert store.entered.wait(LIMIT_S)
    for value in range(2, 500):
        leader.publish(Controls.of(1, token_budget=value))
    store.released.set()
    wait_until(lambda: len(store.written) == 2)
    leader.close()
    controls = [Message.decode(text).controls for text in store.written]
    assert [c and c.token_budget[0] for c in controls] == [1, 499, None]


def test_a_store_that_does_not_answer_holds_up_neither_a_decision_nor_the_end():
    store = Jammed()
    follower = Follower(store)
    assert store.entered.wait(LIMIT_S)
    assert FollowPolicy(follower).act(Telemetry.of(1)).plant(0) == {}
    follower.close(timeout_s=0.0)
    store.released.set()
    wait_until(lambda: not follower.connected)


def test_an_older_message_does_not_win(store: Any):
    follower = Follower(store)
    with closing(follower):
        for sequence, tokens in ((2, 200), (1, 100), (3, 300)):
            store.set(KEY, Message("run", sequence, Controls.of(1, token_budget=tokens)).encode())
            if sequence != 1:
                wait_until(lambda tokens=tokens: budget(follower) == tokens)
            else:
                time.sleep(3 * Follower.PERIOD_S[0])  # long enough to be read
                assert budget(follower) == 200


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "nonsense", '{"run": "a", "sequence": 9}', '{"run": "a", "sequence": 9, "controls": {"x": 1}}'],
)
def test_a_malformed_message_is_ignored_and_said_once(store: Any, text: str, caplog: pytest.LogCaptureFixture):
    leader, follower = Leader(store), Follower(store)
    with closing(leader, follower):
        leader.publish(Controls.of(1, token_budget=100))
        wait_until(lambda: budget(follower) == 100)
        store.set(KEY, text)
        wait_until(lambda: caplog.records)
        assert budget(follower) == 100
        leader.publish(Controls.of(1, token_budget=200))
        wait_until(lambda: budget(follower) == 200)
    assert len(caplog.records) == 1


def test_a_control_proposed_once_stays_published_but_a_fixed_checkpointing_does_not(store: Any):
    leader, follower = Leader(store), Follower(store)
    with closing(leader, follower):
        leader.publish(Controls.of(1, token_budget=100, num_workers=2, checkpoint_fraction=0.5))
        leader.publish(Controls.of(1, token_budget=200))
        wait_until(lambda: budget(follower) == 200)
        latest = follower.latest()
    assert latest is not None
    assert latest.plant(0) == {"token_budget": 200, "num_workers": 2}


def test_a_second_training_in_the_same_processes_begins_afresh(store: Any):
    for tokens in (100, 200):
        leader, follower = Leader(store), Follower(store)
        with closing(leader, follower):
            assert follower.latest() is None
            leader.publish(Controls.of(1, token_budget=tokens))
            wait_until(lambda follower=follower, tokens=tokens: budget(follower) == tokens)


def test_the_followers_of_one_leader_ask_at_a_bounded_rate(store: Any):
    asked = []

    class Counting(Jammed):
        def check(self, keys: list[str], /) -> bool:
            asked.append(time.monotonic())
            return False

    follower = Follower(Counting())
    with closing(follower):
        wait_until(lambda: len(asked) >= 6)
    assert np.diff(asked).min() >= 0.9 * Follower.PERIOD_S[0]


def test_the_policy_knows_that_a_first_proposal_is_waiting_and_proposes_it_for_every_plant(store: Any):
    leader, follower = Leader(store), Follower(store)
    with closing(leader, follower):
        policy = FollowPolicy(follower)
        policy.reset(3)
        assert np.isnan(policy.act(Telemetry.of(3)).token_budget).all()
        assert not policy.waiting
        leader.publish(Controls.of(1, token_budget=100))
        wait_until(lambda: policy.waiting)
        assert policy.act(Telemetry.of(3)).token_budget.tolist() == [100, 100, 100]
        assert not policy.waiting
        assert policy.diagnostics()["leader_age_s"].shape == (3,)


def test_a_resumed_follower_holds_what_it_had_until_the_leader_is_heard_of(store: Any):
    leader, first, second = Leader(store), Follower(store), Follower(torch.distributed.HashStore())
    with closing(leader, first, second):
        leader.publish(Controls.of(1, token_budget=100, memory_target=0.8))
        wait_until(lambda: first.latest())
        before, after = FollowPolicy(first), FollowPolicy(second)
        before.act(Telemetry.of(1))
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        assert after.act(Telemetry.of(1)).plant(0) == {"token_budget": 100, "memory_target": 0.8}
        after.load_state_dict({"climber": {"home": [9.0]}})  # of rank 0's own policy
        assert after.act(Telemetry.of(1)).plant(0) == {}


def test_without_a_process_group_the_option_is_refused():
    with pytest.raises(ConfigError, match="ranks='own'"):
        default_store()


values = st.floats(0, 1e12)


@given(st.dictionaries(st.sampled_from(CONTROL_FIELDS), values), st.integers(0, 2**60))
def test_a_message_arrives_as_it_was_sent(controls: dict[str, float], sequence: int):
    message = Message.decode(Message("run", sequence, Controls.of(1, **controls)).encode())
    assert (message.run, message.sequence) == ("run", sequence)
    assert message.controls is not None
    assert message.controls.plant(0) == controls


any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["run", "sequence", "controls", *CONTROL_FIELDS]), inner)
    ),
)


@given(st.binary() | any_json.map(json.dumps))
def test_whatever_is_read_it_is_a_message_or_a_value_error(text: bytes | str):
    try:
        message = Message.decode(text)
    except ValueError:
        return
    if message.controls is not None:
        assert all(np.isfinite(v) and v >= 0 for v in message.controls.plant(0).values())
