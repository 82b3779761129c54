"""Find out, while this rank waits, whether the ranks wait for each other forever; end a process that is stuck.

Ranks that train together run one program: the training thread of each hands over gradients and joins collectives of the
default group in the same order. So the history of each rank is a prefix of the same sequence. Two ranks wait forever if
each of them waits for something that the other does only after its own wait. :func:`find_standstill` looks for that; a
long wait alone proves nothing.

:class:`VitalSigns` is for the fault board's thread. Four times a second a rank shows that it lives and where it stands.
It looks at the others only when it has been waiting for a while itself, or when a thread asks why a collective failed.
So a training that goes on costs the store nothing more.

Waits announce themselves (:func:`waiting`): those of this package, and the strategies' collectives that Lightning
calls. A collective that a project calls itself, as with ``torch.distributed``, does not count as waiting. Then nothing
is concluded, and the wait ends with its timeout, whose error says where the ranks are.

:class:`Watchdog` ends a process whose training thread does not notice that training is over. After a rank has failed, a
survivor's training thread comes back by itself from any wait for this package, and from a wait for torch soon after the
failing process has ended. It does not come back from an endless loop, or from a collective whose other side is alive
but will not come. NCCL's watchdog and Lightning's launcher end such a process too; this one first says why, and where
the thread was.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import permutations
from typing import NamedTuple

import torch
import torch.distributed as dist
from msgspec.structs import replace

from lightning_bytescheduler.failures.messages import RANKS_SHOWN, StoreMessage, names_of, values_of

log = logging.getLogger(__name__)

_PATIENCE_S = 5.0
_LAST_WORDS_S = 1.0


class Watchdog:
    """Watches over the thread that made it.

    Args:
        patience: Seconds the thread has to come back after :meth:`arm`.
        end: Ends the process with an exit code, at once.
    """

    def __init__(self, patience: float = _PATIENCE_S, end: Callable[[int], object] = os._exit) -> None:
        self._patience = patience
        self._end = end
        self._thread = threading.get_ident()
        self._why: str | None = None
        self._since = 0.0
        self._suspended = False
        self._disarmed = False

    def arm(self, why: str) -> None:
        """Note that training is over, because of ``why``; the thread should come back from where it is."""
        if self._why is None:
            self._since = time.monotonic()
            self._why = why

    def disarm(self) -> None:
        """Note that the thread is back; its process will not be ended."""
        self._disarmed = True

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Do not end the process within this context; the patience starts anew afterwards. For the watched thread."""
        self._suspended = True
        try:
            yield
        finally:
            self._since = time.monotonic()
            self._suspended = False

    def check(self) -> None:
        """End the process if the time has come. Another thread calls it regularly."""
        if self._why is None or self._disarmed or self._suspended or time.monotonic() < self._since + self._patience:
            return
        self._disarmed = True
        # On a thread of its own: the stuck thread may hold the lock of a stream that is not read, and asking for frames
        # may collect garbage, whose destructors may wait forever. See CPython issue 106883.
        reporter = threading.Thread(target=self._report, name="bytescheduler-last-words", daemon=True)
        reporter.start()
        reporter.join(_LAST_WORDS_S)
        self._end(1)

    def _report(self) -> None:
        frame = sys._current_frames().get(self._thread)
        log.critical(
            "%s. The training thread did not come back within %g s, so its process is ended. It was at:\n%s",
            (self._why or "").rstrip("."), self._patience, "".join(traceback.format_stack(frame)) if frame else "",
        )  # fmt: skip
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # closed, or replaced by an object that cannot
                stream.flush()


_EVEN = (
    "Give each as many: leave "
    "Trainer(use_distributed_sampler=True), use a sampler that pads or drops, such as DistributedSampler(dataset, "
    "drop_last=True), or SliceDataModule for data without a length, or bound all with Trainer(limit_train_batches=N)."
)
_STOPPED = (
    " A rank that leaves the fit within an epoch was stopped by itself, as by trainer.should_stop or max_time: let all "
    "stop at the same step, as trainer.strategy.reduce_boolean_decision(stop, all=False) decides."
)
_ALIKE = (
    "All ranks have to take the same steps and call the same collectives in the same order: look for what one rank "
    "alone does or skips, such as self.log(sync_dist=True), self.all_gather or a barrier under a condition. Layers "
    "that one rank uses and another one does not need find_unused_parameters=True."
)
_UNUSED_NUMBER = 2**30  # no message uses it

_CURIOUS_S = 1.0  # of waiting, before it looks at the others
_CERTAIN_S = 3.0  # how long ranks must have stayed where they are
_BEATS_MISSED = 5
_FRESH_BEATS = 8
_LOOK_S = 0.5
_STALL_S = 5.0  # after so long a time without a look, silence since the last look proves nothing


