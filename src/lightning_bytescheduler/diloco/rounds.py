"""The rounds of a run: who takes part, when a round ends, what follows its end. The documents' batch scheduler.

:class:`Rounds` is a state machine without clock, threads or transport, for one thread or under one lock. It takes a
message and the time, and passes what to send to ``post``. Its host is worker 0 of workers launched together
(:class:`RoundsThread`), or a coordinator. Call ``tick`` at ``next_tick``, or regularly. No worker can keep a round from
ending: a silent worker is not counted on, and pseudo-gradients are waited for until a deadline plus grace.

A round: all workers are told to start, fetch the weights and train. Each report is answered, and updates the
projection. When the projected end is a few steps of the slowest worker away, or a worker asks for the end, each worker
is told after how many steps to send. When all pseudo-gradients have arrived, or the time is over, the round is over.
The next one begins when the host says so, as when the mean is there. To decide the end, all workers are looked at: with
few of them after each message, with more less often, so that it takes a small share of the time.

Workers come and go. A worker that joins in mid-round trains in it at once. If the end is decided, or all take equally
many steps, it waits for the next round, unless it was in this one already, as after a restart. No steps of a worker
that leaves or pauses are waited for, and what it has sent counts; what one that pauses is sending is waited for. If all
have gone and nothing was sent, the round begins anew with the next worker. A worker is lost when it misses the end of
its round; it joins the next round as soon as it is heard of. A worker that pauses keeps its name and its pace.

*Standing still.* Each of the workers that were launched together may ask for the end of a round, because its data or
its steps are used up, or for a validation. Then no worker starts the next round before all have passed that point. In
the records of such a run, a worker that is done before the others is waiting until they come: it can send nothing
before that.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import TypeAlias

from lightning_bytescheduler.diloco.messages import (
    Acknowledge,
    EndRound,
    FromWorker,
    JoinRounds,
    LeaveRounds,
    PassedRoundEnd,
    PauseRounds,
    PseudoGradientArrived,
    RoundEnded,
    RoundStarted,
    SendAfter,
    SendingPseudoGradient,
    StartRound,
    StepReport,
    ToWorker,
    TrainingOver,
)
from lightning_bytescheduler.diloco.round_end import FixedSteps, RoundOptions, RoundTarget, seconds_of
from lightning_bytescheduler.diloco.round_record import RoundRecord
from lightning_bytescheduler.diloco.round_roster import WorkerProgress, WorkerState, means_of

_FEW = 16  # workers that are looked at after each message
_LOOK_AT_ONE_S = 1e-4  # between two looks at all workers, for each worker: many times what a look at one takes
_LOOK_S = 0.5

LEAD_STEPS = 3
"""The end of a round is decided this many steps of the slowest worker before it. Fewer steps would give a better
forecast, but with one, a worker may be in the middle of a step that it should not have begun."""


_OfRound: TypeAlias = JoinRounds | StepReport | SendingPseudoGradient | PseudoGradientArrived | RoundStarted


class _Phase(Enum):
    IDLE = "no worker is there"
    TRAINING = "the end of the round is open"
    COLLECTING = "the end of the round is decided"
    HELD = "the round is over, and its host has not gone on"


class Rounds:
    """See the module.

    Args:
        target: What ends a round.
        options: When to decide, and how long to wait for which workers.
        post: Called with a worker's name and the message for it.
        end: Called with each round that is over. The updates of the workers in its ``merged`` are to be merged; if it
            is empty, the weights stay as they are. The next round begins with :meth:`go_on`; for workers launched
            together it begins by itself, unless all stand still.
        together: Names of workers launched together: all stand still if one has asked for it.

    Attributes:
        round: The current round, or the last one; 0 before the first.
        workers: All workers that take part, pause or wait to take part, by name. Read only.
    """

    def __init__(
        self,
        target: RoundTarget,
        options: RoundOptions | None = None,
        *,
        post: Callable[[str, ToWorker], object],
        end: Callable[[RoundRecord], object],
        together: Sequence[str] = (),
    ) -> None:
        self.round = 0
        self.workers: dict[str, WorkerProgress] = {}
        self._target = target
        self._options = RoundOptions() if options is None else options
        self._post = post
        self._end = end
        self._together = tuple(together)
        self._wishes: set[str] = set()  # what is to happen at the end of the round, of workers launched together
        self._passed: dict[str, bool] = {}  # workers that have passed the end of a round, and whether they stop
        self._phase = _Phase.IDLE
        self._now = 0.0
        self._started = 0.0
        self._decided: float | None = None
        self._deadline = 0.0
        self._look_at = 0.0  # when to look at all workers, where there are many
        self._is_to_look = False  # something was heard since the last look
        self._counted_on: set[str] = set()  # workers from which the quorum is computed

    # ── What is known ───────────────────────────────────────────────────────────

    @property
    def finished(self) -> bool:
        """Whether ``outer_steps`` rounds and the closing rounds after them are over."""
        return not self.is_open and self.last_round is not None and self.round >= self.last_round

    @property
    def last_round(self) -> int | None:
        """The last round of the training, with the closing rounds after ``outer_steps``."""
        steps = self._options.outer_steps
        return None if steps is None else steps + self._options.closing_rounds

    @property
    def left(self) -> int:
        """What remains of this round, in the target's unit; 0 or less when the target is reached."""
        return self._left_of(self._members())

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
    def stand_still(self) -> bool:
        """Whether a round is over, and the next one waits for :meth:`go_on`."""
        return self._phase is _Phase.HELD

    @property
    def next_tick(self) -> float | None:
        """When ``tick`` may change something, if no message comes before; ``None`` if it cannot."""
        if not self.is_open:
            return None
        training = self._phase is _Phase.TRAINING
        if training and self._is_to_look:
            return self._look_at
        workers = self.workers.values()
        awaited = (one.awaited_until(self._options) for one in workers if one.is_training or not training)
        silence = min((until for until in awaited if self._now < until < math.inf), default=math.inf)
        until = silence if training else min(silence, self._deadline)
        return None if until == math.inf else until

    def expects(self, worker: str, round: int) -> bool:
        """Whether a worker's pseudo-gradient for a round would be part of the round if it arrived now."""
        if round != self.round or not self.is_open:
            return False
        known = self.workers.get(worker)
        return known is not None and known.is_member and known.state is not WorkerState.ARRIVED

    def _members(self) -> list[WorkerProgress]:
        """Workers that take part in this round."""
        return [worker for worker in self.workers.values() if worker.is_member]

    # ── What is told ───────────────────────────────────────────────────────────

    def handle(self, message: FromWorker, *, now: float) -> None:
        """Take in a message, and answer it.

        Args:
            message: From a worker, or about one.
            now: In seconds; never less than before.
        """
        self._now = now
        worker = self.workers.get(message.worker)
        if isinstance(message, PassedRoundEnd):
            self._take_passed(message, now)
        elif self.finished and not self.stand_still:
            self._post(message.worker, TrainingOver(round=self.round))
        elif worker is not None and isinstance(message, StepReport):  # most messages are these
            self._hear(worker, message, now)
        elif isinstance(message, EndRound):
            self._wishes |= {name for name in ("epoch", "validate", "stop") if getattr(message, name)}
            if message.now:
                self._end_now(message.steps, now)
        elif isinstance(message, JoinRounds):
            self._hear(self._known(message, now), message, now)
        elif worker is None:
            pass  # it has left, and this was overtaken
        elif isinstance(message, (LeaveRounds, PauseRounds)):
            worker.left, worker.pauses = isinstance(message, LeaveRounds), isinstance(message, PauseRounds)
            if not worker.has_ended:
                self._let_go(worker)
            self._advance(now)
        else:
            self._hear(worker, message, now)

    def tick(self, *, now: float) -> None:
        """Note that time has passed, to ``now``, never less than before."""
        self._now = now
        self._advance(now)

    def note_connections(self, heard: Mapping[str, float], *, now: float) -> None:
        """Note which workers have a connection or an upload under way, where the host can tell.

        Args:
            heard: When each of these was last heard of, if only by the answer to a ping. That counts for a worker that
                waits for weights, which may take long without a message. One that trains is expected to report steps.
            now: In seconds.
        """
        for worker in self.workers.values():
            if worker.name not in heard:
                worker.gone = now if worker.gone is None else worker.gone
                continue
            worker.gone = None
            if worker.state is WorkerState.STARTING:
                worker.heard = max(worker.heard, heard[worker.name])

    def go_on(self, *, over: bool = False) -> None:
        """Begin the next round, as what follows the last one's end is done; ``over`` ends the training instead."""
        self._phase = _Phase.IDLE
        if over:
            self._options = replace(self._options, outer_steps=self.round, closing_rounds=0)
        if self.finished:
            for name in self.workers:
                self._post(name, TrainingOver(round=self.round))
        else:
            self._begin_round(self._now)

    def end_soon(self) -> None:
        """Make the current round the last one with steps, or the next round if none is running."""
        steps = self.round + (not self.is_open)
        if self._options.outer_steps is None or steps < self._options.outer_steps:
            self._options = replace(self._options, outer_steps=steps)

    def resume(self, rounds_over: int) -> None:
        """Continue after that many rounds. Call it before any worker joins.

        The round that was on begins anew, with the steps that workers report for it when they join.
        """
        self.round = rounds_over
        if rounds_over:
            self.expect(1)

    def expect(self, workers: int) -> None:
        """Make the next round wait for this many workers, such as those before a restart."""
        self._options = replace(self._options, start_workers=max(workers, 1))

    # ── One worker ───────────────────────────────────────────────────────────

    def _hear(self, worker: WorkerProgress, message: _OfRound, now: float) -> None:
        worker.heard, worker.gone = now, None
        if worker.state is WorkerState.LOST:
            worker.state = WorkerState.WAITING
            if isinstance(message, PseudoGradientArrived):
                worker.measure_transfer(now)  # too late; the next one gets more time
        was_open = self.is_open
        if isinstance(message, JoinRounds):
            self._take_in(worker, message, now)
        elif self._phase is _Phase.IDLE:
            self._begin_round(now)
        if message.round == self.round and not isinstance(message, JoinRounds):
            self._follow(worker, message, now)
        if was_open:
            self._answer(worker)
        self._advance(now)

    def _known(self, join: JoinRounds, now: float) -> WorkerProgress:
        """A worker that joins or is back; where its process was started anew, all but what it had sent is lost."""
        worker = self.workers.get(join.worker)
        if worker is not None and join.session != worker.session:
            worker.session = join.session
            if worker.state is not WorkerState.ARRIVED:
                worker.left = True
                self._let_go(worker)
                worker = None
        if worker is None:
            worker = self.workers[join.worker] = WorkerProgress(name=join.worker, session=join.session, heard=now)
        worker.left = worker.pauses = False
        if worker.state is WorkerState.PAUSED:
            worker.state = WorkerState.WAITING
        return worker

    def _let_go(self, worker: WorkerProgress) -> None:
        """A worker leaves or pauses; not before the end of the round, if its pseudo-gradient is sent."""
        worker.state = WorkerState.PAUSED
        if worker.left:
            del self.workers[worker.name]
        if self.is_open and not self._members():
            self.round, self._phase = self.round - 1, _Phase.IDLE
            self._begin_round(self._now)

    def _take_in(self, worker: WorkerProgress, join: JoinRounds, now: float) -> None:
        """Let a worker into the current round if possible: in the middle of it, or with nothing done."""
        if not self.is_open:
            worker.resumed = join
            if self._phase is _Phase.IDLE:
                self._begin_round(now)
        elif worker.state is not WorkerState.WAITING:
            pass  # it has a place in the round already
        elif join.round == self.round:
            worker.tell_to_start(now)
            worker.take_up(join, now)
            self._counted_on.add(worker.name)
        elif self._phase is _Phase.TRAINING and not isinstance(self._target, FixedSteps):
            # No worker has to wait for it: the others do what it does not.
            worker.tell_to_start(now, late=True)

    def _follow(self, worker: WorkerProgress, message: _OfRound, now: float) -> None:
        """Apply what is new. Ignore what is overtaken or doubled; infer what is missing."""
        if isinstance(message, (RoundStarted, StepReport)) and worker.state is WorkerState.STARTING:
            worker.receiving.observe(now - worker.told)
            worker.start(now)
        if isinstance(message, StepReport):
            # One that goes on in a round that it has sent has lost its connection, and will send anew.
            if message.steps > worker.steps and worker.state in (WorkerState.TRAINING, WorkerState.SENDING):
                worker.state = WorkerState.TRAINING
                worker.take_report(message, now)
            return
        if isinstance(message, SendingPseudoGradient) and message.steps >= worker.steps:
            worker.steps, worker.samples = message.steps, message.samples
        if isinstance(message, (SendingPseudoGradient, PseudoGradientArrived)) and worker.is_training:
            worker.end(now)
        if isinstance(message, PseudoGradientArrived) and worker.state is WorkerState.SENDING:
            worker.arrive(now)

    def _answer(self, worker: WorkerProgress) -> None:
        """Say what is decided; a worker that waits for the next round will hear when that starts."""
        if worker.state is WorkerState.STARTING:
            cap = 0 if self._closes else self._target.step_cap
            self._post(worker.name, StartRound(round=self.round, step_cap=cap))
        elif worker.state is WorkerState.TRAINING and self._phase is _Phase.COLLECTING:
            self._tell_to_send(worker)
        elif worker.is_member:
            self._post(worker.name, Acknowledge(round=self.round, reported=worker.steps))

    def _tell_to_send(self, worker: WorkerProgress) -> None:
        self._post(worker.name, SendAfter(round=self.round, steps=worker.send_after, reported=worker.steps))

    # ── The round ───────────────────────────────────────────────────────────

    def _begin_round(self, now: float) -> None:
        members = [worker for worker in self.workers.values() if worker.state is WorkerState.WAITING]
        if sum(worker.gone is None for worker in members) < self._options.start_workers:
            return
        self.expect(1)
        self.round += 1
        self._phase = _Phase.TRAINING
        self._started, self._decided, self._look_at = now, None, now
        for worker in members:
            worker.tell_to_start(now)
            if worker.resumed is not None and worker.resumed.round == self.round:
                worker.take_up(worker.resumed, now)
            worker.resumed = None
            self._answer(worker)

    def _advance(self, now: float) -> None:
        """Decide the end of the round when it is time, and end the round when it is over."""
        if self._phase is _Phase.TRAINING:
            self._is_to_look = len(self.workers) > _FEW and now < self._look_at
            if not self._is_to_look:
                self._look_at = now + len(self.workers) * _LOOK_AT_ONE_S
                self._decide(now)
        if self._phase is _Phase.COLLECTING and (
            not any(now < worker.awaited_until(self._options) for worker in self.workers.values())
            or now >= self._deadline
        ):
            self._end_round(now)

    def _decide(self, now: float) -> None:
        members = self._members()
        training = [worker for worker in members if worker.is_counted_on(self._options, now)]
        # A silent worker is not counted on, nor is what it did: its pseudo-gradient will probably not come.
        ended = [
            one
            for one in members
            if one.has_ended and (one.arrived is not None or now < one.awaited_until(self._options))
        ]
        left = self._left_of(training + ended)
        if not training or left <= 0 or self._closes:
            # No worker should begin another step, and a worker that has not started yet need not.
            self._collect({}, self._seconds_until(0, training), now)
        elif all(one.step_time.is_known or one.began_late for one in training):
            known = {one: one.pace(self._target.step_cap) for one in training}
            paced = {one: pace for one, pace in known.items() if pace is not None}
            paces = list(paced.values())
            # Each worker must hear of it before its last step.
            lead = max((max(LEAD_STEPS, pace.committed + 1) * pace.step_seconds for pace in paces), default=0.0)
            plan = self._target.plan(left, paces, now=now, within=lead) if paces else None
            if plan is not None and (seconds := seconds_of(plan, paces, now=now)) <= lead:
                more = zip(paced.items(), plan, strict=True)
                counters = {worker: pace.steps + max(steps, pace.sure) for (worker, pace), steps in more}
                self._collect(counters, seconds, now)

    def _seconds_until(self, steps: int, workers: list[WorkerProgress]) -> float:
        """How long it takes until all have so many steps, and each those that it takes before it hears of that."""
        taken = ((one.step_time.seconds or 0.0, max(steps - one.steps, one.in_flight + 1)) for one in workers)
        return max((seconds * more for seconds, more in taken), default=0.0)

    def _end_now(self, steps: int, now: float) -> None:
        """End the current round for all, at the request of one worker, which has taken ``steps`` steps.

        Where all take the same number of steps in a round, workers that are behind that one go on until they have
        taken as many.
        """
        most = steps if isinstance(self._target, FixedSteps) else 0
        training = [worker for worker in self._members() if worker.is_training]
        if self._phase is _Phase.TRAINING:
            seconds = self._seconds_until(most, training)
            self._collect(dict.fromkeys(training, most), seconds, now)
        elif self._phase is _Phase.COLLECTING:
            for worker in training:
                worker.send_after = min(worker.send_after, most)
                self._tell_to_send(worker)
        self._advance(now)

    def _collect(self, counters: Mapping[WorkerProgress, int], seconds: float, now: float) -> None:
        """Tell all workers, silent ones too, that the end of the round is decided."""
        self._phase = _Phase.COLLECTING
        self._decided = now
        measured = [one.transfer.mean for one in self.workers.values() if one.state is not WorkerState.LOST]
        transfer = max((mean for mean in measured if mean is not None), default=None)
        self._deadline = now + 2 * seconds + 2 * (transfer or 0.0) + self._options.grace
        for worker in self._members():
            if worker.began_late and worker.is_training and not worker.steps:
                worker.state = WorkerState.WAITING  # its first step may take any time, and belongs to the next round
        members = self._members()
        self._counted_on = {worker.name for worker in members}
        for worker in members:
            if worker.is_training:
                worker.send_after = counters.get(worker, 0)
                self._tell_to_send(worker)

    @property
    def _closes(self) -> bool:
        """Whether this round has no step."""
        return self._options.outer_steps is not None and self.round > self._options.outer_steps

    def _least(self) -> int:
        """Pseudo-gradients that the quorum needs."""
        return max(math.ceil(self._options.quorum * len(self._counted_on)), 1)

    def _end_round(self, now: float) -> None:
        members = self._members()
        arrived = [one for one in members if one.state is WorkerState.ARRIVED]
        merged = set(arrived if len(arrived) >= self._least() else ())
        # Workers launched together send to each other, so none can before all are there.
        sending = [one.sending for one in members if one.sending is not None]
        all_there = max(sending, default=None) if self._together else None
        record = RoundRecord(
            round=self.round,
            start=self._started,
            end=now,
            decided=self._decided,
            workers=tuple(one.record(now, merged=one in merged, all_there=all_there) for one in members),
            metrics=means_of(members),
        )
        for worker in members:
            is_there = worker.state is WorkerState.ARRIVED
            worker.state = WorkerState.WAITING if is_there else WorkerState.LOST
        self._phase = _Phase.HELD
        for worker in members:
            if worker.left or worker.pauses:
                self._let_go(worker)
        self._end(record)
        if self._together:
            self._halt(record)

    # ── Workers launched together ───────────────────────────────────────────────────────────

    def _halt(self, record: RoundRecord) -> None:
        """Tell all workers that a round is over, and whether all stand still; else begin the next one."""
        ended = RoundEnded(
            round=record.round,
            samples=record.samples,
            metrics=record.metrics,
            epoch="epoch" in self._wishes,
            validate="validate" in self._wishes,
            stop="stop" in self._wishes or self.finished,
            halts=bool(self._wishes) or self.finished,
        )
        self._wishes, self._passed = set(), {}
        for worker in self._together:
            self._post(worker, ended)
        if not ended.halts:
            self.go_on()

    def _take_passed(self, message: PassedRoundEnd, now: float) -> None:
        if self.stand_still:
            self._passed[message.worker] = message.stop
            if len(self._passed) == len(self._together):
                self.go_on(over=any(self._passed.values()))


