"""Speaks for a worker: counts its steps, sends its update when it is time to, and hands on what the others make of it.

All but :meth:`~LeadingSession.receive` and :meth:`~LeadingSession.fail` is called by the training thread, which waits
for other workers at two places only: for an update that is to be merged now, and for the start of a round.
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
    encode,
)
from lightning_bytescheduler.outer_loop.outer_state import OuterState
from lightning_bytescheduler.outer_loop.update_exchange import Exchange, UpdateExchange
from lightning_bytescheduler.outer_loop.worker_group import WorkerGroup
from lightning_bytescheduler.outer_loop.worker_session import WorkerSession

__all__ = ["LeadingSession"]

_SLICE_S = 1.0


@dataclass(frozen=True, slots=True)
class _Sent:
    round: int
    fragment: int
    exchange: Exchange


class LeadingSession(WorkerSession):
    """The first rank of a worker, often the only one.

    Args:
        worker: The worker's name.
        group: The worker's ranks.
        state: The global weights.
        exchange: What updates travel through.
        overlap_steps: See :class:`WorkerSession`.
        flush: See :class:`WorkerSession`.
        post: Sends a message to the host, without waiting.
        timeout: Longest wait for the other workers, in seconds.
        clock: Seconds; injected by tests.
    """

    def __init__(
        self,
        *,
        worker: str,
        group: WorkerGroup,
        state: OuterState,
        exchange: UpdateExchange,
        overlap_steps: int,
        flush: Callable[[], None],
        post: Callable[[Message | Control], None],
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(worker=worker, group=group, overlap_steps=overlap_steps, flush=flush)
        self.left: int | None = None
        self._state = state
        self._exchange = exchange
        self._post = post
        self._timeout = timeout
        self._clock = clock
        self._changed = threading.Condition()
        # What follows changes under the condition.
        self._counter = RoundCounter(worker)
        self._boundaries: dict[int, Boundary] = {}
        # The training thread's own.
        self._update: _Sent | None = None

    @property
    def round(self) -> int:
        """The round this worker is in."""
        return self._counter.round

    @property
    def steps_left(self) -> int | None:
        """Steps until the update is sent, or ``None`` while nobody knows."""
        return self._counter.steps_left

    def progress(self) -> dict[str, float]:
        """How the rounds go, by name; what is not known is left out."""
        known = {"round": self._counter.round, "to_go": self.left, "steps_left": self.steps_left}
        return {name: float(value) for name, value in known.items() if value is not None} | super().progress()

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
        """See WorkerSession."""
        with self._changed:
            super().fail(error)
            self._changed.notify_all()
        self._exchange.abort(error)

    # ------------------------------------------------------------------ the training thread

    def ask(self, *, now: bool = False, epoch: bool = False, validate: bool = False, stop: bool = False) -> None:
        """See WorkerSession."""
        round, steps = self._counter.round, self._counter.steps
        self._post(
            EndRound(worker=self.worker, round=round, now=now, steps=steps, epoch=epoch, validate=validate, stop=stop)
        )

    def _join(self) -> None:
        self._post(Join(worker=self.worker))

    def _report(self, *, samples: int, seconds: float, tokens: int, loss: float | None) -> None:
        with self._changed:
            report = self._counter.step(batch_size=samples, seconds=seconds, tokens=tokens)
        self._state.count(samples=samples, tokens=tokens)
        self._post(report)
        self._post(StepMetrics(worker=self.worker, round=report.round, samples=samples, seconds=seconds, loss=loss))

    def _is_due(self) -> bool:
        with self._changed:
            return self._counter.due

    def _send_update(self) -> None:
        with self._changed:
            round, message = self._counter.round, self._counter.send()
        self._post(message)
        fragment = self._state.trained.fragment_of(round)
        self._update = _Sent(round, fragment, self._send(fragment, message))

    def _merge(self) -> Boundary:
        sent, self._update = self._update, None
        if sent is None:
            raise RuntimeError("Cannot merge an update: none was sent.")
        began = self._clock()
        mean, total = sent.exchange.wait(self._timeout)
        self.statistics.exchange_s += self._clock() - began
        boundary = self._await_boundary(sent.round)
        self._state.merge(sent.fragment, mean, total=total, exactly=boundary.halts)
        self._group.tell(encode(boundary))
        self._group.share(self._state.trained.of(sent.fragment))
        return boundary

    def _merge_rest(self, round: int) -> None:
        trained = self._state.trained
        exchanges = [(fragment, self._send(fragment)) for fragment in trained.others(round)]
        began = self._clock()
        for fragment, exchange in exchanges:
            mean, total = exchange.wait(self._timeout)
            self._state.merge(fragment, mean, total=total, exactly=True)
        self.statistics.exchange_s += self._clock() - began
        for fragment, _ in exchanges:
            self._group.share(trained.of(fragment))

    def _say_passed(self, round: int, *, stop: bool) -> None:
        self._post(Passed(worker=self.worker, round=round, stop=stop))

    def _await_round(self) -> bool:
        self._wait(lambda: self._counter.next_round is not None or self._counter.finished, "the next round")
        with self._changed:
            if self._counter.finished:
                return True
            message = self._counter.start()
        self._post(message)
        return False

    def _send(self, fragment: int, message: SendingUpdate | None = None) -> Exchange:
        update, weight = self._state.update(fragment)

        def arrived(error: BaseException | None) -> None:
            if error is None and message is not None:
                self._post(UpdateArrived(worker=self.worker, round=message.round))

        return self._exchange.start(f"fragment {fragment}", update, weight=weight, on_end=arrived)

    def _await_boundary(self, round: int) -> Boundary:
        self._wait(lambda: round in self._boundaries, f"the end of round {round}")
        return self._boundaries.pop(round)

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
