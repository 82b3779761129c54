"""What would come too late if it were sent as it is: the rest of a step, played through at the link's measured speed.

Used by ``compression="auto"``, on the rank that decides. The rule, in one sentence: *a part is sent as it is as
long as everything behind it could still come in time, in fewer bytes if need be*. So the transfers that are left of the
step are played through in the order of their priorities, in fewer bytes, once behind this part as it is and once behind
this part in fewer bytes; if a gate would be reached before its gradient, and later so in the first play than in the
second, the part is compressed. The other way round, compressing first until the rest fits as it is, the link would fall
idle in the backward pass, where gradients come one after the other, and more would have to be compressed in the end.

Three things are measured:

* when, in recent steps, each bucket's gradient existed and was first needed: :class:`StepTimes`. Both count from the
  moment the last gradient existed, without the time for which training waited for gradients: so would they come in a
  step that never waits, whatever is sent and however late it was;
* how long the link takes for a byte: :class:`LinkPace`, by parts that followed each other without a gap;
* how long training waits.

Steps in which exact transfers hide are left alone, also if one of them stumbles: compressing begins when two steps in a
row have waited for more than ``BEGIN`` of their computation *and* the play of the whole step says that they had to; it
ends when the play says less than ``END``. In between, parts are compressed until waits of ``AIM`` are left. A form in
which parts are seen to take nearly as long as they are (codecs that cannot keep up) is not used, and tried again later.

Nothing here knows of torch, threads, or clocks: moments are arguments, in seconds of one clock.
"""

from __future__ import annotations

import heapq
import statistics
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace

__all__ = ["AIM", "BEGIN", "END", "LateTransfers", "LinkPace", "StepTimes", "Transfer", "lateness"]

BEGIN = 0.05
"""Share of the computation that training has to wait before anything is compressed."""
END = 0.03
"""Share below which exact transfers hide again."""
AIM = 0.01
"""Share that compressing leaves."""
_STEPS = 5  # that moments are taken from
_PARTS = 96  # of a kind, that the link's speed is taken from
_ENOUGH = 16  # of a smaller form, to say something about parts as they are
_IN_A_ROW = 2
_WORTH_IT = 0.8  # of the time of a part as it is; a form that takes more is not used
_LEAST_SECONDS = 1e-3  # of a part on the link: a codec takes about as long, however small it is
_SAME = 1e-9  # seconds
_TRIED_AGAIN = 50  # steps later


@dataclass(frozen=True, slots=True)
class Transfer:
    """Something to be sent.

    Attributes:
        ready: When its data exists.
        due: When it is needed.
        priority: A lower number is sent first.
        seconds: The link takes for it.
    """

    ready: float
    due: float
    priority: int
    seconds: float


def lateness(start: float, transfers: Iterable[Transfer]) -> float:
    """By how much the latest of ``transfers`` misses its moment, in seconds; below 0 if all are early.

    Args:
        start: When the link is free.
        transfers: Sent by priority, as their data comes; a more urgent one interrupts.

    Returns:
        Minus infinity if there are none.
    """
    coming = sorted(transfers, key=lambda transfer: transfer.ready)
    now, worst, at = start, float("-inf"), 0
    waiting: list[tuple[int, int, float]] = []  # priority, position, seconds that are left
    while at < len(coming) or waiting:
        if not waiting and coming[at].ready > now:
            now = coming[at].ready
        while at < len(coming) and coming[at].ready <= now:
            heapq.heappush(waiting, (coming[at].priority, at, coming[at].seconds))
            at += 1
        priority, position, seconds = heapq.heappop(waiting)
        if at < len(coming) and coming[at].ready < now + seconds:
            heapq.heappush(waiting, (priority, position, seconds - (coming[at].ready - now)))
            now = coming[at].ready
        else:
            now += seconds
            worst = max(worst, now - coming[position].due)
    return worst


