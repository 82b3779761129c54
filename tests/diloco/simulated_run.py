"""Workers, a network and a parameter server that are played event by event around the real state machines."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lightning_bytescheduler.diloco.messages import (
    FromWorker,
    JoinRounds,
    LeaveRounds,
    Message,
    PseudoGradientArrived,
    RoundStarted,
    SendingPseudoGradient,
    TrainingOver,
)
from lightning_bytescheduler.diloco.round_counter import RoundCounter
from lightning_bytescheduler.diloco.round_end import RoundOptions, RoundTarget
from lightning_bytescheduler.diloco.round_record import RoundRecord
from lightning_bytescheduler.diloco.rounds import Rounds


@dataclass(kw_only=True)
class Machine:
    """One worker. Times are in seconds.

    ``jitter`` is the spread of a step's time, ``blips`` the share of steps that take ten times as long, ``warm_up``
    what the first step of each round takes on top, ``delay`` that of a message one way, ``transfer`` that of weights
    one way, ``slower_at`` from when on steps take ``slower_by`` times as long. ``dies`` is without a word, ``leaves``
    with one; at ``returns``, another process of the same name takes the place of one that has died. ``sleeps`` are
    spans in which the process is stopped. With ``overlap_steps``, training goes on for so many steps while the update
    travels.
    """

    batch_size: int
    step_seconds: float
    jitter: float = 0.0
    blips: float = 0.0
    warm_up: float = 0.0
    delay: float = 0.0
    transfer: float = 0.0
    joins: float = 0.0
    leaves: float = math.inf
    dies: float = math.inf
    returns: float = math.inf
    sleeps: tuple[tuple[float, float], ...] = ()
    slower_at: float = math.inf
    slower_by: float = 1.0
    overlap_steps: int = 0

    def next_step(self, chance: random.Random, now: float, first: bool) -> float:
        seconds = self.step_seconds * (self.slower_by if now >= self.slower_at else 1.0)
        if self.jitter:
            seconds *= chance.lognormvariate(0.0, self.jitter)
        if self.blips and chance.random() < self.blips:
            seconds *= 10
        return seconds + (self.warm_up if first else 0.0)


@dataclass
class SimulatedRun:
    """What was seen.

    ``taken``: samples that workers say they have processed when they send, by round. ``ends``: when each worker's last
    step of a round ended, by round. ``in_flight``: the most steps reported as in flight. ``busy``: seconds in which a
    worker computed. ``bounds``: until when pseudo-gradients are waited for, by round.
    """

    rounds: list[RoundRecord] = field(default_factory=list)
    taken: dict[int, dict[str, int]] = field(default_factory=dict)
    ends: dict[int, dict[str, float]] = field(default_factory=dict)
    in_flight: dict[str, int] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    bounds: dict[int, float] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """That have become part of the weights."""
        return sum(record.samples for record in self.rounds)


def simulate(
    machines: list[Machine],
    target: RoundTarget,
    options: RoundOptions,
    *,
    seed: int = 0,
    loss: float = 0.0,
    doubling: float = 0.0,
    until: float = math.inf,
    kind: type[Rounds] = Rounds,
    lease: float = math.inf,
    restarts: tuple[float, ...] = (),
) -> SimulatedRun:
    """Play a run until it is over, nothing is left to happen or the time is up.

    A worker that has been dead or asleep for ``lease`` counts as left, and joins again when it wakes. At ``restarts``
    the scheduler is replaced by one that knows what the other knew at the end of the last round, and all workers join
    again.

    A share ``loss`` of messages is lost, a share ``doubling`` comes twice, the second time much later. A worker that
    waits for long asks again.
    """
    return _Run(machines, target, options, random.Random(seed), loss, doubling, kind, lease, restarts).play(until)


class _Run:
    def __init__(
        self,
        machines: list[Machine],
        target: RoundTarget,
        options: RoundOptions,
        chance: random.Random,
        loss: float,
        doubling: float,
        kind: type[Rounds],
        lease: float,
        restarts: tuple[float, ...],
    ) -> None:
        self.seen = SimulatedRun()
        self.lease = lease
        self._make = lambda: kind(target, options, post=self._post, end=self._ended)
        self.scheduler = self._watched()
        self._saved = self.scheduler.round - self.scheduler.is_open
        self.chance, self.loss, self.doubling = chance, loss, doubling
        self.now, self.numbers = 0.0, itertools.count()
        self.heap: list[tuple[float, bool, int, Callable[[], None]]] = []
        self.workers = {f"w{index}": _Worker(self, f"w{index}", machine) for index, machine in enumerate(machines)}
        self.ticks: set[float] = set()
        for time in restarts:
            self.at(time, self._restart)

    def at(self, time: float, do: Callable[[], None], *, last: bool = False) -> None:
        """Do something at that time; ``last`` of all that happens at that instant."""
        heapq.heappush(self.heap, (time, last, next(self.numbers), do))

    def play(self, until: float) -> SimulatedRun:
        while self.heap and self.heap[0][0] <= until:
            self.now, _, _, do = heapq.heappop(self.heap)
            do()
        return self.seen

    def _ended(self, record: RoundRecord) -> None:
        assert record.round == len(self.seen.rounds) + 1
        self.seen.rounds.append(record)
        self._saved = self.scheduler.round - self.scheduler.is_open
        self.scheduler.go_on()

    def _restart(self) -> None:
        self.scheduler = self._watched()
        self.scheduler.resume(self._saved)
        for worker in self.workers.values():
            worker.join_again()

    def _watched(self) -> Rounds:
        made = self._make()
        collect = made._collect

        def noted(*arguments: Any) -> None:
            collect(*arguments)
            self.seen.bounds[made.round] = made._deadline

        made._collect = noted  # type: ignore[method-assign,assignment]
        return made

    def to_scheduler(self, message: FromWorker, delay: float) -> None:
        for late in self._copies(delay):
            self.at(self.now + late, partial(self._hear, message))

    def _hear(self, message: FromWorker) -> None:
        self.scheduler.handle(message, now=self.now)
        self._await_tick()

    def _tick(self) -> None:
        self.ticks.discard(self.now)
        self.scheduler.tick(now=self.now)
        self._await_tick()

    def _post(self, name: str, message: Message) -> None:
        if name in self.workers:
            worker = self.workers[name]
            for late in self._copies(worker.machine.delay):
                worker.at(self.now + late, partial(worker.receive, message))

    def _await_tick(self) -> None:
        tick = self.scheduler.next_tick
        if tick is not None and tick > self.now and tick not in self.ticks:
            self.ticks.add(tick)
            self.at(tick, self._tick)

    def _copies(self, delay: float) -> list[float]:
        if not self.loss and not self.doubling:
            return [delay]
        copies = [] if self.chance.random() < self.loss else [delay * self.chance.uniform(0.5, 2)]
        if self.chance.random() < self.doubling:
            copies.append(delay * self.chance.uniform(1, 50))
        return copies


class _Counter(RoundCounter):
    """Of a worker that knows what to say again to a scheduler that was started anew."""

    sent: SendingPseudoGradient | None = None
    finished = False

    def receive(self, message: Message) -> None:
        self.finished = self.finished or isinstance(message, TrainingOver)
        super().receive(message)

    def start(self) -> RoundStarted:
        self.sent = None
        return super().start()

    def send(self) -> SendingPseudoGradient:
        self.sent = super().send()
        return self.sent

    def join(self, session: int) -> JoinRounds:
        done = self.sent or self
        return JoinRounds(
            worker=self.worker,
            session=session,
            round=self.round,
            steps=done.steps,
            samples=done.samples,
        )


class _Worker:
    def __init__(self, run: _Run, name: str, machine: Machine, session: int = 0) -> None:
        self.run, self.machine, self.session = run, machine, session
        self.counter = _Counter(name)
        self.busy = False
        self.last_said: FromWorker = JoinRounds(worker=name)
        self.asked = 0
        self.fetching: int | None = None
        self.fetched: int | None = None
        self.sent_beside = False
        self.said_to_be_gone = False
        self.at(max(machine.joins, run.now), lambda: self._say(JoinRounds(worker=name, session=session)))
        if machine.leaves < math.inf:
            run.at(machine.leaves, lambda: run.to_scheduler(LeaveRounds(worker=name), machine.delay))
        if machine.returns < math.inf and machine.dies <= machine.returns:
            run.at(machine.returns, self._return)
        for start, end in (*machine.sleeps, (machine.dies, math.inf)):
            if end > start + run.lease:
                run.at(start + run.lease, partial(self._give_up, end))
            if end < math.inf:
                run.at(end, self._wake)

    def at(self, time: float, do: Callable[[], None], *, last: bool = False) -> None:
        """Do something at that time, or when it wakes."""

        def awake() -> None:
            end = next((end for start, end in self.machine.sleeps if start <= self.run.now < end), None)
            if end is None:
                do()
            else:
                self.run.at(end, awake, last=last)

        self.run.at(time, awake, last=last)

    def _return(self) -> None:
        machine = replace(self.machine, dies=math.inf, returns=math.inf, sleeps=(), leaves=math.inf)
        name = self.counter.worker
        self.run.workers[name] = _Worker(self.run, name, machine, self.session + 1)

    def _give_up(self, until: float) -> None:
        if self.run.now < until and self.run.workers[self.counter.worker] is self:
            self.said_to_be_gone = True
            self.run.to_scheduler(LeaveRounds(worker=self.counter.worker), 0.0)

    def _wake(self) -> None:
        if self.said_to_be_gone:
            self.said_to_be_gone = False
            self.join_again()

    def join_again(self) -> None:
        """Say what was done in the round, and send again what was sent."""
        self.at(self.run.now + self.machine.delay, self._join_again)

    def _join_again(self) -> None:
        counter = self.counter
        if self.gone or counter.finished or self.run.now < self.machine.joins:
            return
        self._say(counter.join(self.session))
        if counter.sent is not None:
            self._say(counter.sent)
            arrived = PseudoGradientArrived(worker=counter.worker, round=counter.sent.round)
            self.at(self.run.now + self.machine.transfer, lambda: None if self.gone else self._say(arrived))

    @property
    def gone(self) -> bool:
        return self.run.now >= min(self.machine.leaves, self.machine.dies)

    def receive(self, message: Message) -> None:
        self.counter.receive(message)
        if self.machine.overlap_steps and self.counter.round and self.counter.next_round not in (None, self.fetching):
            self.fetching = self.counter.next_round
            self.at(self.run.now + self.machine.transfer, partial(self._fetched_beside, self.fetching))
        if not self.busy and not self.gone:
            self._go_on()

    def _say(self, message: FromWorker) -> None:
        self.last_said = message
        self.run.to_scheduler(message, self.machine.delay)
        self.asked += 1
        if self.run.loss:
            self.at(self.run.now + 20 * self.machine.step_seconds + 1, partial(self._ask, self.asked))

    def _ask(self, asked: int) -> None:
        if asked == self.asked and not self.busy and not self.gone and not self.counter.finished:
            self._say(self.last_said)

    def _go_on(self) -> None:
        """Do what is next: fetch weights, take a step, send, or nothing until a message comes."""
        counter, run = self.counter, self.run
        if counter.finished or self.gone:
            return
        if counter.next_round is not None and not (self.machine.overlap_steps and counter.round):
            self.busy = True
            self.at(run.now + self.machine.transfer, self._fetched)

    def _fetched_beside(self, round: int) -> None:
        self.fetched = round
        if not self.busy and not self.gone:
            self._begin_step()

    def _fetched(self) -> None:
        self.busy = False
        if not self.gone:
            self._say(self.counter.start())
            self.busy = True
            self.at(self.run.now, self._after_step, last=True)

    def _begin_step(self) -> None:
        counter, run = self.counter, self.run
        if self.sent_beside and not self._merge_beside():
            return  # stalled: the answer is late
        if counter.finished or (not self.sent_beside and counter.next_round is not None):
            self._go_on()
        elif counter.due:
            self._send()
        else:
            self.busy = True
            seconds = self.machine.next_step(run.chance, run.now, counter.steps == 0)
            run.seen.busy[counter.worker] = run.seen.busy.get(counter.worker, 0.0) + seconds
            self.at(run.now + seconds, lambda: self._stepped(seconds))

    def _merge_beside(self) -> bool:
        """Whether training can go on: it is not time for the answer yet, or the answer is there and is merged."""
        counter = self.counter
        if counter.steps < self.machine.overlap_steps:
            return True
        if counter.next_round is None or self.fetched != counter.next_round:
            return False
        self.sent_beside = False
        self._say(counter.start())
        return True

    def _stepped(self, seconds: float) -> None:
        self.busy = False
        if self.gone:
            return
        report = self.counter.step(batch_size=self.machine.batch_size, seconds=seconds)
        name = self.counter.worker
        self.run.seen.in_flight[name] = max(self.run.seen.in_flight.get(name, 0), report.in_flight)
        self.run.seen.ends.setdefault(self.counter.round, {})[name] = self.run.now
        self._say(report)
        # Answers that come at this very instant are heard before the next step begins.
        self.busy = True
        self.at(self.run.now, self._after_step, last=True)

    def _after_step(self) -> None:
        self.busy = False
        self._begin_step()

    def _send(self) -> None:
        counter, run = self.counter, self.run
        run.seen.taken.setdefault(counter.round, {})[counter.worker] = counter.samples
        self._say(counter.send())
        arrived = PseudoGradientArrived(worker=counter.worker, round=counter.round)

        def arrive() -> None:
            if not self.gone:
                self._say(arrived)

        self.at(run.now + self.machine.transfer, arrive)
        if self.machine.overlap_steps:
            self.sent_beside = True
            self._begin_step()
