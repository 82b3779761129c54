"""A rank that trains with others as one worker, and whose leader speaks for it."""

from __future__ import annotations

from collections.abc import Callable

from lightning_bytescheduler.outer_loop.control_messages import Boundary, decode
from lightning_bytescheduler.outer_loop.trained_weights import TrainedWeights
from lightning_bytescheduler.outer_loop.worker_group import WorkerGroup
from lightning_bytescheduler.outer_loop.worker_session import WorkerSession

__all__ = ["FollowingSession"]


class FollowingSession(WorkerSession):
    """Goes along with its leader, and takes over the weights that it merges.

    Args:
        worker: The worker's name.
        group: The worker's ranks.
        trained: What is trained.
        overlap_steps: See :class:`WorkerSession`.
        flush: See :class:`WorkerSession`.
    """

    def __init__(
        self,
        *,
        worker: str,
        group: WorkerGroup,
        trained: TrainedWeights,
        overlap_steps: int,
        flush: Callable[[], None],
    ) -> None:
        super().__init__(worker=worker, group=group, overlap_steps=overlap_steps, flush=flush)
        self._trained = trained

    @property
    def round(self) -> int:
        """The round this worker is in."""
        return self.statistics.rounds + 1

    def ask(self, *, now: bool = False, epoch: bool = False, validate: bool = False, stop: bool = False) -> None:
        """See WorkerSession; the leader does."""

    def _join(self) -> None:
        pass

    def _report(self, *, samples: int, seconds: float, tokens: int, loss: float | None) -> None:
        pass

    def _is_due(self) -> bool:
        return False

    def _send_update(self) -> None:
        pass

    def _merge(self) -> Boundary:
        boundary = decode(self._group.tell().encode())
        if not isinstance(boundary, Boundary):
            raise RuntimeError(f"The leader told of no round's end, but of {boundary!r}.")
        self._group.share(self._trained.of(self._trained.fragment_of(boundary.round)))
        return boundary

    def _merge_rest(self, round: int) -> None:
        for fragment in self._trained.others(round):
            self._group.share(self._trained.of(fragment))

    def _say_passed(self, round: int, *, stop: bool) -> None:
        pass

    def _await_round(self) -> bool:
        return False
