"""How a worker's state comes to the worker that writes a checkpoint: when that asks for it, over the job's store.

Each worker keeps its state of the last moments that a checkpoint can be of, in memory, and a thread of its own answers.
So its training thread takes no part, wherever it is, and nobody waits in a circle: who writes waits for threads that
wait for nothing but a moment which their worker gets to without the writer. That moment is the writer's present one. A
round begins, or all workers stand still at its end, once the writer's pseudo-gradient of the round before is with
everybody; from there each worker gets to the same moment by itself, and beyond it by one round at most, if pseudo-
gradients travel beside steps.

A state travels as torch writes it, and is read with ``weights_only=True``, which makes nothing but tensors and
primitives of it, as the checkpoint's reader will.
"""

from __future__ import annotations

import io
import json
import logging
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from lightning_bytescheduler.diloco.mailbox import Mailbox, Sender
from lightning_bytescheduler.diloco.worker_state import Moment
from lightning_bytescheduler.failures.store import connect_to_store

__all__ = ["KeptStates", "StateCollection", "StateService"]

_PART = 4 * 2**20  # bytes of a value in the store
_SHORTEST_S, _LONGEST_S = 0.0005, 0.02
_LOOK_S = 0.5
_OVER = "states/over"


log = logging.getLogger(__name__)


def _log_gone(error: BaseException) -> None:
    """Nobody can be answered any more."""
    log.debug("States of this worker are no longer given.", exc_info=error)


class KeptStates:
    """A worker's states of the last moments; kept by the training thread, for any thread.

    Args:
        count: How many.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._changed = threading.Condition()
        self._states: dict[Moment, dict[str, Any]] = {}  # what follows changes under the condition
        self._unsettled: set[Moment] = set()
        self._closed = False

    def keep(self, moment: Moment, state: dict[str, Any], *, settled: bool = True) -> None:
        """Keep a state, in the place of the oldest one.

        Args:
            moment: When it was taken.
            state: Is not changed any more, but by :meth:`settle`.
            settled: Whether that is all of it.
        """
        with self._changed:
            self._states.pop(moment, None)
            self._states[moment] = state
            self._unsettled.discard(moment)
            if not settled:
                self._unsettled.add(moment)
            while len(self._states) > self._count:
                self._states.pop(next(iter(self._states)))
            self._changed.notify_all()

    def settle(self, **more: Any) -> None:
        """Add to the last state what belongs to it now."""
        with self._changed:
            moment = next(reversed(self._states), None)
            if moment is not None:
                self._states[moment] = {**self._states[moment], **more}
                self._unsettled.discard(moment)
                self._changed.notify_all()

    @property
    def last(self) -> tuple[Moment, dict[str, Any], bool] | None:
        """What was kept last, and whether that is all of it."""
        with self._changed:
            moment = next(reversed(self._states), None)
            return None if moment is None else (moment, self._states[moment], moment not in self._unsettled)

    def of(self, moment: Moment, limit: float, *, settled: bool = True) -> dict[str, Any] | None:
        """The state of a moment, which may be still to come.

        Args:
            moment: Which.
            limit: Longest wait, in seconds.
            settled: Whether all of it is wanted.
        """
        deadline = time.monotonic() + limit
        with self._changed:
            while not self._closed and (moment not in self._states or (settled and moment in self._unsettled)):
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(min(left, _LOOK_S))
            return None if self._closed else self._states[moment]

    def close(self) -> None:
        """Nothing is given any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class StateService:
    """Answers for a worker, on a thread named ``bytescheduler-outer-states``, until the writer is through.

    Args:
        store: That all ranks share.
        worker: The worker's name.
        kept: Its states.
        limit: How long a moment is waited for, in seconds.
    """

    def __init__(
        self,
        store: dist.Store,
        worker: str,
        kept: KeptStates,
        *,
        limit: float,
    ) -> None:
        self._worker = worker
        self._kept = kept
        self._limit = limit
        self._waits = _connected(store)
        self._store = _connected(store)
        # If the store is gone, this worker's other mailbox knows, or the fit is over and the writer has ended.
        self._mailbox = Mailbox(
            store, _mailbox(worker), thread="bytescheduler-outer-states", handle=self._answer, on_error=_log_gone
        )

    def await_writer(self, limit: float, check: Callable[[], None]) -> None:
        """Stay until the writer asks for nothing any more.

        Args:
            limit: Longest wait, in seconds.
            check: Called again and again; raises if it never will be through.
        """
        _await(self._waits, _OVER, limit, check)

    def stop(self, timeout: float) -> bool:
        """End the thread; returns whether it ended within ``timeout`` seconds."""
        self._kept.close()
        return self._mailbox.stop(timeout)

    def _answer(self, sender: str, text: str) -> None:
        asked = json.loads(text)
        key = f"states/{asked['number']}/{self._worker}"
        moment = Moment(asked["rounds"], asked["halted"])
        state = self._kept.of(moment, self._limit, settled=asked["settled"])
        file = io.BytesIO()
        why = "it has not come to this moment"
        try:
            if state is not None:
                torch.save(state, file)
        except Exception as error:  # a schedule may have what cannot be written
            state, why = None, f"{type(error).__name__}: {error}"
        if state is None:
            self._store.set(key, json.dumps({"parts": None, "why": why}))
            return
        whole = file.getbuffer()
        parts = range(0, len(whole), _PART)
        self._store.set(key, json.dumps({"parts": len(parts)}))
        for index, begin in enumerate(parts):
            self._store.set(f"{key}/{index}", bytes(whole[begin : begin + _PART]))  # type: ignore[arg-type]  # or bytes


