"""Small messages between a job's ranks, over its rendezvous store.

A mailbox is a numbered sequence of keys. Whoever posts takes the next number; its owner waits for one number after the
other, inside native code and for as long as it takes. Each user has a connection of its own, as a wait blocks it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch.distributed as dist

from lightning_bytescheduler.collectives.store_connection import connect_to_store
from lightning_bytescheduler.diloco.messages import Message, Report
from lightning_bytescheduler.outer_loop.control_messages import Closed, Control, StepMetrics, decode, encode

__all__ = ["Postman", "Reader"]

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
