"""A worker's part in the rounds, as each of its ranks goes through it: steps, pseudo-gradients, standing still.

On every rank of a worker the same calls lead to the same places, at the same steps; see ``WorkerGroup`` for why. What
is said to other workers is the business of the worker's first rank, which counts its steps, sends its pseudo-gradient
when it is time to, and merges what the others make of it. The worker's other ranks follow: they hear in an ``Outcome``
what the first one has done, and get its weights, bit for bit.

There are two roads to the others. Here is that of workers launched together (``WorkerSession`` on a rank that follows,
``LeadingSession`` on one that leads), where all live or the job ends, and all stand still where one of them has an
epoch's end, a validation, or its own end. That of a coordinator, where workers come and go, is in
``coordinated_session.py``. Both end a round with the same: a weighted mean that every worker has the same bits of, with
which each takes the outer step itself.

All but ``receive`` and ``fail`` is called by the training thread, which waits for other workers at two places only: for
a pseudo-gradient that is to be merged now, and for the start of a round.

Where a merge follows the mean (``overlap_steps="auto"``, see ``fragments.py``), the leader alone looks whether it is
there, after each step beside it, and the others hear what it has seen. All of them ask after the same steps, as they
have sent after the same one, and have been told since that nothing is to be merged yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
from torch import Tensor

from lightning_bytescheduler.diloco.fragments import Overlap, TrainedWeights
from lightning_bytescheduler.diloco.messages import (
    EndRound,
    JoinRounds,
    Message,
    PassedRoundEnd,
    RoundEnded,
    RoundStatus,
    SendingPseudoGradient,
    StepMetrics,
)
from lightning_bytescheduler.diloco.outer_optimizer import OuterState
from lightning_bytescheduler.diloco.outer_timeline import OuterTimeline
from lightning_bytescheduler.diloco.process_groups import WorkerGroup
from lightning_bytescheduler.diloco.round_counter import RoundCounter
from lightning_bytescheduler.exceptions import SchedulerTimeoutError


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What a worker has made of a fragment in a round.

    Attributes:
        worker: Who.
        round: In which round; 0 where fragments are synchronised that do not belong to the round that ends.
        fragment: Which fragment.
        pseudo_gradient: Flat, fp32, on the CPU; not to be changed any more.
        weight: In the mean, as this worker works it out.
        samples: Processed since this fragment was last sent.
        tokens: The same in tokens; 0 where nobody counts them.
        steps: Taken in this round.
        round_samples: Processed in this round.
    """

    worker: str
    round: int
    fragment: int
    pseudo_gradient: Tensor
    weight: int = 0
    samples: int = 0
    tokens: int = 0
    steps: int = 0
    round_samples: int = 0


