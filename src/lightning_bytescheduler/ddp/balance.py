"""Decides how many samples of each batch every rank takes, so that all ranks finish together. Reads no clock.

A rank's *pace* is the computing time of one sample, in seconds: the mean of the middle half of recent values, so that
short disturbances do not move it. When several values in a row lie well above or below it, the pace has changed, and
older values are dropped. A rank whose share changes is measured anew, as part of a step's time does not depend on the
number of samples.

*When shares change*: when the slowest rank's step would become shorter by more than a few percent and by more than the
paces are uncertain. So noise changes nothing, and equal machines keep equal shares.

*For which batch*: a decision based on the times of batch t counts from batch t + ahead on. All ranks put the same
numbers in the same order into the same arithmetic, so they decide alike without further messages. With each batch a
rank posts the time of the previous one (``number_exchange.py``). A rank that asks for the shares of batch b needs what
was posted with all batches up to b - ahead + 1.

Source: performance-aware scheduling. DiLoCo's rounds use the same paces (``diloco/round_roster.py``) to choose the
number of steps, where this module chooses their size.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from lightning_bytescheduler.collectives.number_exchange import PostedNumbers

__all__ = ["Balance", "Pace", "part_of", "shares_by_pace"]

_WINDOW = 64
_CHANGED_AFTER = 5  # values in a row; a disturbance is shorter
_SLOWER, _FASTER = 1.5, 0.5  # times the pace; both equally unlikely by chance
_LEAST_VALUES = 5  # before a pace is used
_LEAST_GAIN = 0.05  # fraction of a step that justifies a change
_CERTAIN = 3.0  # times the uncertainty of a pace


class Pace:
    """Seconds that one sample takes on one rank."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_WINDOW)

    def observe(self, seconds: float) -> None:
        """Record the seconds of one sample in a step."""
        self._values.append(seconds)
        recent = list(self._values)[-_CHANGED_AFTER:]
        before = list(self._values)[:-_CHANGED_AFTER]
        if before:
            mean = _middle_mean(before)
            if min(recent) > mean * _SLOWER or max(recent) < mean * _FASTER:
                self._values = deque(recent, maxlen=_WINDOW)

    def forget(self) -> None:
        """Drop all values, as they belong to another share."""
        self._values.clear()

    @property
    def known(self) -> bool:
        """Whether enough steps were observed."""
        return len(self._values) >= _LEAST_VALUES

    @property
    def seconds(self) -> float:
        """Typical seconds per sample."""
        return _middle_mean(list(self._values))

    @property
    def uncertainty(self) -> float:
        """Relative standard error of :attr:`seconds`, estimated from the quartiles."""
        ordered = sorted(self._values)
        quarter = len(ordered) // 4
        spread = (ordered[-1 - quarter] - ordered[quarter]) / 1.35  # standard deviation, for a normal distribution
        return spread / math.sqrt(len(ordered)) / self.seconds


