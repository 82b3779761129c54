"""Find out, while this rank waits, whether the ranks wait for each other forever; end a process that is stuck.

Ranks that train together run one program: the training thread of each hands over gradients and joins collectives of the
default group in the same order. So the history of each rank is a prefix of the same sequence. Two ranks wait forever if
each of them waits for something that the other does only after its own wait. :func:`find_standstill` looks for that; a
long wait alone proves nothing.

:class:`VitalSigns` is for the fault board's thread. Four times a second a rank shows that it lives and where it stands.
It reads what the others show once a second; the more ranks there are, the more seldom.

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

import faulthandler
import logging
import math
import os
import re
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

from lightning_bytescheduler.failures.messages import RANKS_SHOWN, StoreMessage

log = logging.getLogger(__name__)

_PATIENCE_S = 5.0
_LAST_WORDS_S = 1.0


class Watchdog:
    """Watches over the thread that made it.

    Args:
        patience: Seconds the thread has to come back after :meth:`arm`.
        end: Ends the process with an exit code, at once.

    Attributes:
        thread: Identifier of that thread.
    """

    def __init__(self, patience: float = _PATIENCE_S, end: Callable[[int], object] = os._exit) -> None:
        self._patience = patience  # endless while the process is not to be ended
        self._end = end
        self.thread = threading.get_ident()
        self._why = ""
        self._since = 0.0

    def arm(self, why: str) -> None:
        """Note that training is over, because of ``why``; the thread should come back from where it is."""
        if not self._why:
            self._why, self._since = why, time.monotonic()

    def disarm(self) -> None:
        """Note that the thread is back; its process will not be ended."""
        self._patience = math.inf

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Do not end the process within this context; the patience starts anew afterwards. For the watched thread."""
        patience, self._patience = self._patience, math.inf
        try:
            yield
        finally:
            self._since, self._patience = time.monotonic(), patience

    def check(self) -> None:
        """End the process if the time has come. Another thread calls it regularly."""
        patience = self._patience
        if not self._why or time.monotonic() < self._since + patience:
            return
        self.disarm()
        # Ends the process in any case: the stuck thread may hold the lock of a stream that is not read, and asking for
        # frames may collect garbage, whose destructors may wait forever. See CPython issue 106883.
        faulthandler.dump_traceback_later(_LAST_WORDS_S, exit=True, file=2)
        late = f"The training thread did not come back within {patience:g} s, so its process is ended. It was at:"
        stack = "".join(traceback.format_stack(sys._current_frames().get(self.thread)))
        log.critical("%s. %s\n%s", self._why.rstrip("."), late, stack)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # closed, or replaced by an object that cannot
                stream.flush()
        self._end(1)


_WAY_OUT = (
    "All ranks have to take the same steps and call the same collectives in the same order. If they have different "
    "numbers of batches, give each as many: leave Trainer(use_distributed_sampler=True), use a sampler that pads or "
    "drops, such as DistributedSampler(dataset, drop_last=True), or SliceDataModule for data without a length, or "
    "bound all with Trainer(limit_train_batches=N). If one stops by itself, as by trainer.should_stop or max_time, "
    "stop all at the same step, as trainer.strategy.reduce_boolean_decision(stop, all=False) decides. Otherwise look "
    "for what one rank alone does or skips, such as self.log(sync_dist=True), self.all_gather or a barrier under a "
    "condition. Layers that one rank uses and another one does not need find_unused_parameters=True."
)
BATCH = "a batch"
"""What a rank waits in until the others have begun its latest batch, too, and not on the default group."""
_UNUSED_NUMBER = 2**30  # no message uses it
_NUMBER = re.compile(r"\d+")

PERIOD_S = 0.25
"""Seconds between two signs of life."""
_CERTAIN_S = 3.0  # how long ranks must have stayed where they are
_BEATS_MISSED = 5
_STALL_S = 5.0  # after so long a time without a look, silence since the last look proves nothing