class LinkPace:
    """How long the link takes for a byte of gradient, by the form in which it travels.

    Parts that were on their way when the one before ended count. Times of others may have the wait for slower ranks in
    them, so they only count if they are shorter than what is known.

    If for ``_PARTS`` parts none was alone on the link as it is, what is known of such may be of another link: a byte
    takes no longer than as many bytes in a smaller form as it would make, so whichever is less counts then. Not before,
    nor by a few parts: some that arrive at once seem to have taken no time, and if exact transfers were taken to hide
    for that, nothing would ever show that they do not.

    Parts of two forms that are under way together share the link, and a small one ends while a large one has got half
    of it. So what they take counts together, and what is not of the large ones, by their pace when they were alone, is
    of the small ones.

    Args:
        ratios: How many times smaller each form is; that of form 0 is 1.
        seconds_per_byte: Of form 0, until parts have been seen; ``None`` if not known.
    """

    def __init__(self, ratios: Mapping[int, float], seconds_per_byte: float | None = None) -> None:
        self._ratios = ratios
        self._first = seconds_per_byte
        self._alone = {form: _Sums() for form in ratios}
        self._together = {form: _Sums() for form in ratios if form}  # with form 0
        self._ends = dict.fromkeys(ratios, float("-inf"))
        self._last_end = float("-inf")
        self._since_exact = 0  # parts, since one was alone on the link as it is

    @property
    def forms(self) -> tuple[int, ...]:
        """All but 0."""
        return tuple(form for form in self._ratios if form)

    def ended(self, form: int, nbytes: float, started: float, ended: float, *, beside: Iterable[int] = ()) -> None:
        """A part of ``nbytes`` (as it is) has travelled.

        Args:
            form: In which it has.
            nbytes: Of it, as it is.
            started: When it was sent.
            ended: When it had arrived.
            beside: Forms of what is still under way.
        """
        before, self._last_end = self._last_end, max(self._last_end, ended)
        took, known = ended - max(started, before), self.seconds_per_byte(form)
        others = {each for each in beside if each != form}
        others |= {each for each, end in self._ends.items() if each != form and end > started}
        self._ends[form] = max(self._ends[form], ended)
        if ended <= before or (started >= before and (known is None or took >= known * nbytes)):
            return
        self._since_exact = self._since_exact + 1 if form or others else 0
        if not others:
            self._alone[form].add(took, 0.0, nbytes)
        elif form:
            self._together[form].add(took, 0.0, nbytes)
        else:
            self._together[max(others, key=lambda each: self._ends[each])].add(took, nbytes, 0.0)

    def helps(self, form: int) -> bool:
        """Whether a byte takes less time in ``form`` than as it is, as far as both were seen."""
        seen, exact = self._seen(form), self._alone[0].per_byte()
        return seen is None or exact is None or seen < _WORTH_IT * exact

    def forget(self, form: int) -> None:
        """Take ``form`` for one that was never seen."""
        self._alone[form] = _Sums()
        self._together[form] = _Sums()

    @property
    def last_end(self) -> float:
        """When the last part ended."""
        return self._last_end

    def seconds_per_byte(self, form: int = 0) -> float | None:
        """Of gradient, not of what travels for it; ``None`` if not known."""
        if form:
            seen, exact = self._seen(form), self.seconds_per_byte()
            if seen is not None:
                return seen
            return None if exact is None else exact / self._ratios[form]
        exact = self._alone[0].per_byte()
        known = [self._first if exact is None else exact]
        if exact is None or self._since_exact >= _PARTS:
            others = [each for each, alone in self._alone.items() if each and len(alone) >= _ENOUGH]
            known += [_times(self._alone[each].per_byte(), self._ratios[each]) for each in others]
        found = [each for each in known if each is not None]
        return max(min(found), 0.0) if found else None

    def _seen(self, form: int) -> float | None:
        """Of a form other than 0, if any of it was seen."""
        alone, together = self._alone[form], self._together[form]
        size = alone.smaller + together.smaller
        if not size:
            return None
        exact = self.seconds_per_byte() or 0.0
        seconds = alone.seconds + together.seconds - exact * together.exact
        return max(seconds / size, min(exact / self._ratios[form], alone.per_byte() or exact), 0.0)


def _times(number: float | None, factor: float) -> float | None:
    return None if number is None else number * factor


class _Sums:
    """Of the last parts of a kind: seconds, bytes that travelled as they are, and bytes that did in a smaller form.

    Bytes of a kind that is of one form alone are all in the last of these.
    """

    __slots__ = ("_parts", "exact", "seconds", "smaller")

    def __init__(self) -> None:
        self._parts: deque[tuple[float, float, float]] = deque(maxlen=_PARTS)
        self.seconds = self.exact = self.smaller = 0.0

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, seconds: float, exact: float, smaller: float) -> None:
        """Another part."""
        if len(self._parts) == _PARTS:
            self._count(*self._parts[0], -1)
        self._parts.append((seconds, exact, smaller))
        self._count(seconds, exact, smaller, 1)

    def _count(self, seconds: float, exact: float, smaller: float, sign: int) -> None:
        self.seconds += sign * seconds
        self.exact += sign * exact
        self.smaller += sign * smaller

    def per_byte(self) -> float | None:
        """Seconds; ``None`` without any part."""
        return max(self.seconds / self.smaller, 0.0) if self.smaller > 0 else None


