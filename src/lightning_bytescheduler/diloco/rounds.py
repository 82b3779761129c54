"""The rounds of a run, as their host has them: worker 0 of those launched together, or a coordinator.

:class:`Rounds` wraps the batch scheduler. What that says goes to the workers, but for the end of a round: there the
host says whether what follows is held until it lets the workers go on, as where a mean is to be there before, or all
stand still. So a worker hears of a round's end before it hears of the next round's start. Beside the scheduler's own
decisions, one worker may end a round for all; where all take equally many steps in a round, those that are behind it go
on until they have taken as many. No clock, no threads, no transport. For one thread, or under one lock.

:class:`BatchSchedulerThread` hosts the rounds of a job on worker 0; a mailbox feeds it. A worker may ask for the end of
a round: because its data or its steps are used up, or for a validation. The thread says with each round's end what is
to happen there. Where anything is, no worker starts the next round before all have passed. In its records a worker that
is through before the others is waiting until they come: it can send nothing before, though to the scheduler it is
sending.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from lightning_bytescheduler.diloco.batch_scheduler import BatchScheduler
from lightning_bytescheduler.diloco.coordinator_protocol import PauseRounds, ResumeRounds
from lightning_bytescheduler.diloco.messages import (
    PARAMETER_SERVER,
    EndRound,
    Envelope,
    MergePseudoGradients,
    Message,
    PassedRoundEnd,
    RoundEnded,
    RoundStarted,
    RoundStatus,
    SendAfter,
    SendingPseudoGradient,
    SendNow,
    StepMetrics,
    StepReport,
    TrainingOver,
    WorkerMessage,
)
from lightning_bytescheduler.diloco.round_end import FixedSteps, RoundOptions, RoundTarget
from lightning_bytescheduler.diloco.round_record import Activity, RoundMetrics, RoundRecord
from lightning_bytescheduler.diloco.round_roster import BatchSchedulerState

_STATUS_EVERY_S = 0.5


class Rounds:
    """See the module.

    Args:
        target: What ends a round.
        options: Of the batch scheduler.
        post: Sends a message to a worker, without waiting.
        end: Called with each end of a round; returns whether what follows is held until :meth:`go_on`.
        observer: Called with each round that has ended, before that.

    Attributes:
        scheduler: The batch scheduler.
        metrics: Of the round that is on.
    """

    def __init__(
        self,
        target: RoundTarget,
        options: RoundOptions,
        *,
        post: Callable[[str, Message], None],
        end: Callable[[MergePseudoGradients], bool],
        observer: Callable[[RoundRecord], None],
    ) -> None:
        self.scheduler = BatchScheduler(target, options, observer=observer)
        self.metrics = RoundMetrics()
        self._target = target
        self._post = post
        self._end = end
        self._ending: SendNow | SendAfter | None = None  # what all were told when one asked for a round's end
        self._told: dict[str, float] = {}
        self._status, self._status_at = RoundStatus(round=0, left=0), 0.0  # one for all: it takes a look at all
        self._held: list[Envelope] | None = None

    def handle(self, message: WorkerMessage | PauseRounds | ResumeRounds, *, now: float) -> None:
        """Take in what a worker says."""
        self._deliver(self.scheduler.handle(message, now=now))
        if isinstance(message, (StepReport, RoundStarted)):
            self._answer(message.worker, message.round, now)

    def measured(self, message: StepMetrics) -> None:
        """Take in what a worker has measured."""
        self.metrics.add(message.worker, batch_size=message.batch_size, seconds=message.seconds, loss=message.loss)

    def tick(self, *, now: float) -> None:
        """Take note that time has passed."""
        self._deliver(self.scheduler.tick(now=now))

    def end_now(self, steps: int) -> None:
        """End the round that is on for all, which one worker asks for.

        Args:
            steps: That it has taken.
        """
        round = self.scheduler.round
        if self._held is None and (self._ending is None or self._ending.round != round):
            equal = isinstance(self._target, FixedSteps)
            self._ending = SendAfter(round=round, steps=steps) if equal else SendNow(round=round)
            for name in self.scheduler.workers:
                self._post(name, self._ending)

    def go_on(self, *, over: int | None = None) -> None:
        """Say what was held, or that training is over after a round."""
        held, self._held = self._held or [], None
        if over is not None:
            held = [Envelope(name, TrainingOver(round=over)) for name in self.scheduler.workers]
        self._deliver(held)

    def forget(self, name: str) -> None:
        """A worker has left."""
        self._told.pop(name, None)

    def _answer(self, name: str, round: int, now: float) -> None:
        if self._held is not None:
            return
        if self._ending is not None and round == self._ending.round:
            self._post(name, self._ending)  # the first may have come before it had started
        elif now - self._told.get(name, -_STATUS_EVERY_S) >= _STATUS_EVERY_S:
            self._told[name] = now
            if self._status.round != self.scheduler.round or now - self._status_at >= _STATUS_EVERY_S:
                self._status_at = now
                self._status = RoundStatus(round=self.scheduler.round, left=max(self.scheduler.left, 0))
            self._post(name, self._status)

    def _deliver(self, envelopes: Iterable[Envelope]) -> None:
        for envelope in envelopes:
            if self._held is not None:
                self._held.append(envelope)
            elif envelope.to != PARAMETER_SERVER:
                self._post(envelope.to, envelope.message)
            elif isinstance(envelope.message, MergePseudoGradients):
                self._ending, self._held = None, []
                if not self._end(envelope.message):
                    self._held = None


_LOOK_S = 1.0
_SILENT_STEPS, _SILENT_S = 3, 5.0  # whose sum is a silence that is told of


class BatchSchedulerThread:
    """The batch scheduler with its thread, ``bytescheduler-batch-scheduler``.

    Args:
        target: What ends a round.
        options: Of the batch scheduler; it waits for all ``workers``.
        workers: Names of all workers.
        post: Sends a message to a worker, without waiting.
        on_round: Called on the thread with each round that has ended.
        on_silence: Called on the thread with the workers that have not been heard of for long, every now and then.
        on_error: Called on the thread with what it failed with.
    """

    def __init__(
        self,
        target: RoundTarget,
        options: RoundOptions,
        *,
        workers: Sequence[str],
        post: Callable[[str, Message], None],
        on_round: Callable[[RoundRecord], object],
        on_silence: Callable[[list[str]], object],
        on_error: Callable[[BaseException], object],
    ) -> None:
        self._workers = tuple(workers)
        everyone = replace(options, start_workers=len(workers))
        self._rounds = Rounds(target, everyone, post=post, end=self._announce, observer=self._round_ended)
        self._post = post
        self._on_round = on_round
        self._on_silence = on_silence
        self._on_error = on_error
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # held while the scheduler takes in a message; no other is taken under it
        # What follows is the thread's.
        self._wishes: set[str] = set()  # what is to happen at the end of the round
        self._passing: dict[str, bool] | None = None  # who has passed the end of a round, and whether it stops
        self._sent_at: dict[str, float] = {}
        self._looked = 0.0
        self._thread = threading.Thread(target=self._run, name="bytescheduler-batch-scheduler", daemon=True)

    def start(self, state: BatchSchedulerState | None = None) -> None:
        """Begin, or carry on from what :meth:`state_dict` gave."""
        if state is not None:
            self._rounds.scheduler.load_state_dict(state)
            self._rounds.scheduler.expect(len(self._workers))
        if self._rounds.scheduler.finished:  # worker 0 may be gone before the others ask
            for worker in self._workers:
                self._post(worker, TrainingOver(round=self._rounds.scheduler.round))
        self._thread.start()

    def handle(self, message: Message) -> None:
        """Take in a message; returns at once."""
        self._inbox.put(message)

    def stop(self, timeout: float) -> bool:
        """End the thread; returns whether it ended within ``timeout`` seconds."""
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def state_dict(self) -> BatchSchedulerState:
        """What to keep over a restart. For any thread."""
        with self._lock:
            return self._rounds.scheduler.state_dict()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while True:
                tick = self._rounds.scheduler.next_tick
                wait = _LOOK_S if tick is None else min(max(tick - time.monotonic(), 0.0), _LOOK_S)
                try:
                    message = self._inbox.get(timeout=wait)
                except queue.Empty:
                    with self._lock:
                        self._rounds.tick(now=time.monotonic())
                else:
                    if message is None:
                        return
                    with self._lock:
                        self._take(message)
                self._look_for_silence()
        except BaseException as error:
            self._on_error(error)

    def _take(self, message: Message) -> None:
        now = time.monotonic()
        if isinstance(message, EndRound):
            self._wishes |= {name for name in ("epoch", "validate", "stop") if getattr(message, name)}
            if message.now:
                self._rounds.end_now(message.steps)
        elif isinstance(message, PassedRoundEnd):
            self._take_passed(message)
        elif isinstance(message, StepMetrics):
            self._rounds.measured(message)
        elif isinstance(message, WorkerMessage):
            if isinstance(message, SendingPseudoGradient):
                self._sent_at[message.worker] = now
            self._rounds.handle(message, now=now)
        else:
            raise RuntimeError(f"The batch scheduler was sent what only it says: {message!r}.")

    def _take_passed(self, message: PassedRoundEnd) -> None:
        if self._passing is None:
            return
        self._passing[message.worker] = message.stop
        if len(self._passing) < len(self._workers):
            return
        stops, self._passing = any(self._passing.values()), None
        self._rounds.go_on(over=message.round if stops else None)

    def _announce(self, merge: MergePseudoGradients) -> bool:
        """Tell everybody that a round is over, before they hear of the next one; returns whether all stand still."""
        samples = self._ended.samples
        ended = RoundEnded(
            round=merge.round,
            samples=samples,
            shares={one.worker: one.samples / samples for one in self._ended.workers} if samples else {},
            metrics=self._rounds.metrics.take(),
            epoch="epoch" in self._wishes,
            validate="validate" in self._wishes,
            stop="stop" in self._wishes or self._rounds.scheduler.finished,
            halts=bool(self._wishes) or self._rounds.scheduler.finished,
        )
        self._wishes = set()
        for worker in self._workers:
            self._post(worker, ended)
        if ended.halts:
            self._passing = {}
        return ended.halts

    def _round_ended(self, record: RoundRecord) -> None:
        self._ended = _with_common_waiting(record, self._sent_at)
        self._sent_at = {}
        self._on_round(self._ended)

    def _look_for_silence(self) -> None:
        now = time.monotonic()
        if self._passing is not None or now - self._looked < _SILENT_S:
            return
        silent = [
            worker.name
            for worker in self._rounds.scheduler.workers.values()
            if worker.is_training
            and worker.step_time.seconds is not None
            and now > worker.heard + _SILENT_STEPS * worker.step_time.seconds + _SILENT_S
        ]
        if silent:
            self._looked = now
            self._on_silence(silent)


def _with_common_waiting(record: RoundRecord, sent_at: Mapping[str, float]) -> RoundRecord:
    """The same round, in which a worker waits until all are through, and sends only from then on.

    Args:
        record: By the batch scheduler.
        sent_at: When each worker was through, by the same clock.
    """
    last = max(sent_at.values(), default=record.end)
    workers = []
    for worker in record.workers:
        spans: list[tuple[Activity, float, float]] = []
        for activity, start, end in worker.spans:
            if activity == "sending" and start < last:
                spans.append(("waiting", start, min(last, end)))
                start = min(last, end)
            if start < end:
                spans.append((activity, start, end))
        workers.append(msgspec.structs.replace(worker, spans=tuple(spans)))
    return msgspec.structs.replace(record, workers=tuple(workers))