class StateCollection:
    """Asks for other workers' states. For one thread.

    Args:
        store: That all ranks share.
        workers: Names of the others.
        limit: How long the next part of a state is waited for, in seconds.
        check: Called again and again while waiting; raises if somebody has failed.
    """

    def __init__(self, store: dist.Store, workers: Sequence[str], *, limit: float, check: Callable[[], None]) -> None:
        self._store = _connected(store)
        self._sender = Sender(store, "checkpoint")
        self._workers = tuple(workers)
        self._limit = limit
        self._check = check
        self._number = 0

    def collect(self, moment: Moment, *, settled: bool = True) -> dict[str, dict[str, Any] | str]:
        """The states of a moment, by worker; or why there is none. Bounded, raises nothing.

        Args:
            moment: The writer's present one.
            settled: Whether the writer's is all there. Amid a validation it is not, and others may wait for the writer.
        """
        self._number += 1
        text = json.dumps({"number": self._number, "settled": settled, **moment._asdict()})
        found: dict[str, dict[str, Any] | str] = {}
        try:
            for worker in self._workers:
                self._sender.post(_mailbox(worker), text)
        except RuntimeError as error:  # the store is gone
            return dict.fromkeys(self._workers, str(error))
        for worker in self._workers:
            try:
                found[worker] = self._one(f"states/{self._number}/{worker}")
            except (Exception, KeyboardInterrupt) as error:  # what is saved without it is better than nothing
                found[worker] = f"{type(error).__name__}: {error}"
                if not isinstance(error, pickle.UnpicklingError):
                    return {**dict.fromkeys(self._workers, found[worker]), **found}
        return found

    def end(self) -> None:
        """Let the others go: nothing will be asked for any more."""
        with suppress(RuntimeError):  # the store is gone, and whoever waits knows
            self._store.set(_OVER, "1")

    def _one(self, key: str) -> dict[str, Any] | str:
        # Twice: who answers may wait as long before it says that there is nothing.
        if not _await(self._store, key, 2 * self._limit, self._check):
            return f"nothing was heard of it for {2 * self._limit:.0f} s"
        answer = json.loads(self._store.get(key))
        self._store.delete_key(key)
        parts = answer["parts"]
        if parts is None:
            return str(answer["why"])
        whole = bytearray()
        for index in range(parts):
            part = f"{key}/{index}"
            if not _await(self._store, part, self._limit, self._check):
                return f"its state stopped to come for {self._limit:.0f} s"
            whole += self._store.get(part)
            self._store.delete_key(part)
        state: dict[str, Any] = torch.load(io.BytesIO(whole), map_location="cpu", weights_only=True)
        return state


def _mailbox(worker: str) -> str:
    return f"{worker}/states"


def _connected(store: dist.Store) -> dist.Store:
    connection, presence = connect_to_store(store)
    presence.close()
    return connection


def _await(store: dist.Store, key: str, limit: float, check: Callable[[], None]) -> bool:
    deadline, pause = time.monotonic() + limit, _SHORTEST_S
    while not store.check([key]):  # torch warns of each wait that is not over in time
        check()
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_S)
    return True
