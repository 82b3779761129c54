"""What a rank has in one training in rounds, put together and taken apart in one place.

A rank that leads its worker has threads and connections; one that follows its leader has none. A leader's threads are
all named ``bytescheduler-*`` and stopped by :meth:`LeadingRuntime.stop` within a bound: one that posts messages, one
that reads this worker's, the exchange's two, and on worker 0 the batch scheduler's with the reader of its mailbox.
"""

from __future__ import annotations

import atexit
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from torch import nn

from lightning_bytescheduler.diloco.batch_scheduler_thread import BatchSchedulerThread
from lightning_bytescheduler.diloco.coordinated_session import CoordinatedRounds
from lightning_bytescheduler.diloco.fragments import Overlap, TrainedWeights
from lightning_bytescheduler.diloco.mailbox import Mailbox, Postman, with_messages
from lightning_bytescheduler.diloco.messages import Message
from lightning_bytescheduler.diloco.options import DiLoCoOptions, OuterOptions
from lightning_bytescheduler.diloco.outer_optimizer import OuterState
from lightning_bytescheduler.diloco.outer_timeline import OuterTimeline
from lightning_bytescheduler.diloco.process_groups import WorkerGroup, WorkerWorld, worker_name
from lightning_bytescheduler.diloco.pseudo_gradient_exchange import PseudoGradientExchange
from lightning_bytescheduler.diloco.round_record import RoundRecord
from lightning_bytescheduler.diloco.session import FollowingSession, LeadingSession, WorkerSession
from lightning_bytescheduler.diloco.transport import CollectiveTransport
from lightning_bytescheduler.exceptions import RankFailedError
from lightning_bytescheduler.failures.board import FaultBoard
from lightning_bytescheduler.failures.messages import is_communication_error

log = logging.getLogger(__name__)

_STOP_S = 5.0
_MOMENT_S = 2.0
_SILENCE_S = 20.0
_SCHEDULER = "scheduler"  # its mailbox
_NOTHING_UNSENT: Mapping[str, Any] = {"workers": 0, "rank": 0, "own": {}, "mean": {}}


def make_runtime(
    module: nn.Module,
    *,
    options: DiLoCoOptions,
    outer: OuterOptions,
    world: WorkerWorld,
    group: WorkerGroup,
    board: FaultBoard,
    flush: Callable[[], None],
    on_round: Callable[[RoundRecord], object],
) -> LeadingRuntime | FollowingRuntime:
    """Start what runs beside the training.

    Args:
        module: What is trained.
        options: The user's.
        outer: The same, as what runs beside the training understands them.
        world: Where this rank is.
        group: The ranks of its worker.
        board: Where failures are published.
        flush: Brings the weights up to date.
        on_round: Called with each round that has ended, on worker 0's leader.
    """
    trained = TrainedWeights(module, options.fragment_options)
    if not group.leads:
        return FollowingRuntime(
            world=world, group=group, board=board, trained=trained, overlap=outer.overlap, flush=flush
        )
    state = OuterState(
        trained,
        weighting=options.weighting,
        lr=options.outer_lr,
        momentum=options.outer_momentum,
        factory=options.outer_optimizer,
    )
    return LeadingRuntime(
        world=world, group=group, board=board, state=state, options=outer, flush=flush, on_round=on_round
    )


class SessionRuntime(ABC):
    """What runs beside a session, and is watched by the fault board.

    Attributes:
        session: The rounds of this rank.
    """

    session: WorkerSession | CoordinatedRounds

    # What the fault board asks and tells (Watched), on its own thread.

    def rank_failed(self, fault: RankFailedError, step: int | None) -> None:
        """Stop: another rank has failed."""
        self.session.fail(fault)

    @abstractmethod
    def own_failure(self) -> BaseException | None:
        """What has stopped this rank, on whichever thread."""

    def phase(self) -> str:
        """What this rank is doing, in words."""
        return f"in round {self.session.round}, step {self.session.statistics.steps}"

    def steps_handed_over(self) -> int:
        """How many rounds' pseudo-gradients were merged."""
        return self.session.statistics.rounds

    # What the strategy calls.

    def fail(self, error: BaseException) -> None:
        """Stop for good, because of this rank's failure or another's."""
        self.session.fail(error)
        self.stop(failed=True)

    @abstractmethod
    def stop(self, *, failed: bool) -> bool:
        """Stop every thread; bounded, never raises, idempotent.

        Args:
            failed: Whether training ended with an error: then nobody is waited for.

        Returns:
            Whether nothing is under way on the group of the leaders.
        """


