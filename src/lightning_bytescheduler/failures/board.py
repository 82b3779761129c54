"""The fault board: every rank watches a notice board on the rendezvous store, and learns who failed and why.

* A failing rank publishes its error *before* it dies. It then stays until the others know, at most two seconds:
  launchers kill the siblings of a dead process within seconds, and the store may live in the failing process itself.
* A rank that was killed publishes nothing. Another rank whose collective failed asks about it, and finds that its sign
  of life is missing. That rank publishes what it found; otherwise the next victims would name the wrong rank.
* Each rank sees a notice within a quarter of a second, logs it at once and hands it to the scheduler. Threads that are
  blocked on communication then raise an error that names the rank. :class:`Watchdog` takes care of a training thread
  that is blocked elsewhere.

One thread does this, ``bytescheduler-fault-watch``. It alone talks to the store, on a connection of its own. A request
blocks in native code for as long as the store's host is frozen, so all other threads ask this one and wait for it for a
limited time. It holds no lock while it talks to the store or calls back.

Besides notices it writes a sign of life, four times a second, and where its rank stands (:class:`VitalSigns`).
"""

from __future__ import annotations

import atexit
import gc
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol

import torch.distributed as dist
from msgspec.structs import replace

from lightning_bytescheduler.exceptions import (
    ByteSchedulerError,
    RankFailedError,
    RanksDivergedError,
    SchedulerTimeoutError,
)
from lightning_bytescheduler.failures.messages import (
    FaultNotice,
    brief,
    is_communication_error,
    is_timeout,
    values_of,
)
from lightning_bytescheduler.failures.rendezvous import (
    Introduction,
    StorePresence,
    agent_keeps_store,
    connect_to_store,
    connection_hint,
    explain_connection,
    hold_roll_call,
    open_board,
    store_gone,
)
from lightning_bytescheduler.failures.standstill import (
    Standing,
    VitalSigns,
    Watchdog,
    break_connections,
    explain_death,
    wait_of,
)

log = logging.getLogger(__name__)

_PERIOD_S = 0.25
_HURRIES = 5  # how many times as often the thread looks while another thread waits for what it learns
_LINGER_S = 2.0
_GOODBYE_S = 5.0
_STOP_S = 2.0
_DIAGNOSE_S = 3.0
_CONNECTING_S = 30.0  # until it is said what to look at
_ASKED_S = 1.0  # how long the thread looks at the others after look_after_others()
NATIVE_S = 20.0
"""Seconds for which a rank may show no sign of life, as it may be busy in native code."""
_VANISHED = 6  # times NATIVE_S: after so long a silence, a rank that this one waits for counts as dead
_WHERE = "Where the ranks are:"

_Place = tuple[int, ...]  # training batches begun, and other batches since


class Watched(Protocol):
    """What a watcher looks after: one of a rank's schedulers. All methods are called on the watcher thread."""

    def rank_failed(self, fault: RankFailedError, step: int | None) -> None:
        """Stop, as another rank has failed. It had handed over ``step`` steps' gradients, if that is known."""

    def own_failure(self) -> BaseException | None:
        """What has stopped the scheduler. The others are told at once, before the training thread notices."""

    def phase(self) -> str:
        """What this rank is doing, in words. Other ranks show it when they wait for this one in vain."""

    def steps_handed_over(self) -> int:
        """How many steps' gradients this rank has handed over completely."""


