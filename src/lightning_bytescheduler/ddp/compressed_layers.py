"""``compression="auto"``: of how many layers gradients are compressed, so that training hardly waits for them.

They are the first layers of the forward pass: their gradients are there last in the backward pass and needed first,
while those of the other layers fill the link as they are. How many, rank 0 finds (:class:`LayerSearch`) from what its
steps take and wait for. It begins with none, so that where exact gradients hide the training is DDP's, bit for bit.

The unit is DDP's bucket. All ranks change the number before the same step (``AgreedValues`` in
``collectives/number_exchange.py``), and DDP has the same buckets on all of them, numbered as gradients come: so they
compress the same. Steps as DDP's are exact, and so is the first one, after which DDP arranges its buckets anew.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import accumulate

from lightning_bytescheduler.collectives.number_exchange import AgreedValues
from lightning_bytescheduler.ddp.statistics import SchedulerStatistics

__all__ = ["CompressedLayers", "LayerSearch"]

_BEGIN = 0.05  # of the computation: exact steps that wait for less are left alone
_STAY = 0.03  # the same, once something is compressed
_AIM = 0.01  # what a change is to leave of the waits
_IDLE, _BUSY = 0.8, 0.9  # of a step: where less than the one is spent on the link, there is room up to the other
_WORTH_IT = 0.25  # of what a change was to bring
_TRIES = 2  # until it has to
_STEPS = 3  # that are looked at together
_LOOKS = 2  # in a row, before anything is compressed
_SETTLE = 2  # first steps of their kind, which do not count
_REST = 100  # steps, after a change that was taken back; twice as many after each further one
_MOST_REST = 3200
_QUIET = 8  # looks in a row at which nothing was to be changed, until exchanges become rare
_INTERVAL = 16  # steps between those


class LayerSearch:
    """Finds the number of buckets with which training waits for next to nothing.

    A step that waits for the link is shorter by what the link is spared. So the number follows from the waits, and how
    long the link takes for exact gradients. Where a change brings less than a quarter of that, as where codecs are what
    takes long, or another rank is waited for, and so does a further one, both are taken back, and no other is tried for
    100 steps: for 200 after the next one in a row, and so on.

    Pure: it has no clock, and says the same of the same steps.

    Args:
        ratio: How many times smaller compressed gradients are.

    Attributes:
        sizes: Bytes of the buckets, from the first layer on; empty until they are known.
        count: How many of them are to be compressed.
    """

    def __init__(self, ratio: float) -> None:
        self.sizes: Sequence[int] = ()
        self.count = 0
        self._saved = 1.0 - 1.0 / ratio
        self._link = 0.0  # seconds, for exact gradients
        self._settle = _SETTLE
        self._steps: list[tuple[float, float, float]] = []
        self._looks = 0
        self._late = 0  # looks in a row
        self._before: tuple[int, float] | None = None  # count and a step's seconds, before what is being tried
        self._saves = 0.0  # what that was to save, of a step
        self._tried = 0  # changes
        self._rest = 0
        self._in_vain = 0  # tries in a row
        self._quiet = 0  # looks in a row

    @property
    def is_settled(self) -> bool:
        """Whether nothing is being tried."""
        return self._looks >= _LOOKS and self._before is None and not self._late

    @property
    def is_quiet(self) -> bool:
        """Whether nothing has been tried for long: a change to come may take some steps to be known."""
        return self._quiet >= _QUIET

    def step_took(self, seconds: float, waited: float, busy: float, *, counts: bool = True) -> None:
        """Take down a step.

        Args:
            seconds: From its beginning to the next one's.
            waited: How much of that training has waited for gradients.
            busy: How much of that gradients were under way.
            counts: Whether it was taken with :attr:`count`, and is like those to come.
        """
        if not counts:
            self._steps.clear()
            self._settle = _SETTLE
            return
        self._rest = max(self._rest - 1, 0)
        if self._settle:
            self._settle -= 1
            return
        self._steps.append((seconds, waited, busy))
        if len(self._steps) == _STEPS:
            seconds, waited, busy = map(statistics.median_low, zip(*self._steps, strict=True))
            self._steps.clear()
            self._look(seconds, waited, busy)

    def _look(self, seconds: float, waited: float, busy: float) -> None:
        self._looks += 1
        computes = max(seconds - waited, 0.0)
        if not self.count:
            self._link = busy
        is_late = waited > (_STAY if self.count else _BEGIN) * computes
        if self._is_in_vain(seconds, is_late=is_late):
            self._rest = min(_REST << self._in_vain, _MOST_REST)
            self._in_vain += 1
        self._late = self._late + 1 if is_late and not self._rest else 0
        if self._late >= (1 if self.count else _LOOKS):
            self._late = 0
            self._change(waited - _AIM * computes, seconds)
        elif self.count and not is_late and not self._rest and busy < _IDLE * seconds:
            self._change(busy - _BUSY * seconds, seconds)
        else:
            self._before = None
        self._quiet = self._quiet + 1 if self.is_settled else 0

    def _is_in_vain(self, seconds: float, *, is_late: bool) -> bool:
        """Whether what was tried has not brought what it was for; then it is taken back."""
        if self._before is None:
            return False
        count, took = self._before
        brings = took - seconds >= _WORTH_IT * self._saves if count < self.count else not is_late
        if not brings and is_late and count < self.count < len(self.sizes) and self._tried < _TRIES:
            return False  # one more bucket may be what it takes
        self._before = None
        if brings:
            self._in_vain = 0
        else:
            self.count = count
        return not brings

    def _change(self, spared: float, seconds: float) -> None:
        """Have the link spared so many seconds more than now, or less."""
        nbytes, whole = [0, *accumulate(self.sizes)], self._saved * self._link
        if not nbytes[-1] or not whole:
            return
        now = min(self.count, len(self.sizes))
        wanted = nbytes[now] + spared / whole * nbytes[-1]
        count = next((number for number, size in enumerate(nbytes) if size >= wanted), len(self.sizes))
        if count == now:
            self._before = None
            return
        if self._before is None:
            self._before, self._saves, self._tried = (self.count, seconds), spared, 0
        self._tried += 1
        self.count = count


class CompressedLayers:
    """One rank's; every rank makes it at the same point.

    Args:
        ratio: See :class:`LayerSearch`.
        values: What ranks agree with; of one number.
        decides: Whether this rank says how many.
        statistics: Of this rank.
        clock: Seconds.

    Attributes:
        count: How many buckets are compressed, on all ranks.
    """

    def __init__(
        self,
        ratio: float,
        values: AgreedValues,
        *,
        decides: bool,
        statistics: SchedulerStatistics,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.count = 0
        self._search = LayerSearch(ratio) if decides else None
        self._values = values
        self._statistics = statistics
        self._clock = clock
        self._step = 0
        self._began = (0.0, 0.0, 0.0)
        self._sizes: dict[int, int] = {}  # of the buckets of this step, so far
        self._first: frozenset[int] = frozenset()
        self._disturbed = False

    @property
    def is_settled(self) -> bool:
        """Whether rank 0 tries nothing; ``True`` on the others."""
        return self._search is None or self._search.is_settled

    def disturb(self) -> None:
        """The present step has something in it that others have not, such as a checkpoint: its time tells nothing."""
        self._disturbed = True

    def before_step(self, step: int, *, counts: bool) -> None:
        """A forward pass of ``step`` begins, on all ranks.

        Args:
            step: Its number; several passes may belong to one.
            counts: Whether the step before is like those to come.
        """
        if step <= self._step:
            return
        search, wanted, interval = self._search, 0, 1
        if search is not None:
            now = self._clock(), self._statistics.exposed_s, self._statistics.communication_s
            seconds, waited, busy = (here - before for here, before in zip(now, self._began, strict=True))
            counts = counts and self._step > 0 and search.count == self.count
            if not (counts and self._disturbed):
                search.step_took(seconds, waited, busy, counts=counts)
            self._began, wanted = now, search.count
            interval = _INTERVAL if search.is_quiet and wanted == self.count else 1
        self._step, self._disturbed = step, False
        agreed = self._values.before_step(step, (wanted,), interval=interval)
        if agreed is not None:
            (self.count,) = agreed

    def begin_backward(self, *, exact: bool) -> None:
        """A backward pass has its first bucket: those of the last one say which are the first layers'.

        Args:
            exact: Whether nothing is compressed in it; the same on all ranks.
        """
        sizes = sorted(self._sizes.items(), reverse=True)
        self._first = frozenset(index for index, _ in sizes[: 0 if exact else self.count])
        if self._search is not None:
            self._search.sizes = [size for _, size in sizes]
        self._sizes = {}

    def include(self, bucket: int, nbytes: int) -> bool:
        """Whether a bucket of this backward pass is compressed, which has so many bytes."""
        self._sizes[bucket] = nbytes
        return bucket in self._first

    def close(self) -> None:
        """Say goodbye to the other ranks; bounded, idempotent."""
        self._values.close()
