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
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
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
    PERIOD_S,
    Standing,
    VitalSigns,
    Watchdog,
    break_connections,
    explain_death,
    wait_of,
    whereabouts,
)

log = logging.getLogger(__name__)

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


class Watched(Protocol):
    """What a watcher looks after: one of a rank's schedulers. All methods are called on the watcher thread."""

    def rank_failed(self, fault: RankFailedError, step: int | None) -> None:
        """Stop, as another rank has failed. It had handed over ``step`` steps' gradients, if that is known."""

    def own_failure(self) -> BaseException | None:
        """What has stopped the scheduler. The others are told at once, before the training thread notices."""

    def steps_handed_over(self) -> int:
        """How many steps' gradients this rank has handed over completely."""


class Request:
    """Something that any rank may ask of all, such as to stop. Rank 0 learns of it from the store, and tells all.

    Args:
        store: Shared by the ranks, empty before.
        rank: This rank.

    Attributes:
        asked: Whether this rank has asked.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store = store
        self._tells = rank == 0
        self._looked = False
        self.asked = False

    def ask(self) -> None:
        """Ask all ranks. Safe on any thread and in a signal handler, as it takes no lock."""
        self.asked = True

    @property
    def known(self) -> bool:
        """Whether this rank, or on rank 0 any rank, has asked."""
        return self.asked or self._looked

    def look(self) -> None:
        """Tell rank 0, or learn from the others. For the watcher's thread."""
        if self._looked:
            return
        if self.asked:
            self._store.set("asked", "")
        self._looked = self.asked or (self._tells and self._store.check(["asked"]))


