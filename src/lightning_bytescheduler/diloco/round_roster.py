"""Who is there, and what those who take part in the round come to together: kept up to date worker by worker.

Whoever changes a worker says so with :meth:`RoundRoster.refresh`. Then sums, bounds and the moment at which the next
worker will have been silent for too long are right again, at a cost that hardly grows with the number of workers.

Nothing here grows without end: those who were lost or have left are forgotten, with their step times, when they have
not been heard of for ``expiry`` seconds, or when there are very many of them.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lightning_bytescheduler.diloco.projection import Pace
from lightning_bytescheduler.diloco.round_end import RoundTarget
from lightning_bytescheduler.diloco.round_options import RoundOptions
from lightning_bytescheduler.diloco.round_totals import RunningMaximum, RunningSum, Tally
from lightning_bytescheduler.diloco.worker_progress import StepTimeState, WorkerProgress, WorkerState

__all__ = ["LEAD_STEPS", "RoundRoster"]

LEAD_STEPS = 3
"""The end of a round is decided so many steps of the slowest worker before it: fewer make a better forecast, and with
one, a worker may be in the middle of a step that it should not have begun."""

_MOST_LOST = 1024
_MOST_REMEMBERED = 4096
_MICRO = 1e6  # of a sample a second, so that speeds add up in whole numbers


@dataclass(slots=True)
class _Remembered:
    """Of one who is not there."""

    since: float
    step_time: StepTimeState
    has_left: bool


class RoundRoster:
    """The workers, and their sums in the round that is on.

    Args:
        target: What ends a round.
        options: How long a worker may be silent, and for how long it is remembered.
    """

    def __init__(self, target: RoundTarget, options: RoundOptions) -> None:
        self.workers: dict[str, WorkerProgress] = {}
        self._target = target
        self._options = options
        self._numbers = 0
        self._departed: list[WorkerProgress] = []  # who has left in this round, and has sent
        self._remembered: OrderedDict[str, _Remembered] = OrderedDict()  # who left first is first
        self.begin_round()

    # ── Who is there ───────────────────────────────────────────────────────────

    def departed(self, name: str) -> WorkerProgress | None:
        """A worker that has left in this round, and whose pseudo-gradient may still come."""
        return next((one for one in self._departed if one.name == name and one.state is WorkerState.SENDING), None)

    def has_left(self, name: str) -> bool:
        """Whether it was there, and has said that it leaves."""
        remembered = self._remembered.get(name)
        return remembered is not None and remembered.has_left

    def add(self, name: str, session: int, now: float) -> WorkerProgress:
        """A worker joins. Its step times are known if it was there before."""
        self._numbers += 1
        worker = self.workers[name] = WorkerProgress(name=name, number=self._numbers, session=session, heard=now)
        remembered = self._remembered.pop(name, None)
        if remembered is not None:
            worker.step_time.load_state_dict(remembered.step_time)
        return worker

    def take_back(self, name: str, session: int, now: float) -> WorkerProgress | None:
        """One who has left in this round after it has sent is back, as the same process: it has its place again."""
        worker = next((one for one in self._departed if (one.name, one.session) == (name, session)), None)
        if worker is None or name in self.workers:
            return None
        self._departed.remove(worker)
        self._remembered.pop(name, None)
        self.workers[name], worker.left, worker.heard = worker, False, now
        return worker

    def remove(self, worker: WorkerProgress, now: float, *, has_left: bool) -> None:
        """It is gone, or was started anew. What it has sent still counts in this round."""
        self._remembered.pop(worker.name, None)
        self._remembered[worker.name] = _Remembered(now, worker.step_time.state_dict(), has_left)
        del self.workers[worker.name]
        worker.left = True
        if worker.has_ended:
            self._departed.append(worker)
        else:
            worker.state = WorkerState.LOST
        self.refresh(worker, now)
        self._forget_left(now)

    def _forget_left(self, now: float) -> None:
        for remembered in self._remembered.values():
            if remembered.since != math.inf:
                break
            remembered.since = now  # kept over a restart, by another clock
        while self._remembered:
            first = next(iter(self._remembered.values()))
            if len(self._remembered) <= _MOST_REMEMBERED and now < first.since + self._options.expiry:
                break
            self._remembered.popitem(last=False)

    def forget_lost(self, now: float) -> None:
        """Forget whoever was lost or has left, and was not heard of for long."""
        lost = [worker for worker in self.workers.values() if worker.state is WorkerState.LOST]
        lost.sort(key=lambda worker: -worker.heard)
        for index, worker in enumerate(lost):
            if index >= _MOST_LOST or now >= worker.heard + self._options.expiry:
                del self.workers[worker.name]
        self._forget_left(now)

    def members(self) -> list[WorkerProgress]:
        """Who takes part in this round."""
        return [worker for worker in (*self.workers.values(), *self._departed) if worker.is_member]

    def counted_training(self) -> list[WorkerProgress]:
        """Who has steps of this round before it, and is neither silent nor paused."""
        return [worker for worker in self.workers.values() if worker.number in self._watched]

    def step_times(self) -> dict[str, StepTimeState]:
        """What to keep of everybody over a restart."""
        known = {name: worker.step_time.state_dict() for name, worker in self.workers.items()}
        return {name: remembered.step_time for name, remembered in self._remembered.items()} | known

    def load_step_times(self, states: Mapping[str, StepTimeState]) -> None:
        """Take over what was kept."""
        kept = {name: _Remembered(math.inf, state, has_left=False) for name, state in states.items()}
        self._remembered = OrderedDict(kept)

    # ── The round ───────────────────────────────────────────────────────────

    def begin_round(self) -> None:
        """Nobody takes part yet."""
        self._departed = []
        self._all, self._counted = Tally(), Tally()
        self._outlook = self._target.outlook()
        self._leads = RunningMaximum()  # seconds before the end at which each worker has to be told
        self._untimed: set[int] = set()  # whose steps' time is not known well
        self._sending: set[int] = set()
        self._missing, self._idle = RunningSum(), RunningSum()
        self._watched: dict[int, WorkerProgress] = {}  # training, and not silent
        self._looks: list[tuple[float, int]] = []  # when to look whether a worker is silent
        self._look_of: dict[int, float] = {}

    def refresh(self, worker: WorkerProgress, now: float) -> None:
        """Take over what has changed of a worker that takes part, or did.

        Args:
            worker: Which.
            now: In seconds.
        """
        key, silent_at = worker.number, worker.silent_at(self._options)
        training = worker.is_training and not worker.paused and now < silent_at
        if training and key in self._watched:  # as with nearly all reports: it trains on
            self._all.set(key, samples=worker.samples, steps=worker.steps)
            self._counted.set(key, samples=worker.samples, steps=worker.steps)
            self._watch(worker, silent_at)
            self._foresee(worker, training, self.pace(worker))
            self._miss(worker)
            return
        if worker.is_member:
            self._all.set(key, samples=worker.samples, steps=worker.steps)
        else:
            self._all.discard(key)
        # Whoever is silent is not counted on, nor is what it did: its pseudo-gradient will probably not come.
        if training or (worker.has_ended and not (worker.left and worker.state is WorkerState.SENDING)):
            self._counted.set(key, samples=worker.samples, steps=worker.steps)
        else:
            self._counted.discard(key)
        if training:
            self._watch(worker, silent_at)
        elif key in self._watched:
            del self._watched[key], self._look_of[key]
        pace = self.pace(worker) if training else None
        self._foresee(worker, training, pace)
        is_sending = worker.state is WorkerState.SENDING and not worker.left
        (self._sending.add if is_sending else self._sending.discard)(key)
        if training or is_sending:
            self._miss(worker)
        else:
            self._missing.discard(key)
        if worker.state is WorkerState.ARRIVED and not worker.left:
            self._idle.set(key, round((worker.samples_per_second or 0.0) * _MICRO))
        else:
            self._idle.discard(key)

    def _miss(self, worker: WorkerProgress) -> None:
        more = 0 if worker.send_after is None else max(worker.send_after - worker.steps, 0)
        self._missing.set(worker.number, worker.samples + more * (worker.step_time.batch_size or 0))

    def _foresee(self, worker: WorkerProgress, training: bool, pace: Pace | None) -> None:
        key = worker.number
        if pace is None:
            self._outlook.discard(key)
            self._leads.discard(key)
        else:
            self._outlook.set(key, pace)
            # The end is decided some steps of the slowest before it; and each must hear of it before its last step.
            self._leads.set(key, max(LEAD_STEPS, pace.committed + 1) * pace.step_seconds)
        untimed = training and not worker.step_time.is_known and not worker.began_late
        (self._untimed.add if untimed else self._untimed.discard)(key)

    def pace(self, worker: WorkerProgress) -> Pace | None:
        """How a worker gets on, or ``None`` where the end of the round does not depend on it.

        Steps of one who has begun late are taken as they come where the round ends with the fastest worker's. Its first
        one is counted on nowhere: if it is not there when the end is decided, it is for the next round.
        """
        if worker.began_late and (self._target.step_cap is not None or not worker.steps):
            return None
        return worker.pace(self._target.step_cap)

    def _watch(self, worker: WorkerProgress, silent_at: float) -> None:
        key = worker.number
        self._watched[key] = worker
        # It is mostly later than when it was last looked for, which is found out when it is looked for again.
        if silent_at < self._look_of.get(key, math.inf):
            self._look_of[key] = silent_at
            heapq.heappush(self._looks, (silent_at, key))

    def look_for_silence(self, now: float) -> None:
        """Count no more on whoever has been silent for too long."""
        # Nobody is silent before the moment at which to look for that.
        while self._looks and self._looks[0][0] <= now and (at := self.next_silence) is not None and at <= now:
            self.refresh(self._watched[self._looks[0][1]], now)

    @property
    def next_silence(self) -> float | None:
        """When the next one will have been silent for too long."""
        while self._looks:
            at, key = self._looks[0]
            worker = self._watched.get(key)
            if worker is None or self._look_of[key] != at:
                heapq.heappop(self._looks)
                continue
            silent_at = worker.silent_at(self._options)
            if silent_at <= at:
                return at
            self._look_of[key] = silent_at
            heapq.heapreplace(self._looks, (silent_at, key))
        return None

    def __iter__(self) -> Iterator[WorkerProgress]:
        return iter(list(self.workers.values()))

    @property
    def left(self) -> int:
        """What is to go by what all have done."""
        return self._target.left(samples=self._all.samples, steps=self._all.steps)

    @property
    def left_to_count_on(self) -> int:
        """The same without those who are silent or paused."""
        return self._target.left(samples=self._counted.samples, steps=self._counted.steps)

    @property
    def training(self) -> int:
        """How many have steps before them and are counted on."""
        return len(self._watched)

    @property
    def awaited(self) -> int:
        """How many pseudo-gradients may still come."""
        return len(self._watched) + len(self._sending)

    @property
    def all_timed(self) -> bool:
        """Whether the time of a step is known of all who have steps before them and are counted on."""
        return not self._untimed

    @property
    def lead(self) -> float:
        """Seconds before its end that a round is decided: each worker must hear of it before its last step."""
        return self._leads.value or 0.0

    @property
    def missing_samples(self) -> int:
        """Of pseudo-gradients that may still come."""
        return self._missing.total

    @property
    def idle_speed(self) -> float:
        """Samples a second of those who are through."""
        return self._idle.total / _MICRO

    @property
    def longest_transfer(self) -> float | None:
        """Of all who are there, as it usually is with each; ``None`` before the first."""
        known = [worker.transfer.mean for worker in self if worker.state is not WorkerState.LOST]
        return max((seconds for seconds in known if seconds is not None), default=None)

    def is_far(self, left: int, *, now: float) -> bool:
        """Whether the end of the round is surely further away than :attr:`lead`."""
        return self._outlook.is_far(left, now=now, within=self.lead)