class Standing(StoreMessage, frozen=True, kw_only=True):
    """One rank's place in a fit.

    Attributes:
        doing: What its schedulers are doing, in words.
        place: The batch, the epoch and the hook, in words; empty if they are not followed.
        steps: Backward passes whose gradients it has handed over completely.
        launched: Collectives that it has begun on the default group.
        awaited_step: The step whose gradients its training thread waits for; 0 for none.
        collective: The collective that its training thread is in; on the default group, the one with the number
            ``launched``.
        begins_batch: Whether that is the collective with which Lightning begins each batch.
        outside: Whether it waits for that outside the default group.
        ended: Whether it has left the fit.
        batches: Batches that it has begun in this fit.
        launched_at_batch: ``launched`` as of the beginning of the last of these batches, where Lightning begins each
            with a collective; else 0.
        epoch: The epoch it is in, or was in last.
        epoch_batches: Batches that it has begun in that epoch.
        is_last: Whether the last of these is the epoch's last.
        through: Whether the last of these has ended, too.
        last_epoch: Batches of the epoch before; 0 if there was none.
        expected: How many batches its epochs have; 0 if unknown.
    """

    doing: str = ""
    place: str = ""
    steps: int = 0
    launched: int = 0
    awaited_step: int = 0
    collective: str = ""
    begins_batch: bool = False
    outside: bool = False
    ended: bool = False
    batches: int = 0
    launched_at_batch: int = 0
    epoch: int = 0
    epoch_batches: int = 0
    is_last: bool = False
    through: bool = False
    last_epoch: int = 0
    expected: int = 0

    @property
    def waits(self) -> bool:
        """Whether its training thread waits for other ranks."""
        return bool(self.awaited_step or self.collective)

    def is_as(self, other: Standing) -> bool:
        """Whether it is the same place. The schedulers' words may go on changing while a rank waits."""
        return replace(self, doing=other.doing) == other

    @property
    def has_or_begins(self) -> int:
        """Batches that it has begun, with the one that it is about to begin."""
        return self.batches + self.begins_batch

    def describe(self) -> str:
        """The place in words."""
        expected = f" of {self.expected}" if self.expected else ""
        if self.ended:
            return f"has ended the fit after {self.batches} batches, {self.epoch_batches} of epoch {self.epoch}"
        waits = ""
        if self.awaited_step:
            waits = f", waits for the gradients of step {self.awaited_step}"
        elif self.begins_batch:
            waits = (
                f", waits for the others to begin its batch {self.epoch_batches + 1}{expected} of epoch {self.epoch}"
            )
        elif self.collective:
            waits = f", waits in {self.collective}, collective {self.launched} of the default group"
        batches = (
            f"has ended epoch {self.epoch} after {self.epoch_batches} batches"
            if self.through
            else f"has begun {self.epoch_batches}{expected} batches of epoch {self.epoch}"
        )
        return f"is {self.place}{waits} ({batches}, {self.batches} in all, and handed over {self.steps} gradients)"


def explain_death(standings: Mapping[int, Standing]) -> str:
    """Say where ranks stood before one of them died, and name uneven data if it may be the reason; else nothing.

    Gloo ends the process when two different collectives meet, so neither rank can report it.

    Args:
        standings: What each rank told last.
    """
    standings = {rank: standing for rank, standing in standings.items() if standing.place}
    if not standings:
        return ""
    where = f"By the last signs of life, four in a second, {_where(standings)}."
    return f"{where} {_EVEN}" if _uneven(standings) else where


def find_standstill(standings: Mapping[int, Standing]) -> str | None:
    """Tell whether the ranks wait for each other for good.

    Args:
        standings: Those of all ranks, each known to have stayed the same for a while.

    Returns:
        Where each rank stands, what led to it, and the ways out. ``None`` if the ranks may go on: one of them is not
            waiting, or will get what it waits for.
    """
    pairs = list(permutations(standings.values(), 2))
    # A rank that computes may still come; a rank that has ended never will.
    all_wait = all(standing.ended or standing.waits for standing in standings.values())
    if any(_waits_for_the_gone(*pair) or (all_wait and _crossed(*pair)) for pair in pairs):
        return _explain(standings)
    return None


def _waits_for_the_gone(one: Standing, other: Standing) -> bool:
    """Whether the other has left the fit without the gradients, or the batch, that this one waits for."""
    if not other.ended or one.ended:
        return False
    lacks_gradients = other.steps < one.awaited_step
    return lacks_gradients or (one.begins_batch and one.has_or_begins > other.batches)


