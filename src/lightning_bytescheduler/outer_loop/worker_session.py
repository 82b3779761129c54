"""A worker's part in the rounds: counts steps, sends its update when it is time to, and lets its weights follow.

All but :meth:`receive` and :meth:`fail` is called by the training thread, which waits for the others at two places
only: for an update that is to be merged now, and for the start of a round.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from lightning_bytescheduler.diloco import RoundCounter
from lightning_bytescheduler.diloco.messages import Join, Message, SendingUpdate, UpdateArrived
from lightning_bytescheduler.exceptions import SchedulerTimeoutError
from lightning_bytescheduler.outer_loop.control_messages import (
    Boundary,
    Closed,
    Control,
    EndRound,
    Passed,
    RoundStatus,
    StepMetrics,
)
from lightning_bytescheduler.outer_loop.outer_state import OuterState
from lightning_bytescheduler.outer_loop.session_statistics import SessionStatistics
from lightning_bytescheduler.outer_loop.update_exchange import Exchange, UpdateExchange

__all__ = ["WorkerSession"]

_SLICE_S = 1.0


@dataclass(frozen=True, slots=True)
class _Sent:
    round: int
    fragment: int
    exchange: Exchange


class WorkerSession:
    """One worker in one training.

    Args:
        worker: Its name.
        state: The global weights.
        exchange: What updates travel through.
        overlap_steps: Steps between sending an update and merging the answer.
        post: Sends a message to the host, without waiting.
        timeout: Longest wait for the other workers, in seconds.
        clock: Seconds; injected by tests.
    """

    def __init__(
        self,
        *,
        worker: str,
        state: OuterState,
        exchange: UpdateExchange,
        overlap_steps: int,
        post: Callable[[Message | Control], None],
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker = worker
        self.statistics = SessionStatistics()
        self.boundary: Boundary | None = None
        self.left: int | None = None
        self._state = state
        self._exchange = exchange
        self._overlap_steps = overlap_steps
        self._post = post
        self._timeout = timeout
        self._clock = clock
        self._changed = threading.Condition()
        # What follows changes under the condition.
        self._counter = RoundCounter(worker)
        self._boundaries: dict[int, Boundary] = {}
        self._failure: BaseException | None = None
        # The training thread's own.
        self._sent: _Sent | None = None
        self._steps_since_sent = 0
        self._halted = False
        self._over = False

    @property
    def round(self) -> int:
        """The round this worker is in."""
        return self._counter.round

    @property
    def steps_left(self) -> int | None:
        """Steps until the update is sent, or ``None`` while nobody knows."""
        return self._counter.steps_left

    @property
    def over(self) -> bool:
        """Whether training is over for all workers."""
        return self._over

    @property
    def halted(self) -> bool:
        """Whether all workers stand still at the end of a round."""
        return self._halted

    @property
    def due(self) -> bool:
        """Whether the update is to be sent before another step is taken."""
        with self._changed:
            return self._counter.due

    def progress(self) -> dict[str, float]:
        """How the rounds go, by name; what is not known is left out."""
        known: dict[str, float | None] = {
            "round": self._counter.round,
            "to_go": self.left,
            "steps_left": self.steps_left,
        }
        if self.boundary is not None:
            known["share"] = self.boundary.shares.get(self.worker, 0.0)
            known.update(self.boundary.metrics)
        return {name: float(value) for name, value in known.items() if value is not None}

    # ------------------------------------------------------------------ other threads

    def receive(self, message: Message | Control) -> None:
        """Take in what the host says."""
        with self._changed:
            if isinstance(message, Boundary):
                self._boundaries[message.round] = message
            elif isinstance(message, RoundStatus):
                self.left = message.left
            elif not isinstance(message, (EndRound, Passed, StepMetrics, Closed)):
                self._counter.receive(message)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Nothing is to be expected of the others any more: raise ``error`` from whatever is waited for."""
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._changed.notify_all()
        self._exchange.abort(error)

    # ------------------------------------------------------------------ the training thread

    def check(self) -> None:
        """Raise what another thread or worker has failed with, if any."""
        if self._failure is not None:
            raise self._failure

    def begin(self) -> None:
        """Join, and wait for all workers and the first round."""
        self._post(Join(worker=self.worker))
        self._start_round()

    def count(self, *, samples: int, seconds: float, tokens: int = 0, loss: float | None = None) -> None:
        """Take note of a step, and report it without waiting.

        With overlap, this merges what was sent ``overlap_steps`` ago, and waits for it if it must.

        Args:
            samples: Of the step.
            seconds: That it took, from the end of the step before.
            tokens: Of the step, where updates are weighted by them.
            loss: Of the step.
        """
        self.check()
        with self._changed:
            report = self._counter.step(batch_size=samples, seconds=seconds, tokens=tokens)
        self._state.count(samples=samples, tokens=tokens)
        self.statistics.steps += 1
        self.statistics.samples += samples
        self._post(report)
        self._post(StepMetrics(worker=self.worker, round=report.round, samples=samples, seconds=seconds, loss=loss))
        if self._sent is not None:
            self._steps_since_sent += 1
            if self._steps_since_sent >= self._overlap_steps:
                self._conclude()

    def ask(self, *, now: bool = False, epoch: bool = False, validate: bool = False, stop: bool = False) -> None:
        """Say what is to happen at the end of this round, and whether that is to be soon."""
        round, steps = self._counter.round, self._counter.steps
        self._post(
            EndRound(worker=self.worker, round=round, now=now, steps=steps, epoch=epoch, validate=validate, stop=stop)
        )

    def end_round(self) -> None:
        """Send the update. Without overlap, merge the answer too, and start the next round unless all halt."""
        if self._sent is not None:
            self._conclude()
        if self._halted:
            return
        with self._changed:
            round, message = self._counter.round, self._counter.send()
        self._post(message)
        fragment = self._state.fragment_of(round)
        self._sent = _Sent(round, fragment, self._send(fragment, message))
        self._steps_since_sent = 0
        if not self._overlap_steps:
            self._conclude()

    def settle(self) -> None:
        """Merge what is under way, if anything is."""
        if self._sent is not None:
            self._conclude()

    def end_round_for_all(self, *, epoch: bool = False, validate: bool = False, stop: bool = False) -> None:
        """End the round for all workers, with something that all of them stand still for."""
        self.settle()
        if self._halted:  # another worker was first
            return
        self.ask(now=True, epoch=epoch, validate=validate, stop=stop)
        self.end_round()
        self.settle()

    def pass_on(self, *, stop: bool = False) -> bool:
        """Go on after everybody stood still, or stop if any worker does; returns whether training goes on."""
        if self._over or not self._halted or self.boundary is None:
            return not self._over
        self._post(Passed(worker=self.worker, round=self.boundary.round, stop=stop))
        self._halted = False
        self._start_round()
        return not self._over

    def finish(self) -> None:
        """End the training for all workers."""
        if self._over:
            return
        if self._sent is not None or not self._halted:
            self.end_round_for_all(stop=True)
        if not self._over:
            self.pass_on(stop=True)

    # ------------------------------------------------------------------ inner workings

    def _send(self, fragment: int, message: SendingUpdate | None = None) -> Exchange:
        update, weight = self._state.update(fragment)

        def arrived(error: BaseException | None) -> None:
            if error is None and message is not None:
                self._post(UpdateArrived(worker=self.worker, round=message.round))

        return self._exchange.start(f"fragment {fragment}", update, weight=weight, on_end=arrived)

    def _conclude(self) -> None:
        sent, self._sent = self._sent, None
        if sent is None:
            return
        began = self._clock()
        mean, total = sent.exchange.wait(self._timeout)
        self.statistics.exchange_s += self._clock() - began
        boundary = self._await_boundary(sent.round)
        self._state.merge(sent.fragment, mean, total=total, exactly=boundary.halts)
        self.statistics.rounds += 1
        self.statistics.merged_samples += boundary.samples
        self.boundary = boundary
        if not boundary.halts:
            self._start_round()
            return
        self._halted = True
        self._exchange_rest(sent.fragment)
        self._over = boundary.stop

    def _exchange_rest(self, done: int) -> None:
        """Where all stand still, all fragments are synchronised, and everybody has the global weights."""
        others = [fragment for fragment in range(self._state.fragments) if fragment != done]
        exchanges = [(fragment, self._send(fragment)) for fragment in others]
        began = self._clock()
        for fragment, exchange in exchanges:
            mean, total = exchange.wait(self._timeout)
            self._state.merge(fragment, mean, total=total, exactly=True)
        self.statistics.exchange_s += self._clock() - began

    def _await_boundary(self, round: int) -> Boundary:
        self._wait(lambda: round in self._boundaries, f"the end of round {round}")
        return self._boundaries.pop(round)

    def _start_round(self) -> None:
        self._wait(lambda: self._counter.next_round is not None or self._counter.finished, "the next round")
        with self._changed:
            if self._counter.finished:
                self._over = True
                return
            message = self._counter.start()
        self._post(message)

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        began = self._clock()
        with self._changed:
            while not ready():
                self.check()
                waited = self._clock() - began
                if waited >= self._timeout:
                    raise SchedulerTimeoutError(
                        f"{self.worker} waited {waited:.0f} s for {what}: not all workers have got there. Raise the "
                        "strategy's timeout if that may take longer."
                    )
                self._changed.wait(min(_SLICE_S, self._timeout - waited))
        self.statistics.start_s += self._clock() - began
