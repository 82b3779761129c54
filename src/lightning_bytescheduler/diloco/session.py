"""A worker's part in the rounds, as each of its ranks goes through it: steps, pseudo-gradients, standing still.

On every rank of a worker the same calls lead to the same places, at the same steps; see ``WorkerGroup`` for why. What
is said to other workers is the business of the worker's first rank, which counts its steps, sends its pseudo-gradient
when it is time to, and merges what the others make of it (``LeadingRank``). The worker's other ranks follow: they hear
in an ``Outcome`` what the first one has done, and get its weights, bit for bit.

There are two roads to the others. Both end a round with the same: a weighted mean that every worker has the same bits
of, with which each takes the outer step itself.

*Launched together* (``WorkerSession`` on a rank that follows, ``LeadingSession`` on one that leads): all live or the
job ends, and all stand still where one of them has an epoch's end, a validation, or its own end. The training thread
waits for other workers at two places only: for a pseudo-gradient that is to be merged now, and for the start of a
round. Where a merge follows the mean (``overlap_steps="auto"``, see ``fragments.py``), the leader alone looks whether
it is there, after each step beside it, and the others hear what it has seen. All of them ask after the same steps, as
they have sent after the same one, and have been told since that nothing is to be merged yet.

*A coordinator's run* (``CoordinatedRounds``, ``CoordinatedSession``), where workers come and go: the training thread
looks at the end of each batch whether there is something to do, which takes no message. If there is, it sends what it
has trained, waits for the end of the round, takes the outer steps that it is behind, and begins the next round. Nobody
stands still for another worker's epoch or validation, and a worker's own end ends it alone. While the coordinator is
away there is nothing to do: the worker takes steps on the weights it has, and what was sent without an answer is sent
again with what was trained since. Samples are counted as sent when the round that they were sent for is part of the
weights here.

All but ``receive``, ``welcomed``, ``lost`` and ``fail`` is called by the training thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from threading import Condition
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from lightning_bytescheduler.diloco.coordinator_protocol import (
    FromCoordinator,
    FromWorker,
    LeaderAppointed,
    PauseRounds,
    ResumeRounds,
    Welcome,
)
from lightning_bytescheduler.diloco.coordinator_transport import (
    AwayError,
    CoordinatedExchange,
    CoordinatorTransport,
    Mean,
)
from lightning_bytescheduler.diloco.fragments import Overlap, TrainedWeights
from lightning_bytescheduler.diloco.messages import (
    EndRound,
    JoinRounds,
    LeaveRounds,
    Message,
    PassedRoundEnd,
    RoundEnded,
    RoundStatus,
    SendingPseudoGradient,
    StepMetrics,
    StepReport,
    TrainingOver,
)
from lightning_bytescheduler.diloco.outer_optimizer import Contribution, OuterState, pack_state, unpack_state
from lightning_bytescheduler.diloco.outer_timeline import OuterTimeline
from lightning_bytescheduler.diloco.process_groups import WorkerGroup
from lightning_bytescheduler.diloco.round_counter import RoundCounter


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


_E = TypeVar("_E", covariant=True)  # carries a pseudo-gradient


class Link(Protocol[_E]):
    """A worker's way to the others. Nothing but what :meth:`start` returns waits for them."""

    def post(self, *messages: Message) -> None:
        """Send messages to what decides about rounds; at once, never blocks."""

    def start(self, contribution: Contribution) -> _E:
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
        overlap: When what was sent is merged.
        flush: Called on the training thread before weights are read or replaced: brings them up to date.

    Attributes:
        worker: As given, until a coordinator gives another one.
        overlap: As given.
        statistics: Of this rank.
        round_end: The last one.
        version: Rounds that are part of the global weights, as all ranks of the worker know it.
        over: Whether training is over, as all ranks of the worker know it.
    """

    def __init__(
        self, *, worker: str, group: WorkerGroup, trained: TrainedWeights, overlap: Overlap, flush: Callable[[], None]
    ) -> None:
        self.worker = worker
        self.statistics = SessionStatistics()
        self.round_end: RoundEnded | None = None
        self.version = 0
        self.over = False
        self._group = group
        self._trained = trained
        self.overlap = overlap
        self._flush = flush
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


_KEPT_ENDS = 16


@dataclass(slots=True, kw_only=True)
class Sent(Generic[_E]):
    """A pseudo-gradient that is on its way.

    Attributes:
        said: Of the round in which it was made.
        update: What is sent.
        exchange: Carries it.
        longest: Steps beside it after which the worker waits.
        steps_since: Steps taken beside it.
    """

    said: SendingPseudoGradient
    update: Contribution
    exchange: _E
    longest: int
    steps_since: int = 0

    @property
    def round(self) -> int:
        """In which it was made."""
        return self.said.round


class LeadingRank(RankSession, Generic[_E]):
    """The first rank of a worker, often the only one: what is the same on either road to the others.

    Args:
        worker: The worker's name.
        group: The worker's ranks.
        state: The global weights.
        link: To the others.
        overlap: See :class:`RankSession`.
        flush: See :class:`RankSession`.
        timeout: Longest wait for the other workers, in seconds.
        lock: Of what other threads bring; notified of it.
        timeline: Where spans go.

    Attributes:
        state: As given.
    """

    def __init__(
        self,
        *,
        worker: str,
        group: WorkerGroup,
        state: OuterState,
        link: Link[_E],
        overlap: Overlap,
        flush: Callable[[], None],
        timeout: float,
        lock: Condition | None = None,
        timeline: OuterTimeline | None = None,
    ) -> None:
        super().__init__(worker=worker, group=group, trained=state.trained, overlap=overlap, flush=flush)
        self.state = state
        self._link = link
        self._timeout = timeout
        self._timeline = OuterTimeline(worker=worker) if timeline is None else timeline
        self._lock = Condition() if lock is None else lock
        # What follows changes under the lock.
        self._counter = RoundCounter(worker)
        self._round_ends: dict[int, RoundEnded] = {}
        self._left: int | None = None
        self._reported: StepReport | None = None
        # The training thread's own.
        self._sent: Sent[_E] | None = None

    def progress(self) -> dict[str, float]:
        """How the rounds go, by name; what is not known is left out."""
        known = {"round": self.round, "to_go": self._left, "steps_left": self._counter.steps_left}
        return {name: float(value) for name, value in known.items() if value is not None} | super().progress()

    def receive(self, message: FromCoordinator | FromWorker) -> None:
        """Take in what the batch scheduler, or the coordinator, says. For any thread."""
        with self._lock:
            self._hear(message)
            self._lock.notify_all()

    def fail(self, error: BaseException) -> None:
        """See RankSession."""
        with self._lock:
            super().fail(error)
            self._lock.notify_all()
        self._link.abort(error)

    def _hear(self, message: FromCoordinator | FromWorker) -> None:
        if isinstance(message, RoundEnded):
            self._round_ends[message.round] = message
            self._round_ends = dict(list(self._round_ends.items())[-_KEPT_ENDS:])
        elif isinstance(message, RoundStatus):
            self._left = message.left
        elif not isinstance(message, (LeaderAppointed, PauseRounds, ResumeRounds)):
            self._counter.receive(message)

    def _post(self, *messages: Message) -> None:
        self._link.post(*messages)

    def _report(self, *, samples: int, seconds: float, tokens: int, loss: float | None) -> None:
        self._timeline.trained(self.round)
        self.state.count(samples=samples, tokens=tokens)
        with self._lock:
            report = self._reported = self._counter.step(batch_size=samples, seconds=seconds, tokens=tokens)
            measured = StepMetrics(
                worker=self.worker, round=report.round, batch_size=samples, seconds=seconds, loss=loss
            )
            self._post(report, measured)
        if self._sent is not None:
            self._sent.steps_since += 1

    def _update(self, fragment: int, round: int, *, steps: int = 0, round_samples: int = 0) -> Contribution:
        with self._timeline.doing("pseudo-gradient"):
            pseudo_gradient, weight = self.state.pseudo_gradient(fragment)
        return Contribution(
            worker=self.worker,
            round=round,
            fragment=fragment,
            pseudo_gradient=pseudo_gradient,
            weight=weight,
            samples=self.state.samples[fragment],
            tokens=self.state.tokens[fragment],
            steps=steps,
            round_samples=round_samples,
        )

    def _step(self, fragment: int, mean: Tensor, total: int, *, exactly: bool) -> None:
        with self._timeline.doing("outer step"):
            self.state.merge(fragment, mean, total=total, exactly=exactly)
        self._changed.add(fragment)

    def _await(self, ready: Callable[[], bool], what: str) -> None:
        def goes_on() -> bool:
            self.check()
            return True

        began = time.monotonic()
        self._timeline.wait_until(self._lock, ready, what, timeout=self._timeout, goes_on=goes_on)
        self.statistics.start_s += time.monotonic() - began


# ---------------------------------------------------------------------- launched together


class WorkerSession(RankSession):
    """One rank of a worker launched with others; by itself, one that follows. For the training thread, but ``fail``.

    See :class:`RankSession` for the arguments.

    Attributes:
        halted: Whether all workers stand still at the end of a round.
        at_begin: Called where a round has begun right after a merge, with nothing of it done yet.
    """

    halted = False
    at_begin: Callable[[], None] | None = None
    _beside: int | None = None  # steps beside a pseudo-gradient that is not merged yet

    def count(self, *, samples: int, seconds: float, tokens: int = 0, loss: float | None = None) -> None:
        """Take note of a step, and report it without waiting.

        With overlap, this merges what was sent when it is time to, and waits for it if it must; see RankSession.
        """
        super().count(samples=samples, seconds=seconds, tokens=tokens, loss=loss)
        if self._beside is not None:
            self._beside += 1
            if self._is_to_merge(self._beside):
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
        self._beside = 0
        if not self.overlap:
            self.merge_sent()

    def merge_sent(self) -> None:
        """Merge what is under way, if anything is."""
        if self._beside is None:
            return
        self._beside = None
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
        if self._beside is not None or not self.halted:
            self.end_round_for_all(stop=True)
        if not self.over:
            self.pass_on(stop=True)

    def _is_to_merge(self, beside: int) -> bool:
        if self.overlap.follows_mean:
            return self._group.any(self._need_not_train_on())
        return beside >= self.overlap.longest(0)

    def _need_not_train_on(self) -> bool:
        """Whether to merge what is under way now, without a number of steps for it."""
        return False

    def _send_pseudo_gradient(self) -> None:
        """Begin to send what the round's steps have made of its fragment."""

    def _merge(self) -> None:
        """Wait for the end of the round, let the trained weights follow, and begin the next one unless all halt."""

    def _pass_on(self, *, stop: bool) -> None:
        """Say that this worker is through with what all stood still for, and begin the next round."""