def _crossed(one: Standing, other: Standing) -> bool:
    """Whether each waits for something that the other does only after its own wait."""
    if one.ended or other.ended:
        return False
    if one.awaited_step > other.steps and other.collective:
        if other.outside:
            return other.has_or_begins > one.batches
        if other.launched > one.launched:
            return True
        # The other is in the collective with which this rank began a batch that the other has not come to.
        began = one.batches > other.batches and one.launched_at_batch == other.launched
        return began and not other.begins_batch
    if one.outside or other.outside:
        # This rank waits until the other begins a batch, and the other is in a collective that this rank has not come
        # to.
        waits = one.outside and one.has_or_begins > other.batches
        return waits and not other.outside and bool(other.collective) and other.launched > one.launched
    if one.collective and other.collective and one.launched == other.launched:
        return one.collective != other.collective or one.begins_batch != other.begins_batch
    return False


def _explain(standings: Mapping[int, Standing]) -> str:
    if _uneven(standings):
        stopped = any(one.ended and 0 < one.epoch_batches < one.expected for one in standings.values())
        return (
            f"The ranks have different numbers of batches, and wait for each other: {_where(standings)}. {_EVEN}"
            f"{_STOPPED if stopped else ''}"
        )
    return f"The ranks wait for each other in different places: {_where(standings)}. {_ALIKE}"


def _where(standings: Mapping[int, Standing]) -> str:
    shown = sorted(standings.items())[:RANKS_SHOWN]
    more = f"; and {len(standings) - RANKS_SHOWN} more" if len(standings) > RANKS_SHOWN else ""
    return "; ".join(f"rank {rank} {standing.describe()}" for rank, standing in shown) + more


def _uneven(standings: Mapping[int, Standing]) -> bool:
    return any(_has_fewer(one, other) for one, other in permutations(standings.values(), 2))


def _has_fewer(one: Standing, other: Standing) -> bool:
    """Whether a rank is seen to have fewer batches than the other one."""
    if 0 < one.expected < other.expected or 0 < one.last_epoch < other.last_epoch:
        return True
    if one.ended:
        return one.batches < other.has_or_begins
    same = one.is_last and not one.outside and one.epoch == other.epoch  # outside, it has not begun the last one yet
    return same and one.epoch_batches < other.epoch_batches + other.begins_batch


class Wait(NamedTuple):
    """What a thread waits for, in the words of :class:`Standing`.

    Attributes:
        collective: Its name.
        begins_batch: Whether it is called before each batch.
        outside: Whether it belongs to another group, and the batch that it begins has been counted already. Where
            buffers are sent late, a validation may begin there too, and counts as the batch before it.
    """

    collective: str
    begins_batch: bool = False
    outside: bool = False


_waits: dict[int, Wait] = {}  # by thread identifier


@contextmanager
def waiting(collective: str, *, begins_batch: bool = False, outside: bool = False) -> Iterator[None]:
    """Note that this thread waits for the other ranks within this context; see :class:`Wait`."""
    thread = threading.get_ident()
    before = _waits.get(thread)
    _waits[thread] = Wait(collective, begins_batch, outside)
    try:
        yield
    finally:
        if before is None:
            del _waits[thread]
        else:
            _waits[thread] = before


def wait_of(thread: int) -> Wait | None:
    """What a thread has said that it waits for.

    Args:
        thread: Its identifier, as of :func:`threading.get_ident`.
    """
    return _waits.get(thread)


def break_connections(group: dist.ProcessGroup) -> None:
    """Wake all threads that wait for a message on ``group``, here and on other ranks. The group is useless afterwards.

    Gloo cannot call off a message, but it closes all connections of a group when a message did not come in time. It
    does not if the message's own connection has already ended, as that to a dead rank. So a message of each rank is
    tried.
    """
    for distance in range(1, group.size()):
        peer = (group.rank() + distance) % group.size()
        with suppress(RuntimeError):
            group.recv([torch.empty(1, dtype=torch.float32)], peer, _UNUSED_NUMBER).wait(timedelta(milliseconds=1))


class Sign(StoreMessage, frozen=True, kw_only=True):
    """A rank's sign of life.

    Attributes:
        beat: How often it has given one; 0 for never.
        standing: Where it stands.
        left: Whether it is the last one, as this rank needs the store for nothing more.
    """

    beat: int = 0
    standing: Standing = Standing()
    left: bool = False


class _Seen(NamedTuple):
    sign: Sign
    alive_at: float  # when its last beat was first seen
    still_since: float  # since when it has stood where it stands