class AgreedStop:
    """One rank's part in the agreement to stop all ranks before the same batch, without a collective.

    Each rank counts the batches that it begins: those it trains on, and after each of them those it does not, because a
    validation may have more batches on one rank than on another. The watcher's thread sees on the store that a rank was
    asked, and writes down how far its own rank has come. From then on the training thread begins no batch before it
    knows what all ranks have written. It goes on as far as the furthest rank, and stops there.

    Why all ranks stop before the same batch: a rank's place is taken under a lock, and moves on only up to the furthest
    place. So each rank begins exactly as many training batches as the furthest rank had begun when it wrote its place.

    Why no rank waits forever: the places are written by watcher threads, which wait for no training thread. A rank
    writes its place even while its training thread is inside a batch, waiting for gradients that another rank's threads
    still send.

    Args:
        store: Shared by the ranks, empty before.
        rank: This rank.
        world_size: Number of ranks.

    Attributes:
        asked: Whether this rank was asked to stop.
    """

    def __init__(self, store: dist.Store, *, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self.asked = False
        self._changed = threading.Condition()
        # What follows changes under the condition.
        self._begun: _Place = (0, 0)
        self._stopping = False
        self._last: _Place | None = None  # where each rank stops

    def ask(self) -> None:
        """Ask all ranks to stop. Safe on any thread and in a signal handler, as it takes no lock."""
        self.asked = True

    @property
    def urgent(self) -> bool:
        """Whether a thread waits for the result of :meth:`look`."""
        return self._last is None and (self.asked or self._stopping)

    def begin_batch(self, failure: Callable[[], BaseException | None], timeout: float, *, trains: bool = True) -> bool:
        """Tell that the training thread is about to begin a batch; ``True`` if it has to stop instead.

        Args:
            failure: Called while it waits; returns the reason why the others will not answer, or ``None``.
            timeout: Longest wait for the others, in seconds.
            trains: Whether it trains on that batch. All ranks train on the same number of batches.

        Raises:
            SchedulerTimeoutError: If the others do not answer in time.
            BaseException: What ``failure`` returned.
        """
        with self._changed:
            cause = self._wait(lambda: not self._stopping or self._last is not None, failure, timeout)
            if self._stopping and self._last is None:
                raise cause or SchedulerTimeoutError(
                    "A rank was asked to stop, and not all ranks have said in time which batch they are in."
                )
            trained, others = self._begun
            following = (trained + 1, 0) if trains else (trained, others + 1)
            if self._last is not None and following > self._last:
                return True
            self._begun = following
            return False

    def _wait(
        self, is_over: Callable[[], bool], failure: Callable[[], BaseException | None], timeout: float
    ) -> BaseException | None:
        """Wait, under the condition, until it is over, time is up or there is a failure, which is returned."""
        deadline = time.monotonic() + timeout
        while not is_over():
            self._changed.release()
            try:
                cause = failure()
            finally:
                self._changed.acquire()
            if cause is not None or time.monotonic() >= deadline:
                return cause
            self._changed.wait(_PERIOD_S)
        return None

    def look(self) -> None:
        """Tell the others, and learn from them. For the watcher's thread; talks to the store without a lock."""
        if self._last is not None:
            return
        if self.asked:
            self._store.set("asked", str(self._rank))
        elif not self._stopping and not self._store.check(["asked"]):
            return
        with self._changed:
            self._stopping = True  # no further batch is begun from here on
        self._store.set(f"begun/{self._rank}", " ".join(map(str, self._begun)))
        keys = [f"begun/{rank}" for rank in range(self._world_size)]
        if self._store.check(keys):
            places = values_of(self._store, keys)
            with self._changed:
                self._last = max(tuple(map(int, place.split())) for place in places)
                self._changed.notify_all()


class FaultBoard:
    """Tells the other ranks of this rank's failure, and tells the watched schedulers of theirs.

    Args:
        store: A store connection that nothing else uses.
        rank: This rank.
        world_size: Number of ranks.
        presence: Tells whether the store is still there.
        watchdog: Ends the process if its training thread does not come back after a failure.
        hosts_store: Whether the store ends with this process, which then leaves last.

    Attributes:
        rank: This rank, among all that share the board.
        world_size: Number of ranks that share the board.
        fault: Another rank's failure, once it is known.
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
        self._store = store
        self.rank = rank
        self.world_size = world_size
        self._presence = StorePresence() if presence is None else presence
        self._watchdog = Watchdog() if watchdog is None else watchdog
        self._others = [r for r in range(world_size) if r != rank]
        self._period = max(_PERIOD_S, world_size / 256)  # spares the store's host when there are many ranks
        self._signs = VitalSigns(store, rank, self._others, self._period)
        self._standing: Callable[[], Standing] | None = None
        self._stood = Standing()  # where this rank stood when it last told
        self._stops: list[AgreedStop] = []
        self._training_thread = threading.get_ident()
        self._changed = threading.Condition()
        # What follows changes under the condition.
        self._watched: list[Watched] = []  # in the order in which they came
        self._phases: list[Callable[[], str]] = []  # of the watched ones; kept after unwatch() until others come
        self._notice: FaultNotice | None = None  # another rank's failure
        self.fault: RankFailedError | None = None  # the notice as an exception
        self._act_at: float | None = None  # when the notice is to be handed on; None: nothing to do
        self._outgoing: FaultNotice | None = None
        self._published: bool | None = None  # whether this rank's notice counts; None until the store has answered
        self._store_lost = False
        self._ready_to_leave = False  # knows of the failure, or leaves in order
        self._left = False  # has told that it leaves
        # For how long a rank may show no sign of life, as threads ask, and until when each is heeded.
        self._silences: dict[float, float] = {}
        self._askers = 0  # threads that wait for what the watcher learns
        self.all_came = False  # whether a rank that has never shown a sign of life may be dead, too
        self._urgent = True  # the first sign of life comes at once
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="bytescheduler-fault-watch", daemon=True)
        self._hosts_store = hosts_store
        self._meetings = itertools.count(1)
        self._process = os.getpid()
        self._thread.start()
        atexit.register(self.close)  # a thread inside torch while the interpreter ends would abort the process

    @classmethod
    def open(cls, *, rank: int, world_size: int, store: dist.Store | None = None) -> FaultBoard:
        """Watch a new board on a store; every rank opens its boards in the same order.

        Args:
            rank: This rank.
            world_size: Number of ranks.
            store: A store that these ranks share; the default group's if left out.

        Raises:
            RankFailedError: If the store is gone, or a rank does not come back to train after a failure.
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

    def meeting_place(self, name: str = "") -> dist.Store:
        """A part of the store for something that all ranks do once in this run, such as a roll call.

        It shares the watcher's connection: for short requests that do not block.

        Args:
            name: Name of what they do. If left out, the number of the call, as all ranks run the same program.
        """
        return dist.PrefixStore(f"meetings/{name or next(self._meetings)}", self._store)

    def all_reach(self, place: str, timeout: float) -> bool:
        """Wait until all ranks have come to the same point, each once in a run.

        Args:
            place: Its name.
            timeout: Longest wait, in seconds.

        Returns:
            Whether they have.
        """
        with suppress(Exception):
            hold_roll_call(
                self.meeting_place(place),
                Introduction(rank=self.rank, facts={}),
                world_size=self.world_size,
                timeout=timeout,
                failure=self.no_hope,
            )
            return True
        return False

    def watch(self, watched: Watched) -> None:
        """Look after ``watched`` too, from now on."""
        with self._changed:
            self._watched.append(watched)
            self._phases = [one.phase for one in self._watched]
            if self.fault is not None and self._act_at is None:
                self._act_at = 0.0
            self._wake()

    def stands(self, standing: Callable[[], Standing]) -> None:
        """Tell the others where this rank stands, and find out whether all ranks wait for each other forever.

        Args:
            standing: Called on the watcher thread. The board adds what the training thread waits for.
        """
        self._standing = standing

    def agree_on_stop(self, what: str = "stop") -> AgreedStop:
        """Have all ranks stop together when one is asked to. Every rank calls this once, at the same point.

        Args:
            what: Why they stop; each reason has a name of its own.
        """
        store = dist.PrefixStore(what, self._store)
        stop = AgreedStop(store, rank=self.rank, world_size=self.world_size)
        self._stops = [*self._stops, stop]  # a new list, as the thread may be iterating over the old one
        return stop

    def unwatch(self, watched: Watched) -> None:
        """Stop looking after ``watched``."""
        with self._changed:
            if watched in self._watched:
                self._watched.remove(watched)

    @property
    def hopeless(self) -> bool:
        """Whether the other ranks will not answer any more: one has failed, or the store is gone."""
        return self._notice is not None or self._outgoing is not None or self._store_lost

    def no_hope(self) -> BaseException | None:
        """Why the other ranks will not answer any more; ``None`` while they may.

        Code that waits for them calls this again and again. Then the board's thread looks at them, and a rank that has
        shown no sign of life for long has failed.
        """
        if self.fault is not None:
            return self.fault
        if self.hopeless:
            return self.diagnose(RuntimeError("c10d: the store is gone"))
        self.look_after_others(2 * NATIVE_S)
        return None

    def look_after_others(self, silence: float, *, seconds: float = _ASKED_S) -> None:
        """Have the board's thread look at the other ranks for a while, and take those for dead that are silent.

        Args:
            silence: How long they must have shown no sign of life, in seconds. The shortest of several counts.
            seconds: For how long it looks.
        """
        self._silences[silence] = time.monotonic() + seconds

    def take_over(self) -> None:
        """Note that the training thread is back with a failure, and will end by itself."""
        self._watchdog.disarm()
        # Peers that wait for this rank inside torch are released when its process has ended. Without this, the
        # interpreter's last garbage collections go through all of torch's objects, which takes seconds on a busy
        # machine.
        atexit.unregister(gc.freeze)
        atexit.register(gc.freeze)

    def patient(self) -> AbstractContextManager[None]:
        """Keep the watchdog from ending this process within this context, while a checkpoint is written."""
        return self._watchdog.suspended()

    def publish(self, error: BaseException, *, patience: float = 0.0) -> bool:
        """Tell every rank that this one failed, and stay until they know, two seconds at most.

        Args:
            error: What this rank failed with.
            patience: How long the others may go on, in seconds. If it is not 0, this rank does not wait for them.

        Returns:
            Whether this rank's failure is now the published one; ``False`` if another was first.
        """
        deadline = time.monotonic() + _LINGER_S
        with self._asking():
            if self._notice is None:
                self._post(error, patience=patience)
            if self._outgoing is None:
                return False
            while self._published is None and self._within(deadline):
                pass
            while self._published and not patience and self._present() and self._within(deadline):
                pass
            return bool(self._published)

    def explain(self, error: BaseException, *, timeout: float = _DIAGNOSE_S) -> BaseException:
        """Return the failure that ``error`` is a consequence of, or ``error`` itself.

        Args:
            error: What a rank ran into, on any thread. One that has nothing to do with communication is returned at
                once.
            timeout: See :meth:`diagnose`.
        """
        if isinstance(error, SchedulerTimeoutError) or (is_communication_error(error) and is_timeout(error)):
            return self._locate(error)
        return self.diagnose(error, timeout) if is_communication_error(error) else error

    def diagnose(self, error: BaseException, timeout: float = _DIAGNOSE_S, *, silence: float = 0.0) -> BaseException:
        """Find out which rank's failure made one of this rank's collectives fail.

        Args:
            error: What the collective raised.
            timeout: Longest wait for a notice, or for proof that a rank shows no sign of life, in seconds.
            silence: How long a rank must have shown no sign of life, in seconds. Where no connection has broken, it
                should be more than five beats, and nothing is found out once all ranks are seen to live.

        Returns:
            A :class:`RankFailedError` that names the rank if it is known, with ``error`` as its cause.
        """
        if isinstance(error, RankFailedError):
            return error
        deadline = time.monotonic() + max(timeout, 8 * self._period, silence + 3 * self._period)
        known_at = math.inf  # when all ranks were first looked at
        broken = f"this broke here: {brief(error)}"
        with self._asking():
            while self.fault is None and not self._store_lost:
                if self._signs.standings():
                    known_at = min(known_at, time.monotonic())
                silent = self._signs.silent(silence)
                if len(silent) == 1 or (silent and time.monotonic() >= deadline):
                    self._bury(silent, broken)
                elif (silence and self._signs.all_live(known_at)) or not self._within(deadline):
                    break
            if self.fault is None and self._store_lost:
                self._learn(FaultNotice.of(store_gone(broken), by=self.rank))
            if self.fault is None:
                return error
            self.fault.__cause__ = error
            return self.fault

    def close(self, timeout: float = _GOODBYE_S) -> bool:
        """Stop watching; idempotent.

        The process that hosts the store waits until the others have left too, ``timeout`` seconds at most: torch prints
        alarming messages when a store vanishes under it. After a failure it waits two seconds, and longer only for
        ranks that still show signs of life.

        Args:
            timeout: Longest wait, in seconds.

        Returns:
            Whether the thread has ended.
        """
        if os.getpid() != self._process:
            return True  # a forked child ends: thread and connection are its parent's
        self._watchdog.disarm()
        now = time.monotonic()
        with self._asking():
            if not self._closing:
                self._ready_to_leave = True
                self._wake()
                while behind := self._left_behind():
                    alive = behind.difference(self._signs.silent())
                    deadline = now + (timeout if alive or not self.hopeless else _LINGER_S)
                    if not self._within(deadline):
                        break
                self._closing = True
                self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_S)
        atexit.unregister(self.close)
        return not self._thread.is_alive()

    def _left_behind(self) -> set[int]:
        """Ranks that still need the store of this process. Called under the condition."""
        if not self._hosts_store:
            return set()
        if self._notice is None or self._notice.self_reported:
            return self._present()
        return self._present() - {self._notice.rank}  # it is dead

    def _present(self) -> set[int]:
        """The other ranks that have not left."""
        return set(self._others) - self._signs.left

    def _vanished(self, silence: float | None) -> list[int]:
        """Ranks that came, and have shown no sign of life for long: as threads ask, or while the training waits."""
        silent = self._signs.silent(_VANISHED * NATIVE_S if silence is None else silence)
        return silent if self.all_came else [rank for rank in silent if rank in self._signs.standings()]

    def _locate(self, error: BaseException) -> BaseException:
        """Name a rank that has vanished without breaking a connection; if all live, say what each is doing."""
        if _WHERE in str(error):
            return error
        found = self.diagnose(error, silence=NATIVE_S)
        if isinstance(found, RankFailedError):
            return found
        with self._changed:
            where = self._signs.whereabouts() or "no rank answers"
        located = SchedulerTimeoutError(f"{brief(error)} {_WHERE} {where}. The strategy's timeout allows more.")
        located.__cause__ = error
        return located

    # ------------------------------------------------------------------ under the condition

    def _wake(self) -> None:
        self._urgent = True
        self._changed.notify_all()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Make the thread look at the others often while the caller waits for what it learns. Under the condition."""
        with self._changed:
            self._askers += 1
            self._wake()
            try:
                yield
            finally:
                self._askers -= 1

    def _bury(self, silent: Sequence[int], *broken: str) -> None:
        """Tell all that ranks are dead."""
        last = explain_death(self._signs.standings())
        cause = "; ".join((_no_sign_of_life(silent), *broken)) + (f". {last}" if last else "")
        self._find(RankFailedError(silent[0], cause))

    def _find(self, failure: RankFailedError) -> None:
        """Note and publish another rank's failure, which that rank does not publish itself."""
        self._learn(FaultNotice.of(failure, by=self.rank))
        self._post(failure)

    def _within(self, deadline: float) -> bool:
        """Wait for the thread's next round; ``False`` if that is too late, or no round will come."""
        left = deadline - time.monotonic()
        if left <= 0 or self._store_lost or self._closing or not self._thread.is_alive():
            return False
        self._changed.wait(min(left, self._period))
        return True

    def _post(self, error: BaseException, *, patience: float = 0.0) -> None:
        """Have ``error`` published, unless a failure has been published before."""
        if self._outgoing is None:
            step = self._watched[0].steps_handed_over() if self._watched else None
            self._outgoing = FaultNotice.of(error, by=self.rank, patience=patience, step=step)
            self._wake()

    def _learn(self, notice: FaultNotice) -> None:
        if self._notice is None:
            self._notice, self.fault = notice, notice.as_error()
            self._act_at = time.monotonic() + notice.patience
            level = logging.INFO if notice.patience else logging.ERROR
            log.log(level, "[rank %d] %s", self.rank, self.fault)
            self._wake()

    def _lose_store(self) -> None:
        # At an orderly end rank 0 may leave first and take the store with it, so a lost store alone is no failure.
        self._store_lost = True
        log.debug("the rendezvous store cannot be reached", exc_info=True)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._urgent:
                    hurry = self._askers or any(stop.urgent for stop in self._stops)
                    self._changed.wait(self._period / _HURRIES if hurry else self._period)
                self._urgent = False
                closing = self._closing
            self._talk()
            self._react()
            with self._changed:
                self._changed.notify_all()
            if closing:
                self._presence.close()
                return

    def _talk(self) -> None:
        if self._store_lost or (self._left and not self._askers):
            return
        if self._presence.gone():
            self._lose_store()
            return
        try:
            for stop in self._stops:
                stop.look()
            notice = self._exchange_notices()
            leaves = self._ready_to_leave
            now = time.monotonic()
            silence = min((each for each, until in list(self._silences.items()) if now < until), default=None)
            standstill = self._signs.beat(
                self._stand(), left=leaves, wanted=silence is not None, examine=bool(self._askers)
            )
            self._left = leaves
        except RuntimeError:
            self._lose_store()
            return
        with self._changed:
            if notice is not None:
                self._learn(notice)
            elif standstill is not None and self._notice is None and self._outgoing is None:
                self._find(RanksDivergedError(standstill))
            elif self._notice is None and self._outgoing is None and (silent := self._vanished(silence)):
                self._bury(silent)

    def _stand(self) -> Standing:
        """Where this rank stands; after a failure, where it stood before."""
        doing = ", ".join(phase() for phase in self._phases) or "in setup"
        if self._standing is None or self._notice is not None or self._outgoing is not None:
            return replace(self._stood, doing=doing)
        try:
            standing = self._standing()
        except Exception:  # read while the training thread changes it
            log.debug("it is not known where this rank stands", exc_info=True)
            standing = Standing()  # what was told before may not hold any more
        wait = None if standing.ended else wait_of(self._training_thread)
        if wait is not None:
            standing = replace(
                standing,
                **wait._asdict(),
                awaited_step=0,
                batches=standing.batches - wait.outside,
                epoch_batches=standing.epoch_batches - wait.outside,
            )
        self._stood = standing
        return replace(standing, doing=doing)

    def _exchange_notices(self) -> FaultNotice | None:
        """Publish this rank's notice, if it has one, and return another rank's."""
        if self._outgoing is not None and self._published is None:
            own = self._outgoing.encode()
            answer = self._store.compare_set("fault", "", own)
            self._published = answer.decode() == own
            return None if self._published else FaultNotice.decode(answer)
        if self._notice is None and not self._published and self._store.check(["fault"]):
            return FaultNotice.decode(self._store.get("fault"))
        return None

    def _react(self) -> None:
        """Publish what has stopped this rank's scheduler, or stop it because of another rank."""
        with self._changed:
            watched, notice, fault = list(self._watched), self._notice, self.fault
            if notice is None and self._outgoing is None:
                for error in (one.own_failure() for one in watched):
                    if error is not None and not is_communication_error(error):  # the others are being diagnosed
                        self._post(error)
                        self._watchdog.arm(f"Rank {self.rank} failed: {error}")
            due = self._act_at is not None and time.monotonic() >= self._act_at
            if due:
                self._act_at = None
        if due and notice is not None and fault is not None:
            self._watchdog.arm(str(fault))
            if notice.diverged and wait_of(self._training_thread) is not None:
                # No other rank will come, and gloo has no other way to call a collective off.
                group = dist.group.WORLD
                with suppress(Exception):
                    if group is not None:
                        break_connections(group)
            if notice.patience:
                log.error("[rank %d] %s", self.rank, fault)
            for one in reversed(watched):  # the first one is last, as it may wait a moment for messages to arrive
                try:
                    one.rank_failed(fault, notice.step)
                except Exception:
                    log.exception("The scheduler could not be stopped.")
            with self._changed:
                self._ready_to_leave = True
                self._wake()
        self._watchdog.check()