class LeadingSession(LeadingRank[Exchanging], WorkerSession):
    """The first rank of a worker that was launched with others. See :class:`LeadingRank` for the arguments."""

    @property
    def round(self) -> int:
        """The round this worker is in."""
        return self._counter.round

    def done_in_round(self) -> dict[str, int]:
        """What was done in this round, by name; where it has just begun, beside the last one's mean."""
        with self._lock:
            counter = self._counter
            return {"steps": counter.steps, "samples": counter.samples, "tokens": counter.tokens}

    def go_on(self, done: Mapping[str, int]) -> None:
        """Count on in the first round of a restart from what :meth:`done_in_round` gave; before its first step."""
        with self._lock:
            self._counter.go_on(steps=done["steps"], samples=done["samples"], tokens=done["tokens"])

    def ask(self, *, now: bool = False, epoch: bool = False, validate: bool = False, stop: bool = False) -> None:
        """See WorkerSession."""
        round, steps = self._counter.round, self._counter.steps
        self._link.post(
            EndRound(worker=self.worker, round=round, now=now, steps=steps, epoch=epoch, validate=validate, stop=stop)
        )

    def _begin(self) -> None:
        self._link.post(JoinRounds(worker=self.worker))
        self._await_round()

    def _is_due(self) -> bool:
        with self._lock:
            return self._counter.due

    def _need_not_train_on(self) -> bool:
        sent = self._sent
        if sent is None or sent.steps_since >= sent.longest:
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
            said = self._counter.send()
        self._link.post(said)
        update, exchange = self._send(self._trained.fragment_of(said.round), said.round)
        self._sent = Sent(said=said, update=update, exchange=exchange, longest=self.overlap.longest(said.steps))

    def _merge(self) -> None:
        sent, self._sent = self._sent, None
        if sent is None:
            raise RuntimeError("Cannot merge a pseudo-gradient: none was sent.")
        mean, total = self._received(sent.exchange)
        self._await(lambda: sent.round in self._round_ends, f"the end of round {sent.round}")
        ended = self.round_end = self._round_ends[sent.round]
        self.version = sent.round
        self._step(sent.update.fragment, mean, total, exactly=ended.halts)
        if not ended.halts:
            self._await_round()
            return
        others = [(fragment, self._send(fragment)[1]) for fragment in self._trained.others(sent.round)]
        for fragment, exchange in others:
            self._step(fragment, *self._received(exchange), exactly=True)
        self.over = ended.stop

    def _pass_on(self, *, stop: bool) -> None:
        ended = self.round_end
        self._timeline.stood("validation" if ended is not None and ended.validate else "end of the epoch")
        self._link.post(PassedRoundEnd(worker=self.worker, round=0 if ended is None else ended.round, stop=stop))
        self._await_round()

    def _await_round(self) -> None:
        self._await(lambda: self._counter.next_round is not None or self._counter.finished, "the next round")
        with self._lock:
            self.over = self._counter.finished
            if not self.over:
                self._link.post(self._counter.start())

    def _send(self, fragment: int, round: int = 0) -> tuple[Contribution, Exchanging]:
        update = self._update(fragment, round)
        self.state.taken(update)
        return update, self._link.start(update)

    def _received(self, exchange: Exchanging) -> tuple[Tensor, int]:
        began, since = time.monotonic(), self._timeline.now()
        found = exchange.wait(self._timeout)
        self.statistics.exchange_s += time.monotonic() - began
        self._timeline.waiting("the mean", since)
        return found


