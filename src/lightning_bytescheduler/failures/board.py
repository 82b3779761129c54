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

Besides notices it writes a sign of life, four times a second, and where its rank stands (:class:`VitalSigns`). Once a
second it reads those of the others, and more often while a thread waits for what it learns.
"""

from __future__ import annotations

import atexit
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Protocol

import torch.distributed as dist
from msgspec.structs import replace

from lightning_bytescheduler.exceptions import RankFailedError, RanksDivergedError, SchedulerTimeoutError
from lightning_bytescheduler.failures.messages import FaultNotice, brief, is_communication_error, is_timeout
from lightning_bytescheduler.failures.rendezvous import (
    INTERFACE,
    Introduction,
    StorePresence,
    agent_keeps_store,
    connect_to_store,
    explain_connection,
    hold_roll_call,
    store_gone,
)
from lightning_bytescheduler.failures.standstill import (
    PERIOD_S,
    Standing,
    VitalSigns,
    Watchdog,
    break_connections,
    wait_of,
    whereabouts,
)

log = logging.getLogger(__name__)

_HURRIES = 5  # times as many rounds of the thread while another one waits for what it learns, and a moment longer
_LOOK_S = 1.0  # between two looks at the other ranks
_LINGER_S = 2.0
_GOODBYE_S = 5.0
_STOP_S = 2.0
_DIAGNOSE_S = 3.0
_LATER_S = 30.0
NATIVE_S = 20.0
"""Seconds for which a rank may show no sign of life, as it may be busy in native code."""
_VANISHED = 6  # times NATIVE_S
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
        world_size: Number of ranks that share the board.
        fault: Another rank's failure, once it is known.
        silence: After so many seconds without a sign of life a rank counts as dead, whatever the others do.
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
        self.world_size = world_size
        self._presence = StorePresence() if presence is None else presence
        self._watchdog = Watchdog() if watchdog is None else watchdog
        # These spare the store's host when there are many ranks.
        period, self._look_every = max(PERIOD_S, world_size / 256), max(_LOOK_S, world_size / 16)
        self._signs = VitalSigns(store, rank, [other for other in range(world_size) if other != rank], period)
        self._all_came = all_came
        self.silence = _VANISHED * NATIVE_S
        self._standing: Callable[[], Standing] = Standing
        self._requests: list[Request] = []
        self._changed = threading.Condition()
        # What follows changes under the condition.
        self._watched: list[Watched] = []  # in the order in which they came
        self._notice: FaultNotice | None = None  # the failure that this rank knows of, which may be its own
        self._published: bool | None = None  # whether that is the one on the store; None until the store has answered
        self.fault: RankFailedError | None = None
        self._store_lost = False
        self._leaves = False  # knows of the failure, or leaves in order
        self._hurries_until = 0.0  # while another thread waits for what the watcher learns
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
            RankFailedError: If the store is gone.
        """
        shared = dist.distributed_c10d._get_default_store() if store is None else store
        connection, presence = connect_to_store(shared)
        number = connection.add(f"boards/{rank}", 1)
        # After a failure, in which a rank may have died, all that train again come at once.
        again = connection.check([f"{number - 1}/fault"])
        part = dist.PrefixStore(str(number), connection)
        return cls(part, rank=rank, world_size=world_size, presence=presence, all_came=all_came or again)

    def roll_call(self, own: Introduction, timeout: float, place: str = "") -> list[Introduction]:
        """Introduce this rank to the others, and wait for theirs; see :func:`hold_roll_call`.

        It shares the watcher's connection, as its requests are short and do not block.

        Args:
            own: This rank's introduction.
            timeout: Longest wait for the others, in seconds.
            place: Name of the point in the run. If left out, the number of the call, as all ranks run the same program.
        """
        store = dist.PrefixStore(f"meetings/{place or self._store.add(f'meetings/{self.rank}', 1)}", self._store)
        return hold_roll_call(store, own, world_size=self.world_size, timeout=timeout, failure=self.no_hope)

    def all_reach(self, place: str, timeout: float) -> bool:
        """Wait until all ranks have come to the same point, each once in a run.

        Args:
            place: Its name.
            timeout: Longest wait, in seconds.

        Returns:
            Whether they have.
        """
        with suppress(Exception):
            return bool(self.roll_call(Introduction(rank=self.rank, facts={}), timeout, place))
        return False

    def watch(self, watched: Watched, standing: Callable[[], Standing] | None = None) -> None:
        """Look after ``watched`` too, from now on; see :meth:`stands`."""
        with self._changed:
            self._watched.append(watched)
            self._standing = standing or self._standing

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
        return self._notice is not None or self._store_lost

    def no_hope(self) -> BaseException | None:
        """Why the other ranks will not answer any more; ``None`` while they may.

        Code that waits for them calls this again and again. A rank that has shown no sign of life for long has failed.
        """
        self.look_after_others(2 * NATIVE_S)
        if self.fault is None and self.hopeless:
            return self.diagnose(RuntimeError("c10d: the store is gone"))
        return self.fault

    def look_after_others(self, silence: float, broken: str = "") -> None:
        """Take those ranks for dead that have shown no sign of life.

        Args:
            silence: For so long, in seconds; it counts if it is more than five beats.
            broken: What has broken here, in words; then also those that never gave a sign of life.
        """
        with self._changed:
            known = self._signs.standings()
            dead = [one for one in self._signs.silent(silence) if broken or self._all_came or one in known]
            if not dead or self.hopeless:
                return
            others = f" (nor do ranks {', '.join(map(str, dead[1:]))})" if dead[1:] else ""
            told = f"by the last signs of life, four in a second, {whereabouts(known)}" if known else ""
            said = [f"it shows no sign of life{others}", broken, told]
            self._learn(RankFailedError(dead[0], "; ".join(filter(None, said))))

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
        with self._changed:
            if self._notice is None:
                self._learn(error, orderly=orderly)
            while self._published is None and self._within(deadline):
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
        broken = is_communication_error(error)
        late = isinstance(error, SchedulerTimeoutError) or (broken and is_timeout(error))
        if _WHERE in str(error) or not (late or broken):
            return error
        # Where it is only late, a rank may have vanished without breaking a connection.
        found = self.diagnose(error, timeout, silence=NATIVE_S / 4 if late else 0.0)
        if found is not error or not late:
            return found
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
        asked_at, period = time.monotonic(), self._signs.period
        deadline = asked_at + max(timeout, 8 * period, silence + 3 * period)
        broken = f"this broke here: {brief(error) or type(error).__name__}"
        with self._changed:
            while self.fault is None and self._within(deadline):
                if self._signs.looked_at > asked_at + 5 * period:  # a rank may have been busy before
                    self.look_after_others(silence, broken)
                if silence and len(self._signs.live(asked_at + period)) == self.world_size - 1:
                    break
            if self.fault is None and self._store_lost:
                self._learn(store_gone(broken))
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
        deadline, hosts_store = time.monotonic() + timeout, self.rank == 0 and not agent_keeps_store()
        with self._changed:
            self._leaves = True
            while hosts_store and self._within(deadline) and self._present():
                pass
            self._closing = True
            self._changed.notify_all()
        self._thread.join(_STOP_S)
        atexit.unregister(self.close)
        return not self._thread.is_alive()

    # ------------------------------------------------------------------ under the condition

    def _present(self) -> set[int]:
        """The other ranks that live and have not left."""
        return set(self._signs.others).difference(self._signs.left, self._signs.silent())

    def _within(self, deadline: float) -> bool:
        """Wait for the thread's next round, which comes soon; ``False`` if that is too late, or no round will come."""
        now = time.monotonic()
        if now >= deadline or self._store_lost or self._closing or not self._thread.is_alive():
            return False
        if now > self._hurries_until:
            self._changed.notify_all()
        self._hurries_until = now + _LOOK_S
        self._changed.wait(min(deadline - now, self._signs.period))
        return True

    def _learn(self, found: BaseException | FaultNotice, *, orderly: bool = False) -> None:
        """Note the first failure that this rank knows of: its own, another rank's that it has found, or a notice."""
        if not isinstance(found, FaultNotice):
            step = self._watched[0].steps_handed_over() if self._watched else None
            found = FaultNotice.of(found, by=self.rank, orderly=orderly, step=step)
        self._notice = found
        if (found.rank, found.by) != (self.rank, self.rank):
            self.fault = found.as_error()
            log.log(logging.INFO if found.orderly else logging.ERROR, "[rank %d] %s", self.rank, self.fault)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        left = False  # has told that it leaves
        while True:
            with self._changed:
                closing, leaves, hurries = self._closing, self._leaves, time.monotonic() < self._hurries_until
            if not self._store_lost and (hurries or not left):
                left = self._talk(leaves, hurries)
            self._react()
            with self._changed:
                self._changed.notify_all()
                if closing:
                    break
                self._changed.wait(self._signs.period / (_HURRIES if hurries else 1))
        self._presence.close()

    def _talk(self, leaves: bool, hurries: bool) -> bool:
        """Talk to the store; returns whether it was told that this rank leaves."""
        try:
            if self._presence.gone():
                raise ConnectionError("The host of the rendezvous store has ended.")
            for request in self._requests:
                request.look()
            self._exchange_notices()
            self._signs.give(self._stand(), left=leaves)
            if hurries or time.monotonic() >= self._signs.looked_at + self._look_every:
                self._signs.look()
        except (RuntimeError, ConnectionError):
            # At an orderly end rank 0 may leave first and take the store with it, so a lost store alone is no failure.
            self._store_lost = True
            log.debug("the rendezvous store cannot be reached", exc_info=True)
            return False
        with self._changed:
            standstill = self._signs.standstill()
            if standstill is not None and not self.hopeless:
                self._learn(RanksDivergedError(standstill))
        self.look_after_others(self.silence)
        return leaves

    def _stand(self) -> Standing:
        """Where this rank stands; after a failure, where it stood before."""
        if self.hopeless:
            return self._signs.own
        standing = Standing()
        with suppress(Exception):  # read while the training thread changes it
            standing = self._standing()
        wait = "" if standing.ended else wait_of(self._watchdog.thread)
        return replace(standing, collective=wait, awaited_step=0) if wait else standing

    def _exchange_notices(self) -> None:
        """Publish what this rank knows of, or learn what another one has published."""
        own = self._notice
        if self._published is not None or (own is None and not self._store.check(["fault"])):
            return
        answer = self._store.get("fault") if own is None else self._store.compare_set("fault", "", own.encode())
        with self._changed:
            published = FaultNotice.decode(answer)
            self._published = published == own
            if not self._published and self.fault is None:
                self._learn(published)

    def _react(self) -> None:
        """Publish what has stopped this rank's scheduler, or stop it because of another rank."""
        with self._changed:
            for error in [] if self.hopeless else [one.own_failure() for one in self._watched]:
                if error is not None and not is_communication_error(error):  # the others are being diagnosed
                    self._learn(error)
                    self._watchdog.arm(f"Rank {self.rank} failed: {error}")
                    break
            notice, fault, leaves, watched = self._notice, self.fault, self._leaves, self._watched[::-1]
        if notice is not None and fault is not None and not notice.orderly:
            self._watchdog.arm(str(fault))
            if notice.diverged and not leaves and wait_of(self._watchdog.thread):
                # No other rank will come, and gloo has no other way to call a collective off.
                with suppress(Exception):
                    break_connections(dist.distributed_c10d._get_default_group())
            for one in watched:  # the first one comes last, as it may wait a moment for messages
                try:
                    one.rank_failed(fault, notice.step)
                except Exception:
                    log.exception("The scheduler could not be stopped.")
                self.unwatch(one)
            self._leaves = True
        self._watchdog.check()


def say_later(text: str) -> threading.Timer:
    """Warn of a wait in torch after half a minute, unless the returned timer is cancelled before."""
    timer = threading.Timer(_LATER_S, log.warning, [f"bytescheduler: {text}"])
    timer.name, timer.daemon = "bytescheduler-late-word", True
    timer.start()
    return timer


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
        board.silence = NATIVE_S  # torch connects, without the GIL
        if rank == 0:
            met = f"all {world_size} ranks have met at {host}:{port}, and are still connecting."
            opened.callback(say_later(f"{met} {INTERFACE}").cancel)
        try:
            yield board
            if board.fault is not None:
                raise board.fault
        except Exception as error:
            cause: BaseException = explain_connection(error, rank, host, port)
            # A rank that has died cannot be connected to either.
            found = board.explain(error) if cause is error else board.diagnose(error, silence=NATIVE_S / 4)
            cause = cause if found is error else found
            board.publish(cause)
            if cause is error:
                raise
            raise cause from error