class Standing(StoreMessage, frozen=True, kw_only=True):
    """One rank's place in a fit.

    Attributes:
        place: Where it is, in words, such as the batch, the epoch and the hook; empty in setup.
        steps: Backward passes whose gradients it has handed over completely.
        launched: Collectives that it has begun on the default group.
        awaited_step: The step whose gradients its training thread waits for; 0 for none.
        collective: The collective that its training thread is in; on the default group, the one with the number
            ``launched``. Or :data:`BATCH`.
        ended: Whether it has left the fit.
        batches: Batches that it has begun in this fit.
        expected: How many batches its epochs have; 0 if unknown.
    """

    place: str = ""
    steps: int = 0
    launched: int = 0
    awaited_step: int = 0
    collective: str = ""
    ended: bool = False
    batches: int = 0
    expected: int = 0

    @property
    def waits(self) -> bool:
        """Whether its training thread waits for other ranks."""
        return bool(self.awaited_step or self.collective)

    def waits_for(self, other: Standing) -> bool:
        """Whether the other rank has not come to what this one waits for."""
        if self.awaited_step:
            return other.steps < self.awaited_step
        if self.collective == BATCH:
            return other.batches < self.batches
        if not self.collective or other.ended:  # after the fit, that one may call it, too
            return False
        meets = other.launched == self.launched and other.collective not in ("", BATCH)
        # Lightning's reduce is two collectives of one name. A rank may have validated on more batches.
        places = {_NUMBER.sub("", one.place) for one in (self, other)}
        apart = other.collective != self.collective or len(places) > 1
        return other.launched < self.launched or (meets and apart)

    def describe(self) -> str:
        """The place in words."""
        batches = f"{self.batches} batches" + (f", {self.expected} in each epoch" if self.expected else "")
        if self.ended:
            return f"has ended the fit after {batches}"
        waits = ""
        if self.awaited_step:
            waits = f", waits for the gradients of step {self.awaited_step}"
        elif self.collective == BATCH:
            waits = ", waits for the others to begin this batch"
        elif self.collective:
            waits = f", waits in {self.collective}, collective {self.launched} of the default group"
        begun = f" (has begun {batches}, and handed over {self.steps} gradients)" if self.batches else ""
        return f"is {self.place or 'in setup'}{waits}{begun}"


def find_standstill(standings: Mapping[int, Standing]) -> str | None:
    """Tell whether the ranks wait for each other for good.

    Args:
        standings: Those of all ranks, each known to have stayed the same for a while.

    Returns:
        Where each rank stands, what led to it, and the ways out. ``None`` if the ranks may go on: one of them is not
            waiting, or will get what it waits for.
    """
    pairs = [(one, other) for one, other in permutations(standings.values(), 2) if not one.ended]
    # A rank that computes may still come; a rank that has ended never will.
    all_wait = all(standing.ended or standing.waits for standing in standings.values())
    for one, other in pairs:
        if one.waits_for(other) and (other.ended or (all_wait and other.waits_for(one))):
            return f"The ranks wait for each other in different places: {whereabouts(standings)}. {_WAY_OUT}"
    return None


def whereabouts(standings: Mapping[int, Standing]) -> str:
    """Where ranks stand, in words."""
    shown = sorted(standings.items())[:RANKS_SHOWN]
    more = f"; and {len(standings) - RANKS_SHOWN} more" if len(standings) > RANKS_SHOWN else ""
    return "; ".join(f"rank {rank} {standing.describe()}" for rank, standing in shown) + more


_waits: dict[int, str] = {}  # by thread identifier


@contextmanager
def waiting(collective: str) -> Iterator[None]:
    """Note that this thread waits for the other ranks within this context; see :class:`Standing`."""
    thread = threading.get_ident()
    before = wait_of(thread)
    _waits[thread] = collective
    try:
        yield
    finally:
        _waits[thread] = before


def wait_of(thread: int) -> str:
    """What a thread has said that it waits in; empty if it does not wait.

    Args:
        thread: Its identifier, as of :func:`threading.get_ident`.
    """
    return _waits.get(thread, "")


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
    """A sign of life.

    Attributes:
        beat: How often it was given; 0 for never.
        standing: Where its giver stands.
        left: Whether it is the last one: its giver has ended in order, or for the reason that it gives as its place.
    """

    beat: int = 0
    standing: Standing = Standing()
    left: bool = False


