"""Finds out, while this rank waits, whether the ranks wait for each other for good.

Ranks that train together run one program: on each, the training thread hands over gradients and joins collectives of
the default group in the same order. So each rank's history is a beginning of the same sequence. A rank that waits for
something which another one can reach only after it has got what *it* waits for, waits for good. That is what
:func:`find_standstill` looks for; time is no proof, however long it takes.

:class:`VitalSigns` is for the fault board's thread. A rank shows four times a second that it lives and where it stands,
but looks at the others only when it has been waiting for a while itself, or somebody wants to know why a collective
failed, so that a training which goes on costs the store nothing more.

A wait of this package says so itself (:func:`waiting_for_a_batch`). A collective of the default group may be anybody's,
of Lightning, torchmetrics or the user, so one look at where the training thread stands tells whether it is inside of
one (:func:`wait_of`), which costs that thread nothing. Limits: what is not recognised, such as a wait for a handle of
an asynchronous call, counts as not waiting; with NCCL the host hardly ever waits inside a collective, so that little is
seen there.

Ends a process whose training thread does not notice that training is over.

After a rank has failed, a survivor's training thread comes back by itself wherever it waits for this package, and soon
after the failing process has ended wherever it waits for torch. Nothing brings it back from a loop that never ends, nor
from a collective whose other side is alive but will not come. NCCL's watchdog and Lightning's launcher end such a
process too; this one says first why, and where the thread was.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import permutations
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist
from msgspec.structs import replace

from lightning_bytescheduler.failures.messages import StoreMessage, names_of

log = logging.getLogger(__name__)

_PATIENCE_S = 5.0
_LAST_WORDS_S = 1.0

_collecting = threading.Lock()  # held while collection of garbage is put off


def frame_of(thread: int) -> FrameType | None:
    """Where a thread is, or ``None`` if there is none such.

    Until Python 3.12 the interpreter holds a lock of its own while it answers, and may collect garbage meanwhile. What
    a destructor does then, such as joining a thread that wants that lock, never ends: all threads stood still for good.
    So there is no collection meanwhile. Source: CPython's issue 106883.

    Args:
        thread: Its identifier, as of :func:`threading.get_ident`.
    """
    if sys.version_info >= (3, 12):
        return sys._current_frames().get(thread)
    with _collecting:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread)
        finally:
            if enabled:
                gc.enable()


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
        """Training is over, because of ``why``; the thread should come back from wherever it is."""
        if self._why is None:
            self._since = time.monotonic()
            self._why = why

    def disarm(self) -> None:
        """The thread is back, and will not be ended any more."""
        self._disarmed = True

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Do not end the process meanwhile; the patience counts anew afterwards. For the thread itself."""
        self._suspended = True
        try:
            yield
        finally:
            self._since = time.monotonic()
            self._suspended = False

    def check(self) -> None:
        """End the process if the time has come; called every now and then by another thread."""
        if self._why is None or self._disarmed or self._suspended or time.monotonic() < self._since + self._patience:
            return
        self._disarmed = True
        # On a thread of its own: the stuck thread may hold the lock of a stream whose other end does not read.
        reporter = threading.Thread(target=self._report, name="bytescheduler-last-words", daemon=True)
        reporter.start()
        reporter.join(_LAST_WORDS_S)
        self._end(1)

    def _report(self) -> None:
        frame = frame_of(self._thread)
        place = "" if frame is None else "".join(traceback.format_stack(frame))
        why = (self._why or "").rstrip(".")
        log.critical(
            "%s. The training thread did not come back within %g s, so its process is ended. It was at:\n%s",
            why, self._patience, place,
        )  # fmt: skip
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # closed, or replaced by something that cannot
                stream.flush()