# ---------------------------------------------------------------------- in a coordinator's run


class CoordinatedRounds(RankSession):
    """One rank of a worker in a coordinator's run; by itself, one that follows. For the training thread, but ``fail``.

    See :class:`RankSession` for the arguments.

    Attributes:
        leads: Whether this rank's worker validates, logs and saves for all, as far as this rank says it.
        last_round: Of the run, once it is over; also while this worker does something else.
    """

    leads = False
    last_round: int | None = None

    def synchronise(self) -> None:
        """Do what is due: send, merge, catch up, and begin the next round."""
        self._together(self._synchronise)

    def pause(self, *, shows: bool = True) -> None:
        """Send what was trained, and do something else until :meth:`resume`.

        Args:
            shows: Whether to have the global weights meanwhile.
        """
        self._together(lambda: self._pause(shows))

    def resume(self) -> None:
        """Go on with the rounds: where the others are by now."""
        self._together(self._resume)

    def leave(self, *, quickly: bool, for_all: bool = False) -> None:
        """Take part no more, and have the global weights. What was trained counts.

        Args:
            quickly: Whether not to wait for the end of the round.
            for_all: Whether this worker leads, and the training of all is to end with this round.
        """
        self._together(lambda: self._leave(quickly, for_all))

    # As in RankSession, for the first rank alone.

    def _synchronise(self) -> None:
        """See :meth:`synchronise`."""

    def _pause(self, shows: bool) -> None:
        """See :meth:`pause`."""

    def _resume(self) -> None:
        """See :meth:`resume`."""

    def _leave(self, quickly: bool, for_all: bool) -> None:
        """See :meth:`leave`."""


