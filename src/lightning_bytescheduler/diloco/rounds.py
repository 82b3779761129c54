"""The rounds of a run, for their host: worker 0 of workers launched together, or a coordinator.

:class:`Rounds` wraps the batch scheduler. The scheduler's messages go to the workers, except at the end of a round.
There the host decides whether later messages are held until it lets the workers go on, as when a mean must arrive
first. So a worker hears of a round's end before it hears of the next round's start. Besides the scheduler, a worker may
end a round for all. Where all take the same number of steps in a round, workers that are behind that one go on until
they have taken as many.

*Whether all stand still* at a round's end is decided here, too. Each of the workers that were launched together may ask
for the end of a round, because its data or its steps are used up, or for a validation. Then no worker starts the next
round before all have passed that point. In the records of such a run, a worker that is done before the others is
waiting until they come. It can send nothing before that, although the scheduler sees it as sending.

No clock, no threads, no transport; for one thread, or under one lock. :class:`RoundsThread` hosts the rounds of a job
on worker 0.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from lightning_bytescheduler.diloco.batch_scheduler import BatchScheduler
from lightning_bytescheduler.diloco.messages import (
    EndRound,
    FromWorker,
    PassedRoundEnd,
    RoundEnded,
    RoundStarted,
    SendAfter,
    SendingPseudoGradient,
    StepReport,
    ToWorker,
    TrainingOver,
)
from lightning_bytescheduler.diloco.round_end import FixedSteps, RoundOptions, RoundTarget
from lightning_bytescheduler.diloco.round_record import Activity, RoundRecord

_LOOK_S = 0.5


class Rounds:
    """See the module.

    Args:
        target: What ends a round.
        options: The batch scheduler's options.
        post: Sends a message to a worker, without waiting.
        end: Called with each round that is over. Later messages are held until :meth:`go_on`. For workers launched
            together they are held only if all stand still.
        together: Names of workers launched together: all stand still if one has asked for it.

    Attributes:
        scheduler: The batch scheduler.
    """

    def __init__(
        self,
        target: RoundTarget,
        options: RoundOptions,
        *,
        post: Callable[[str, ToWorker], None],
        end: Callable[[RoundRecord], object],
        together: Sequence[str] = (),
    ) -> None:
        self.scheduler = BatchScheduler(target, options, post=self._say, end=self._over)
        self._target = target
        self._post = post
        self._end = end
        self._ending: SendAfter | None = None  # what all were told when one asked for a round's end
        # Messages after a round's end, and an end that comes before the last one was passed or merged.
        self._held: list[tuple[str, ToWorker] | RoundRecord] | None = None
        self._together = tuple(together)
        self._wishes: set[str] = set()  # what is to happen at the end of the round, of workers launched together
        self._passed: dict[str, bool] = {}  # workers that have passed the end of a round, and whether they stop
        self._sent_at: dict[str, float] = {}  # when each worker said that it sends

    @property
    def stand_still(self) -> bool:
        """Whether messages after a round's end are held."""
        return self._held is not None

    def handle(self, message: FromWorker, *, now: float) -> None:
        """Handle a worker's message.

        Raises:
            RuntimeError: If it is not a message of a worker.
        """
        if isinstance(message, EndRound):
            self._wishes |= {name for name in ("epoch", "validate", "stop") if getattr(message, name)}
            if message.now:
                self.end_now(message.steps)
        elif isinstance(message, PassedRoundEnd):
            self._take_passed(message, now)
        elif not isinstance(message, FromWorker):
            raise RuntimeError(f"The batch scheduler was sent a message that only it sends: {message!r}.")
        else:
            if isinstance(message, SendingPseudoGradient) and self._together:
                self._sent_at[message.worker] = now
            self.scheduler.handle(message, now=now)
            ending = self._ending
            if isinstance(message, (StepReport, RoundStarted)) and ending and ending.round == message.round:
                self._say(message.worker, ending)  # sent again: the first may have come before the worker had started

    def tick(self, *, now: float) -> None:
        """Note that time has passed."""
        if not self._together or self._held is None:  # no worker is silent while all stand still
            self.scheduler.tick(now=now)

    def end_now(self, steps: int) -> None:
        """End the current round for all, at the request of one worker.

        Args:
            steps: Steps that this worker has taken.
        """
        round = self.scheduler.round
        if self._held is None and (self._ending is None or self._ending.round != round):
            equal = isinstance(self._target, FixedSteps)
            self._ending = SendAfter(round=round, steps=steps if equal else 0)
            for name in self.scheduler.workers:
                self._post(name, self._ending)

    def go_on(self, *, over: int | None = None) -> None:
        """Send the messages that were held, or tell that training is over after a round."""
        held, self._held = self._held or [], None
        if over is not None:
            held = [(name, TrainingOver(round=over)) for name in self.scheduler.workers]
        for one in held:
            if isinstance(one, RoundRecord):
                self._over(one)
            else:
                self._say(*one)

    def _say(self, name: str, message: ToWorker) -> None:
        if self._held is not None:
            self._held.append((name, message))
            return
        self._post(name, message)

    def _over(self, record: RoundRecord) -> None:
        if self._held is not None:
            self._held.append(record)
            return
        self._ending = None
        if self._together:
            record = self._with_common_waiting(record)
            self._end(record)
            self._halt(record)
        else:
            self._held = []
            self._end(record)

    # ------------------------------------------------------------------ of workers launched together

    def _halt(self, record: RoundRecord) -> None:
        """Tell all workers that a round is over, and whether all stand still, before they hear of the next round."""
        stops = "stop" in self._wishes or self.scheduler.finished
        ended = RoundEnded(
            round=record.round,
            samples=record.samples,
            metrics=record.metrics,
            epoch="epoch" in self._wishes,
            validate="validate" in self._wishes,
            stop=stops,
            halts=bool(self._wishes) or stops,
        )
        self._wishes, self._passed, self._sent_at = set(), {}, {}
        self._held = [] if ended.halts else None
        for worker in self._together:
            self._post(worker, ended)

    def _take_passed(self, message: PassedRoundEnd, now: float) -> None:
        if self._held is None:
            return
        self._passed[message.worker] = message.stop
        if len(self._passed) == len(self._together):
            self.scheduler.start_waiting(now=now)
            self.go_on(over=message.round if any(self._passed.values()) else None)

    def _with_common_waiting(self, record: RoundRecord) -> RoundRecord:
        """The same round, in which each worker waits until all are done, and sends only from then on."""
        last = max(self._sent_at.values(), default=record.end)
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