def _middle_mean(values: list[float]) -> float:
    ordered = sorted(values)
    cut = max(len(ordered) // 4, 1) if len(ordered) > 2 else 0
    kept = ordered[cut : len(ordered) - cut]
    return sum(kept) / len(kept)


def shares_by_pace(total: int, paces: Sequence[float], limits: Sequence[int]) -> tuple[int, ...]:
    """Share samples out so that the slowest rank finishes as early as possible.

    Args:
        total: Samples of a batch over all ranks: at least one for each rank, at most the sum of ``limits``.
        paces: Seconds per sample, by rank, each above 0.
        limits: The most samples that each rank may take, 1 or more.

    Returns:
        Samples by rank, each 1 or more; their sum is ``total``.
    """
    rate = sum(1.0 / pace for pace in paces)
    shares = [min(max(int(total / pace / rate), 1), limit) for pace, limit in zip(paces, limits, strict=True)]
    ranks = range(len(shares))
    while sum(shares) > total:
        shares[max((rank for rank in ranks if shares[rank] > 1), key=lambda rank: shares[rank] * paces[rank])] -= 1
    while sum(shares) < total:
        free = (rank for rank in ranks if shares[rank] < limits[rank])
        shares[min(free, key=lambda rank: (shares[rank] + 1) * paces[rank])] += 1
    return tuple(shares)


def part_of(shares: Sequence[int], size: int) -> tuple[int, ...]:
    """Scale shares to a batch of ``size`` samples, with at least one for each rank if there are enough.

    A rank without a sample would compute on a copy of another rank's and save no time.
    """
    total = sum(shares)
    parts = [share * size // total for share in shares]
    left = sorted(range(len(shares)), key=lambda rank: (-(shares[rank] * size % total), rank))
    for rank in left[: size - sum(parts)]:
        parts[rank] += 1
    while 0 in parts and size >= len(parts):
        parts[parts.index(max(parts))] -= 1
        parts[parts.index(0)] += 1
    return tuple(parts)


class Balance:
    """The shares of each batch, derived from the times of earlier batches. Used by the training thread.

    Args:
        total: Samples of a batch over all ranks: at least one for each rank, at most the sum of ``limits``.
        ahead: A decision counts this many batches later, 2 or more: the time of a batch is posted with the next one,
            and no rank's loader draws farther ahead. With ``math.inf`` shares stay equal.
        failure: Called while waiting for other ranks' numbers; returns the reason if they will not come.
    """

    def __init__(
        self,
        total: int,
        ranks: int,
        *,
        ahead: float,
        limits: Sequence[int] | None = None,
        failure: Callable[[], BaseException | None] = lambda: None,
    ) -> None:
        self._limits = tuple(limits) if limits is not None else (total,) * ranks
        self.changes = 0
        self.total = total
        self.ahead = ahead
        self._failure = failure
        self._paces = [Pace() for _ in range(ranks)]
        self._equal = shares_by_pace(total, [1.0] * ranks, self._limits)
        self._from: list[tuple[float, tuple[int, ...]]] = [(0, self._equal)]  # (first batch, shares), oldest first
        self._asked = 0
        self._posted: deque[PostedNumbers] = deque()
        self._taken = 0
        self._begun = 0
        self._first = 0  # number of this pass's first batch, counted over all passes

    @property
    def follows_pace(self) -> bool:
        """Whether shares may change."""
        return math.isfinite(self.ahead)

    def add(self, posted: PostedNumbers) -> None:
        """Record that a batch begins. Each row has samples, then the samples and nanoseconds of the previous one."""
        if self.follows_pace:
            self._posted.append(posted)
        self._begun += 1

    def of_pass(self, batch: int) -> tuple[int, ...]:
        """Return the shares of the n-th batch that is drawn in a pass over the data, from 0.

        Raises:
            BaseException: The reason why other ranks' numbers do not come.
        """
        if batch == 0:
            self._first = self._begun  # batches drawn in the last pass but not trained on do not count
        number = self._first + batch
        needed = number + 1 - self.ahead
        while self._taken <= needed:
            if not self._posted:
                raise RuntimeError(f"Batch {number} was drawn before batch {needed} had begun.")
            posted = self._posted.popleft()
            posted.wait(self._failure)
            seconds = [spent / samples * 1e-9 if samples and spent else None for _, samples, spent in posted.rows]
            self.observe(self._taken - 1, seconds)
            self._taken += 1
        return self.shares(number)

    def observe(self, batch: int, seconds: Sequence[float | None]) -> None:
        """Record the seconds per sample of each rank in batch ``batch``; ``None`` where unknown.

        Call this for every batch, in order.
        """
        last_from, current = self._from[-1]
        if batch < last_from:  # these times belong to shares that are already being replaced
            return
        for pace, value in zip(self._paces, seconds, strict=True):
            if value is not None and value > 0:
                pace.observe(value)
        paces = self._known_paces()
        if paces is None:
            return
        wanted = shares_by_pace(self.total, paces, self._limits)
        gain = _longest(current, paces) / _longest(wanted, paces) - 1.0
        if gain <= max(_LEAST_GAIN, _CERTAIN * max(pace.uncertainty for pace in self._paces)):
            return
        self.changes += 1
        self._from.append((batch + self.ahead, wanted))
        for pace, before, now in zip(self._paces, current, wanted, strict=True):
            if abs(now - before) > 0.1 * before:
                pace.forget()

    def _known_paces(self) -> list[float] | None:
        return [pace.seconds for pace in self._paces] if all(pace.known for pace in self._paces) else None

    def shares(self, batch: int) -> tuple[int, ...]:
        """Return the shares of batch ``batch``. A loader that draws ahead may ask for later batches earlier."""
        self._asked = batch
        return self.present

    @property
    def present(self) -> tuple[int, ...]:
        """Shares of the batch that was asked for last."""
        return next(shares for first, shares in reversed(self._from) if first <= self._asked)

    @property
    def saved_ms(self) -> float | None:
        """Milliseconds that present shares save per step against equal ones; ``None`` while paces are unknown."""
        paces = self._known_paces()
        return None if paces is None else 1e3 * (_longest(self._equal, paces) - _longest(self.present, paces))

    def metrics(self) -> dict[str, float]:
        """Return the values to log; empty if shares cannot change."""
        if not self.follows_pace:
            return {}
        shares = {f"bytescheduler/share_of_rank_{rank}": float(share) for rank, share in enumerate(self.present)}
        saved = self.saved_ms
        return shares if saved is None else {**shares, "bytescheduler/waiting_saved_ms": saved}


def _longest(shares: Sequence[int], paces: Sequence[float]) -> float:
    return max(share * pace for share, pace in zip(shares, paces, strict=True))
