"""The batch scheduler: decides how many steps each worker takes in a round, so that all end it together.

A state machine without clock, threads or transport. A message and the time go in; what to send comes out. ``tick`` is
to be called at ``next_tick``, or now and then. Nothing that a worker does or fails to do keeps a round from ending: a
silent worker is not counted on, and pseudo-gradients are waited for until a deadline plus grace.

A round: everyone is told to start, fetches the weights and trains. Each report is answered, and moves the projection.
When the projected end is a few steps of the slowest worker away, each worker is told after how many steps to send.
When the pseudo-gradients are there, or the time is over, they are merged and the next round starts.

Not thread-safe: call it from one thread, or under one lock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Annotated, TypeAlias, TypedDict

import msgspec

from lightning_bytescheduler.diloco.messages import (
    PARAMETER_SERVER,
    Acknowledge,
    CollectPseudoGradients,
    Envelope,
    JoinRounds,
    LeaveRounds,
    MergePseudoGradients,
    PseudoGradientArrived,
    RoundStarted,
    SchedulerMessage,
    SendAfter,
    SendingPseudoGradient,
    SendNow,
    StartRound,
    StepReport,
    TrainingOver,
    WaitForRound,
    WorkerMessage,
)
from lightning_bytescheduler.diloco.round_end import Pace, RoundOptions, RoundTarget
from lightning_bytescheduler.diloco.round_record import RoundRecord
from lightning_bytescheduler.diloco.worker_progress import StepTimeState, WorkerProgress, WorkerState
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["BatchScheduler", "BatchSchedulerState"]


_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class BatchSchedulerState(TypedDict):
    """What to keep of a ``BatchScheduler`` over a restart: primitives only."""

    round: _Count
    samples: _Count
    step_times: dict[str, StepTimeState]


class _Phase(Enum):
    IDLE = "nobody is there"
    TRAINING = "the end of the round is open"
    COLLECTING = "the end of the round is decided"
    FINISHED = "the training is over"


class BatchScheduler:
    """Schedules the rounds of a run.

    Args:
        target: What ends a round.
        options: When to decide, and how long to wait for whom.
        observer: Called with each round that has ended.
    """

    def __init__(
        self,
        target: RoundTarget,
        options: RoundOptions | None = None,
        *,
        observer: Callable[[RoundRecord], None] | None = None,
    ) -> None:
        self._target = target
        self._options = RoundOptions() if options is None else options
        self._observer = observer
        caps = [cap for cap in (target.step_cap, self._options.step_cap) if cap is not None]
        self._step_cap = min(caps, default=None)
        self._phase = _Phase.IDLE
        self._round = 0
        self._samples = 0
        self._workers: dict[str, WorkerProgress] = {}
        self._step_times: dict[str, StepTimeState] = {}  # of workers that are not there
        self._gone: set[str] = set()
        self._first = self._options.start_workers  # that the next round waits for
        self._now = 0.0
        self._started = 0.0
        self._decided: float | None = None
        self._deadline = 0.0
        self._longest_send = 0.0
        self._outgoing: list[Envelope] = []

    @property
    def round(self) -> int:
        """The round that is on, or the last one; 0 before the first."""
        return self._round

    @property
    def finished(self) -> bool:
        """Whether ``outer_steps`` rounds are over."""
        return self._phase is _Phase.FINISHED

    @property
    def samples(self) -> int:
        """That have become part of the weights, in all rounds so far."""
        return self._samples

    @property
    def workers(self) -> Mapping[str, WorkerProgress]:
        """Everyone who takes part, or waits to. To be read only."""
        return self._workers

    @property
    def left(self) -> int:
        """What is to go in this round, in the target's unit; 0 or less when it is reached."""
        return self._left(self._members())

    @property
    def next_tick(self) -> float | None:
        """When ``tick`` may change something, if no message comes before; ``None`` if it cannot."""
        if self._phase not in (_Phase.TRAINING, _Phase.COLLECTING):
            return None
        times = [worker.silent_at(self._options) for worker in self._training(self._now)]
        if self._phase is _Phase.COLLECTING:
            times.append(self._deadline + self._options.grace)
        return min(times, default=None)

    def handle(self, message: WorkerMessage, *, now: float) -> tuple[Envelope, ...]:
        """Take in a message.

        Args:
            message: From a worker, or about one.
            now: In seconds; never less than before.

        Returns:
            What to send, the answer to the sender among it.
        """
        self._now = now
        worker = self._workers.get(message.worker)
        if self.finished:
            self._tell(message.worker, TrainingOver(round=self._round))
        elif isinstance(message, LeaveRounds):
            if worker is not None:
                self._forget(worker)
                self._gone.add(worker.name)
                self._advance(now)
        elif isinstance(message, JoinRounds) and (worker is None or message.session != worker.session):
            if worker is not None:
                self._forget(worker)  # it has been started anew, and what it did is lost
            self._join(message.worker, message.session, now)
        elif worker is None:
            # After a restart of the scheduler, workers that it does not know report to it: they join, too. Whoever has
            # left does not come back with a report that was overtaken.
            if message.worker not in self._gone:
                self._join(message.worker, 0, now)
        else:
            self._hear(worker, message, now)
        return self._take_outgoing()

    def tick(self, *, now: float) -> tuple[Envelope, ...]:
        """Take note that time has passed.

        Args:
            now: In seconds; never less than before.

        Returns:
            What to send.
        """
        self._now = now
        self._advance(now)
        return self._take_outgoing()

    def state_dict(self) -> BatchSchedulerState:
        """What to keep over a restart. Workers have to join again; the round that was on begins anew."""
        open_round = self._phase in (_Phase.TRAINING, _Phase.COLLECTING)
        known = {name: worker.step_time.state_dict() for name, worker in self._workers.items()}
        return {
            "round": self._round - open_round,
            "samples": self._samples,
            "step_times": {**self._step_times, **known},
        }

    def load_state_dict(self, state: BatchSchedulerState) -> None:
        """Carry on from what was kept. Call it before anybody joins.

        Raises:
            OptionError: If it is not what :meth:`state_dict` gave; names what is wrong with it.
        """
        try:
            state = msgspec.convert(state, BatchSchedulerState)
        except msgspec.ValidationError as error:
            raise OptionError("state of the rounds", state, f"what a batch scheduler has kept ({error})") from error
        self._round, self._samples = state["round"], state["samples"]
        self._step_times = dict(state["step_times"])
        if self._round:
            self._first = self._options.restart_workers
        self._phase = _Phase.FINISHED if self._is_over() else _Phase.IDLE

    def _hear(self, worker: WorkerProgress, message: WorkerMessage, now: float) -> None:
        worker.heard = now
        if worker.state is WorkerState.LOST:
            worker.state = WorkerState.WAITING
            if isinstance(message, PseudoGradientArrived):
                self._measure_transfer(worker, now)  # too late, so that the next one is given more time
        if self._phase is _Phase.IDLE:
            self._begin_round(now)
        if not isinstance(message, (JoinRounds, LeaveRounds)) and message.round == self._round:
            self._follow(worker, message, now)
        self._answer(worker)
        self._advance(now)

    def _follow(
        self,
        worker: WorkerProgress,
        message: StepReport | SendingPseudoGradient | PseudoGradientArrived | RoundStarted,
        now: float,
    ) -> None:
        """Take over what is new. What is overtaken or doubled is not; what is missing is inferred."""
        if isinstance(message, (RoundStarted, StepReport)) and worker.state is WorkerState.STARTING:
            worker.start(now)
        if isinstance(message, StepReport) and worker.is_training and message.steps > worker.steps:
            worker.take_report(message, now)
        if isinstance(message, SendingPseudoGradient) and message.steps >= worker.steps:
            worker.steps, worker.samples, worker.tokens = message.steps, message.samples, message.tokens
        if isinstance(message, (SendingPseudoGradient, PseudoGradientArrived)) and worker.is_training:
            worker.end(now)
        if isinstance(message, PseudoGradientArrived) and worker.state is WorkerState.SENDING:
            worker.arrive(now)
            self._measure_transfer(worker, now)

    def _measure_transfer(self, worker: WorkerProgress, now: float) -> None:
        if worker.sending is not None:
            self._longest_send = max(self._longest_send, now - worker.sending)

    def _answer(self, worker: WorkerProgress) -> None:
        if worker.state in (WorkerState.WAITING, WorkerState.LOST):
            self._tell(worker.name, WaitForRound(round=self._round + 1))
        elif worker.state is WorkerState.STARTING:
            self._tell(worker.name, StartRound(round=self._round, step_cap=self._step_cap))
        elif worker.state is WorkerState.TRAINING and self._phase is _Phase.COLLECTING:
            self._tell_to_send(worker)
        else:
            self._tell(worker.name, Acknowledge(round=self._round, reported=worker.steps))

    def _join(self, name: str, session: int, now: float) -> None:
        self._gone.discard(name)
        worker = self._workers[name] = WorkerProgress(name=name, session=session, heard=now)
        if name in self._step_times:
            worker.step_time.load_state_dict(self._step_times.pop(name))
        if self._phase is _Phase.IDLE:
            self._begin_round(now)
        if worker.state is WorkerState.WAITING:
            self._answer(worker)
        self._advance(now)

    def _forget(self, worker: WorkerProgress) -> None:
        self._step_times[worker.name] = worker.step_time.state_dict()
        del self._workers[worker.name]

    def _begin_round(self, now: float) -> None:
        members = [worker for worker in self._workers.values() if worker.state is not WorkerState.LOST]
        if len(members) < self._first:
            self._phase = _Phase.IDLE
            return
        self._first = 1
        self._round += 1
        self._phase = _Phase.TRAINING
        self._started, self._decided = now, None
        for worker in members:
            worker.tell_to_start(now)
            self._answer(worker)

    def _advance(self, now: float) -> None:
        """Decide the end of the round if it is time to, and end it if it is over."""
        if self._phase is _Phase.TRAINING:
            self._decide(now)
        if self._phase is _Phase.COLLECTING:
            awaited = [worker for worker in self._members() if worker.state is WorkerState.SENDING]
            awaited += self._training(now)
            if not awaited or now >= self._deadline + self._options.grace:
                self._end_round(now)

    def _decide(self, now: float) -> None:
        training = self._training(now)
        if not training:
            self._collect({}, 0.0, now)
            return
        paces = {worker.name: worker.pace(self._step_cap) for worker in training}
        known = {name: pace for name, pace in paces.items() if pace is not None}
        slowest = max((pace.step_seconds for pace in known.values()), default=0.0)
        # Whoever is silent is not counted on, nor is what it did: its pseudo-gradient will probably not come.
        left = self._left([*training, *(worker for worker in self._members() if worker.has_ended)])
        if left <= 0:
            # Nobody is to begin another step. Whoever has not started yet does not have to.
            self._collect({}, slowest * max(worker.in_flight + 1 for worker in training), now)
        elif all(worker.step_time.is_known for worker in training):
            lead = self._lead(known, slowest)
            plan = self._target.plan(left, list(known.values()), now=now, within=lead)
            if plan is not None:
                counters = {
                    name: pace.steps + max(steps, pace.sure)
                    for (name, pace), steps in zip(known.items(), plan.steps, strict=True)
                }
                self._collect(counters, plan.seconds, now)

    def _left(self, counted: list[WorkerProgress]) -> int:
        return self._target.left(
            samples=sum(worker.samples for worker in counted), steps=[worker.steps for worker in counted]
        )

    def _lead(self, paces: Mapping[str, Pace], slowest: float) -> float:
        """How many seconds before its end a round is decided: each worker must hear of it before its last step."""
        told_in_time = max((pace.committed + 1) * pace.step_seconds for pace in paces.values())
        return max(self._options.lead_steps * slowest, told_in_time)

    def _collect(self, counters: Mapping[str, int], seconds: float, now: float) -> None:
        """The end of the round is decided: everyone is told, also those who are silent."""
        self._phase = _Phase.COLLECTING
        self._decided = now
        self._deadline = now + 2 * seconds + 2 * self._longest_send
        members = self._members()
        for worker in members:
            if worker.is_training:
                worker.send_after = counters.get(worker.name)
                self._tell_to_send(worker)
        names = tuple(worker.name for worker in members)
        timeout = self._deadline + self._options.grace - now
        self._tell(PARAMETER_SERVER, CollectPseudoGradients(round=self._round, workers=names, timeout=timeout))

    def _tell_to_send(self, worker: WorkerProgress) -> None:
        if worker.send_after is None:
            self._tell(worker.name, SendNow(round=self._round))
        else:
            self._tell(worker.name, SendAfter(round=self._round, steps=worker.send_after, reported=worker.steps))

    def _end_round(self, now: float) -> None:
        members = self._members()
        arrived = [worker for worker in members if worker.state is WorkerState.ARRIVED and worker.samples]
        if len(arrived) < max(math.ceil(self._options.quorum * len(members)), 1):
            arrived = []
        merged = tuple(worker.name for worker in arrived)
        self._samples += sum(worker.samples for worker in arrived)
        self._tell(PARAMETER_SERVER, MergePseudoGradients(round=self._round, workers=merged))
        record = RoundRecord(
            round=self._round,
            start=self._started,
            end=now,
            decided=self._decided,
            workers=tuple(worker.record(now, merged=worker.name in merged) for worker in members),
        )
        for worker in members:
            if worker.state is not WorkerState.ARRIVED:
                worker.state = WorkerState.LOST
        if self._is_over():
            self._phase = _Phase.FINISHED
            for name in self._workers:
                self._tell(name, TrainingOver(round=self._round))
        else:
            self._begin_round(now)
        if self._observer is not None:
            self._observer(record)

    def _is_over(self) -> bool:
        return self._options.outer_steps is not None and self._round >= self._options.outer_steps

    def _members(self) -> list[WorkerProgress]:
        """Who takes part in this round."""
        outside = (WorkerState.WAITING, WorkerState.LOST)
        return [worker for worker in self._workers.values() if worker.state not in outside]

    def _training(self, now: float) -> list[WorkerProgress]:
        """Who has steps of this round before it, and is not silent."""
        return [w for w in self._members() if w.is_training and now < w.silent_at(self._options)]

    def _tell(self, name: str, message: SchedulerMessage) -> None:
        self._outgoing.append(Envelope(name, message))

    def _take_outgoing(self) -> tuple[Envelope, ...]:
        outgoing, self._outgoing = tuple(self._outgoing), []
        return outgoing