class RoundsThread:
    """The rounds of workers that were launched together, on a thread, ``bytescheduler-rounds``; a ``Link`` to them.

    Args:
        target: What ends a round.
        options: The batch scheduler's options; it waits for all ``workers``.
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
        everyone = replace(options, start_workers=len(workers))
        self._rounds = Rounds(target, everyone, post=post, end=on_round, together=workers)
        self._post = post
        self._look = look
        self._on_error = on_error
        self._inbox: queue.SimpleQueue[FromWorker | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # held while the scheduler takes in a message
        self._thread = threading.Thread(target=self._run, name="bytescheduler-rounds", daemon=True)

    def start(self, rounds_over: int) -> None:
        """Begin, or carry on after that many rounds."""
        self._rounds.scheduler.resume(rounds_over)
        self._rounds.scheduler.expect(len(self._workers))
        if self._rounds.scheduler.finished:  # worker 0 may be gone before the others ask
            for worker in self._workers:
                self._post(worker, TrainingOver(round=self._rounds.scheduler.round))
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

    @property
    def rounds_over(self) -> int:
        """Number of rounds that are over, to keep over a restart. For any thread."""
        with self._lock:
            return self._rounds.scheduler.rounds_over

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
                        self._rounds.handle(message, now=time.monotonic())
                self._look(self._rounds.stand_still or self._rounds.scheduler.finished)
        except BaseException as error:
            self._on_error(error)
