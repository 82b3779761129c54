"""``compression="auto"``: decides how many layers' gradients are compressed, so that training hardly waits for them.

These are the first layers of the forward pass: their gradients come last in the backward pass and are needed first. The
other layers' gradients travel uncompressed. Rank 0 finds the number (:class:`LayerSearch`) from the times of its steps
and waits. It begins with none: where exact gradients are hidden, the training equals DDP's bit for bit.

The unit is DDP's bucket. All ranks change the number before the same step (``AgreedValues`` in
``collectives/number_exchange.py``), and DDP numbers the same buckets alike on all ranks, so they compress the same
ones. Steps as DDP's are exact. So is the first step, after which DDP arranges its buckets anew.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import accumulate

from lightning_bytescheduler.collectives.number_exchange import AgreedValues
from lightning_bytescheduler.ddp.statistics import SchedulerStatistics

__all__ = ["CompressedLayers", "LayerSearch"]

_BEGIN = 0.05  # of computing time: exact steps that wait for less stay exact
_STAY = 0.03  # the same, once something is compressed
_AIM = 0.01  # of computing time: the wait that a change aims at
_IDLE, _BUSY = 0.8, 0.9  # of a step: below the first share of link use, there is room up to the second
_WORTH_IT = 0.25  # of the expected gain: the least that justifies a change
_TRIES = 2  # changes until the gain has to show
_STEPS = 3  # steps that are evaluated together, by their median
_LOOKS = 2  # evaluations in a row before anything is compressed
_SETTLE = 2  # first steps after a change, which do not count
_REST = 100  # steps without a change after one was taken back; doubled for each further one
_MOST_REST = 3200
_QUIET = 8  # evaluations in a row without a change, after which ranks exchange rarely
_INTERVAL = 16  # steps between these exchanges


class LayerSearch:
    """Finds the number of buckets to compress, so that training hardly waits.

    A step that waits for the link becomes shorter by the time the link saves. So the number follows from the wait and
    from the link's time for exact gradients. A change may bring less than a quarter of the expected gain, for example
    when codecs are slow or when the wait is for another rank. If one further change does not help either, both are
    taken back. Then nothing is tried for 100 steps, and twice as long after each further failure.

    It reads no clock: the same steps give the same result.

    Attributes:
        sizes: Bytes of the buckets, from the first layer on; empty until they are known.
    """

    def __init__(self, ratio: float) -> None:
        self.sizes: Sequence[int] = ()
        self.count = 0
        self._saved = 1.0 - 1.0 / ratio
        self._link = 0.0  # seconds of link use per step with exact gradients
        self._settle = _SETTLE
        self._steps: list[tuple[float, float, float]] = []
        self._looks = 0
        self._late = 0  # evaluations in a row with too long a wait
        self._before: tuple[int, float] | None = None  # (count, seconds of a step) before the current trial
        self._saves = 0.0  # the seconds that the trial is expected to save
        self._tried = 0  # changes within the current trial
        self._rest = 0
        self._in_vain = 0  # failed trials in a row
        self._quiet = 0  # evaluations in a row without a change

    @property
    def is_settled(self) -> bool:
        """Whether no change is being tried."""
        return self._looks >= _LOOKS and self._before is None and not self._late

    @property
    def is_quiet(self) -> bool:
        """Whether no change was tried for long, so that a new value may take some steps to reach all ranks."""
        return self._quiet >= _QUIET

    def step_took(self, seconds: float, waited: float, busy: float, *, counts: bool = True) -> None:
        """Record a step.

        Args:
            seconds: From its beginning to the beginning of the next one.
            waited: Seconds of it for which training waited for gradients.
            busy: Seconds of it in which gradients were being sent.
            counts: Whether it was taken with :attr:`count` and is typical.
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
        """Whether the trial failed; if so, it is taken back."""
        if self._before is None:
            return False
        count, took = self._before
        brings = took - seconds >= _WORTH_IT * self._saves if count < self.count else not is_late
        if not brings and is_late and count < self.count < len(self.sizes) and self._tried < _TRIES:
            return False  # one more bucket may be enough
        self._before = None
        if brings:
            self._in_vain = 0
        else:
            self.count = count
        return not brings

    def _change(self, spared: float, seconds: float) -> None:
        """Change the count so that the link's time changes by ``spared`` seconds."""
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
    """The number of compressed buckets on one rank; all ranks make it at the same point."""

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
        self._sizes: dict[int, int] = {}  # bytes by index of the bucket, in this step so far
        self._first: frozenset[int] = frozenset()
        self._disturbed = False

    @property
    def is_settled(self) -> bool:
        """Whether rank 0 tries nothing; ``True`` on the other ranks."""
        return self._search is None or self._search.is_settled

    def disturb(self) -> None:
        """Ignore the time of the present step, as something unusual such as a checkpoint is in it."""
        self._disturbed = True

    def before_step(self, step: int, *, counts: bool) -> None:
        """Record that a forward pass of ``step`` begins, on all ranks."""
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
        """Begin a backward pass. The buckets of the last one tell which belong to the first layers.

        Args:
            exact: Whether nothing is compressed in this step; the same on all ranks.
        """
        sizes = sorted(self._sizes.items(), reverse=True)
        self._first = frozenset(index for index, _ in sizes[: 0 if exact else self.count])
        if self._search is not None:
            self._search.sizes = [size for _, size in sizes]
        self._sizes = {}

    def include(self, bucket: int, nbytes: int) -> bool:
        """Whether a bucket of this backward pass is compressed; ``nbytes`` is its size."""
        self._sizes[bucket] = nbytes
        return bucket in self._first

    def close(self) -> None:
        """Leave the exchange with the other ranks; bounded, idempotent."""
        self._values.close()
