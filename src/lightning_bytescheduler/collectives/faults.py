"""Who failed, and why: a notice board on the rendezvous store that every rank watches.

A failing rank publishes its error *before* it dies, then lingers until the others have seen it (at most two seconds):
launchers kill the siblings of a dead process within seconds, and the store may live in the failing process itself.
Each rank's watcher thread sees the notice within a quarter of a second, logs it at once and aborts the scheduler, so
that threads blocked on communication raise an error that names the rank. A rank that was killed publishes nothing;
its missing sign of life names it, once somebody's collective has failed and asks.

One thread, ``bytescheduler-fault-watch``, owned by the board; :meth:`FaultBoard.close` ends it. It uses a store
connection of its own: a connection blocked in a long ``get`` elsewhere would block the watcher too.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from lightning_bytescheduler.exceptions import RankFailedError

__all__ = ["FaultBoard"]

log = logging.getLogger(__name__)

_POLL_S = 0.25
_LINGER_S = 2.0
_STORE_TIMEOUT = timedelta(seconds=5)
_CAUSE_LIMIT = 2000  # characters of an error message that travel


class FaultBoard:
    """Publishes this rank's failure and learns of the others'.

    Args:
        store: A store connection that nothing else uses.
        rank: This rank.
        world_size: Number of ranks.
        on_fault: Called on the watcher thread, once, when another rank has published its failure.
    """

    def __init__(
        self, store: dist.Store, *, rank: int, world_size: int, on_fault: Callable[[RankFailedError], None]
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._on_fault = on_fault
        self._fault: RankFailedError | None = None
        self._published = False
        self._store_lost = False
        self._period = max(_POLL_S, world_size / 256)  # spares the store's host when there are many ranks
        self._lock = threading.Lock()  # one request at a time on the connection
        self._stopping = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._watch, name="bytescheduler-fault-watch", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls, *, instance: int, rank: int, world_size: int, on_fault: Callable[[RankFailedError], None]
    ) -> FaultBoard:
        """Watch a board on the default group's store.

        Args:
            instance: Distinguishes successive boards of one process group; the same on every rank.
            rank: This rank.
            world_size: Number of ranks.
            on_fault: See the class.
        """
        connection = dist.distributed_c10d._get_default_store().clone()
        connection.set_timeout(_STORE_TIMEOUT)
        store = dist.PrefixStore(f"bytescheduler/{instance}", connection)
        return cls(store, rank=rank, world_size=world_size, on_fault=on_fault)

    @property
    def fault(self) -> RankFailedError | None:
        """Another rank's published failure, once it was seen."""
        return self._fault

    def publish(self, error: BaseException) -> bool:
        """Tell every rank that this one failed, and stay until they know.

        Args:
            error: What this rank failed with.

        Returns:
            Whether this rank's failure is now the published one; ``False`` if another was first.
        """
        if self._published or self._fault is not None or self._store_lost:
            return self._published
        cause = f"{type(error).__name__}: {error}"[:_CAUSE_LIMIT]
        notice = json.dumps({"rank": self._rank, "cause": cause})
        try:
            with self._lock:
                first = self._store.compare_set("fault", "", notice)
        except RuntimeError:
            log.debug("could not publish the failure", exc_info=True)
            return False
        self._published = first.decode() == notice
        if self._published:
            deadline = time.monotonic() + _LINGER_S
            while time.monotonic() < deadline and self._seen_by() < self._world_size - 1:
                time.sleep(0.05)
        return self._published

    def diagnose(self, error: BaseException, timeout: float = 3.0) -> BaseException:
        """Find out whose failure made one of this rank's collectives fail.

        Args:
            error: What the collective raised.
            timeout: Longest wait for a notice or for proof that a rank shows no sign of life, in seconds.

        Returns:
            A :class:`RankFailedError` that names the rank if it can be told, with ``error`` as its cause.
        """
        if isinstance(error, RankFailedError):
            return error
        before = self._beats()
        silence_proven = time.monotonic() + 5 * self._period
        deadline = time.monotonic() + max(timeout, 8 * self._period)
        while time.monotonic() < deadline:
            if self._fault is None:
                self._look()
            if self._fault is not None:
                return self._caused(self._fault, error)
            if self._store_lost:
                break
            if time.monotonic() > silence_proven:
                after = self._beats()
                silent = [r for r in range(self._world_size) if r != self._rank and after.get(r) == before.get(r)]
                if len(silent) == 1 and after:
                    return self._caused(
                        RankFailedError(silent[0], f"it shows no sign of life; here that broke: {error}"), error
                    )
            time.sleep(_POLL_S / 2)
        if self._store_lost:
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                return self._caused(RankFailedError(None, f"the rendezvous agent is gone; here: {error}"), error)
            return self._caused(
                RankFailedError(0, f"its process is gone (the rendezvous store went with it); here: {error}"), error
            )
        return error

    def close(self, timeout: float = 6.0) -> bool:
        """Stop watching; returns whether the thread ended within ``timeout`` seconds."""
        self._stopping.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @staticmethod
    def _caused(fault: RankFailedError, error: BaseException) -> RankFailedError:
        fault.__cause__ = error
        return fault

    def _watch(self) -> None:
        while not self._stopping.wait(self._period):
            self._beat()
            if self._fault is None and not self._published:
                self._look()
            if self._store_lost:
                return

    def _look(self) -> None:
        try:
            with self._lock:
                if self._fault is not None or not self._store.check(["fault"]):
                    return
                notice = json.loads(self._store.get("fault"))
                if notice["rank"] == self._rank:
                    return
                self._store.add("seen", 1)
                self._fault = RankFailedError(notice["rank"], notice["cause"])
        except RuntimeError:
            self._lose_store()
            return
        log.error("[rank %d] %s Ending this rank too.", self._rank, self._fault)
        self._on_fault(self._fault)

    def _beat(self) -> None:
        try:
            with self._lock:
                self._store.add(f"alive/{self._rank}", 1)
        except RuntimeError:
            self._lose_store()

    def _beats(self) -> dict[int, int]:
        try:
            with self._lock:
                return {r: self._store.add(f"alive/{r}", 0) for r in range(self._world_size)}
        except RuntimeError:
            self._lose_store()
            return {}

    def _seen_by(self) -> int:
        try:
            with self._lock:
                return self._store.add("seen", 0)
        except RuntimeError:
            return self._world_size

    def _lose_store(self) -> None:
        # At an orderly end rank 0 may leave first and take the store with it, so this alone is no failure.
        self._store_lost = True
        log.debug("the rendezvous store cannot be reached", exc_info=True)