class VitalSigns:
    """One rank's view of all ranks: whether they live, where they say they stand, and whether they wait forever.

    Only the board's thread may call methods that use the store.

    Args:
        store: Where the ranks write these.
        rank: This rank.
        others: All other ranks.
        period: Time between two beats, in seconds.

    Attributes:
        left: The other ranks that were seen to leave.
    """

    def __init__(self, store: dist.Store, rank: int, others: Sequence[int], period: float) -> None:
        self._store = store
        self._rank = rank
        self._others = others
        self._period = period
        # Spares the store's host when there are many ranks.
        self._every = min(max(_LOOK_S, len(others) / 64), _STALL_S / 2)
        self._told = _Seen(Sign(), 0.0, 0.0)
        self._came: list[int] = []  # the others that have given a sign
        self._looked_at = 0.0
        self._seen: dict[int, _Seen] = {}
        self.left: set[int] = set()

    def beat(
        self, standing: Standing, *, left: bool = False, wanted: bool = False, examine: bool = False
    ) -> str | None:
        """Show that this rank is alive and where it stands. Look at the others if it has waited for a while.

        Args:
            standing: Where this rank stands.
            left: Whether it leaves.
            wanted: Look at the others now and then, even if it does not wait.
            examine: Look at the others at once.

        Returns:
            How the ranks wait for each other forever, if they do; see :func:`find_standstill`.
        """
        now = time.monotonic()
        self._told = _next(self._told, Sign(beat=self._told.sign.beat + 1, standing=standing, left=left), now)
        self._store.set(f"signs/{self._rank}", self._told.sign.encode())
        waits = standing.waits and now >= self._told.still_since + _CURIOUS_S
        if examine or ((waits or wanted) and now >= self._looked_at + self._every):
            self._examine(now)
            return self._standstill(now) if waits else None
        if not waits and not wanted:
            self._seen = {}
        return None

    def silent(self, at_least: float = 0.0) -> list[int]:
        """Ranks that missed five beats since they were looked at, and showed none for ``at_least`` seconds.

        Ranks that have left in order do not count.
        """
        patience = max(_BEATS_MISSED * self._period, at_least)
        return [
            rank
            for rank, seen in self._seen.items()
            if not seen.sign.left and self._looked_at - seen.alive_at > patience
        ]

    def all_live(self, since: float) -> bool:
        """Whether all other ranks have shown a sign of life since then, or have left in order."""
        seen = [self._seen.get(rank) for rank in self._others]
        return all(one and (one.sign.left or (one.sign.beat and one.alive_at > since)) for one in seen)

    def standings(self) -> dict[int, Standing]:
        """Where all ranks last said that they stand; empty if no other rank's place is known."""
        found = {rank: seen.sign.standing for rank, seen in self._seen.items() if seen.sign.beat}
        return {**found, self._rank: self._told.sign.standing} if found else {}

    def whereabouts(self) -> str:
        """What the ranks are doing, with ranks that do the same grouped; empty if nothing is known."""
        by_place: dict[str, list[int]] = {}
        for rank, standing in sorted(self.standings().items()):
            by_place.setdefault(", ".join(filter(None, (standing.doing, standing.place))), []).append(rank)
        return "; ".join(f"{names_of(ranks)}: {place}" for place, ranks in by_place.items())

    def _examine(self, now: float) -> None:
        if now > self._looked_at + _STALL_S:
            self._seen = {}  # all may have been stopped together, and this rank be the first to go on
        keys = {rank: f"signs/{rank}" for rank in self._others}
        self._came += [rank for rank in self._others if rank not in self._came and self._store.check([keys[rank]])]
        signs = dict.fromkeys(self._others, Sign())
        texts = values_of(self._store, [keys[rank] for rank in self._came])
        signs.update(zip(self._came, map(Sign.decode, texts), strict=True))
        self._seen = {rank: _next(self._seen.get(rank), sign, now) for rank, sign in signs.items()}
        self.left = {rank for rank, sign in signs.items() if sign.left}
        self._looked_at = now

    def _standstill(self, now: float) -> str | None:
        if not all(seen.sign.beat for seen in self._seen.values()):
            return None  # a rank is not there yet
        fresh = _FRESH_BEATS * self._period
        if any(now > seen.alive_at + fresh for seen in self._seen.values() if not seen.sign.standing.ended):
            return None  # what was told may be out of date
        same_since = max(seen.still_since for seen in (self._told, *self._seen.values()))
        return find_standstill(self.standings()) if now >= same_since + _CERTAIN_S else None


def _next(last: _Seen | None, sign: Sign, now: float) -> _Seen:
    """What is known of a rank that gives ``sign``."""
    if last is None:
        return _Seen(sign, now, now)
    same = sign.standing.is_as(last.sign.standing)
    return _Seen(sign, last.alive_at if sign.beat == last.sign.beat else now, last.still_since if same else now)
