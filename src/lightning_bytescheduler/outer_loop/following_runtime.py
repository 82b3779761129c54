"""What a rank needs in one training whose leader speaks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning_bytescheduler.collectives.faults import FaultBoard
from lightning_bytescheduler.exceptions import RankFailedError
from lightning_bytescheduler.outer_loop.following_session import FollowingSession
from lightning_bytescheduler.outer_loop.trained_weights import TrainedWeights
from lightning_bytescheduler.outer_loop.worker_group import WorkerGroup
from lightning_bytescheduler.outer_loop.world import WorkerWorld, worker_name

__all__ = ["FollowingRuntime"]


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
