"""Small messages between a job's ranks, over its rendezvous store.

A mailbox is a numbered sequence of keys. Whoever posts takes the next number; its owner waits for one number after the
other, inside native code and for as long as it takes. Each user has a connection of its own, as a wait blocks it.

Calls from any rank to one that answers, over a job's rendezvous store.

Callers post to a mailbox, a numbered sequence of keys; each answer has a key of its own. Everybody has a connection of
its own, as a wait blocks it.

What a job's workers and the host of its rounds tell each other beside the messages of ``diloco.messages``.
"""

from __future__ import annotations

import atexit
import json
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TypeAlias

import torch.distributed as dist

from lightning_bytescheduler.diloco.messages import Message, Report, from_json, to_json
from lightning_bytescheduler.exceptions import SchedulerTimeoutError
from lightning_bytescheduler.failures.store import connect_to_store

__all__ = [
    "Boundary",
    "CallServer",
    "Caller",
    "Closed",
    "Control",
    "EndRound",
    "Passed",
    "Postman",
    "Reader",
    "RoundStatus",
    "StepMetrics",
    "decode",
    "encode",
]

_NO_CALL_LIMIT = timedelta(days=30)  # a wait for the next call, which ``stop`` ends
_SHORTEST_S, _LONGEST_S = 0.0002, 0.05  # between two looks for an answer
_LOOK_S = 1.0  # between two looks for failures
_END = ""
_FAREWELL = "farewell"


