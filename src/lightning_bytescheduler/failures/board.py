"""Who failed, and why: a notice board on the rendezvous store that every rank watches.

* A failing rank publishes its error *before* it dies, then lingers until the others know (at most two seconds):
  launchers kill the siblings of a dead process within seconds, and the store may live in the failing process itself.
* A rank that was killed publishes nothing. Its missing sign of life names it once somebody's collective has failed
  and asks; that rank publishes what it found, or the next victims would name the first.
* Each watcher sees a notice within a quarter of a second, logs it at once and hands it to the scheduler, so that
  threads blocked on communication raise an error that names the rank. A training thread that is blocked elsewhere is
  the affair of :class:`Watchdog`.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import os
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch.distributed as dist

from lightning_bytescheduler.exceptions import RankFailedError, SchedulerTimeoutError
from lightning_bytescheduler.failures.messages import FaultNotice, brief, is_communication_error, is_timeout
from lightning_bytescheduler.failures.standstill import Watchdog, explain_death
from lightning_bytescheduler.failures.store import StorePresence, agent_keeps_store, connect_to_store, open_board
from lightning_bytescheduler.failures.watcher import FaultWatcher

__all__ = ["FaultBoard"]

_LINGER_S = 2.0
_GOODBYE_S = 5.0
_STOP_S = 2.0
_LOCATE_S = 1.0
_DIAGNOSE_S = 3.0
_WHERE = "Where the ranks are:"


class FaultBoard(FaultWatcher):
    """Publishes this rank's failure and learns of the others'.

    Args:
        store: A store connection that nothing else uses.
        rank: This rank.
        world_size: Number of ranks.
        presence: Tells whether the store is still there.
        watchdog: Ends the process if its training thread does not come back after a failure.
        hosts_store: Whether the store ends with this process: then it leaves last.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        world_size: int,
        presence: StorePresence | None = None,
        watchdog: Watchdog | None = None,
        hosts_store: bool = False,
    ) -> None:
        self._hosts_store = hosts_store
        self._meetings = itertools.count(1)
        self._process = os.getpid()
        super().__init__(store, rank=rank, world_size=world_size, presence=presence, watchdog=watchdog)
        atexit.register(self.close)  # a thread inside torch while the interpreter ends would abort the process

    @classmethod
    def open(cls, *, rank: int, world_size: int, store: dist.Store | None = None) -> FaultBoard:
        """Watch a new board on a store; every rank opens its boards in the same order.

        Args:
            rank: This rank.
            world_size: Number of ranks.
            store: That these ranks share; the default group's unless given.

        Raises:
            RankFailedError: If the store is gone, or a rank does not train again after a failure.
        """
        shared = dist.distributed_c10d._get_default_store() if store is None else store
        connection, presence = connect_to_store(shared)
        return cls(
            open_board(connection, presence, rank=rank, world_size=world_size),
            rank=rank,
            world_size=world_size,
            presence=presence,
            hosts_store=rank == 0 and not agent_keeps_store(),
        )

    def meeting_place(self, name: str) -> dist.Store:
        """A part of the store for something that all ranks do once in this run, such as a roll call.

        It shares the watcher's connection: for short requests that do not block.

        Args:
            name: Of what they do.
        """
        return dist.PrefixStore(f"meetings/{name}", self._store)

    def next_meeting(self) -> dist.Store:
        """A part of the store for what all ranks compare next, which is the same thing if they run the same program."""
        return self.meeting_place(str(next(self._meetings)))

    @property
    def fault(self) -> RankFailedError | None:
        """Another rank's failure, once it is known."""
        return self._fault

    @property
    def hopeless(self) -> bool:
        """Whether nothing is to be expected of the other ranks any more: one has failed, or the store is gone."""
        return self._notice is not None or self._outgoing is not None or self._store_lost

    def take_over(self) -> None:
        """The training thread is back with a failure, and will end by itself."""
        self._watchdog.disarm()
        # Peers that wait for this rank inside torch get free when its process has ended. Without this, the
        # interpreter's last garbage collections go through all of torch's objects, for seconds on a busy machine.
        atexit.unregister(gc.freeze)
        atexit.register(gc.freeze)

    def patient(self) -> AbstractContextManager[None]:
        """Do not end this process meanwhile, whatever happens elsewhere: the training thread writes a checkpoint."""
        return self._watchdog.suspended()

    def publish(self, error: BaseException, *, patience: float = 0.0) -> bool:
        """Tell every rank that this one failed, and stay until they know, two seconds at most.

        Args:
            error: What this rank failed with.
            patience: How long the others may go on, in seconds; if any, nobody is waited for.

        Returns:
            Whether this rank's failure is now the published one; ``False`` if another was first.
        """
        deadline = time.monotonic() + _LINGER_S
        with self._changed:
            if self._notice is None:
                self._post(error, patience=patience)
            if self._outgoing is None:
                return False
            while not self._answered and self._within(deadline):
                pass
            while self._published and not patience and self._present:
                if not self._within(deadline, awaiting_others=True):
                    break
            return self._published

    def explain(self, error: BaseException, *, timeout: float = _DIAGNOSE_S) -> BaseException:
        """Return the failure that ``error`` is a consequence of, or ``error`` itself.

        Args:
            error: What a rank met with, on any thread. One that has nothing to do with communication is returned at
                once.
            timeout: See :meth:`diagnose`.
        """
        if isinstance(error, SchedulerTimeoutError) or (is_communication_error(error) and is_timeout(error)):
            return self._locate(error)
        return self.diagnose(error, timeout) if is_communication_error(error) else error

    def diagnose(self, error: BaseException, timeout: float = _DIAGNOSE_S, *, silence: float = 0.0) -> BaseException:
        """Find out whose failure made one of this rank's collectives fail.

        Args:
            error: What the collective raised.
            timeout: Longest wait for a notice or for proof that a rank shows no sign of life, in seconds.
            silence: How long a rank must have shown none, in seconds; more than five beats where nothing has broken.

        Returns:
            A :class:`RankFailedError` that names the rank if it can be told, with ``error`` as its cause.
        """
        if isinstance(error, RankFailedError):
            return error
        deadline = time.monotonic() + max(timeout, 8 * self._period, silence + 3 * self._period)
        broken = f"here that broke: {brief(error)}"
        with self._changed, self._vital_signs.examined():
            while self._fault is None and not self._store_lost:
                silent = self._vital_signs.silent(silence)
                if len(silent) == 1 or (silent and time.monotonic() >= deadline):
                    last = explain_death(self._standstills.told)
                    cause = f"{_no_sign_of_life(silent)}; {broken}" + (f". {last}" if last else "")
                    found = RankFailedError(silent[0], cause)
                    self._learn(FaultNotice.of(found, by=self._rank))
                    self._post(found)
                elif not self._within(deadline):
                    break
            if self._fault is None and self._store_lost:
                self._learn(FaultNotice.of(_store_gone(broken), by=self._rank))
            if self._fault is None:
                return error
            self._fault.__cause__ = error
            return self._fault

    def close(self, timeout: float = _GOODBYE_S) -> bool:
        """Stop watching; idempotent.

        The process that hosts the store waits until the others have left too, ``timeout`` seconds at most: a store that
        vanishes under them would make torch print alarming things. Once there is a failure it waits two seconds, and
        longer only for those that still show signs of life.

        Args:
            timeout: In seconds.

        Returns:
            Whether the thread has ended.
        """
        if os.getpid() != self._process:
            return True  # a forked child ends: thread and connection are its parent's
        self._watchdog.disarm()
        now = time.monotonic()
        with self._changed, self._vital_signs.examined():
            if not self._closing:
                self._ready_to_leave = True
                self._wake()
                while behind := self._left_behind():
                    alive = behind.difference(self._vital_signs.silent())
                    deadline = now + (timeout if alive or not self.hopeless else _LINGER_S)
                    if not self._within(deadline, awaiting_others=True):
                        break
                self._closing = True
                self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_S)
        atexit.unregister(self.close)
        return not self._thread.is_alive()

    def _left_behind(self) -> set[int]:
        """Who still needs the store that this process hosts; called under the condition."""
        if not self._hosts_store:
            return set()
        if self._notice is None or self._notice.self_reported or self._notice.rank is None:
            return self._present
        return self._present - {self._notice.rank}  # it is dead

    def _locate(self, error: BaseException) -> BaseException:
        """Say what each rank is doing, if nobody has failed and the time was up all the same."""
        if _WHERE in str(error):
            return error
        deadline = time.monotonic() + _LOCATE_S
        with self._changed, self._vital_signs.examined(doing=True):
            while self._fault is None and not self._vital_signs.located() and self._within(deadline):
                pass
            if self._fault is not None:
                return self._fault
            where = self._vital_signs.whereabouts() or "nobody answers"
        located = SchedulerTimeoutError(f"{brief(error)} {_WHERE} {where}. The strategy's timeout allows more.")
        located.__cause__ = error
        return located


def _no_sign_of_life(silent: Sequence[int]) -> str:
    others = "" if len(silent) == 1 else f" (nor do ranks {', '.join(map(str, silent[1:]))})"
    return f"it shows no sign of life{others}"


def _store_gone(broken: str) -> RankFailedError:
    if not agent_keeps_store():
        return RankFailedError(0, f"its process is gone, and the rendezvous store with it; {broken}")
    return RankFailedError(None, f"the rendezvous agent is gone; {broken}")