class FaultBoard:
    """Tells the other ranks of this rank's failure, and tells the watched schedulers of theirs.

    Args:
        store: A store connection that nothing else uses.
        rank: This rank.
        world_size: Number of ranks.
        presence: Tells whether the store is still there.
        watchdog: Ends the process if its training thread does not come back after a failure.
        all_came: Whether all ranks are known to have started, so that one that never shows a sign of life is dead.

    Attributes:
        rank: This rank, among all that share the board.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        world_size: int,
        presence: StorePresence | None = None,
        watchdog: Watchdog | None = None,
        all_came: bool = False,
    ) -> None:
        self._store = store
        self.rank = rank
        self._presence = StorePresence() if presence is None else presence
        self._watchdog = Watchdog() if watchdog is None else watchdog
        others = [other for other in range(world_size) if other != rank]
        period = max(PERIOD_S, world_size / 256)  # spares the store's host when there are many ranks
        self._signs = VitalSigns(store, rank, others, period)
        self._all_came = all_came
        self._standing: Callable[[], Standing] = Standing
        self._requests: list[Request] = []
        self._changed = threading.Condition()
        # What follows changes under the condition.
        self._watched: list[Watched] = []  # in the order in which they came
        self._found: tuple[FaultNotice, RankFailedError] | None = None  # another rank's failure
        self._outgoing: FaultNotice | None = None
        self._published: bool | None = None  # whether this rank's notice counts; None until the store has answered
        self._store_lost = False
        self._leaves = False  # knows of the failure, or leaves in order
        # For how long others may show no sign of life before they count as dead, and why: for each thread that waits
        # for what the watcher learns, and for those that have asked until a time.
        self._asking: list[tuple[float, str]] = []
        self._asked = 0.0, 0.0
        self._urgent = True  # the first sign of life comes at once
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="bytescheduler-fault-watch", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread inside torch while the interpreter ends would abort the process

    @classmethod
    def open(cls, *, rank: int, world_size: int, store: dist.Store | None = None, all_came: bool = False) -> FaultBoard:
        """Watch a new board on a store; every rank opens its boards in the same order.

        Args:
            rank: This rank.
            world_size: Number of ranks.
            store: A store that these ranks share; the default group's if left out.
            all_came: Whether they have just met.

        Raises:
            RankFailedError: If the store is gone, or a rank does not come back to train after a failure.
        """
        shared = dist.distributed_c10d._get_default_store() if store is None else store
        connection, presence = connect_to_store(shared)
        part = open_board(connection, presence, rank=rank, world_size=world_size)
        return cls(part, rank=rank, world_size=world_size, presence=presence, all_came=all_came)

    @property
    def world_size(self) -> int:
        """Number of ranks that share the board."""
        return len(self._signs.others) + 1

    @property
    def fault(self) -> RankFailedError | None:
        """Another rank's failure, once it is known."""
        return None if self._found is None else self._found[1]

    def meeting_place(self, name: str = "") -> dist.Store:
        """A part of the store for something that all ranks do once in this run, such as a roll call.

        It shares the watcher's connection: for short requests that do not block.

        Args:
            name: Name of what they do. If left out, the number of the call, as all ranks run the same program.
        """
        return dist.PrefixStore(f"meetings/{name or self._store.add(f'meetings/{self.rank}', 1)}", self._store)

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

    def watch(self, watched: Watched, standing: Callable[[], Standing] | None = None) -> None:
        """Look after ``watched`` too, from now on; see :meth:`stands`."""
        with self._changed:
            self._watched.append(watched)
            self._standing = standing or self._standing
            self._wake()

    def stands(self, standing: Callable[[], Standing]) -> None:
        """Tell the others where this rank stands, and find out whether all ranks wait for each other forever.

        Args:
            standing: Called on the watcher thread. The board adds what the training thread waits for.
        """
        self._standing = standing

    def request(self, what: str) -> Request:
        """Return what any rank may ask of all. Every rank calls this once for each name."""
        made = Request(dist.PrefixStore(what, self._store), self.rank)
        self._requests = [*self._requests, made]  # a new list, as the thread may be iterating over the old one
        return made

    def unwatch(self, watched: Watched) -> None:
        """Stop looking after ``watched``."""
        with self._changed:
            if watched in self._watched:
                self._watched.remove(watched)

    @property
    def hopeless(self) -> bool:
        """Whether the other ranks will not answer any more: one has failed, or the store is gone."""
        return self._found is not None or self._outgoing is not None or self._store_lost

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
            silence: How long they must have shown no sign of life, in seconds. What was asked last counts.
            seconds: For how long it looks.
        """
        self._asked = silence, time.monotonic() + seconds

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

    def publish(self, error: BaseException, *, orderly: bool = False) -> bool:
        """Tell every rank that this one failed, and stay until they know, two seconds at most.

        Args:
            error: What this rank failed with.
            orderly: Whether the others end by themselves, as they have agreed to. They are not stopped, and this rank
                does not wait for them.

        Returns:
            Whether this rank's failure is now the published one; ``False`` if another was first.
        """
        deadline = time.monotonic() + _LINGER_S
        with self._looking():
            if self._found is None:
                self._post(error, orderly=orderly)
            while self._outgoing is not None and self._published is None and self._within(deadline):
                pass
            while self._published and not orderly and self._present() and self._within(deadline):
                pass
            return bool(self._published)

    def explain(self, error: BaseException, *, timeout: float = _DIAGNOSE_S) -> BaseException:
        """Return what ``error`` is a consequence of, or ``error`` itself. A timeout says where the ranks are.

        Args:
            error: What a rank ran into, on any thread. One that has nothing to do with communication is returned at
                once.
            timeout: See :meth:`diagnose`.
        """
        late = isinstance(error, SchedulerTimeoutError) or (is_communication_error(error) and is_timeout(error))
        if not late:
            return self.diagnose(error, timeout) if is_communication_error(error) else error
        if _WHERE in str(error):
            return error
        # A rank may have vanished without breaking a connection.
        found = self.diagnose(error, silence=NATIVE_S)
        if found is not error:
            return found
        with self._changed:
            where = whereabouts(self._signs.standings()) or "no rank answers"
        located = SchedulerTimeoutError(f"{brief(error)} {_WHERE} {where}. The strategy's timeout allows more.")
        located.__cause__ = error
        return located

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
        period, asked_at, known_at = self._signs.period, time.monotonic(), math.inf
        deadline = asked_at + max(timeout, 8 * period, silence + 3 * period)
        broken = f"this broke here: {brief(error) or type(error).__name__}"
        with self._looking(silence, broken):
            while self.fault is None and self._within(deadline):
                if self._signs.looked_at > asked_at:
                    known_at = min(known_at, self._signs.looked_at)
                if silence and len(self._signs.live(known_at)) == len(self._signs.others):
                    break
            if self.fault is None and self._store_lost:
                self._learn(FaultNotice.of(store_gone(broken), by=self.rank))
            if self.fault is None:
                return error
            self.fault.__cause__ = error
            return self.fault

    def close(self, timeout: float = _GOODBYE_S) -> bool:
        """Stop watching; idempotent.

        The process that hosts the store waits until the others have left too or show no sign of life, ``timeout``
        seconds at most: torch prints alarming messages when a store vanishes under it.

        Args:
            timeout: Longest wait, in seconds.

        Returns:
            Whether the thread has ended.
        """
        if not self._thread.is_alive():
            return True  # also in a forked child: thread and connection are its parent's
        self._watchdog.disarm()
        asked_at, hosts_store = time.monotonic(), self.rank == 0 and not agent_keeps_store()
        with self._looking():
            self._leaves = True
            while hosts_store and self._present() and self._within(asked_at + timeout):
                # A rank may have been silent when it was last looked at, long ago.
                if self._signs.looked_at > asked_at and not self._present().difference(self._signs.silent()):
                    break
            self._closing = True
            self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_S)
        atexit.unregister(self.close)
        return not self._thread.is_alive()

    # ------------------------------------------------------------------ under the condition

    def _present(self) -> set[int]:
        """The other ranks that have not left."""
        return set(self._signs.others).difference(self._signs.left)

    def _wake(self) -> None:
        self._urgent = True
        self._changed.notify_all()

    @contextmanager
    def _looking(self, silence: float = math.inf, broken: str = "") -> Iterator[None]:
        """Make the thread look at the others often while the caller waits for what it learns. Under the condition.

        Args:
            silence: How long others must have shown no sign of life to count as dead.
            broken: What has broken here, in words; then also those that never gave a sign of life.
        """
        with self._changed:
            self._asking.append((silence, broken))
            self._wake()
            try:
                yield
            finally:
                self._asking.remove((silence, broken))

    def _within(self, deadline: float) -> bool:
        """Wait for the thread's next round; ``False`` if that is too late, or no round will come."""
        left = deadline - time.monotonic()
        if left <= 0 or self._store_lost or self._closing or not self._thread.is_alive():
            return False
        self._changed.wait(min(left, self._signs.period))
        return True

    def _post(self, error: BaseException, *, orderly: bool = False) -> None:
        """Have ``error`` published, unless a failure has been published before."""
        if self._outgoing is None:
            step = self._watched[0].steps_handed_over() if self._watched else None
            self._outgoing = FaultNotice.of(error, by=self.rank, orderly=orderly, step=step)
            self._wake()

    def _learn(self, notice: FaultNotice) -> None:
        if self._found is None:
            self._found = notice, notice.as_error()
            log.log(logging.INFO if notice.orderly else logging.ERROR, "[rank %d] %s", self.rank, self.fault)
            self._wake()

    def _find(self, failure: RankFailedError) -> None:
        """Note and publish another rank's failure, which that rank does not publish itself."""
        self._learn(FaultNotice.of(failure, by=self.rank))
        self._post(failure)

    def _bury(self, silent: Sequence[int], broken: str) -> None:
        """Tell all that ranks are dead."""
        last = explain_death(self._signs.standings())
        others = f" (nor do ranks {', '.join(map(str, silent[1:]))})" if silent[1:] else ""
        cause = f"it shows no sign of life{others}{broken and '; '}{broken}{last and '. '}{last}"
        self._find(RankFailedError(silent[0], cause))

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        left = False  # has told that it leaves
        while True:
            with self._changed:
                if not self._urgent:
                    self._changed.wait(self._signs.period / (_HURRIES if self._asking else 1))
                self._urgent = False
                closing, leaves, asking = self._closing, self._leaves, list(self._asking)
            if not self._store_lost and (asking or not left):
                left = self._talk(leaves, asking)
            self._react()
            with self._changed:
                self._changed.notify_all()
            if closing:
                self._presence.close()
                return

    def _talk(self, leaves: bool, asking: list[tuple[float, str]]) -> bool:
        """Talk to the store; returns whether it was told that this rank leaves."""
        silence, until = self._asked
        wanted = time.monotonic() < until
        try:
            if self._presence.gone():
                raise ConnectionError("The host of the rendezvous store has ended.")
            for request in self._requests:
                request.look()
            notice = self._exchange_notices()
            self._signs.give(self._stand(), left=leaves)
            standstill = self._signs.watch(wanted=wanted, examine=bool(asking))
        except (RuntimeError, ConnectionError):
            # At an orderly end rank 0 may leave first and take the store with it, so a lost store alone is no failure.
            self._store_lost = True
            log.debug("the rendezvous store cannot be reached", exc_info=True)
            return False
        silence, broken = min([*asking, (silence, "")] if wanted else asking, default=(_VANISHED * NATIVE_S, ""))
        dead = self._signs.silent(silence)
        if not broken and not self._all_came:
            dead = [rank for rank in dead if rank in self._signs.standings()]
        with self._changed:
            if notice is not None:
                self._learn(notice)
            elif standstill is not None and not self.hopeless:
                self._find(RanksDivergedError(standstill))
            elif dead and not self.hopeless:
                self._bury(dead, broken)
        return leaves

    def _stand(self) -> Standing:
        """Where this rank stands; after a failure, where it stood before."""
        if self.hopeless:
            return self._signs.own
        try:
            standing = self._standing()
        except Exception:  # read while the training thread changes it
            log.debug("it is not known where this rank stands", exc_info=True)
            return Standing()  # what was told before may not hold any more
        wait = None if standing.ended else wait_of(self._watchdog.thread)
        return standing if wait is None else replace(standing, **wait._asdict(), awaited_step=0)

    def _exchange_notices(self) -> FaultNotice | None:
        """Publish this rank's notice, if it has one, and return another rank's."""
        if self._outgoing is not None and self._published is None:
            own = self._outgoing.encode()
            answer = self._store.compare_set("fault", "", own)
            self._published = answer.decode() == own
            return None if self._published else FaultNotice.decode(answer)
        if self._found is None and not self._published and self._store.check(["fault"]):
            return FaultNotice.decode(self._store.get("fault"))
        return None

    def _react(self) -> None:
        """Publish what has stopped this rank's scheduler, or stop it because of another rank."""
        with self._changed:
            for error in [] if self.hopeless else [one.own_failure() for one in self._watched]:
                if error is not None and not is_communication_error(error):  # the others are being diagnosed
                    self._post(error)
                    self._watchdog.arm(f"Rank {self.rank} failed: {error}")
            stops = self._found is not None and not self._found[0].orderly
            watched = [*reversed(self._watched)] if stops else []  # the first one may wait a moment for messages
            found, leaves = self._found, self._leaves
        if stops and found is not None:
            notice, fault = found
            self._watchdog.arm(str(fault))
            if notice.diverged and not leaves and wait_of(self._watchdog.thread) is not None:
                # No other rank will come, and gloo has no other way to call a collective off.
                group = dist.group.WORLD
                with suppress(Exception):
                    if group is not None:
                        break_connections(group)
            for one in watched:
                try:
                    one.rank_failed(fault, notice.step)
                except Exception:
                    log.exception("The scheduler could not be stopped.")
            with self._changed:
                self._watched = [one for one in self._watched if one not in watched]
                if not leaves:
                    self._leaves = True
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
    with ExitStack() as opened:
        board = FaultBoard.open(rank=rank, world_size=world_size, store=store, all_came=True)
        opened.callback(board.close)
        if rank < 2:  # rank 0 for all, and rank 1 in case rank 0 has died
            board.look_after_others(NATIVE_S, seconds=math.inf)
        if rank == 0:
            hint = threading.Timer(_CONNECTING_S, log.warning, [connection_hint(world_size, host, port)])
            hint.name, hint.daemon = "bytescheduler-connecting", True
            hint.start()
            opened.callback(hint.join, _STOP_S)
            opened.callback(hint.cancel)
        try:
            yield board
            if board.fault is not None:
                raise board.fault
        except Exception as error:
            cause: BaseException = explain_connection(error, rank, host, port)
            # A rank that has died cannot be connected to either.
            if cause is not error or is_communication_error(error):
                found = board.diagnose(error, silence=NATIVE_S / 4)
                cause = cause if found is error else found
            if not board.publish(cause) and board.fault is not None and not isinstance(error, ByteSchedulerError):
                cause = board.fault
            if cause is error:
                raise
            raise cause from error
