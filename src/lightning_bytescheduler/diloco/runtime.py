"""What a rank has in one training in rounds, put together and taken apart in one place.

A rank that leads its worker has threads and connections; one that follows its leader has none. A leader's threads are
all named ``bytescheduler-*`` and stopped by :meth:`LeadingRuntime.stop` within a bound: one that posts messages, one
that reads this worker's, the exchange's two, and on worker 0 the batch scheduler's with the reader of its mailbox.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Generic, TypeVar

from lightning_bytescheduler.diloco.batch_scheduler_thread import BatchSchedulerThread
from lightning_bytescheduler.diloco.fragments import TrainedWeights
from lightning_bytescheduler.diloco.mailbox import Mailbox, Postman
from lightning_bytescheduler.diloco.messages import Message, PseudoGradientArrived, decode
from lightning_bytescheduler.diloco.options import DiLoCoOptions
from lightning_bytescheduler.diloco.outer_optimizer import OuterState
from lightning_bytescheduler.diloco.outer_timeline import OuterTimeline
from lightning_bytescheduler.diloco.process_groups import WorkerGroup, WorkerWorld, worker_name
from lightning_bytescheduler.diloco.pseudo_gradient_exchange import (
    Exchange,
    PseudoGradientExchange,
    outer_sizes,
)
from lightning_bytescheduler.diloco.round_record import RoundRecord
from lightning_bytescheduler.diloco.session import Contribution, LeadingSession, RankSession, WorkerSession
from lightning_bytescheduler.exceptions import RankFailedError
from lightning_bytescheduler.failures.board import FaultBoard
from lightning_bytescheduler.failures.messages import is_communication_error

log = logging.getLogger(__name__)

_STOP_S = 5.0
_MOMENT_S = 2.0
_SILENCE_S = 20.0
_SCHEDULER = "scheduler"  # its mailbox
_NOTHING_UNSENT: Mapping[str, Any] = {"workers": 0, "rank": 0, "own": {}, "mean": {}}


_Session = TypeVar("_Session", bound=RankSession)


class SessionRuntime(Generic[_Session]):
    """A session, watched by the fault board. By itself that of a rank whose leader speaks for it: there are no threads.

    Args:
        session: The rounds of this rank.
        board: Where failures are published; not closed with the runtime.

    Attributes:
        session: The same, once there is one.
        state: The global weights, on a rank that leads its worker.
    """

    session: _Session
    state: OuterState | None = None

    def __init__(self, session: _Session, board: FaultBoard) -> None:
        self.session = session
        self._board = board
        board.watch(self)

    # What the fault board asks and tells (Watched), on its own thread.

    def rank_failed(self, fault: RankFailedError, step: int | None) -> None:
        """Stop: another rank has failed."""
        if self._begun:
            self.session.fail(fault)

    def own_failure(self) -> BaseException | None:
        """What has stopped this rank, on whichever thread."""
        return None

    def phase(self) -> str:
        """What this rank is doing, in words."""
        if not self._begun:
            return "connecting to the coordinator"
        return f"in round {self.session.round}, step {self.session.statistics.steps}"

    def steps_handed_over(self) -> int:
        """How many rounds' pseudo-gradients were merged."""
        return self.session.statistics.rounds if self._begun else 0

    @property
    def _begun(self) -> bool:
        return hasattr(self, "session")

    # What the strategy calls.

    def start(self, state: Mapping[str, Any] | None = None) -> None:
        """Join the other workers and begin the first round.

        Args:
            state: What :meth:`state_dict` gave, to carry on from; the leader does.
        """
        self.session.begin()

    def state_dict(self) -> dict[str, Any] | None:
        """What to keep beside the global weights; ``None`` on all ranks but one."""
        return None

    def fail(self, error: BaseException) -> None:
        """Stop for good, because of this rank's failure or another's."""
        if self._begun:
            self.session.fail(error)
        self.stop(failed=True)

    def stop(self, *, failed: bool) -> bool:
        """Stop every thread; bounded, never raises, idempotent.

        Args:
            failed: Whether training ended with an error: then nobody is waited for.

        Returns:
            Whether nothing is under way on the group of the leaders.
        """
        self._board.unwatch(self)
        return not failed


