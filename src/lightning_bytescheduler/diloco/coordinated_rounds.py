"""One rank's part in the rounds of a coordinator.

The ranks of one worker go through the same calls in the same order. The first one has the session, the others follow it
(:class:`FollowingCoordinated`): they are told after each synchronisation what has changed, and get the first rank's
weights, bit for bit.
"""

from __future__ import annotations

from abc import abstractmethod

import msgspec

from lightning_bytescheduler.diloco.fragments import TrainedWeights
from lightning_bytescheduler.diloco.messages import RoundEnded
from lightning_bytescheduler.diloco.process_groups import WorkerGroup
from lightning_bytescheduler.diloco.rank_session import RankSession

__all__ = ["CoordinatedRounds", "FollowingCoordinated", "Outcome"]


class Outcome(msgspec.Struct, frozen=True):
    """What the first rank tells the worker's others after a synchronisation."""

    changed: list[int]  # fragments whose weights it has others of now
    version: int
    over: bool
    ended: RoundEnded | None


class CoordinatedRounds(RankSession):
    """One rank of a worker in a coordinator's run. All but :meth:`fail` is for the training thread.

    Args:
        worker: The worker's name.
        group: The worker's ranks.

    Attributes:
        worker: As given, until the coordinator gives another one.
        over: Whether the run is over.
        version: Of the global weights, as all ranks of the worker know it.
    """

    def __init__(self, *, worker: str, group: WorkerGroup) -> None:
        super().__init__(worker=worker, group=group)
        self.over = False
        self.version = 0

    @property
    def leads(self) -> bool:
        """Whether this rank's worker validates, logs and saves for all, as far as this rank says it."""
        return False

    def begin(self) -> None:
        """Take the global weights, and wait for the first round."""
        self._take_in(self._begin())

    def is_due(self) -> bool:
        """Whether there is something to do before another step: as the first rank knows it now."""
        return self._group.any(self._is_due())

    def synchronise(self) -> None:
        """Do it: send, merge, catch up, and begin the next round."""
        self._take_in(self._synchronise())

    def pause(self, *, shows: bool = True) -> None:
        """Send what was trained, and do something else until :meth:`resume`.

        Args:
            shows: Whether to have the global weights meanwhile.
        """
        self._take_in(self._pause(shows))

    def is_over_elsewhere(self) -> bool:
        """Whether the run has ended while this worker did something else; looks only."""
        return False

    def resume(self) -> None:
        """Go on with the rounds: where the others are by now."""
        self._take_in(self._resume())

    def leave(self, *, quickly: bool, for_all: bool = False) -> None:
        """Take part no more, and have the global weights. What was trained counts.

        Args:
            quickly: Whether not to wait for the end of the round.
            for_all: Whether this worker leads, and the training of all is to end with this round.
        """
        self._take_in(self._leave(quickly, for_all))

    def _take_in(self, own: Outcome | None) -> None:
        text = self._group.tell("" if own is None else msgspec.json.encode(own).decode())
        outcome = msgspec.json.decode(text, type=Outcome)
        if outcome.ended is not None and outcome.ended is not self.round_end:
            self.round_end = outcome.ended
        self.version = outcome.version
        self.over = outcome.over
        trained = self._trained
        for fragment in outcome.changed:
            self._group.share(trained.of(fragment))

    @property
    @abstractmethod
    def _trained(self) -> TrainedWeights:
        """What is trained."""

    def _begin(self) -> Outcome | None:
        return None

    def _is_due(self) -> bool:
        return False

    def _synchronise(self) -> Outcome | None:
        return None

    def _pause(self, shows: bool) -> Outcome | None:
        return None

    def _resume(self) -> Outcome | None:
        return None

    def _leave(self, quickly: bool, for_all: bool) -> Outcome | None:
        return None


class FollowingCoordinated(CoordinatedRounds):
    """Goes along with its first rank, and takes over the weights that it merges.

    Args:
        worker: The worker's name.
        group: The worker's ranks.
        trained: What is trained.
    """

    def __init__(self, *, worker: str, group: WorkerGroup, trained: TrainedWeights) -> None:
        super().__init__(worker=worker, group=group)
        self._own = trained

    @property
    def round(self) -> int:
        """The round this worker is in."""
        return 0 if self.round_end is None else self.round_end.round + 1

    @property
    def _trained(self) -> TrainedWeights:
        return self._own

    def _report(self, *, samples: int, seconds: float, tokens: int, loss: float | None) -> None:
        pass
