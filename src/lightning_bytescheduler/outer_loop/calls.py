"""Calls from any rank to one that answers, over a job's rendezvous store.

Callers post to a mailbox, a numbered sequence of keys; each answer has a key of its own. Everybody has a connection of
its own, as a wait blocks it.
"""

from __future__ import annotations

import atexit
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from lightning_bytescheduler.collectives.store_connection import connect_to_store
from lightning_bytescheduler.exceptions import SchedulerTimeoutError

__all__ = ["CallServer", "Caller"]

_NO_LIMIT = timedelta(days=30)  # a wait for the next call, which ``stop`` ends
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
                self._store.wait([key], _NO_LIMIT)
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