_RANKS_SHOWN = 16
_EVEN = (
    "ByteSchedulerStrategy(weighting='samples') trains on all of them. Or give each as many: leave "
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
_MUTUAL = ("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "barrier", "reduce_scatter")
"""Collectives that no rank gets through before all have come."""

_COLLECTIVES = {
    ("torch.distributed.distributed_c10d", name): name
    for name in (
        *("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "barrier", "broadcast"),
        "reduce_scatter",
    )
} | {("torch.nn.parallel.distributed", "_distributed_broadcast_coalesced"): "broadcast"}
_UNUSED_NUMBER = 2**30  # no message has it

_CURIOUS_S = 1.0  # of waiting, before the others are looked at
_CERTAIN_S = 3.0
_UNCERTAIN_S = 15.0
_BEATS_MISSED = 5
_FRESH_BEATS = 8
_LOOK_S = 0.5


class Standing(StoreMessage, frozen=True, kw_only=True):
    """One rank's place in a fit.

    Attributes:
        doing: What its schedulers are at, in words.
        place: In words: the batch, the epoch and the hook; empty where nobody follows it.
        steps: Backward passes whose gradients it has handed over completely.
        launched: Collectives it has begun on the default group.
        awaited_step: The step whose gradients its training thread waits for; 0 for none.
        collective: What its training thread is inside of: on the default group, that of number ``launched``.
        begins_batch: Whether that is Lightning's own at the start of each batch.
        outside: Whether it waits for that outside of the default group.
        ended: Whether it has left the fit.
        batches: That it has begun in this fit.
        launched_at_batch: What ``launched`` was when the last of them had begun, where Lightning begins each with a
            collective; else 0.
        epoch: The epoch it is in, or was in last.
        epoch_batches: Batches that it has begun in that epoch.
        is_last: Whether none comes after those.
        through: Whether the last of them has ended, too.
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
        """Whether it is the same place; words of its schedulers may go on changing while a rank waits."""
        return replace(self, doing=other.doing) == other

    @property
    def has_or_begins(self) -> int:
        """Batches that it has begun, the one that it is about to begin among them."""
        return self.batches + self.begins_batch

    def describe(self) -> str:
        """In words."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """Ranks that wait for each other for good.

    Attributes:
        certain: Whether the numbers alone prove it. Otherwise a network that lets nothing through for a while would
            look the same, and it has to be seen for longer.
        text: Where each rank stands, what led to it, and the ways out.
    """

    certain: bool
    text: str


def explain_death(standings: Mapping[int, Standing]) -> str:
    """Say where ranks stood before one of them died, and that uneven data may be the reason, if it may; else nothing.

    Two different collectives that meet make gloo end the process; nobody gets to say anything.

    Args:
        standings: What each told last.
    """
    standings = {rank: standing for rank, standing in standings.items() if standing.place}
    if not standings:
        return ""
    where = f"Last, {_where(standings)}."
    return f"{where} {_EVEN}" if _uneven(standings) else where


def find_standstill(standings: Mapping[int, Standing]) -> Standstill | None:
    """Tell whether the ranks wait for each other for good.

    Args:
        standings: Of all ranks, each known to have stayed the same for a while.

    Returns:
        ``None`` if they may go on: if one of them is not waiting, or will get what it waits for.
    """
    pairs = list(permutations(standings.values(), 2))
    if any(_waits_for_the_gone(one, other) for one, other in pairs):
        return Standstill(certain=True, text=_explain(standings))
    if not all(standing.ended or standing.waits for standing in standings.values()):
        return None  # whoever computes may still come
    for proof, certain in ((_crossed, True), (_passed_by, False)):
        if any(proof(one, other) for one, other in pairs):
            return Standstill(certain=certain, text=_explain(standings))
    return None


def _waits_for_the_gone(one: Standing, other: Standing) -> bool:
    """The other has left the fit, and never handed over the gradients that this one waits for."""
    if not other.ended or one.ended:
        return False
    lacks_gradients = other.steps < one.awaited_step
    return lacks_gradients or (one.begins_batch and one.has_or_begins > other.batches)


def _crossed(one: Standing, other: Standing) -> bool:
    """Each waits for what the other does only afterwards."""
    if one.ended or other.ended:
        return False
    if one.awaited_step > other.steps and other.collective:
        if other.outside:
            return other.has_or_begins > one.batches
        if other.launched > one.launched:
            return True
        # What the other is inside of was, here, what begins a batch that the other has not come to.
        began = one.batches > other.batches and one.launched_at_batch == other.launched
        return began and not other.begins_batch
    if one.outside or other.outside:
        # This one waits until the other begins a batch, and that for a collective which this one has not come to.
        waits = one.outside and one.has_or_begins > other.batches
        return waits and not other.outside and bool(other.collective) and other.launched > one.launched
    if one.collective and other.collective and one.launched == other.launched:
        return one.collective != other.collective or one.begins_batch != other.begins_batch
    return False


def _passed_by(one: Standing, other: Standing) -> bool:
    """The other is still inside of a collective that nobody leaves before all have come, and this one is beyond it."""
    if one.ended or other.ended or other.collective not in _MUTUAL or one.launched < other.launched:
        return False
    gradients = one.awaited_step > other.steps
    return gradients or (bool(one.collective) and one.launched > other.launched)


def _explain(standings: Mapping[int, Standing]) -> str:
    if _uneven(standings):
        stopped = any(one.ended and 0 < one.epoch_batches < one.expected for one in standings.values())
        return (
            f"The ranks have different numbers of batches, and wait for each other: {_where(standings)}. {_EVEN}"
            f"{_STOPPED if stopped else ''}"
        )
    return f"The ranks wait for each other in different places: {_where(standings)}. {_ALIKE}"


def _where(standings: Mapping[int, Standing]) -> str:
    shown = sorted(standings.items())[:_RANKS_SHOWN]
    more = f"; and {len(standings) - _RANKS_SHOWN} more" if len(standings) > _RANKS_SHOWN else ""
    return "; ".join(f"rank {rank} {standing.describe()}" for rank, standing in shown) + more


def _uneven(standings: Mapping[int, Standing]) -> bool:
    return any(_has_fewer(one, other) for one, other in permutations(standings.values(), 2))


def _has_fewer(one: Standing, other: Standing) -> bool:
    """Whether a rank is seen to have fewer batches than the other one."""
    if 0 < one.expected < other.expected or 0 < one.last_epoch < other.last_epoch:
        return True
    if one.ended:
        return one.batches < other.has_or_begins
    same = one.is_last and not one.outside and one.epoch == other.epoch  # outside it begins the last one
    return same and one.epoch_batches < other.epoch_batches + other.begins_batch


class Wait(NamedTuple):
    """Inside of what a thread is; as attributes of :class:`Standing`.

    Attributes:
        collective: Its name.
        begins_batch: Whether it is called before each batch.
        outside: Whether it is another group's, and the batch that it begins is among those that have been counted.
            Where buffers come late a validation may begin there, too; it counts as the last batch before it.
    """

    collective: str
    begins_batch: bool = False
    outside: bool = False


_for_a_batch: dict[int, bool] = {}  # by thread: whether outside of the default group


@contextmanager
def waiting_for_a_batch(*, outside: bool) -> Iterator[None]:
    """This thread waits meanwhile for others to begin a batch, or for what they send as they do.

    Args:
        outside: Of the default group.
    """
    thread = threading.get_ident()
    _for_a_batch[thread] = outside
    try:
        yield
    finally:
        del _for_a_batch[thread]


def wait_of(thread: int) -> Wait | None:
    """What a thread has said that it waits for, or the collective of the default group that it is inside of.

    Args:
        thread: Its identifier, as of :func:`threading.get_ident`.
    """
    if _for_a_batch.get(thread):
        return Wait("broadcast", begins_batch=True, outside=True)
    frame = frame_of(thread)
    name = frame and _COLLECTIVES.get((str(frame.f_globals.get("__name__")), frame.f_code.co_name))
    if frame is None or name is None or not any(frame.f_locals.get("group") is one for one in (None, dist.group.WORLD)):
        return None
    return Wait(name, begins_batch=thread in _for_a_batch)


def break_connections(group: dist.ProcessGroup) -> None:
    """Wake whoever waits for a message on ``group``, here and on other ranks; nothing can be sent on it afterwards.

    Gloo has no way to call off a message, but closes all connections of a group when one did not come in time; not
    when its own connection has ended before, as that of a rank that is gone. So messages of all ranks are tried.
    """
    for distance in range(1, group.size()):
        peer = (group.rank() + distance) % group.size()
        with suppress(RuntimeError):
            group.recv([torch.empty(1, dtype=torch.float32)], peer, _UNUSED_NUMBER).wait(timedelta(milliseconds=1))


class VitalSigns:
    """One rank's view of all ranks: whether they live, where they say they stand, and whether they wait for good.

    All methods that use the store are for the board's thread.

    Args:
        store: Where the ranks tell it.
        rank: This rank.
        others: All other ranks.
        period: Between two beats, in seconds.
    """

    def __init__(self, store: dist.Store, rank: int, others: Sequence[int], period: float) -> None:
        self._store = store
        self._rank = rank
        self._others = others
        self._period = period
        self._every = max(_LOOK_S, len(others) / 64)  # spares the store's host when there are many ranks
        self._told: Standing | None = None
        self._told_at = 0.0
        self._examiners = 0
        self._examined_at = 0.0
        self._looked_at = 0.0  # for a standstill
        self._beats: dict[int, tuple[int, float]] = {}  # count, and when it was first seen
        self._stands: dict[int, tuple[Standing, float]] = {}  # and since when it has been the same

    def beat(self, standing: Standing) -> Standstill | None:
        """Show that this rank is alive, and where it stands; look at the others if somebody wants to know, or it waits.

        Returns:
            Ranks that wait for each other for good, if they are seen to.
        """
        now = time.monotonic()
        if standing != self._told:
            self._store.set(f"stands/{self._rank}", standing.encode())  # before the beat that shows it
            if self._told is None or not standing.is_as(self._told):
                self._told_at = now
            self._told = standing
        self._store.add(f"alive/{self._rank}", 1)
        waits = standing.waits and now >= self._told_at + _CURIOUS_S
        if waits and now >= self._looked_at + self._every:
            self._looked_at = now
            self._examine(now)
            return self._standstill(standing, now)
        if self._examiners:
            self._examine(now)
        elif not waits:
            self._beats, self._stands = {}, {}
        return None

    @contextmanager
    def examined(self) -> Iterator[None]:
        """Have :meth:`beat` look at the other ranks meanwhile."""
        self._examiners += 1
        try:
            yield
        finally:
            self._examiners -= 1

    def silent(self, at_least: float = 0.0) -> list[int]:
        """Ranks that have missed five beats since they have been looked at, and none came for ``at_least`` seconds."""
        patience = max(_BEATS_MISSED * self._period, at_least)
        return [r for r, (_, since) in self._beats.items() if self._examined_at - since > patience]

    def standings(self) -> dict[int, Standing]:
        """Where all ranks have told that they stand, of those that are known; nothing if no other rank is."""
        found = {rank: standing for rank, (standing, _) in self._stands.items()}
        return {**found, self._rank: self._told} if found and self._told is not None else {}

    def whereabouts(self) -> str:
        """What the ranks are doing, those that do the same together; empty if nothing is known."""
        by_place: dict[str, list[int]] = {}
        for rank, standing in sorted(self.standings().items()):
            by_place.setdefault(", ".join(filter(None, (standing.doing, standing.place))), []).append(rank)
        return "; ".join(f"{names_of(ranks)}: {place}" for place, ranks in by_place.items())

    def _examine(self, now: float) -> None:
        beats, stands = dict(self._beats), dict(self._stands)
        for rank in self._others:
            count, key = self._store.add(f"alive/{rank}", 0), f"stands/{rank}"
            if rank not in beats or beats[rank][0] != count:
                beats[rank] = (count, now)
            if self._store.check([key]):
                standing = Standing.decode(self._store.get(key))
                known = stands.get(rank)
                stands[rank] = (standing, known[1] if known is not None and standing.is_as(known[0]) else now)
        self._beats, self._stands, self._examined_at = beats, stands, now

    def _standstill(self, own: Standing, now: float) -> Standstill | None:
        if len(self._stands) < len(self._others):
            return None  # somebody is not there yet
        fresh = _FRESH_BEATS * self._period
        if any(now > self._beats[rank][1] + fresh for rank, (one, _) in self._stands.items() if not one.ended):
            return None  # what was told may be out of date
        found = find_standstill({**self.standings(), self._rank: own})
        if found is None:
            return None
        same_since = max(self._told_at, *(since for _, since in self._stands.values()))
        return found if now >= same_since + (_CERTAIN_S if found.certain else _UNCERTAIN_S) else None
