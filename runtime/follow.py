"""All ranks follow rank 0: what its policy proposes travels through the process group's store, and nobody waits for it.

There is no collective here, and everything that talks to the store runs in a daemon thread with a connection of its
own: a rank 0 that is slow, stopped or dead holds up no other rank's decision. Its last proposal stays.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from .controls import Controls
from .errors import ConfigError
from .policy import State
from .telemetry import Telemetry

logger = logging.getLogger(__name__)

KEY = "swiftcruise/controls"  #: where the newest message stands in the store


class Store(Protocol):
    """What is needed of a `torch.distributed.Store`."""

    def clone(self) -> Store:
        """Another connection to the same store."""
        ...

    def set(self, key: str, value: str, /) -> object:
        """Write a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """Read a value; waits until there is one."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all of these keys have a value."""
        ...


def default_store() -> Store:
    """The store of the running process group, for `Leader` and `Follower`.

    Raises:
        ConfigError: there is no process group, or its store has no connections to spare.
    """
    import torch.distributed

    if not torch.distributed.is_initialized():
        raise ConfigError("ranks='follow' needs several ranks (torch.distributed is not initialized): use ranks='own'")
    group: Any = torch.distributed.group.WORLD
    store: Any = group.get_group_store() if hasattr(group, "get_group_store") else None
    # A store's calls wait for each other: on the connection that torch itself uses they would hold up the training.
    if not hasattr(store, "clone"):
        raise ConfigError(f"ranks='follow' needs a newer torch than {torch.__version__}: use ranks='own'")
    return store


class Message(NamedTuple):
    """A proposal of the leader, or (no controls) its good-bye."""

    run: str  #: names the leader: one store may see several trainings of one process
    sequence: int  #: rises with every message of the run
    controls: Controls | None  #: of one plant

    def encode(self) -> str:
        """The message as JSON."""
        controls = None if self.controls is None else self.controls.plant(0)
        return json.dumps({"run": self.run, "sequence": self.sequence, "controls": controls})

    @classmethod
    def decode(cls, text: bytes | str) -> Message:
        """The inverse of `encode`.

        Raises:
            ValueError: this is no message.
        """
        try:
            values = json.loads(text)
            run, sequence, controls = values["run"], values["sequence"], values["controls"]
            if not isinstance(run, str) or type(sequence) is not int:
                raise TypeError(f"run={run!r}, sequence={sequence!r}")
            if controls is None:
                return cls(run, sequence, None)
            if any(type(value) not in (int, float) or not 0 <= value < math.inf for value in controls.values()):
                raise ValueError(f"controls={controls!r}")
            return cls(run, sequence, Controls.of(1, **controls))
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"no message of a leader ({error!r:.200}): {text!r:.200}") from None