class RoundsThread:
    """The rounds of workers that were launched together, on a thread, ``bytescheduler-rounds``; a ``Link`` to them.

    Args:
        target: What ends a round.
        options: See :class:`Rounds`; the first round waits for all ``workers``.
        workers: Names of all workers.
        post: Sends a message to a worker; called on the thread.
        on_round: Called on the thread with each round that has ended.
        look: Called on the thread again and again, with whether all stand still: finds out whether all workers live.
        on_error: Called on the thread with the error with which it ends.
    """

    def __init__(
        self,
        target: RoundTarget,
        options: RoundOptions,
        *,
        workers: Sequence[str],
        post: Callable[[str, ToWorker], None],
        on_round: Callable[[RoundRecord], object],
        look: Callable[[bool], object],
        on_error: Callable[[BaseException], object],
    ) -> None:
        self._workers = tuple(workers)
        self._rounds = Rounds(target, options, post=post, end=on_round, together=workers)
        self._post = post
        self._look = look
        self._on_error = on_error
        self._inbox: queue.SimpleQueue[FromWorker | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="bytescheduler-rounds", daemon=True)

    def start(self, rounds_over: int) -> None:
        """Begin, or carry on after that many rounds."""
        self._rounds.resume(rounds_over)
        self._rounds.expect(len(self._workers))
        if self._rounds.finished:  # worker 0 may be gone before the others ask
            for worker in self._workers:
                self._post(worker, TrainingOver(round=self._rounds.round))
        self._thread.start()

    def post(self, *messages: FromWorker) -> None:
        """Take in messages; returns at once."""
        for message in messages:
            self._inbox.put(message)

    def stop(self, timeout: float) -> bool:
        """End the thread; returns whether it ended within ``timeout`` seconds."""
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while True:
                tick = self._rounds.next_tick
                wait = _LOOK_S if tick is None else min(max(tick - time.monotonic(), 0.0), _LOOK_S)
                try:
                    message = self._inbox.get(timeout=wait)
                except queue.Empty:
                    self._rounds.tick(now=time.monotonic())
                else:
                    if message is None:
                        return
                    self._rounds.handle(message, now=time.monotonic())
                self._look(self._rounds.stand_still or self._rounds.finished)
        except BaseException as error:
            self._on_error(error)
