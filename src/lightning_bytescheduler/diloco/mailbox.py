"""Mailboxes over a job's rendezvous store: a rank reads its own, and any rank posts to it, or calls and is answered.

A mailbox is a numbered sequence of keys. A sender takes the next number with the store's counter, so that no two
letters have the same number and none is overwritten. The one reader waits for one number after another, inside native
code and for as long as it takes. So it reads each letter once, in the order of the numbers. Letters of one connection
keep their order, as the connection takes a number only after the letter before was written. A sender that dies between
the two leaves a gap, at which the reader would wait forever. As with any rank that dies, the fault board then ends the
training, and :meth:`Mailbox.stop` closes the mailbox at the gap. An answer goes to a key that only its call knows, so
answers need no order.

Each end has a connection of its own, as a wait blocks the connection.
"""

from __future__ import annotations

import atexit
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial

import msgspec
import torch.distributed as dist

from lightning_bytescheduler.diloco.messages import AnyMessage, coalesced, decoded, encode
from lightning_bytescheduler.exceptions import SchedulerTimeoutError
from lightning_bytescheduler.failures.rendezvous import connect_to_store
from lightning_bytescheduler.scheduler.threads import WorkThread

_NO_LIMIT = timedelta(days=30)  # for the next letter: a closing letter ends the wait, and failures are found elsewhere
_SHORTEST_S, _LONGEST_S = 0.0002, 0.05  # between two looks for an answer
_PART = 4 * 2**20  # bytes of a value in the store


class _Letter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sender: str
    text: str | None = None  # a letter without text closes the mailbox
    answer_to: str | None = None  # a key, for a call


class _Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    content: bytes = b""
    parts: int = 0  # their number, if the content is too large for one value of the store
    failure: str | None = None


_LETTERS: msgspec.json.Decoder[_Letter] = msgspec.json.Decoder(_Letter)