@dataclass(slots=True)
class _Bucket:
    nbytes: float
    priority: int
    ready: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS))
    needed: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS))


class StepTimes:
    """When gradients exist and are needed, as in recent steps of the same kind; see the module.

    Buckets are named by anything that is the same in each step.
    """

    def __init__(self) -> None:
        self._kind: Hashable = None
        self._known: dict[Hashable, dict[int, _Bucket]] = {}
        self._spans: dict[Hashable, deque[float]] = {}
        self.buckets: dict[int, _Bucket] = {}
        self._ready_at: dict[int, float] = {}
        self._needed: set[int] = set()
        self._waited = 0.0
        self._waiting_since: float | None = None
        self._origin: float | None = None
        self._offsets: dict[int, tuple[float, float]] = {}

    def begin(self, kind: Hashable) -> None:
        """A step begins; what is known of steps of another kind says nothing about it."""
        if self._origin is not None and len(self._ready_at) != len(self.buckets):
            self._known.pop(self._kind, None)  # other buckets than in the step before
        self._kind = kind
        self.buckets = self._known.setdefault(kind, {})
        self._spans.setdefault(kind, deque(maxlen=_STEPS))
        self._ready_at, self._needed, self._offsets = {}, set(), {}
        self._waited, self._waiting_since, self._origin = 0.0, None, None

    def ready(self, bucket: int, nbytes: float, priority: int, now: float, *, last: bool) -> None:
        """A bucket's gradient exists on this rank; ``last`` of the step."""
        known = self.buckets.get(bucket)
        if known is None or known.nbytes != nbytes:
            known = self.buckets[bucket] = _Bucket(nbytes, priority)
            self._offsets.pop(bucket, None)
        known.priority = priority
        self._ready_at[bucket] = now
        if last:
            self._origin = now
            for each, at in self._ready_at.items():
                self.buckets[each].ready.append(at - now)

    def needed(self, bucket: int, now: float) -> None:
        """A bucket's gradient is needed; the first time in a step counts."""
        if self._origin is not None and bucket in self.buckets and bucket not in self._needed:
            self._needed.add(bucket)
            moment = max(now - self._origin - self.waited(now), 0.0)
            self.buckets[bucket].needed.append(moment)
            if len(self._needed) == len(self._ready_at):  # the last one: so long is a step, without what is after it
                self._spans[self._kind].append(moment - min(self._ready_at.values()) + self._origin)

    def waiting(self, now: float) -> None:
        """Training begins to wait for gradients."""
        self._waiting_since = now

    def waiting_ends(self, now: float) -> None:
        """It has got them."""
        if self._waiting_since is not None:
            self._waited += max(now - self._waiting_since, 0.0)
            self._waiting_since = None

    def waited(self, now: float) -> float:
        """How long training has waited in this step."""
        return self._waited + (0.0 if self._waiting_since is None else max(now - self._waiting_since, 0.0))

    @property
    def complete(self) -> bool:
        """Whether it is known of all buckets when they exist and are needed."""
        return bool(self.buckets) and all(known.ready and known.needed for known in self.buckets.values())

    @property
    def span(self) -> float:
        """Seconds from the first gradient of a step to the last gate, without waits; 0 if not known."""
        spans = self._spans.get(self._kind)
        return _typical(spans) if spans else 0.0

    def origin(self, now: float) -> float:
        """When this step's last gradient existed, or will."""
        if self._origin is not None:
            return self._origin
        behind = [at - self.offsets(b)[0] for b, at in self._ready_at.items()]
        return max(behind[-1], now) if behind else now

    def is_ready(self, bucket: int) -> bool:
        """Whether the gradient exists in this step."""
        return bucket in self._ready_at

    def offsets(self, bucket: int) -> tuple[float, float]:
        """(when it exists, when it is needed) after the origin, as in recent steps."""
        found = self._offsets.get(bucket)
        if found is None:  # for the whole step: what is noted in it counts in the next
            known = self.buckets[bucket]
            found = self._offsets[bucket] = statistics.median(known.ready), _typical(known.needed)
        return found