class LeadingRuntime(SessionRuntime):
    """A leader's threads and connections.

    Args:
        world: Where this worker is.
        group: The worker's ranks.
        board: Where failures are published; not closed with the runtime.
        state: The global weights.
        options: The same on all ranks.
        flush: See :class:`WorkerSession`.
        on_round: Called with each round that has ended, on worker 0, on a thread of its own.
    """

    def __init__(
        self,
        *,
        world: WorkerWorld,
        group: WorkerGroup,
        board: FaultBoard,
        state: OuterState,
        options: OuterOptions,
        flush: Callable[[], None],
        on_round: Callable[[RoundRecord], object],
    ) -> None:
        if world.leaders is None:
            raise RuntimeError("Cannot exchange pseudo-gradients: only the first rank of a worker does.")
        self.state: OuterState = state
        self._board = board
        self._name = worker_name(world.worker)
        # A process that is busy in native code may show no sign of life for seconds.
        self._silence = min(_SILENCE_S, options.timeout / 4)
        self._stopped = False
        self._idle = False
        self._examining: threading.Thread | None = None
        self._elements = [sum(p.numel() for p in state.trained.of(f)) for f in range(len(state.trained.fragments))]
        self._timeout = options.timeout
        self.overlaps = bool(options.overlap)
        self.timeline = OuterTimeline(options.timeline, rank=world.rank, worker=self._name)
        self._postman = Postman(world.store, self._name, self._on_error)
        self._exchange = PseudoGradientExchange(
            world.leaders,
            wire=options.wire,
            partition_size=options.partition_size,
            credit=options.credit,
            timeline=self.timeline,
            on_error=self._on_error,
        )
        self._transport = CollectiveTransport(self._postman, _SCHEDULER, self._exchange)
        self.session: LeadingSession = LeadingSession(
            worker=self._name,
            group=group,
            state=state,
            transport=self._transport,
            overlap=options.overlap,
            flush=flush,
            timeout=options.timeout,
            timeline=self.timeline,
        )
        self._mailboxes = [self._open(world, self._name, "bytescheduler-outer-mail", self.session.receive)]
        self._scheduler: BatchSchedulerThread | None = None
        if world.rank == 0:
            self._scheduler = BatchSchedulerThread(
                options.target,
                options.rounds,
                workers=[worker_name(number) for number in range(world.workers)],
                post=self._postman.post,
                on_round=on_round,
                on_silence=self._examine,
                on_error=self._on_error,
            )
            self._mailboxes.append(self._open(world, _SCHEDULER, "bytescheduler-host-mail", self._scheduler.handle))
        board.watch(self)
        atexit.register(self.stop, failed=True)  # a thread inside torch while the interpreter ends would abort it

    def start(self, state: Mapping[str, Any] | None = None) -> None:
        """Join the other workers and begin the first round.

        Args:
            state: What :meth:`state_dict` gave, to carry on from.
        """
        if state is not None:
            self.state.load_state_dict(state["outer"])
        link = self._exchange.follow_link(max(self._elements), timeout=self._timeout)
        if link is not None and self._scheduler is not None:
            sent, flying = self._exchange.sizes
            log.info(
                "diloco: a part of a pseudo-gradient takes %.1f ms and a second for each %.1f MB of fp32 between these "
                "workers: %d parameters are sent at once, and %d may be in flight",
                1e3 * link.alpha,
                1e-6 / link.beta,
                sent,
                flying,
            )
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
        handle = with_messages(receive)
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


class FollowingRuntime(SessionRuntime):
    """What a rank has whose leader speaks for it: no threads, no connections, no global weights.

    Args:
        world: Where this rank is.
        group: The ranks it trains with.
        board: Where failures are published; not closed with the runtime.
        trained: What is trained.
        overlap: See :class:`WorkerSession`.
        flush: See :class:`WorkerSession`.
    """

    def __init__(
        self,
        *,
        world: WorkerWorld,
        group: WorkerGroup,
        board: FaultBoard,
        trained: TrainedWeights,
        overlap: Overlap,
        flush: Callable[[], None],
    ) -> None:
        self._board = board
        self.state: OuterState | None = None
        self.session: FollowingSession = FollowingSession(
            worker=worker_name(world.worker),
            group=group,
            trained=trained,
            overlap=overlap,
            flush=flush,
        )
        board.watch(self)

    def start(self, state: Mapping[str, Any] | None = None) -> None:
        """Wait for the first round. What there is to carry on from is the leader's."""
        self.session.begin()

    def own_failure(self) -> BaseException | None:
        """None: nothing runs here but the training thread."""
        return None

    def stop(self, *, failed: bool) -> bool:
        """Leave the board; returns whether nothing is under way."""
        self._board.unwatch(self)
        return not failed