class Mailbox:
    """Reads the letters of a mailbox one by one, on a thread of its own.

    Args:
        store: The store that all ranks share.
        name: Name of the mailbox, whose only reader this is.
        thread: The thread's name.
        handle: Called on the thread with the sender and the text of each letter. For a call, its result or its error is
            the answer; for another letter, an error ends the reading.
        on_error: Called on the thread when the reading ends otherwise than by a closing letter: ``handle`` has failed,
            a letter is damaged, or the store is gone (a ``RuntimeError``).
        postman: Posts the closing letter, after all that it was given before. Without one, the mailbox has a
            connection for that.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        *,
        thread: str,
        handle: Callable[[str, str], bytes | None],
        on_error: Callable[[BaseException], object],
        postman: Postman | None = None,
    ) -> None:
        self._store = connection_to(store)
        self._closing = connection_to(store) if postman is None else postman
        self._name = name
        self._handle = handle
        self._on_error = on_error
        self._awaited = ""  # the key of the next letter
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=thread, daemon=True)
        self._thread.start()
        atexit.register(self.stop, 0.5)  # a thread inside torch while the interpreter ends would abort it

    def stop(self, timeout: float) -> bool:
        """End the reading after the letters that have come; idempotent.

        If it has not ended after half the time, it ends at the awaited letter, which a dead sender has not written.

        Returns:
            Whether the thread ended within ``timeout`` seconds.
        """
        if not self._stopped:
            self._stopped = True
            atexit.unregister(self.stop)
            self._close(partial(post, mailbox=self._name, sender=self._name, text=None))
            self._thread.join(timeout / 2)
            if self._thread.is_alive():
                self._close(partial(_fill, key=self._awaited, sender=self._name))
        self._thread.join(timeout / 2)
        return not self._thread.is_alive()

    def _close(self, write: Callable[[dist.Store], object]) -> None:
        if isinstance(self._closing, Postman):
            self._closing.write(write)
        else:
            with suppress(RuntimeError):  # the store is gone, which ends the thread too
                write(self._closing)

    def _run(self) -> None:
        number = 0
        try:
            while True:
                number += 1
                key = self._awaited = f"{self._name}/{number}"
                self._store.wait([key], _NO_LIMIT)
                letter = decoded(_LETTERS, self._store.get(key), sender=f"a rank to {self._name}", of="its letters")
                self._store.delete_key(key)
                if letter.text is None:
                    return
                if letter.answer_to is None:
                    self._handle(letter.sender, letter.text)
                else:
                    _answer(self._store, letter.answer_to, partial(self._handle, letter.sender, letter.text))
        except BaseException as error:
            self._on_error(error)


def _answer(store: dist.Store, key: str, make: Callable[[], bytes | None]) -> None:
    try:
        content = make() or b""
    except Exception as error:  # the caller gets it
        answer = _Answer(failure=f"{type(error).__name__}: {error}")
    else:
        answer = _Answer(content)
        if len(content) > _PART:
            begins = range(0, len(content), _PART)
            for index, begin in enumerate(begins):
                store.set(f"{key}/{index}", content[begin : begin + _PART])  # type: ignore[arg-type]  # or bytes
            answer = _Answer(parts=len(begins))
    store.set(key, msgspec.json.encode(answer).decode())


class Postman:
    """Posts messages to one mailbox, on the thread ``bytescheduler-outer-post``; a ``Link`` to the mailbox's reader.

    If a worker's reports have piled up, only the last is posted, as it has the sums of all before it.

    Args:
        store: The store that all ranks share.
        sender: The sender's name.
        to: The mailbox.
        on_error: Called on the thread when the store is gone.
    """

    def __init__(self, store: dist.Store, sender: str, *, to: str, on_error: Callable[[BaseException], object]) -> None:
        self._store = connection_to(store)
        self._sender = sender
        self._to = to
        self._on_error = on_error
        self._lock = threading.Lock()
        self._outbox: list[AnyMessage] = []  # changes under the lock
        self._thread = WorkThread("outer-post")

    def post(self, *messages: AnyMessage) -> None:
        """Queue messages to be posted; never blocks."""
        with self._lock:
            self._outbox += messages
        self.write(self._post_all)

    def write(self, work: Callable[[dist.Store], object]) -> None:
        """Queue a write to the store, after all messages posted before; never blocks."""
        with self._lock:
            self._thread.put(partial(work, self._store), self._on_error)

    def stop(self, timeout: float) -> bool:
        """Post what is left and end; returns whether that took no more than ``timeout`` seconds."""
        return self._thread.stop(timeout)

    def _post_all(self, store: dist.Store) -> None:
        with self._lock:
            taken, self._outbox = self._outbox, []
        for message in coalesced(taken):
            post(store, self._to, self._sender, encode(message))


class Caller:
    """Calls readers of mailboxes, which need not be there yet.

    Args:
        store: The store that all ranks share.
        sender: The caller's name.
        timeout: Longest wait for an answer, in seconds.
        check: Called again and again while waiting; raises if no answer will come.
    """

    def __init__(self, store: dist.Store, *, sender: str, timeout: float, check: Callable[[], None]) -> None:
        self._store = connection_to(store)
        self._sender = sender
        self._timeout = timeout
        self._check = check
        self._answers = f"answers/{uuid.uuid4().hex}"
        self._calls = 0

    def call(self, mailbox: str, text: str) -> bytes:
        """Call, and wait for the answer. For one thread.

        Raises:
            SchedulerTimeoutError: If there is none in time.
            RuntimeError: If the call failed, with its error; or if the store is gone.
        """
        self._calls += 1
        key = f"{self._answers}/{self._calls}"
        post(self._store, mailbox, self._sender, text, key)
        if not await_key(self._store, key, limit=self._timeout, check=self._check):
            raise SchedulerTimeoutError(
                f"No answer came at {mailbox!r} for {self._timeout:.0f} s. Raise the strategy's timeout if a worker "
                "may take longer to get there."
            )
        answer = msgspec.json.decode(self._taken(key), type=_Answer)
        if answer.failure is not None:
            raise RuntimeError(f"The call to {mailbox!r} failed: {answer.failure}")
        return answer.content + b"".join(self._taken(f"{key}/{index}") for index in range(answer.parts))

    def tell(self, key: str) -> None:
        """Set a key for those that wait for it with :func:`await_key`; a store that is gone has told them already."""
        with suppress(RuntimeError):
            self._store.set(key, "1")

    def _taken(self, key: str) -> bytes:
        value: bytes = self._store.get(key)
        self._store.delete_key(key)
        return value


def await_key(store: dist.Store, key: str, *, limit: float, check: Callable[[], None]) -> bool:
    """Wait until a store has a key; return whether it has. Calls ``check`` while it waits, and raises its error."""
    began, pause = time.monotonic(), _SHORTEST_S
    while not store.check([key]):  # as torch warns of each wait that is not over in time
        check()
        if time.monotonic() - began >= limit:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_S)
    return True


def connection_to(store: dist.Store) -> dist.Store:
    """Return a new connection to the store, as a wait blocks a connection."""
    connection, presence = connect_to_store(store)
    presence.close()
    return connection


def post(store: dist.Store, mailbox: str, sender: str, text: str | None, answer_to: str | None = None) -> None:
    """Post a letter now, on this thread; without a text, it closes the mailbox."""
    letter = _Letter(sender, text, answer_to)
    store.set(f"{mailbox}/{store.add(mailbox, 1)}", msgspec.json.encode(letter).decode())


def _fill(store: dist.Store, key: str, sender: str) -> None:
    """Write a closing letter in the place of a letter that has not come."""
    store.compare_set(key, "", msgspec.json.encode(_Letter(sender)).decode())