class _Seen(NamedTuple):
    sign: Sign
    alive_at: float  # when its last beat was first seen
    still_since: float  # since when it has stood where it stands

    def then(self, sign: Sign, now: float) -> _Seen:
        """What is known once ``sign`` is seen."""
        alive_at = self.alive_at if sign.beat == self.sign.beat else now
        return _Seen(sign, alive_at, self.still_since if sign.standing == self.sign.standing else now)


class VitalSigns:
    """What ranks, or parameter servers, write on a store four times a second; and one process's view of the others.

    One thread at a time calls methods that use the store.

    Args:
        store: Where they write.
        rank: This process.
        others: Those that are looked at.
        period: Time between two beats, in seconds.

    Attributes:
        others: As given.
        period: As given.
        looked_at: When it last looked.
    """

    def __init__(self, store: dist.Store, rank: int, others: Sequence[int] = (), period: float = PERIOD_S) -> None:
        self._store = store
        self._rank = rank
        self.others = others
        self.period = period
        self._told = _Seen(Sign(), 0.0, 0.0)
        self._came: list[int] = []  # the others that have given a sign
        self._seen: dict[int, _Seen] = {}
        self.looked_at = 0.0

    def give(self, standing: Standing, *, left: bool = False) -> None:
        """Show that this process is alive, and where it stands."""
        sign = Sign(beat=self._told.sign.beat + 1, standing=standing, left=left)
        self._told = self._told.then(sign, time.monotonic())
        self._store.set(f"signs/{self._rank}", sign.encode())

    def look(self, others: Sequence[int] | None = None) -> None:
        """Look at the others now; at ``others`` from now on, if given."""
        now, self.others = time.monotonic(), self.others if others is None else others
        if now > self.looked_at + max(_STALL_S, len(self.others) / 4):
            self._seen = {}  # all may have been stopped together, and this one be the first to go on
        keys = {rank: f"signs/{rank}" for rank in self.others}
        self._came += [rank for rank in self.others if rank not in self._came and self._store.check([keys[rank]])]
        signs = dict.fromkeys(self.others, Sign())
        texts = self._store.multi_get([keys[rank] for rank in self._came])
        signs.update(zip(self._came, map(Sign.decode, texts), strict=True))
        self._seen = {rank: self._seen.get(rank, _Seen(sign, now, now)).then(sign, now) for rank, sign in signs.items()}
        self.looked_at = now

    @property
    def own(self) -> Standing:
        """Where this process last said that it stands."""
        return self._told.sign.standing

    @property
    def left(self) -> dict[int, str]:
        """Those that have left, and why; a reason is empty where that was in order."""
        return {rank: seen.sign.standing.place for rank, seen in self._seen.items() if seen.sign.left}

    def silent(self, at_least: float = 0.0) -> list[int]:
        """Those that missed five beats since they were looked at, and showed none for ``at_least`` seconds.

        Those that have left do not count. The one that was silent first is the first.
        """
        patience = max(_BEATS_MISSED * self.period, at_least)
        seen_at = {rank: seen.alive_at for rank, seen in self._seen.items() if not seen.sign.left}
        return sorted((rank for rank in seen_at if self.looked_at - seen_at[rank] > patience), key=seen_at.__getitem__)

    def live(self, since: float) -> list[int]:
        """Those that have shown a sign of life since then, or have left."""
        return [rank for rank, one in self._seen.items() if one.sign.left or (one.sign.beat and one.alive_at > since)]

    def standings(self) -> dict[int, Standing]:
        """Where all ranks last said that they stand; empty if no other rank's place is known."""
        found = {rank: seen.sign.standing for rank, seen in self._seen.items() if seen.sign.beat}
        return {**found, self._rank: self.own} if found else {}

    def standstill(self) -> str | None:
        """How the ranks wait for each other forever, if this one waits, too, and all have for a while."""
        seen = [self._told, *self._seen.values()]
        same_since = max(one.still_since for one in seen)
        if not self.own.waits or self.looked_at < same_since + _CERTAIN_S or self.silent():
            return None
        return find_standstill(self.standings()) if all(one.sign.beat for one in seen) else None
