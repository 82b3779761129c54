"""What a rank needs in one training whose leader speaks for it.

Everything a worker's leader needs in one training, put together and taken apart in one place.

Threads, all named ``bytescheduler-*`` and stopped by :meth:`OuterRuntime.stop` within a bound: one that posts messages,
one that reads this worker's, the exchange's two, and on worker 0 the batch scheduler with the reader of its mailbox.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lightning_bytescheduler.diloco.mailbox import Closed, Postman, Reader
from lightning_bytescheduler.diloco.outer_state import OuterState, TrainedWeights
from lightning_bytescheduler.diloco.round_host import RoundHost
from lightning_bytescheduler.diloco.round_options import RoundOptions
from lightning_bytescheduler.diloco.round_record import RoundRecord
from lightning_bytescheduler.diloco.round_target import RoundTarget
from lightning_bytescheduler.diloco.session import FollowingSession, LeadingSession
from lightning_bytescheduler.diloco.update_exchange import UpdateExchange
from lightning_bytescheduler.diloco.wire import WireFormat
from lightning_bytescheduler.diloco.world import WorkerGroup, WorkerWorld, worker_name
from lightning_bytescheduler.exceptions import RankFailedError
from lightning_bytescheduler.failures.board import FaultBoard
from lightning_bytescheduler.failures.notice import is_communication_error

__all__ = ["FollowingRuntime", "OuterOptions", "OuterRuntime"]

log = logging.getLogger(__name__)

_STOP_S = 5.0
_MOMENT_S = 0.5
_SILENCE_S = 20.0
_HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterOptions:
    """How updates travel and rounds end; the parts are validated where they are made.

    Attributes:
        target: What ends a round.
        rounds: Of the batch scheduler.
        wire: What travels.
        overlap_steps: See :class:`WorkerSession`.
        partition_size: Largest piece of an update sent at once, in parameters.
        credit: What may be in flight at once, in parameters.
        timeout: Longest wait for the other workers, in seconds.
    """

    target: RoundTarget
    rounds: RoundOptions
    wire: WireFormat
    overlap_steps: int
    partition_size: int
    credit: int
    timeout: float


class OuterRuntime:
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
        if world.updates is None:
            raise RuntimeError("Cannot exchange updates: only the first rank of a worker does.")
        self.state = state
        self._board = board
        self._name = worker_name(world.worker)
        # A process that is busy in native code may show no sign of life for seconds.
        self._silence = min(_SILENCE_S, options.timeout / 4)
        self._stopped = False
        self._idle = False
        self._examining: threading.Thread | None = None
        self._postman = Postman(world.store, self._on_error)
        self._exchange = UpdateExchange(
            world.updates,
            wire=options.wire,
            partition_size=options.partition_size,
            credit=options.credit,
            on_error=self._on_error,
        )
        self.session = LeadingSession(
            worker=self._name,
            group=group,
            state=state,
            exchange=self._exchange,
            overlap_steps=options.overlap_steps,
            flush=flush,
            post=lambda message: self._postman.post(_HOST, message),
            timeout=options.timeout,
        )
        self._readers = [
            Reader(
                world.store,
                self._name,
                name="bytescheduler-outer-mail",
                handle=self.session.receive,
                on_error=self._on_error,
            )
        ]
        self._host: RoundHost | None = None
        if world.rank == 0:
            self._host = RoundHost(
                options.target,
                options.rounds,
                workers=[worker_name(number) for number in range(world.workers)],
                post=self._postman.post,
                on_round=on_round,
                on_silence=self._examine,
                on_error=self._on_error,
            )
            self._readers.append(
                Reader(
                    world.store,
                    _HOST,
                    name="bytescheduler-host-mail",
                    handle=self._host.handle,
                    on_error=self._on_error,
                )
            )
        board.watch(self)
        atexit.register(self.stop, failed=True)  # a thread inside torch while the interpreter ends would abort it

    def start(self, state: Mapping[str, Any] | None = None) -> None:
        """Join the other workers and begin the first round.

        Args:
            state: What :meth:`state_dict` gave, to carry on from.
        """
        if state is not None:
            self.state.load_state_dict(state["outer"])
        if self._host is not None:
            self._host.start(None if state is None else state["rounds"])
        self.session.begin()

    def state_dict(self) -> dict[str, Any] | None:
        """What to keep beside the global weights; ``None`` on all workers but the first."""
        if self._host is None:
            return None
        return {"outer": self.state.state_dict(), "rounds": self._host.state_dict()}

    # What the fault board asks and tells (Watched), on its own thread.

    def rank_failed(self, fault: RankFailedError, step: int | None) -> None:
        """Stop: another rank has failed."""
        self.session.fail(fault)

    def own_failure(self) -> BaseException | None:
        """What has stopped the exchange, on whichever thread."""
        return self._exchange.abort_cause

    def phase(self) -> str:
        """What this rank is doing, in words."""
        return f"in round {self.session.round}, step {self.session.statistics.steps}"

    def steps_handed_over(self) -> int:
        """How many updates were merged."""
        return self.session.statistics.rounds

    # What the strategy calls.

    def explain(self, error: BaseException) -> BaseException:
        """Return the failure of another rank that ``error`` is a consequence of, or ``error`` itself."""
        return self._board.explain(error)

    def fail(self, error: BaseException) -> None:
        """Stop for good, because of this rank's failure or another's."""
        self.session.fail(error)
        self.stop(failed=True)

    def stop(self, *, failed: bool) -> bool:
        """Stop every thread; bounded, never raises, idempotent.

        Args:
            failed: Whether training ended with an error: then nobody is waited for.

        Returns:
            Whether nothing is under way on the group of updates.
        """
        if self._stopped:
            return self._idle
        self._stopped = True
        self._board.unwatch(self)
        atexit.unregister(self.stop)
        patience = _MOMENT_S if failed else _STOP_S
        with suppress(Exception):
            self._postman.post(self._name, Closed())
            if self._host is not None:
                self._postman.post(_HOST, Closed())
            self._postman.stop(patience)
            for reader in self._readers:
                reader.join(patience)
            if self._host is not None:
                self._host.stop(patience)
        self._idle = self._exchange.stop(_STOP_S) and not failed
        if self._examining is not None:
            self._examining.join(_STOP_S)
        return self._idle

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


class FollowingRuntime:
    """What a rank has whose leader speaks for it: no threads, no connections, no global weights.

    Args:
        world: Where this rank is.
        group: The ranks it trains with.
        board: Where failures are published; not closed with the runtime.
        trained: What is trained.
        overlap_steps: See :class:`WorkerSession`.
        flush: See :class:`WorkerSession`.
    """

    def __init__(
        self,
        *,
        world: WorkerWorld,
        group: WorkerGroup,
        board: FaultBoard,
        trained: TrainedWeights,
        overlap_steps: int,
        flush: Callable[[], None],
    ) -> None:
        self._board = board
        self.session = FollowingSession(
            worker=worker_name(world.worker),
            group=group,
            trained=trained,
            overlap_steps=overlap_steps,
            flush=flush,
        )
        board.watch(self)

    def start(self, state: Mapping[str, Any] | None = None) -> None:
        """Wait for the first round. What there is to carry on from is the leader's."""
        self.session.begin()

    # What the fault board asks and tells (Watched), on its own thread.

    def rank_failed(self, fault: RankFailedError, step: int | None) -> None:
        """Stop: another rank has failed."""
        self.session.fail(fault)

    def own_failure(self) -> BaseException | None:
        """None: nothing runs here but the training thread."""
        return None

    def phase(self) -> str:
        """What this rank is doing, in words."""
        return f"in round {self.session.round}, step {self.session.statistics.steps}"

    def steps_handed_over(self) -> int:
        """How many updates were merged."""
        return self.session.statistics.rounds

    # What the strategy calls.

    def fail(self, error: BaseException) -> None:
        """Stop for good, because of this rank's failure or another's."""
        self.session.fail(error)
        self.stop(failed=True)

    def stop(self, *, failed: bool) -> bool:
        """Leave the board; returns whether nothing is under way."""
        self._board.unwatch(self)
        return not failed