def _typical(moments: Iterable[float]) -> float:
    """The second largest of several.

    The largest may be that of a step with a validation before its forward pass. Small ones are of steps that waited:
    where a device is given work ahead, it still computes during a part of each wait.
    """
    ordered = sorted(moments)
    return ordered[-2] if len(ordered) > 2 else ordered[-1]


class LateTransfers:
    """Says of each part that is about to be sent whether it has to be smaller; see the module.

    For whoever holds the launching lock and whoever trains; the caller sees to that these do not meet.

    Args:
        pace: Of the link.
        halves: Whether each bucket travels twice: first to be summed, all of them before anything is needed, then back.

    Attributes:
        compressing: Whether parts may be compressed in this step.
        usual: The form that parts are compressed in.
    """

    def __init__(self, pace: LinkPace, *, halves: bool = False) -> None:
        self.times = StepTimes()
        self.pace = pace
        self.halves = halves
        self.compressing = False
        self.usual = min(pace.forms, default=0)
        self._left: dict[tuple[int, int], float] = {}  # bytes that were not sent, by bucket and half
        self._under_way: dict[Hashable, tuple[int, float]] = {}
        self._planned_smaller: dict[int, float] = {}  # bytes of buckets that are to be smaller, and were not sent
        self._waited_for_long = 0
        self._planned = False
        self._steps = 0

    def begin(self, kind: Hashable, now: float) -> None:
        """A step begins: nothing of the last one is under way."""
        times = self.times
        if times.span:
            waits = times.waited(now) > BEGIN * times.span
            self._waited_for_long = self._waited_for_long + 1 if waits else 0
        self._steps += 1
        if self._steps % _TRIED_AGAIN == 0:
            for form in self.pace.forms:
                if not self.pace.helps(form):
                    self.pace.forget(form)
        times.begin(kind)
        self._left.clear()
        self._planned_smaller.clear()
        self._under_way.clear()
        self._planned = False

    def ready(self, bucket: int, nbytes: float, priority: int, now: float, *, last: bool) -> None:
        """See :meth:`StepTimes.ready`."""
        self.times.ready(bucket, nbytes, priority, now, last=last)
        if self.halves:
            self._left[bucket, 0] = self._left[bucket, 1] = nbytes / 2
        else:
            self._left[bucket, 0] = nbytes

    def sent(self, part: Hashable, bucket: int, half: int, form: int, nbytes: float) -> None:
        """A part is on its way."""
        left = self._left.get((bucket, half), 0.0) - nbytes
        self._left[bucket, half] = max(left, 0.0)
        self._under_way[part] = (form, nbytes)

    def ended(self, part: Hashable, started: float, ended: float) -> None:
        """A part has arrived."""
        known = self._under_way.pop(part, None)
        if known is not None:
            self.pace.ended(*known, started, ended, beside=(form for form, _ in self._under_way.values()))

    def late_share(self, bucket: int, nbytes: float, now: float) -> float:
        """How much of a bucket that has just become ready is to travel in fewer bytes: a share, in quarters.

        Here what is ready already and was not to be smaller is taken to be sent as it is, as then most buckets travel
        in one way. Otherwise parts of many buckets would be left when time runs out, each to be encoded by itself.

        Args:
            bucket: That is ready, and of which nothing was sent.
            nbytes: Of it, as it is.
            now: When that is decided.
        """
        if not self._may_compress(nbytes, now):
            return 0.0
        start, behind = now + self._busy(now), self._behind(now, settled=True)
        exact, smaller = self._paces()
        own = next(each for at, each in behind if at == (bucket, 0))
        others = [each for at, each in behind if at != (bucket, 0)]

        def play(share: float) -> float:
            seconds = nbytes * (share * smaller + (1 - share) * exact)
            return lateness(start, [*others, replace(own, seconds=seconds)])

        goal = max(self._allowed(now), play(1.0) + _SAME)
        share = next((quarter / 4 for quarter in range(4) if play(quarter / 4) <= goal), 1.0)
        if share:
            self._planned_smaller[bucket] = share * nbytes
        return share

    def is_planned(self, bucket: int) -> bool:
        """Whether :meth:`late_share` has said in this step that some of it is to be smaller."""
        return bucket in self._planned_smaller

    def is_late(self, bucket: int, half: int, nbytes: float, now: float) -> bool:
        """Whether the part that is next has to be smaller, so that nothing waits for it, or for what is behind it.

        Args:
            bucket: The part's.
            half: 0, or 1 on its way back.
            nbytes: Of the part, as it is.
            now: When that is decided.
        """
        if self._planned_smaller.get(bucket, 0.0) > nbytes / 2:
            self._planned_smaller[bucket] -= nbytes
            return True
        if not self._may_compress(nbytes, now):
            return False
        exact, smaller = self._paces()
        due, others = now, []
        for at, transfer in self._behind(now):
            if at == (bucket, half):
                due = transfer.due
                transfer = replace(transfer, seconds=transfer.seconds - nbytes * smaller)
            if transfer.seconds > 0:
                others.append(transfer)
        ends = [now + self._busy(now) + nbytes * pace for pace in (exact, smaller)]
        as_it_is = max(ends[0] - due, lateness(ends[0], others))
        return as_it_is > self._allowed(now) and as_it_is > max(ends[1] - due, lateness(ends[1], others)) + _SAME

    def _may_compress(self, nbytes: float, now: float) -> bool:
        """Whether something that is as large may have to be smaller in this step."""
        exact, smaller = self._paces()
        if not exact or not smaller or not self.times.span or not self.times.complete:
            return False
        if nbytes * exact < _LEAST_SECONDS:
            return False
        if not self._planned:
            self._planned = True
            self._plan(exact, self.times.span)
        return self.compressing

    def _paces(self) -> tuple[float, float]:
        """Seconds for a byte as it is, and in the usual form; 0 where that is not known."""
        return self.pace.seconds_per_byte() or 0.0, self.pace.seconds_per_byte(self.usual) or 0.0

    def _busy(self, now: float) -> float:
        """How long the link still takes for what is on its way."""
        busy = sum((self.pace.seconds_per_byte(form) or 0.0) * n for form, n in self._under_way.values())
        if self._under_way and self.pace.last_end > 0:  # the first of them is partly there
            busy = max(busy - max(now - self.pace.last_end, 0.0), 0.0)
        return busy

    def _allowed(self, now: float) -> float:
        return max(AIM * self.times.span - self.times.waited(now), 0.0)

    def _behind(self, now: float, *, settled: bool = False) -> list[tuple[tuple[int, int], Transfer]]:
        """What is left to be sent of this step, by bucket and half: in fewer bytes, but for what is settled."""
        times, found = self.times, []
        (exact, smaller), origin, waited = self._paces(), times.origin(now), times.waited(now)
        soonest = min(times.offsets(each)[1] for each in times.buckets)
        for each, known in times.buckets.items():
            ready, needed = times.offsets(each)
            there = times.is_ready(each)
            at = now if there else max(origin + ready, now)
            for half, size in self._sizes(each, known):
                as_it_is = max(size - self._planned_smaller.get(each, 0.0), 0.0) if settled and there else 0.0
                seconds = as_it_is * exact + (size - as_it_is) * smaller
                transfer = self._transfer(known, half, at, origin + waited, (soonest, needed), seconds)
                found.append(((each, half), transfer))
        return found

    def _plan(self, per_byte: float, span: float) -> None:
        """Whether exact transfers of the whole step hide."""
        times = self.times
        soonest = min(times.offsets(bucket)[1] for bucket in times.buckets)
        whole = []
        for bucket, known in times.buckets.items():
            ready, needed = times.offsets(bucket)
            share = 0.5 if self.halves else 1.0
            for half in range(1 + self.halves):
                seconds = known.nbytes * share * per_byte
                whole.append(self._transfer(known, half, ready, 0.0, (soonest, needed), seconds))
        wait = lateness(min(each.ready for each in whole), whole)
        if self.compressing:
            self.compressing = wait > END * span
        else:
            self.compressing = wait > BEGIN * span and self._waited_for_long >= _IN_A_ROW

    def _sizes(self, bucket: int, known: _Bucket) -> list[tuple[int, float]]:
        if not self.times.is_ready(bucket):
            return [(0, known.nbytes / 2), (1, known.nbytes / 2)] if self.halves else [(0, known.nbytes)]
        return [(half, self._left.get((bucket, half), 0.0)) for half in range(1 + self.halves)]

    def _transfer(
        self, known: _Bucket, half: int, ready: float, due: float, needed: tuple[float, float], seconds: float
    ) -> Transfer:
        first = self.halves and not half  # sums are all needed before the first gate opens, and precede everything
        return Transfer(
            ready=ready,
            due=due + needed[not first],
            priority=known.priority - (1 << 40 if first else 0),
            seconds=seconds,
        )