class Exchanging(Protocol):
    """A pseudo-gradient that is on its way between workers launched together."""

    def is_there(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once. Looks only."""

    def wait(self, timeout: float) -> tuple[Tensor, int]:
        """Wait for the weighted mean, flat, and the sum of the weights.

        Args:
            timeout: Longest wait in seconds.

        Raises:
            SchedulerTimeoutError: If it is not there in time.
            BaseException: What the exchange has failed with.
        """


class Link(Protocol):
    """A worker's way to the others that were launched with it. Nothing but :meth:`Exchanging.wait` waits for them."""

    def post(self, message: Message) -> None:
        """Send a message to the batch scheduler; at once, never blocks."""

    def start(self, contribution: Contribution) -> Exchanging:
        """Begin to exchange a fragment; returns at once."""

    def abort(self, cause: BaseException) -> None:
        """Fail everything that is under way, and whatever is started later. For any thread."""


@dataclass(slots=True)
class SessionStatistics:
    """Where a worker's time went.

    Attributes:
        rounds: That have ended.
        steps: Taken.
        samples: Processed.
        merged_samples: Of all workers, in rounds that have ended.
        exchange_s: That the training thread waited for pseudo-gradients, its own and the others'.
        start_s: That it waited for a round to start.
    """

    rounds: int = 0
    steps: int = 0
    samples: int = 0
    merged_samples: int = 0
    exchange_s: float = 0.0
    start_s: float = 0.0


class Outcome(msgspec.Struct, frozen=True):
    """What the first rank tells the worker's others once it has done something for all of them.

    Attributes:
        changed: Fragments whose weights it has others of now.
        version: Rounds that are part of the global weights.
        over: Whether training is over.
        ended: The last round's end.
    """

    changed: list[int]
    version: int
    over: bool
    ended: RoundEnded | None


class RankSession:
    """One rank of a worker in one training. All but :meth:`fail` is for the training thread.

    Args:
        worker: The worker's name.
        group: The worker's ranks.
        trained: What is trained.

    Attributes:
        worker: As given, until a coordinator gives another one.
        statistics: Of this rank.
        round_end: The last one.
        version: Rounds that are part of the global weights, as all ranks of the worker know it.
        over: Whether training is over, as all ranks of the worker know it.
    """

    def __init__(self, *, worker: str, group: WorkerGroup, trained: TrainedWeights) -> None:
        self.worker = worker
        self.statistics = SessionStatistics()
        self.round_end: RoundEnded | None = None
        self.version = 0
        self.over = False
        self._group = group
        self._trained = trained
        self._changed: set[int] = set()  # fragments whose weights the worker's other ranks do not have yet
        self._failure: BaseException | None = None

    @property
    def round(self) -> int:
        """The round this worker is in."""
        return self.version + 1

    def progress(self) -> dict[str, float]:
        """How the rounds go, by name; what is not known on this rank is left out."""
        if self.round_end is None:
            return {}
        return {"share": self.round_end.shares.get(self.worker, 0.0), **self.round_end.metrics}

    def fail(self, error: BaseException) -> None:
        """Nothing is to be expected of the others any more: raise ``error`` from whatever is waited for."""
        if self._failure is None:
            self._failure = error
        self._group.abort(error)

    def check(self) -> None:
        """Raise what another thread or rank has failed with, if any."""
        if self._failure is not None:
            raise self._failure

    def begin(self) -> None:
        """Join, and wait for the first round."""
        self._together(self._begin)

    def count(self, *, samples: int, seconds: float, tokens: int = 0, loss: float | None = None) -> None:
        """Take note of a step, and report it without waiting.

        Args:
            samples: Of the step, on all ranks of the worker together.
            seconds: That it took, from the end of the step before.
            tokens: Of the step, where pseudo-gradients are weighted by them.
            loss: Of the step.
        """
        self.check()
        self._report(samples=samples, seconds=seconds, tokens=tokens, loss=loss)
        self.statistics.steps += 1
        self.statistics.samples += samples

    def is_due(self) -> bool:
        """Whether there is something to do before another step is taken: as the leader knows it now."""
        return self._group.any(self._is_due())

    def _together(self, work: Callable[[], None]) -> None:
        """The first rank does it; the others hear what has become of it, and get the weights that it has changed."""
        if self._group.leads:
            work()
            outcome = Outcome(sorted(self._changed), self.version, self.over, self.round_end)
            self._group.tell(msgspec.json.encode(outcome).decode())
        else:
            outcome = msgspec.json.decode(self._group.tell(), type=Outcome)
            self.version, self.over, self.round_end = outcome.version, outcome.over, outcome.ended
        self._changed.clear()
        for fragment in outcome.changed:
            self._group.share(self._trained.of(fragment))

    # What follows is the first rank's business; the others do nothing there.

    def _begin(self) -> None:
        """Become one of the workers, and begin the first round."""

    def _report(self, *, samples: int, seconds: float, tokens: int, loss: float | None) -> None:
        """Tell of a step."""

    def _is_due(self) -> bool:
        """Whether there is something to do now."""
        return False


_SLICE_S = 1.0


class WorkerSession(RankSession):
    """One rank of a worker launched with others; by itself, one that follows. For the training thread, but ``fail``.

    Args:
        worker: The worker's name.
        group: The worker's ranks.
        trained: What is trained.
        overlap: When what was sent is merged.
        flush: Called on the training thread before weights are read or replaced: brings them up to date.

    Attributes:
        halted: Whether all workers stand still at the end of a round.
        at_begin: Called where a round has begun right after a merge, with nothing of it done yet.
    """

    def __init__(
        self,
        *,
        worker: str,
        group: WorkerGroup,
        trained: TrainedWeights,
        overlap: Overlap,
        flush: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(worker=worker, group=group, trained=trained)
        self.halted = False
        self.at_begin: Callable[[], None] | None = None
        self._overlap = overlap
        self._flush = flush
        self._sent = False  # a pseudo-gradient that is not merged yet
        self._steps_since_sent = 0

    def count(self, *, samples: int, seconds: float, tokens: int = 0, loss: float | None = None) -> None:
        """Take note of a step, and report it without waiting.

        With overlap, this merges what was sent when it is time to, and waits for it if it must; see RankSession.
        """
        super().count(samples=samples, seconds=seconds, tokens=tokens, loss=loss)
        if self._sent:
            self._steps_since_sent += 1
            if self._is_to_merge():
                self.merge_sent()

    def ask(self, *, now: bool = False, epoch: bool = False, validate: bool = False, stop: bool = False) -> None:
        """Say what is to happen at the end of this round, and whether that is to be soon; the leader does."""

    def end_round(self) -> None:
        """Send the pseudo-gradient. Without overlap, merge the answer too, and start the next round unless all halt."""
        self.merge_sent()
        if self.halted:
            return
        self._flush()
        self._send_pseudo_gradient()
        self._sent = True
        self._steps_since_sent = 0
        if not self._overlap:
            self.merge_sent()

    def merge_sent(self) -> None:
        """Merge what is under way, if anything is."""
        if not self._sent:
            return
        self._sent = False
        self._flush()
        self._together(self._merge)
        if self.round_end is None:
            raise RuntimeError("The leader told of no round's end.")
        self.statistics.rounds += 1
        self.statistics.merged_samples += self.round_end.samples
        # Where all stand still, all fragments are synchronised, and everybody has the global weights.
        self.halted = self.round_end.halts
        if not self.halted and not self.over and self.at_begin is not None:
            self.at_begin()

    def end_round_for_all(self, *, epoch: bool = False, validate: bool = False, stop: bool = False) -> None:
        """End the round for all workers, with something that all of them stand still for."""
        self.merge_sent()
        if self.halted:  # another worker was first
            return
        self.ask(now=True, epoch=epoch, validate=validate, stop=stop)
        self.end_round()
        self.merge_sent()

    def pass_on(self, *, stop: bool = False) -> bool:
        """Go on after everybody stood still, or stop if any worker does; returns whether training goes on."""
        if self.over or not self.halted:
            return not self.over
        self.halted = False
        self._together(lambda: self._pass_on(stop=stop))
        return not self.over

    def finish(self) -> None:
        """End the training for all workers."""
        if self.over:
            return
        if self._sent or not self.halted:
            self.end_round_for_all(stop=True)
        if not self.over:
            self.pass_on(stop=True)

    def _is_to_merge(self) -> bool:
        if self._overlap.follows_mean:
            return self._group.any(self._need_not_train_on())
        return self._steps_since_sent >= self._overlap.longest(0)

    def _need_not_train_on(self) -> bool:
        """Whether to merge what is under way now, without a number of steps for it."""
        return False

    def _send_pseudo_gradient(self) -> None:
        """Begin to send what the round's steps have made of its fragment."""

    def _merge(self) -> None:
        """Wait for the end of the round, let the trained weights follow, and begin the next one unless all halt."""

    def _pass_on(self, *, stop: bool) -> None:
        """Say that this worker is through with what all stood still for, and begin the next round."""


@dataclass(frozen=True, slots=True)
class _Sent:
    round: int
    fragment: int
    exchange: Exchanging
    longest: int  # steps beside it


class LeadingSession(WorkerSession):
    """The first rank of a worker, often the only one.

    Args:
        worker: The worker's name.
        group: The worker's ranks.
        state: The global weights.
        link: To the batch scheduler and the other workers.
        overlap: See :class:`WorkerSession`.
        flush: See :class:`WorkerSession`.
        timeout: Longest wait for the other workers, in seconds.
        timeline: Where spans go.
    """

    def __init__(
        self,
        *,
        worker: str,
        group: WorkerGroup,
        state: OuterState,
        link: Link,
        overlap: Overlap,
        flush: Callable[[], None],
        timeout: float,
        timeline: OuterTimeline | None = None,
    ) -> None:
        super().__init__(worker=worker, group=group, trained=state.trained, overlap=overlap, flush=flush)
        self.left: int | None = None
        self._state = state
        self._link = link
        self._timeout = timeout
        self._timeline = OuterTimeline() if timeline is None else timeline
        self._lock = threading.Condition()
        # What follows changes under the lock.
        self._counter = RoundCounter(worker)
        self._round_ends: dict[int, RoundEnded] = {}
        # The training thread's own.
        self._under_way: _Sent | None = None

    @property
    def round(self) -> int:
        """The round this worker is in."""
        return self._counter.round

    def progress(self) -> dict[str, float]:
        """How the rounds go, by name; what is not known is left out."""
        known = {"round": self._counter.round, "to_go": self.left, "steps_left": self._counter.steps_left}
        return {name: float(value) for name, value in known.items() if value is not None} | super().progress()

    def done_in_round(self) -> dict[str, int]:
        """What was done in this round, by name; where it has just begun, beside the last one's mean."""
        with self._lock:
            counter = self._counter
            return {"steps": counter.steps, "samples": counter.samples, "tokens": counter.tokens}

    def go_on(self, done: Mapping[str, int]) -> None:
        """Count on in the first round of a restart from what :meth:`done_in_round` gave; before its first step."""
        with self._lock:
            self._counter.go_on(steps=done["steps"], samples=done["samples"], tokens=done["tokens"])

    # ------------------------------------------------------------------ other threads

    def receive(self, message: Message) -> None:
        """Take in what the batch scheduler says."""
        with self._lock:
            if isinstance(message, RoundEnded):
                self._round_ends[message.round] = message
            elif isinstance(message, RoundStatus):
                self.left = message.left
            else:
                self._counter.receive(message)
            self._lock.notify_all()

    def fail(self, error: BaseException) -> None:
        """See RankSession."""
        with self._lock:
            super().fail(error)
            self._lock.notify_all()
        self._link.abort(error)

    # ------------------------------------------------------------------ the training thread

    def ask(self, *, now: bool = False, epoch: bool = False, validate: bool = False, stop: bool = False) -> None:
        """See WorkerSession."""
        round, steps = self._counter.round, self._counter.steps
        self._link.post(
            EndRound(worker=self.worker, round=round, now=now, steps=steps, epoch=epoch, validate=validate, stop=stop)
        )

    def _begin(self) -> None:
        self._link.post(JoinRounds(worker=self.worker))
        self._await_round()

    def _report(self, *, samples: int, seconds: float, tokens: int, loss: float | None) -> None:
        self._timeline.trained(self._counter.round)
        with self._lock:
            report = self._counter.step(batch_size=samples, seconds=seconds, tokens=tokens)
        self._state.count(samples=samples, tokens=tokens)
        self._link.post(report)
        self._link.post(
            StepMetrics(worker=self.worker, round=report.round, batch_size=samples, seconds=seconds, loss=loss)
        )

    def _is_due(self) -> bool:
        with self._lock:
            return self._counter.due

    def _need_not_train_on(self) -> bool:
        sent = self._under_way
        if sent is None or self._steps_since_sent >= sent.longest:
            return True
        if not sent.exchange.is_there():
            return False
        counter = self._counter
        with self._lock:
            ended = self._round_ends.get(sent.round)
            # Where all stand still, no round is begun before all have passed that.
            return ended is not None and (ended.halts or counter.next_round is not None or counter.finished)

    def _send_pseudo_gradient(self) -> None:
        with self._lock:
            round, message = self._counter.round, self._counter.send()
        self._link.post(message)
        fragment = self._trained.fragment_of(round)
        longest = self._overlap.longest(message.steps)
        self._under_way = _Sent(round, fragment, self._send(fragment, message), longest)

    def _merge(self) -> None:
        sent, self._under_way = self._under_way, None
        if sent is None:
            raise RuntimeError("Cannot merge a pseudo-gradient: none was sent.")
        mean, total = self._received(sent.exchange)
        self._await(lambda: sent.round in self._round_ends, f"the end of round {sent.round}")
        ended = self.round_end = self._round_ends.pop(sent.round)
        self.version = sent.round
        self._step(sent.fragment, mean, total, exactly=ended.halts)
        if not ended.halts:
            self._await_round()
            return
        others = [(fragment, self._send(fragment)) for fragment in self._trained.others(sent.round)]
        for fragment, exchange in others:
            self._step(fragment, *self._received(exchange), exactly=True)
        self.over = ended.stop

    def _step(self, fragment: int, mean: Tensor, total: int, *, exactly: bool) -> None:
        with self._timeline.doing("outer step"):
            self._state.merge(fragment, mean, total=total, exactly=exactly)
        self._changed.add(fragment)

    def _pass_on(self, *, stop: bool) -> None:
        ended = self.round_end
        self._timeline.stood("validation" if ended is not None and ended.validate else "end of the epoch")
        self._link.post(PassedRoundEnd(worker=self.worker, round=0 if ended is None else ended.round, stop=stop))
        self._await_round()

    def _await_round(self) -> None:
        self._await(lambda: self._counter.next_round is not None or self._counter.finished, "the next round")
        with self._lock:
            self.over = self._counter.finished
            message = None if self.over else self._counter.start()
        if message is not None:
            self._link.post(message)

    def _send(self, fragment: int, message: SendingPseudoGradient | None = None) -> Exchanging:
        with self._timeline.doing("pseudo-gradient"):
            pseudo_gradient, weight = self._state.pseudo_gradient(fragment)
        return self._link.start(
            Contribution(
                worker=self.worker,
                round=0 if message is None else message.round,
                fragment=fragment,
                pseudo_gradient=pseudo_gradient,
                weight=weight,
            )
        )

    def _received(self, exchange: Exchanging) -> tuple[Tensor, int]:
        began, since = time.monotonic(), self._timeline.now()
        found = exchange.wait(self._timeout)
        self.statistics.exchange_s += time.monotonic() - began
        self._timeline.waiting("the mean", since)
        return found

    def _await(self, ready: Callable[[], bool], what: str) -> None:
        began, since = time.monotonic(), self._timeline.now()
        with self._lock:
            while not ready():
                self.check()
                waited = time.monotonic() - began
                if waited >= self._timeout:
                    raise SchedulerTimeoutError(
                        f"{self.worker} waited {waited:.0f} s for {what}: not all workers have got there. Raise the "
                        "strategy's timeout if that may take longer."
                    )
                self._lock.wait(min(_SLICE_S, self._timeout - waited))
        self.statistics.start_s += time.monotonic() - began
        self._timeline.waiting(what, since)