class _StoreThread:
    """A daemon thread with a connection of its own to the store; a fault ends it and is said once."""

    _fault: str  #: what the user is told of a fault

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._wake = threading.Event()
        self._closed = False
        self._connected = True
        self._thread = threading.Thread(target=self._run, name=f"swiftcruise-{name}", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        """Whether the store is still asked: no fault, no good-bye."""
        return self._connected

    def close(self, timeout_s: float = 1.0) -> None:
        """End the thread; one that a silent store holds is left to itself. May be called twice."""
        self._closed = True
        self._wake.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._serve(self._store.clone())
            self._connected = False
        except Exception as error:
            self._connected = False
            if not self._closed:  # at the end of a training rank 0 may be the first to go
                reason = next(iter(str(error).splitlines()), "")  # below it torch prints a stack
                logger.warning("swiftcruise: %s: %s: %.200s", self._fault, type(error).__name__, reason)

    def _serve(self, store: Store) -> None:
        raise NotImplementedError


class Leader(_StoreThread):
    """Publishes what rank 0's policy proposes. Only the newest proposal is kept until it can be sent.

    Args:
        store: See `default_store`.
    """

    _fault = "the other ranks cannot be reached, they keep their last controls"

    def __init__(self, store: Store) -> None:
        self._name = uuid.uuid4().hex
        self._sequence = 0
        self._controls = Controls.of(1)
        self._unsent: deque[Message] = deque(maxlen=1)
        super().__init__(store, "leader")

    def publish(self, proposed: Controls) -> None:
        """Let the other ranks know; returns at once.

        A control that is left unset ("as it is") is published as last proposed, since a follower may have missed that
        message. An unset `checkpoint_fraction` means something else (the plant chooses) and stays unset.

        Args:
            proposed: Of one plant.
        """
        kept = proposed.or_else(self._controls)
        self._controls = kept.replace(checkpoint_fraction=proposed.checkpoint_fraction)
        self._send(self._controls)

    def close(self, timeout_s: float = 1.0) -> None:
        """Say good-bye, so that nobody asks a store that may be about to go; may be called twice."""
        if not self._closed:
            self._send(None)
        super().close(timeout_s)

    def _send(self, controls: Controls | None) -> None:
        self._sequence += 1
        self._unsent.append(Message(self._name, self._sequence, controls))
        self._wake.set()

    def _serve(self, store: Store) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            closed = self._closed  # read before the slot: the good-bye that `close` puts there is still sent
            while self._unsent:
                store.set(KEY, self._unsent.popleft().encode())
            if closed:
                return


class Follower(_StoreThread):
    """Reads what the leader published last, a few times a second at most.

    It asks more often soon after news than long after: after an eighth of the time since then, from `PERIOD_S[0]` to
    `PERIOD_S[1]` seconds.

    Args:
        store: See `default_store`.
        clock: Seconds, monotonic.
    """

    PERIOD_S = 0.05, 1.0
    _fault = "rank 0's controls cannot be received any more, the last ones stay"

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begin = clock()
        self._heard: tuple[Message, float] | None = None  # with its time; replaced as a whole, read from any thread
        self._malformed: bytes | None = None
        super().__init__(store, "follower")

    def latest(self) -> Controls | None:
        """The newest proposal (of one plant), None before the first; never waits."""
        heard = self._heard
        return None if heard is None else heard[0].controls

    @property
    def news(self) -> tuple[str, int]:
        """Names the newest proposal: it differs from before once there is a newer one."""
        heard = self._heard
        return ("", 0) if heard is None else (heard[0].run, heard[0].sequence)

    @property
    def age_s(self) -> float:
        """Seconds since the newest proposal was received (before the first: since this follower began)."""
        heard = self._heard
        return self._clock() - (self._begin if heard is None else heard[1])

    def _serve(self, store: Store) -> None:
        while not self._closed:
            # `check` first: `get` of a missing key would hold the store's connection.
            if store.check([KEY]) and not self._take(store.get(KEY)):
                return
            self._wake.wait(min(max(self.age_s / 8, self.PERIOD_S[0]), self.PERIOD_S[1]))

    def _take(self, text: bytes) -> bool:
        """Take a message in; False once the leader has said good-bye."""
        if text == self._malformed:
            return True
        try:
            message = Message.decode(text)
        except ValueError as error:
            if self._malformed is None:
                logger.warning("swiftcruise: ignored: %s", error)
            self._malformed = text
            return True
        last = None if self._heard is None else self._heard[0]
        same_run = last is not None and message.run == last.run
        if message.controls is None:
            return not same_run  # else the good-bye of an earlier training
        if last is None or not same_run or message.sequence > last.sequence:
            self._heard = message, self._clock()
        return True


class FollowPolicy:
    """Proposes what rank 0's policy proposed last; nothing before that is known.

    Each rank's own guard still has the last word. A leader that is not heard of for ``patience`` decisions in a row and
    ``patience_s`` seconds is reported once, and so is its return.

    Args:
        follower: Where the leader's proposals arrive; its owner closes it.
        patience: Decisions.
        patience_s: Seconds.

    Raises:
        ConfigError: a patience below 1 decision or 0 seconds.
    """

    def __init__(self, follower: Follower, patience: int = 3, patience_s: float = 10.0) -> None:
        if patience < 1 or not patience_s >= 0:
            raise ConfigError(f"patience={patience} and patience_s={patience_s} must be at least 1 and 0")
        self.follower = follower
        self.patience = patience
        self.patience_s = patience_s
        self.reset(1)

    def reset(self, n: int, seed: int | None = None) -> None:
        """Forget everything but what the follower has heard; ``seed`` has no use here."""
        self._n = n
        self._controls: Controls | None = None  # last proposed
        self._news = ("", 0)
        self._silent = 0  # decisions in a row without news
        self._reported = False

    @property
    def waiting(self) -> bool:
        """Whether the leader's first proposal has arrived and was not decided on yet."""
        return self._news == ("", 0) and self.follower.news != self._news

    def act(self, telemetry: Telemetry) -> Controls:
        """The leader's latest controls, whatever this rank measured; never waits."""
        news = self.follower.news
        latest = self.follower.latest()
        if news != self._news:
            self._news, self._silent = news, 0
            if self._reported:
                logger.warning("swiftcruise: rank 0 is heard of again, its controls are followed")
            self._reported = False
        else:
            self._silent += 1
            late = self._silent >= self.patience and self.follower.age_s >= self.patience_s
            if late and not self._reported and self.follower.connected:  # else it is said already, or the end
                self._reported = True
                logger.warning(
                    "swiftcruise: rank 0 has not been heard of for %d decisions (%.0f s): its last controls stay",
                    self._silent,
                    self.follower.age_s,
                )
        if latest is not None:
            self._controls = latest
        self._n = telemetry.n
        return Controls.of(telemetry.n, **({} if self._controls is None else self._controls.plant(0)))

    def state_dict(self) -> State:
        """The controls last proposed."""
        return {"followed": None if self._controls is None else self._controls.plant(0)}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`'s state; a checkpoint holds rank 0's own policy instead, of no meaning here."""
        followed = state.get("followed")
        self._controls = None if followed is None else Controls.of(1, **followed)

    def diagnostics(self) -> Mapping[str, Any]:
        """``leader_age_s``: seconds since the leader was last heard of."""
        return {"leader_age_s": np.full(self._n, self.follower.age_s)}

    def explain(self) -> str:
        """For the console."""
        return "" if self._controls is None else "follows rank 0"