_RECEIPT_S = 30.0  # for what is sent before the worker does something else, or goes


class CoordinatedSession(LeadingRank[CoordinatedExchange], CoordinatedRounds):
    """The first rank of a worker in a coordinator's run.

    A round without a quorum changes no weights. What was done in it is *carried*: it stays in the local weights and in
    the counts of samples, and the next update of the fragment has all of it.

    Lock: that of the transport, for what the client's thread changes.

    Args:
        transport: To the coordinator.
        **given: See :class:`LeadingRank`.
    """

    def __init__(self, *, transport: CoordinatorTransport, **given: Any) -> None:
        super().__init__(link=transport, lock=transport.changed, timeline=transport.timeline, **given)
        self._transport = transport
        # What follows changes under the lock.
        self._begun = False  # has the run's weights
        self._joined = False  # over this connection
        self._away = False  # pauses, or has left
        # The training thread's own.
        self._carried_steps = self._carried_samples = 0  # from rounds without a quorum
        # Steps beside the last mean, at most.
        self._beside = 0 if self.overlap.follows_mean else self.overlap.longest(0)
        self._carries = False  # what was trained, over to weights from before it
        self._shown = ExitStack()

    @property
    def round(self) -> int:
        """The round this worker is in."""
        return self._transport.version + 1

    @property
    def _fragments(self) -> range:
        return range(len(self._trained.fragments))

    # ------------------------------------------------------------------ the client's thread

    def welcomed(self, welcome: Welcome) -> None:
        """There is a connection, and maybe another coordinator."""
        transport = self._transport
        with self._lock:
            transport.welcomed(welcome, begun=self._begun)
            self.worker, self.leads, self._joined = welcome.worker, welcome.leads, False
            self._counter.worker = welcome.worker
            if self._reported is not None:
                self._reported = msgspec.structs.replace(self._reported, worker=self.worker)
            if self._begun and not transport.realign and transport.ended == transport.version:
                self._join()
            self._lock.notify_all()

    def lost(self) -> None:
        """There is no connection any more."""
        with self._lock:
            self._transport.connected = self._joined = False
            self._lock.notify_all()

    def _hear(self, message: FromCoordinator | FromWorker) -> None:
        super()._hear(message)
        if isinstance(message, LeaderAppointed):
            self.leads = message.worker == self.worker
        elif isinstance(message, RoundEnded):
            self._transport.round_ended(message.round)
        if isinstance(message, TrainingOver) or (isinstance(message, RoundEnded) and message.stop):
            self.last_round = message.round

    # ------------------------------------------------------------------ a step

    def _together(self, work: Callable[[], None]) -> None:
        def done() -> None:
            work()
            self.version, self.over = self._transport.version, self._over_here

        super()._together(done)

    def _post(self, *messages: FromWorker) -> None:
        if self._joined:
            self._transport.client.post(*messages)

    def _is_due(self) -> bool:
        transport = self._transport
        with self._lock:
            if self._failure is not None or self._over_here:
                return True
            if not transport.connected:
                return False
            if (sent := self._sent) is not None:
                return sent.steps_since >= sent.longest or (self.overlap.follows_mean and self._is_concluded(sent))
            return self._late or (self._joined and self._counter.due)

    def _is_concluded(self, sent: Sent[CoordinatedExchange]) -> bool:
        """Whether nothing is left to wait for before the next round, or to find out where the others are."""
        transport = self._transport
        if not sent.exchange.is_there():
            return False
        is_last = self.last_round is not None and sent.round >= self.last_round
        told = max(self._counter.next_round or 0, transport.ended) > sent.round
        return transport.realign or is_last or told

    @property
    def _late(self) -> bool:
        """Whether the round that this worker is in is over, or another one."""
        return self._transport.realign or self._transport.ended > self._transport.version

    @property
    def _over_here(self) -> bool:
        """Whether the run is over, and nothing is left to merge."""
        return self.last_round is not None and self._transport.version >= self.last_round

    # ------------------------------------------------------------------ the end of a round

    def _begin(self) -> None:
        while True:
            try:
                self._follow_others()
                self._start_round()
                break
            except AwayError:
                self._await(lambda: self._transport.connected, "the coordinator")
        self._changed.update(self._fragments)

    def _synchronise(self) -> None:
        self.check()
        self._flush()
        travels = self._sent is None and self._send() and self.overlap and not self._counter.closes
        if not travels:
            self._conclude()

    def _conclude(self) -> None:
        """Merge the round that is due and all others that have ended, and begin the next one, or go on alone."""
        try:
            sent = self._sent
            if sent is not None:
                began = time.monotonic()
                mean = sent.exchange.wait(self._timeout)
                self.statistics.exchange_s += time.monotonic() - began
                if mean is not None:
                    self._merge(sent.round, mean)
            self._follow_others()
            self._start_round()
        except AwayError:
            self._go_on_alone()

    def _send(self) -> bool:
        """Send what was trained in this round; returns if that was on before: no step depends on how it is after."""
        transport, state, fragment = self._transport, self.state, self._trained.fragment_of(self.round)
        late = self._late
        self._carries = transport.rewound
        if self._carries or (late and not state.samples[fragment]):
            return False
        with self._lock:
            if self._counter.round != self.round:
                self._counter = self._counter.carried_into(self.round)
            said = self._counter.send()
            self._reported = None
            if not late:
                self._post(said)
        update = self._update(
            fragment,
            said.round,
            steps=said.steps + self._carried_steps,
            round_samples=said.samples + self._carried_samples,
        )
        longest = self.overlap.longest(said.steps)
        self._sent = Sent(said=said, update=update, exchange=transport.start(update), longest=longest)
        return not late

    def _merge(self, round: int, mean: Mean) -> None:
        """Take the outer step of a round, and let the trained weights follow.

        A round without a quorum changes nothing: what was trained is carried into the next one, unless it is late and
        counts there already.
        """
        fragment = self._trained.fragment_of(round)
        with self._lock:
            ended = self._round_ends.get(round)
        sent, counts = self._sent, False
        if self.overlap.follows_mean:
            self._beside = 0 if sent is None or sent.round != round else sent.steps_since
        if sent is not None and sent.round == round:
            self._sent = None
            counts = sent.exchange.settle(total=mean.total, timeout=_RECEIPT_S)
            if mean.total or counts:
                # Steps beside which it travelled are still to be sent.
                self.state.taken(sent.update)
                self._carry(None)
            else:
                self._carry(sent.said)
        elif not mean.total or self._trained.mixing:
            with self._lock:
                if (counter := self._counter).round == round:
                    self._carry(counter)
                    counter.steps = counter.samples = counter.tokens = 0
        else:
            self.state.overwritten(fragment)
            self._carry(None)
        if mean.total or counts:
            self._step(fragment, mean.values, mean.total, exactly=False)
        self._transport.took(round, mean)
        self.statistics.rounds += 1
        if ended is not None:
            self.statistics.merged_samples += ended.samples
            self.round_end = ended

    def _carry(self, done: SendingPseudoGradient | RoundCounter | None) -> None:
        """A round is over that has changed nothing, and what was done in it is sent later. With None, all counts."""
        self._carried_steps = 0 if done is None else self._carried_steps + done.steps
        self._carried_samples = 0 if done is None else self._carried_samples + done.samples

    def _follow_others(self) -> None:
        """Catch up, mean by mean or with the state, and be where the others are.

        Raises:
            AwayError: If the coordinator is away.
        """
        self.check()
        transport = self._transport
        while self._late:
            if transport.realign:
                sent, self._sent = self._sent, None
                if sent is not None and transport.rewound:
                    sent.exchange.uploading.cancel()
                    self._carry(sent.said)
                    self._carries = True
                self._align()
            elif (mean := transport.mean(self.round, self._timeout)) is not None:
                self._merge(self.round, mean)
        with self._lock:
            if not transport.connected:
                raise AwayError
            if not self._joined:
                self._join()

    def _ask(self) -> None:
        """Say that this worker waits for a round: it may have been taken for lost. With the lock held."""
        if not self._away:
            self._post(JoinRounds(worker=self.worker))

    def _told_what_is_next(self) -> bool:
        return (self._counter.next_round or 0) >= self.round or self._late or self._over_here

    def _start_round(self) -> None:
        """Wait for the next round and begin it, unless this worker does something else or the run is over.

        Raises:
            AwayError: If the coordinator is away.
        """
        while not (self._over_here or self._away):
            began = time.monotonic()
            self._transport.wait(self._told_what_is_next, "the next round", self._timeout, meanwhile=self._ask)
            self.statistics.start_s += time.monotonic() - began
            if self._late:
                self._follow_others()
                continue
            with self._lock:
                if not self._over_here and self._counter.next_round == self.round:
                    self._post(self._counter.start())
                    break

    # ------------------------------------------------------------------ where the others are

    def _align(self) -> None:
        """Give the first weights, or take those that there are."""
        transport, state = self._transport, self.state
        if transport.provides:
            transport.provide(pack_state(state.full_state()), self._timeout)
        # What was provided is fetched, too: all begin with what the coordinator has made of it.
        began = time.monotonic()
        payload, version, chain = transport.fetch_state(self._timeout)
        self.statistics.exchange_s += time.monotonic() - began
        self._flush()
        # What was trained after a round that is to be repeated is not sent before: a worker has one update in a round.
        with state.carried() if self._carries else nullcontext():
            state.load_state_dict(unpack_state(payload, state.full_state()))
            self._take_global_weights()
        if not self._carries:
            for fragment in self._fragments:
                state.overwritten(fragment)
        self._carry(self._counter if self._carries else None)
        self._carries = False
        transport.aligned(version, chain)
        with self._lock:
            self._begun = True
            self._counter = RoundCounter(self.worker)
            self._reported = None

    def _take_global_weights(self) -> None:
        for fragment in self._fragments:
            self.state.merge(fragment, torch.empty(0, dtype=torch.float32), total=0, exactly=True)
        self._changed.update(self._fragments)

    def _join(self) -> None:
        """Say over this connection that this worker takes part, and how far it is. With the lock held."""
        if self._away:
            return
        self._joined = True
        counter, round = self._counter, self.round
        message = JoinRounds(worker=self.worker)
        if counter.round == round and self._reported is not None and self._sent is None:
            message = msgspec.structs.replace(
                message, round=round, steps=counter.steps, samples=counter.samples, tokens=counter.tokens
            )
        self._post(message)
        if message.round and self._reported is not None:
            self._post(self._reported)

    def _go_on_alone(self) -> None:
        """The coordinator is away: take steps in the round that was sent, and send all of it again, or in the next."""
        sent, self._sent = self._sent, None
        if sent is not None:
            sent.exchange.uploading.cancel()
        with self._lock:
            if sent is not None:
                self._counter = self._counter.carried_into(sent.round, sent.said)
            elif self._counter.round != self.round:
                self._counter = self._counter.carried_into(self.round)

    # ------------------------------------------------------------------ doing something else, and going

    def _pause(self, shows: bool) -> None:
        self._flush()
        # Neither what was carried alone, nor the few steps beside the last mean, which mixing keeps for the next round.
        if self._sent is not None or self._counter.steps > (self._beside if self._trained.mixing else 0):
            self._hand_in()
        with self._lock:
            self._away = True
            self._post(PauseRounds(worker=self.worker))
        if shows:
            self._shown.enter_context(self.state.shown())
            self._changed.update(self._fragments)

    def _resume(self) -> None:
        self._shown.close()
        self._timeline.stood("validation or another pause")
        with self._lock:
            self._away = False
            self._post(ResumeRounds(worker=self.worker))
            if self._transport.connected and not self._joined and not self._late:  # it was away meanwhile
                self._join()
            stays = self._sent is None and not self._late and self._counter.round == self.round
        if not stays:
            self._conclude()
        self._changed.update(self._fragments)

    def _leave(self, quickly: bool, for_all: bool) -> None:
        self._shown.close()
        transport, told = self._transport, None
        while for_all and self.leads and transport.connected and not self._over_here:
            if told is not transport.welcome:  # a coordinator that was started again knows of no wish
                told, steps = transport.welcome, self._counter.steps
                transport.client.post(EndRound(worker=self.worker, round=self.round, now=True, steps=steps, stop=True))
            if quickly:
                break
            self._synchronise()  # each of them is bounded: to the run's last weights
        if self._failure is None:
            if not quickly and self._sent is not None and transport.connected:
                self._conclude()  # what travels beside the last steps
            self._hand_in()
            with self._lock:
                self._away = True
            if not quickly and self._sent is not None and transport.connected:
                self._conclude()
            with self._lock:
                self._post(LeaveRounds(worker=self.worker))
            if transport.connected:
                transport.client.flush(_RECEIPT_S / 3)
        self._sent = None
        self._take_global_weights()

    def _hand_in(self) -> None:
        """Send what was trained so far in this round, and wait for the receipt, if there is a connection."""
        self._flush()
        unsent = self.state.samples[self._trained.fragment_of(self.round)]
        if self._transport.connected and not self._over_here and self._sent is None and unsent:
            self._send()
        if self._sent is not None:
            self._sent.exchange.await_receipt(_RECEIPT_S)