@contextmanager
def connected(store: dist.Store, host: str, port: int, *, rank: int, world_size: int) -> Iterator[FaultBoard]:
    """Watch over this rank within the context, in which it connects to the others and may wait for them in torch.

    Args:
        store: A store that these ranks share.
        host: Where they have met.
        port: Its port.
        rank: This rank.
        world_size: Number of ranks.

    Raises:
        RanksUnreachableError: If this rank cannot connect to the others.
        RankFailedError: If another rank has failed. A rank that does not come back from torch is ended.
    """
    board = FaultBoard.open(rank=rank, world_size=world_size, store=store)
    board.all_came = True  # they have just met
    if rank < 2:  # rank 0 for all, and rank 1 in case rank 0 has died
        board.look_after_others(NATIVE_S, seconds=math.inf)
    hint = threading.Timer(_CONNECTING_S, log.warning, [connection_hint(world_size, host, port)])
    hint.name, hint.daemon = "bytescheduler-connecting", True
    if rank == 0:
        hint.start()
    try:
        yield board
        if board.fault is not None:
            raise board.fault
    except Exception as error:
        cause: BaseException = explain_connection(error, rank, host, port)
        if cause is not error or is_communication_error(error):  # a rank that has died cannot be connected to either
            found = board.diagnose(error, silence=NATIVE_S / 4)
            cause = cause if found is error else found
        if not board.publish(cause) and board.fault is not None and not isinstance(error, ByteSchedulerError):
            cause = board.fault
        if cause is error:
            raise
        raise cause from error
    finally:
        hint.cancel()
        board.close()


def _no_sign_of_life(silent: Sequence[int]) -> str:
    others = "" if len(silent) == 1 else f" (nor do ranks {', '.join(map(str, silent[1:]))})"
    return f"it shows no sign of life{others}"