class _Mail:
    """A ``Link`` between ranks that were launched together.

    Args:
        postman: Carries messages.
        exchange: Carries pseudo-gradients; every worker starts the same ones in the same order.
    """

    def __init__(self, postman: Postman, exchange: PseudoGradientExchange) -> None:
        self._postman = postman
        self._exchange = exchange

    def post(self, message: Message) -> None:
        self._postman.post(_SCHEDULER, message)

    def start(self, contribution: Contribution) -> Exchange:
        """See ``Link``; tells the batch scheduler when the mean is there."""

        def arrived(error: BaseException | None) -> None:
            if error is None and contribution.round:
                self.post(PseudoGradientArrived(worker=contribution.worker, round=contribution.round))

        name = f"fragment {contribution.fragment}"
        return self._exchange.start(name, contribution.pseudo_gradient, weight=contribution.weight, on_end=arrived)

    def abort(self, cause: BaseException) -> None:
        self._exchange.abort(cause)


class LeadingRuntime(SessionRuntime[WorkerSession]):
    """A leader's threads and connections.

    Args:
        trained: What is trained.
        world: Where this worker is.
        group: The worker's ranks.
        board: Where failures are published; not closed with the runtime.
        options: The user's.
        timeout: Longest wait for the other workers, in seconds.
        flush: See :class:`WorkerSession`.
        on_round: Called with each round that has ended, on worker 0, on a thread of its own.
    """

    session: LeadingSession
    state: OuterState

    def __init__(
        self,
        trained: TrainedWeights,
        *,
        world: WorkerWorld,
        group: WorkerGroup,
        board: FaultBoard,
        options: DiLoCoOptions,
        timeout: float,
        flush: Callable[[], None],
        on_round: Callable[[RoundRecord], object],
    ) -> None:
        if world.leaders is None:
            raise RuntimeError("Cannot exchange pseudo-gradients: only the first rank of a worker does.")
        self._name = worker_name(world.worker)
        # A process that is busy in native code may show no sign of life for seconds.
        self._silence = min(_SILENCE_S, timeout / 4)
        self._stopped = False
        self._idle = False
        self._examining: threading.Thread | None = None
        self._elements = [sum(p.numel() for p in trained.of(f)) for f in range(len(trained.fragments))]
        partition_size, credit = outer_sizes(
            max(self._elements), partition_size=options.partition_size, credit=options.credit
        )
        self.overlaps = bool(options.run.overlap)
        self.timeline = OuterTimeline(options.timeline, rank=world.rank, worker=self._name)
        self._postman = Postman(world.store, self._name, self._on_error)
        self._exchange = PseudoGradientExchange(
            world.leaders,
            wire=options.run.wire,
            partition_size=partition_size,
            credit=credit,
            timeline=self.timeline,
            on_error=self._on_error,
        )
        self.state = OuterState(trained, weighting=options.run.weighting, **options.outer_step)
        session = LeadingSession(
            worker=self._name,
            group=group,
            state=self.state,
            link=_Mail(self._postman, self._exchange),
            overlap=options.run.overlap,
            flush=flush,
            timeout=timeout,
            timeline=self.timeline,
        )
        super().__init__(session, board)
        self._mailboxes = [self._open(world, self._name, "bytescheduler-outer-mail", session.receive)]
        self._scheduler: BatchSchedulerThread | None = None
        if world.rank == 0:
            self._scheduler = BatchSchedulerThread(
                options.run.target,
                options.rounds(timeout),
                workers=[worker_name(number) for number in range(world.workers)],
                post=self._postman.post,
                on_round=on_round,
                on_silence=self._examine,
                on_error=self._on_error,
            )
            self._mailboxes.append(self._open(world, _SCHEDULER, "bytescheduler-host-mail", self._scheduler.handle))
        atexit.register(self.stop, failed=True)  # a thread inside torch while the interpreter ends would abort it

    def start(self, state: Mapping[str, Any] | None = None) -> None:
        """See SessionRuntime."""
        if state is not None:
            self.state.load_state_dict(state["outer"])
        if state is not None:
            self._exchange.load_state_dict(state.get("unsent", _NOTHING_UNSENT))
        if self._scheduler is not None:
            self._scheduler.start(None if state is None else state["rounds"])
        self.session.begin()

    def state_dict(self) -> dict[str, Any] | None:
        """What to keep beside the global weights; ``None`` on all workers but the first."""
        if self._scheduler is None:
            return None
        return {
            "outer": self.state.state_dict(),
            "rounds": self._scheduler.state_dict(),
            "unsent": self._exchange.state_dict(),
        }

    def own_state(self) -> dict[str, Any]:
        """What this worker alone has at the begin of a round.

        What is left to be sent; and where fragments or overlap leave something of the last round open, its weights,
        which are not the global ones, and what they were trained on, and with overlap the steps that count for this
        round already.
        """
        own: dict[str, Any] = {"unsent": self._exchange.state_dict()}
        if self.overlaps or len(self._elements) > 1:
            own |= self.state.own_state_dict()
        if self.overlaps:
            own["begun_with"] = self.session.done_in_round()
        return own

    def load_own_counts(self, state: Mapping[str, Any]) -> None:
        """Count on from what :meth:`own_state` gave; its weights are the module's."""
        if "samples" in state:
            self.state.load_counts(state)
        if self.overlaps and "begun_with" in state:
            self.session.go_on(state["begun_with"])

    def own_failure(self) -> BaseException | None:
        """What has stopped the exchange, on whichever thread."""
        return self._exchange.abort_cause

    def stop(self, *, failed: bool) -> bool:
        """Stop every thread; bounded, never raises, idempotent.

        Args:
            failed: Whether training ended with an error: then nobody is waited for.

        Returns:
            Whether nothing is under way on the group of the leaders.
        """
        if self._stopped:
            return self._idle
        self._stopped = True
        self._board.unwatch(self)
        atexit.unregister(self.stop)
        patience = _MOMENT_S if failed else _STOP_S
        with suppress(Exception):
            for mailbox in self._mailboxes:
                mailbox.stop(patience)
            self._postman.stop(patience)
            if self._scheduler is not None:
                self._scheduler.stop(patience)
        self._idle = self._exchange.stop(_STOP_S) and not failed
        if self._examining is not None:
            self._examining.join(_STOP_S)
        self.timeline.close()
        return self._idle

    def _open(self, world: WorkerWorld, name: str, thread: str, receive: Callable[[Message], object]) -> Mailbox:
        def handle(sender: str, text: str) -> None:
            receive(decode(text, sender=sender))

        return Mailbox(world.store, name, thread=thread, handle=handle, on_error=self._on_error, postman=self._postman)

    def _examine(self, silent: list[str]) -> None:
        """Some workers have not been heard of: find out whether they live."""
        if self._examining is not None and self._examining.is_alive():
            return

        def examine() -> None:
            names = ", ".join(silent)
            heard = RuntimeError(f"nothing was heard of {names} for long")
            found = self._board.diagnose(heard, silence=self._silence)
            if isinstance(found, RankFailedError):
                self.session.fail(found)

        self._examining = threading.Thread(target=examine, name="bytescheduler-outer-examine", daemon=True)
        self._examining.start()

    def _on_error(self, error: BaseException) -> BaseException:
        """Something failed on one of the threads: find out why, and let everybody here know."""
        if self._stopped:
            return error
        cause = self._exchange.abort_cause or self._board.explain(error)
        if is_communication_error(cause):
            cause = RankFailedError(None, f"it could not be told which; here that broke: {error}")
            cause.__cause__ = error
        self.session.fail(cause)
        return cause
