"""The batch scheduler: decides how many steps each worker takes in a round, so that all end it together.

The scheduler is a state machine without clock, threads or transport. It takes a message and the time, and passes what
to send to ``post``. Call ``tick`` at ``next_tick``, or regularly. No worker can keep a round from ending: a silent
worker is not counted on, and pseudo-gradients are waited for until a deadline plus grace.

To decide the end, the scheduler looks at all workers. With few workers it does so after each message, with more workers
less often, so that it takes a small share of the time.

A round: all workers are told to start, fetch the weights and train. Each report is answered, and updates the
projection. When the projected end is a few steps of the slowest worker away, each worker is told after how many steps
to send. When all pseudo-gradients have arrived, or the time is over, they are merged and the next round starts.

Workers come and go. A worker that joins in mid-round trains in it at once. If the end is decided, or all take equally
many steps, it waits for the next round, unless it was in this one already, as after a restart. A worker that leaves is
not waited for, and what it has sent counts. A worker is lost when it misses the end of its round; it joins the next
round as soon as it is heard of. A worker that pauses is not counted on, and not started.

Not thread-safe: call it from one thread, or under one lock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from enum import Enum

from lightning_bytescheduler.diloco.messages import (
    Acknowledge,
    FromScheduler,
    JoinRounds,
    LeaveRounds,
    PauseRounds,
    PseudoGradientArrived,
    ResumeRounds,
    RoundStarted,
    SendAfter,
    SendingPseudoGradient,
    StartRound,
    StepReport,
    ToScheduler,
    TrainingOver,
)
from lightning_bytescheduler.diloco.round_end import FixedSteps, RoundOptions, RoundTarget, worthwhile_wait
from lightning_bytescheduler.diloco.round_record import RoundRecord
from lightning_bytescheduler.diloco.round_roster import RoundRoster, WorkerProgress, WorkerState, means_of

_FIRST_TRANSFER_S = 60.0  # for a first pseudo-gradient, as no transfer was measured yet
_FEW = 16  # workers that are looked at after each message
_LOOK_S = 1e-4  # between two looks at all workers, for each worker: twenty times what a look at one takes

LEAD_STEPS = 3
"""The end of a round is decided this many steps of the slowest worker before it. Fewer steps would give a better
forecast, but with one, a worker may be in the middle of a step that it should not have begun."""


class _Phase(Enum):
    IDLE = "no worker is there"
    TRAINING = "the end of the round is open"
    COLLECTING = "the end of the round is decided"
    FINISHED = "the training is over"


class BatchScheduler:
    """Schedules the rounds of a run.

    Args:
        target: What ends a round.
        options: When to decide, and how long to wait for which workers.
        post: Called with a worker's name and the message for it.
        end: Called with each round that is over, before any message about the next one. The updates of the workers in
            its ``merged`` are to be merged; if it is empty, the weights stay as they are.
    """

    def __init__(
        self,
        target: RoundTarget,
        options: RoundOptions | None = None,
        *,
        post: Callable[[str, FromScheduler], object],
        end: Callable[[RoundRecord], object],
    ) -> None:
        self._target = target
        self._options = RoundOptions() if options is None else options
        self._tell = post
        self._end = end
        self._phase = _Phase.IDLE
        self._round = 0
        self._roster = RoundRoster()
        self._first = self._options.start_workers  # workers that the next round waits for
        self._now = 0.0
        self._started = 0.0
        self._decided: float | None = None
        self._paused_since: float | None = None  # since when all present workers pause after the decision
        self._deadline = 0.0
        self._look_at = 0.0  # when to look at all workers, where there are many
        self._is_to_look = False  # something was heard since the last look
        self._longest_grace = 0.0
        self._counted_on: set[int] = set()  # numbers of the workers from which the quorum is computed

    @property
    def round(self) -> int:
        """The current round, or the last one; 0 before the first."""
        return self._round

    @property
    def finished(self) -> bool:
        """Whether ``outer_steps`` rounds and the closing rounds after them are over."""
        return self._phase is _Phase.FINISHED

    def note_connections(self, there: Collection[str], *, now: float) -> None:
        """Note which workers have a connection or an upload under way, where the host can tell."""
        for name, worker in self._roster.workers.items():
            if name in there:
                worker.gone = None
            elif worker.gone is None:
                worker.gone = now

    @property
    def last_round(self) -> int | None:
        """The last round of the training, with the closing rounds after ``outer_steps``."""
        steps = self._options.outer_steps
        return None if steps is None else steps + self._options.closing_rounds

    @property
    def workers(self) -> Mapping[str, WorkerProgress]:
        """All workers that take part or wait to. Read only."""
        return self._roster.workers

    @property
    def left(self) -> int:
        """What remains of this round, in the target's unit; 0 or less when the target is reached."""
        return self._left_of(self._roster.members())

    def _left_of(self, workers: list[WorkerProgress]) -> int:
        samples, steps = sum(worker.samples for worker in workers), [worker.steps for worker in workers]
        return self._target.left(samples=samples, steps=steps)

    @property
    def collecting(self) -> bool:
        """Whether the end of the round has been decided."""
        return self._phase is _Phase.COLLECTING

    @property
    def is_open(self) -> bool:
        """Whether a round is running: it has begun and is not over."""
        return self._phase in (_Phase.TRAINING, _Phase.COLLECTING)

    @property
    def next_tick(self) -> float | None:
        """When ``tick`` may change something, if no message comes before; ``None`` if it cannot."""
        if not self.is_open:
            return None
        if self._phase is _Phase.TRAINING and self._is_to_look:
            return self._look_at
        training = self._phase is _Phase.TRAINING or self._all_pause()
        awaited = [worker.awaited_until(self._options) for worker in self._roster if worker.is_training or not training]
        silence = min((until for until in awaited if self._now < until < math.inf), default=None)
        if training:
            return silence
        end = self._end_of_waiting(self._now)
        return end if silence is None else min(silence, end)

    def expects(self, worker: str, round: int) -> bool:
        """Whether a worker's pseudo-gradient for a round would be part of the round if it arrived now."""
        if round != self._round or not self.is_open:
            return False
        known = self._roster.workers.get(worker)
        if known is not None and known.is_member:
            return known.state is not WorkerState.ARRIVED
        return self._roster.departed(worker) is not None

    def handle(self, message: ToScheduler, *, now: float) -> None:
        """Take in a message, and answer it.

        Args:
            message: From a worker, or about one.
            now: In seconds; never less than before.
        """
        self._now = now
        worker = self._roster.workers.get(message.worker)
        if self.finished:
            self._tell(message.worker, TrainingOver(round=self._round))
        elif worker is not None and isinstance(message, StepReport):  # most messages are these
            self._hear(worker, message, now)
        elif isinstance(message, LeaveRounds):
            if worker is not None:
                self._roster.remove(worker)
                self._advance(now)
        elif isinstance(message, PseudoGradientArrived) and (worker is None or not worker.is_member):
            self._arrive_after_leaving(message, worker, now)
        elif isinstance(message, JoinRounds) and (worker is None or message.session != worker.session):
            if worker is not None:
                # It was restarted: its work is lost, except for what it has sent.
                self._roster.remove(worker)
            self._join(message, now)
        elif worker is not None:  # else it has left, and this was overtaken
            self._hear(worker, message, now)

    def note_alive(self, worker: str, *, now: float) -> None:
        """Note a sign of life that is no message, such as an answer to a ping.

        It counts for a worker that waits for weights, which may take long without a message. A worker that trains is
        expected to report steps.
        """
        known = self._roster.workers.get(worker)
        if known is not None and known.state is WorkerState.STARTING and now >= known.heard:
            known.heard = now

    def start_waiting(self, *, now: float) -> None:
        """Measure the waits of starting workers from now on, as all workers stood still until now."""
        self._now = now
        for worker in self._roster:
            if worker.state is WorkerState.STARTING:
                worker.told = worker.reported = worker.heard = now

    def end_soon(self) -> None:
        """Make the current round the last one with steps, or the next round if none is running."""
        self._options = replace(self._options, outer_steps=self._round + (not self.is_open))

    def tick(self, *, now: float) -> None:
        """Note that time has passed, to ``now``, never less than before."""
        self._now = now
        self._advance(now)

    @property
    def rounds_over(self) -> int:
        """How many rounds are over, to keep over a restart. Workers then join again, and their paces are observed anew.

        The current round begins anew, with the steps that workers report for it when they join.
        """
        return self._round - self.is_open

    def resume(self, rounds_over: int) -> None:
        """Continue after that many rounds. Call it before any worker joins."""
        self._round = rounds_over
        if rounds_over:
            self._first = 1
        self._phase = _Phase.FINISHED if self._is_over() else _Phase.IDLE

    def expect(self, workers: int) -> None:
        """Make the next round wait for this many workers, such as those before a restart."""
        self._first = max(workers, 1)

    # ── One worker ───────────────────────────────────────────────────────────

    def _hear(self, worker: WorkerProgress, message: ToScheduler, now: float) -> None:
        worker.heard, worker.gone = now, None
        if worker.state is WorkerState.LOST:
            worker.state = WorkerState.WAITING
        if isinstance(message, PauseRounds):
            worker.paused = True
            self._advance(now)
            return
        if isinstance(message, (JoinRounds, ResumeRounds)):
            worker.resume(now)
            self._take_in(worker, message if isinstance(message, JoinRounds) else None, now)
        elif self._phase is _Phase.IDLE:
            self._begin_round(now)
        if not isinstance(message, (JoinRounds, LeaveRounds, ResumeRounds)) and message.round == self._round:
            self._follow(worker, message, now)
        worker.note_pace(self._target.step_cap)
        self._answer(worker)
        self._advance(now)

    def _take_in(self, worker: WorkerProgress, join: JoinRounds | None, now: float) -> None:
        """Let a worker into the current round if possible: in the middle of it, or with nothing done."""
        if self._phase is _Phase.IDLE:
            worker.resumed = join
            self._begin_round(now)
        elif worker.state is not WorkerState.WAITING:
            pass  # it has a place in the round already
        elif join is not None and join.round == self._round:
            worker.tell_to_start(now)
            worker.take_up(join, now)
            if self._phase is _Phase.COLLECTING:
                self._counted_on.add(worker.number)
        elif self._phase is _Phase.TRAINING and not isinstance(self._target, FixedSteps):
            # No worker has to wait for it: the others do what it does not.
            worker.tell_to_start(now, late=True)
        worker.note_pace(self._target.step_cap)

    def _follow(
        self,
        worker: WorkerProgress,
        message: StepReport | SendingPseudoGradient | PseudoGradientArrived | RoundStarted,
        now: float,
    ) -> None:
        """Apply what is new. Ignore what is overtaken or doubled; infer what is missing."""
        if isinstance(message, (RoundStarted, StepReport)) and worker.state is WorkerState.STARTING:
            worker.receiving.observe(now - worker.told)
            worker.start(now)
        if isinstance(message, StepReport):
            if worker.is_training and message.steps > worker.steps:
                worker.paused = False
                worker.take_report(message, now)
            return
        if isinstance(message, SendingPseudoGradient) and message.steps >= worker.steps:
            worker.steps, worker.samples = message.steps, message.samples
        if isinstance(message, (SendingPseudoGradient, PseudoGradientArrived)) and worker.is_training:
            worker.end(now)
        if isinstance(message, PseudoGradientArrived) and worker.state is WorkerState.SENDING:
            worker.arrive(now)
            _measure_transfer(worker, now)

    def _arrive_after_leaving(self, message: PseudoGradientArrived, worker: WorkerProgress | None, now: float) -> None:
        """Handle the arrival of a pseudo-gradient whose worker has left, or has missed the end of its round."""
        departed = self._roster.departed(message.worker) if message.round == self._round else None
        if departed is not None:
            departed.arrive(now)
            self._advance(now)
        elif worker is not None:
            if worker.state is WorkerState.LOST:
                _measure_transfer(worker, now)  # too late; the next one gets more time
            self._hear(worker, message, now)

    def _answer(self, worker: WorkerProgress) -> None:
        """Say what is decided; a worker that waits for the next round will hear when that starts."""
        if worker.state is WorkerState.STARTING:
            self._tell(
                worker.name, StartRound(round=self._round, step_cap=0 if self._closes else self._target.step_cap)
            )
        elif worker.state is WorkerState.TRAINING and self._phase is _Phase.COLLECTING:
            self._tell_to_send(worker)
        elif worker.is_member:
            self._tell(worker.name, Acknowledge(round=self._round, reported=worker.steps))

    def _join(self, join: JoinRounds, now: float) -> None:
        open_round = self.is_open
        is_back = open_round and join.round == self._round
        worker = self._roster.take_back(join.worker, join.session, now) if is_back else None
        worker = worker or self._roster.add(join.worker, join.session, now)
        self._take_in(worker, join, now)
        if open_round:
            self._answer(worker)
        self._advance(now)

    # ── The round ───────────────────────────────────────────────────────────

    def _begin_round(self, now: float) -> None:
        members = [worker for worker in self._roster if worker.state is not WorkerState.LOST and not worker.paused]
        if sum(worker.gone is None for worker in members) < self._first:
            self._phase = _Phase.IDLE
            return
        self._first = 1
        self._round += 1
        self._phase = _Phase.TRAINING
        self._started, self._decided, self._look_at = now, None, now
        self._roster.begin_round()
        for worker in members:
            worker.tell_to_start(now)
            if worker.resumed is not None and worker.resumed.round == self._round:
                worker.take_up(worker.resumed, now)
            worker.resumed = None
            worker.note_pace(self._target.step_cap)
            self._answer(worker)

    def _advance(self, now: float) -> None:
        """Decide the end of the round when it is time, and end the round when it is over."""
        if self._phase is _Phase.TRAINING:
            self._is_to_look = len(self.workers) > _FEW and now < self._look_at
            if not self._is_to_look:
                self._look_at = now + len(self.workers) * _LOOK_S
                self._decide(now)
        if self._phase is not _Phase.COLLECTING:
            return
        if self._all_pause():
            self._paused_since = now if self._paused_since is None else self._paused_since
            return
        if self._paused_since is not None:
            self._deadline += now - self._paused_since
            self._paused_since = None
        if not any(now < worker.awaited_until(self._options) for worker in self.workers.values()) or (
            now >= self._end_of_waiting(now)
        ):
            self._end_round(now)

    def _all_pause(self) -> bool:
        """Whether all present workers pause in mid-round. Then none waits for its end, and their steps should count."""
        pausing = False
        for worker in self._roster.workers.values():
            if worker.state is WorkerState.LOST:
                continue
            if not (worker.paused and worker.is_training):
                return False
            pausing = True
        return pausing

    def _decide(self, now: float) -> None:
        members = self._roster.members()
        training = [worker for worker in members if worker.is_counted_on(self._options, now)]
        if not training:
            # If all are paused, no worker waits for an end, and their steps must not be lost. But a worker that joined
            # later may wait for the next round.
            waits = any(one.state is WorkerState.WAITING and not one.paused for one in self._roster)
            is_idle = waits and not any(worker.steps for worker in members)
            if not members or is_idle or any(worker.has_ended or not worker.paused for worker in members):
                self._collect({}, 0.0, now)
            return
        # A silent worker is not counted on, nor is what it did: its pseudo-gradient will probably not come.
        ended = [
            one
            for one in members
            if one.has_ended and (one.arrived is not None or now < one.awaited_until(self._options))
        ]
        left = self._left_of(training + ended)
        if left <= 0 or self._closes:
            # No worker should begin another step, and a worker that has not started yet need not.
            slowest = max(one.step_time.seconds or 0.0 for one in training)
            self._collect({}, slowest * max(one.in_flight + 1 for one in training), now)
        elif all(one.step_time.is_known or one.began_late for one in training):
            paces = [(one, one.pace) for one in training if one.pace is not None]
            # Each worker must hear of it before its last step.
            lead = max((max(LEAD_STEPS, pace.committed + 1) * pace.step_seconds for _, pace in paces), default=0.0)
            plan = self._target.plan(left, [pace for _, pace in paces], now=now, within=lead) if paces else None
            if plan is not None:
                counters = {
                    worker.number: pace.steps + max(steps, pace.sure)
                    for (worker, pace), steps in zip(paces, plan.steps, strict=True)
                }
                self._collect(counters, plan.seconds, now)

    def _collect(self, counters: Mapping[int, int], seconds: float, now: float) -> None:
        """Tell all workers, silent ones too, that the end of the round is decided."""
        self._phase = _Phase.COLLECTING
        self._decided, self._paused_since = now, None
        transfer = self._roster.longest_transfer
        self._deadline = now + 2 * seconds + 2 * (transfer or 0.0)
        if self._options.grace == "auto":
            # In that time, workers that have arrived could do the whole round again. A first transfer may take longer
            # than a short round.
            self._longest_grace = max(self._deadline - self._started, _FIRST_TRANSFER_S if transfer is None else 0.0)
        else:
            self._longest_grace = self._options.grace
        for worker in self._roster.members():
            if worker.began_late and worker.is_training and not worker.steps:
                worker.state = WorkerState.WAITING  # its first step may take any time, and belongs to the next round
        members = self._roster.members()
        self._counted_on = {worker.number for worker in members}
        for worker in members:
            if worker.is_training:
                worker.send_after = counters.get(worker.number, 0)
                self._tell_to_send(worker)

    def _end_of_waiting(self, now: float) -> float:
        """When the wait for pseudo-gradients ends, as far as is known now."""
        if self._options.grace != "auto":
            return self._deadline + self._longest_grace
        if now < self._deadline or self._decided is None:
            return self._deadline  # the wait lasts until then in any case; only then it is known whether to go on
        workers = self._roster.workers.values()
        missing = sum(worker.missing_samples for worker in workers if now < worker.awaited_until(self._options))
        arrived = self._arrived(self._roster.members())
        if len(arrived) < self._least():
            missing += sum(worker.samples for worker in arrived)  # without a quorum, these do not count either
        return worthwhile_wait(
            decided=self._decided,
            deadline=self._deadline,
            longest=self._longest_grace,
            missing=missing,
            idle=sum(one.samples_per_second or 0.0 for one in workers if one.state is WorkerState.ARRIVED),
        )

    def _tell_to_send(self, worker: WorkerProgress) -> None:
        self._tell(worker.name, SendAfter(round=self._round, steps=worker.send_after, reported=worker.steps))

    def _arrived(self, members: list[WorkerProgress]) -> list[WorkerProgress]:
        # In a round without steps, earlier training counts.
        return [one for one in members if one.state is WorkerState.ARRIVED and (one.samples or self._closes)]

    @property
    def _closes(self) -> bool:
        return self._options.closes(self._round)

    def _least(self) -> int:
        """Pseudo-gradients that the quorum needs."""
        return max(math.ceil(self._options.quorum * len(self._counted_on)), 1)

    def _end_round(self, now: float) -> None:
        members = self._roster.members()
        arrived = self._arrived(members)
        if len(arrived) < self._least():
            arrived = []
        numbers = {worker.number for worker in arrived}
        record = RoundRecord(
            round=self._round,
            start=self._started,
            end=now,
            decided=self._decided,
            workers=tuple(worker.record(now, merged=worker.number in numbers) for worker in members),
            metrics=means_of(members),
        )
        for worker in members:
            is_there = worker.state is WorkerState.ARRIVED or worker.paused
            worker.state = WorkerState.WAITING if is_there else WorkerState.LOST
        self._roster.begin_round()
        self._phase = _Phase.FINISHED if self._is_over() else _Phase.IDLE
        self._end(record)
        if self.finished:
            for name in self._roster.workers:
                self._tell(name, TrainingOver(round=self._round))
        else:
            self._begin_round(now)

    def _is_over(self) -> bool:
        return self._options.ends_with(self._round)


def _measure_transfer(worker: WorkerProgress, now: float) -> None:
    if worker.sending is not None:
        worker.transfer.observe(now - worker.sending)