class CallServer:
    """Answers calls, one after the other, on a thread of its own.

    Args:
        store: That all ranks share.
        mailbox: Whose only server this is.
        name: Of the thread.
        answer: Called on the thread with what came; returns what goes back. Must not wait.
    """

    def __init__(self, store: dist.Store, mailbox: str, *, name: str, answer: Callable[[str], str]) -> None:
        self._store, presence = connect_to_store(store)
        presence.close()
        self._posting, presence = connect_to_store(store)
        presence.close()
        self._mailbox = mailbox
        self._answer = answer
        self._stopped = False
        self._changed = threading.Condition()
        self._farewells = 0  # changes under the condition
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.stop, 0.5)  # a thread inside torch while the interpreter ends would abort it

    def await_farewells(self, count: int, *, timeout: float, check: Callable[[], None]) -> bool:
        """Wait until so many callers have said that they call no more; returns whether they have, in time.

        Args:
            count: How many.
            timeout: Longest wait, in seconds.
            check: Called while waiting, each second; raises if they never will.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._farewells < count:
                check()
                left = deadline - time.monotonic()
                if left <= 0 or not self._thread.is_alive():
                    return False
                self._changed.wait(min(left, _LOOK_S))
        return True

    def stop(self, timeout: float) -> bool:
        """End the thread; idempotent. Returns whether that took no more than ``timeout`` seconds."""
        if not self._stopped:
            self._stopped = True
            atexit.unregister(self.stop)
            with suppress(RuntimeError):  # the store is gone, which ends the thread too
                _post(self._posting, self._mailbox, _END)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        number = 0
        # A store that is gone took its callers' answers with it: they find out by themselves.
        with suppress(RuntimeError):
            while True:
                number += 1
                key = f"{self._mailbox}/{number}"
                self._store.wait([key], _NO_CALL_LIMIT)
                letter = self._store.get(key).decode()
                self._store.delete_key(key)
                if letter == _END:
                    return
                if letter == _FAREWELL:
                    with self._changed:
                        self._farewells += 1
                        self._changed.notify_all()
                    continue
                sender, _, text = letter.partition("\n")
                try:
                    answer = f"+{self._answer(text)}"
                except Exception as error:  # it belongs to whoever called
                    answer = f"-{type(error).__name__}: {error}"
                self._store.set(sender, answer)


class Caller:
    """Calls a server, which need not be there yet.

    Args:
        store: That all ranks share.
        mailbox: The server's.
        timeout: Longest wait for an answer, in seconds.
        check: Called again and again while waiting; raises if no answer is to be expected any more.
        clock: Seconds; injected by tests.
    """

    def __init__(
        self,
        store: dist.Store,
        mailbox: str,
        *,
        timeout: float,
        check: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, presence = connect_to_store(store)
        presence.close()
        self._mailbox = mailbox
        self._timeout = timeout
        self._check = check
        self._clock = clock
        self._sender = f"{mailbox}/answers/{uuid.uuid4().hex}"
        self._calls = 0

    def call(self, text: str) -> str:
        """Call, and wait for the answer. For one thread.

        Raises:
            SchedulerTimeoutError: If there is no answer in time.
            RuntimeError: If the server could not answer, with what it said; or the store is gone.
        """
        self._calls += 1
        key = f"{self._sender}/{self._calls}"
        began = self._clock()
        _post(self._store, self._mailbox, f"{key}\n{text}")
        pause = _SHORTEST_S
        while not self._store.check([key]):  # torch warns of each wait that is not over in time
            self._check()
            waited = self._clock() - began
            if waited >= self._timeout:
                raise SchedulerTimeoutError(
                    f"Nobody answered at {self._mailbox!r} for {waited:.0f} s. Raise the strategy's timeout if worker "
                    "0 may take longer to get there."
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)
        answer = self._store.get(key).decode()
        self._store.delete_key(key)
        if answer[0] == "-":
            raise RuntimeError(f"Worker 0 could not answer: {answer[1:]}")
        return answer[1:]

    def bid_farewell(self) -> None:
        """Say that there will be no more calls; does not wait for an answer."""
        with suppress(RuntimeError):  # the store is gone, and the server with it
            _post(self._store, self._mailbox, _FAREWELL)


def _post(store: dist.Store, mailbox: str, letter: str) -> None:
    store.set(f"{mailbox}/{store.add(mailbox, 1)}", letter)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRound:
    """To the host: this round is to end soon, or what is to happen at its end.

    Attributes:
        worker: Who asks.
        round: Which round.
        now: Whether no worker is to begin another step; where all take equally many, none that has taken ``steps``.
        steps: That the worker has taken in this round.
        epoch: Whether an epoch ends with the round.
        validate: Whether the weights are to be validated after it.
        stop: Whether training ends with it.
    """

    worker: str
    round: int
    now: bool = False
    steps: int = 0
    epoch: bool = False
    validate: bool = False
    stop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """To the host: I am through with what happened at the end of a round.

    Attributes:
        worker: Who.
        round: That ended.
        stop: Whether this worker stops training.
    """

    worker: str
    round: int
    stop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """To the host: what a step came to.

    Attributes:
        worker: Who.
        round: In which round.
        samples: Of the step.
        seconds: That it took.
        loss: Its loss, or ``None``.
    """

    worker: str
    round: int
    samples: int
    seconds: float
    loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """To a worker: a round is over.

    Attributes:
        round: Which.
        samples: That all workers together have processed in it.
        shares: Each worker's share of them.
        metrics: Means over the round and all workers, by name.
        epoch: See :class:`EndRound`.
        validate: See :class:`EndRound`.
        stop: See :class:`EndRound`.
    """

    round: int
    samples: int = 0
    shares: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    epoch: bool = False
    validate: bool = False
    stop: bool = False

    @property
    def halts(self) -> bool:
        """Whether all workers stand still here until each one has said that it has passed."""
        return self.epoch or self.validate or self.stop


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStatus:
    """To a worker: how far the round is.

    Attributes:
        round: Which.
        left: What is to go, in samples or steps.
    """

    round: int
    left: int


@dataclass(frozen=True, slots=True)
class Closed:
    """To oneself: no more messages are to be waited for."""


Control: TypeAlias = EndRound | Passed | StepMetrics | Boundary | RoundStatus | Closed
_KINDS = {kind.__name__: kind for kind in (EndRound, Passed, StepMetrics, Boundary, RoundStatus, Closed)}


def encode(message: Message | Control) -> str:
    """Write a message as one line of JSON."""
    if type(message).__name__ in _KINDS:
        return json.dumps({"kind": type(message).__name__, **asdict(message)})
    return to_json(message)  # type: ignore[arg-type]


def decode(text: bytes) -> Message | Control:
    """Read what :func:`encode` wrote."""
    values = json.loads(text)
    kind = _KINDS.get(values.get("kind"))
    if kind is None:
        return from_json(text)
    del values["kind"]
    message: Control = kind(**values)
    return message


_NO_LIMIT = timedelta(days=30)  # liveness is watched elsewhere

Letter = tuple[str, Message | Control]


class Postman:
    """Posts messages on a thread of its own, named ``bytescheduler-outer-post``: nobody waits for the network.

    Of reports that have piled up only the last of each worker is posted, as it has the sums of all before it.

    Args:
        store: That all ranks share.
        on_error: Called on the thread when the store is gone.
    """

    def __init__(self, store: dist.Store, on_error: Callable[[BaseException], object]) -> None:
        self._store, presence = connect_to_store(store)
        presence.close()
        self._on_error = on_error
        self._queue: queue.SimpleQueue[Letter | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="bytescheduler-outer-post", daemon=True)
        self._thread.start()

    def post(self, mailbox: str, message: Message | Control) -> None:
        """Have a message posted; at once, never blocks."""
        self._queue.put((mailbox, message))

    def stop(self, timeout: float) -> bool:
        """Post what is left and end; returns whether that took no more than ``timeout`` seconds."""
        self._queue.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while True:
                letters = [self._queue.get()]  # woken by stop(), which puts None
                while not self._queue.empty():
                    letters.append(self._queue.get())
                for mailbox, message in _without_overtaken([letter for letter in letters if letter is not None]):
                    number = self._store.add(mailbox, 1)
                    self._store.set(f"{mailbox}/{number}", encode(message))
                if None in letters:
                    return
        except BaseException as error:
            self._on_error(error)


class Reader:
    """Hands on what comes to a mailbox, on a thread of its own.

    Args:
        store: That all ranks share.
        mailbox: Whose only reader this is.
        name: Of the thread.
        handle: Called on the thread with each message.
        on_error: Called on the thread when the store is gone, or ``handle`` has failed; no more is read then.
    """

    def __init__(
        self,
        store: dist.Store,
        mailbox: str,
        *,
        name: str,
        handle: Callable[[Message | Control], object],
        on_error: Callable[[BaseException], object],
    ) -> None:
        self._store, presence = connect_to_store(store)
        presence.close()
        self._mailbox = mailbox
        self._handle = handle
        self._on_error = on_error
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait until ``Closed`` has been read; returns whether that took no more than ``timeout`` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        number = 0
        try:
            while True:
                number += 1
                key = f"{self._mailbox}/{number}"
                self._store.wait([key], _NO_LIMIT)
                message = decode(self._store.get(key))
                self._store.delete_key(key)
                if isinstance(message, Closed):
                    return
                self._handle(message)
        except BaseException as error:
            self._on_error(error)


def _without_overtaken(letters: Iterable[Letter]) -> list[Letter]:
    kept: list[Letter] = []
    last: dict[tuple[str, int], int] = {}  # where a report is that a later one would make up for
    for letter in letters:
        message = letter[1]
        if isinstance(message, Report):
            key = (message.worker, message.round)
            if key in last:
                del kept[last[key]]
                last = {other: index - (index > last[key]) for other, index in last.items() if other != key}
            last[key] = len(kept)
        elif not isinstance(message, StepMetrics):
            last = {}  # nothing is to overtake what is told once
        kept.append(letter)
    return kept
