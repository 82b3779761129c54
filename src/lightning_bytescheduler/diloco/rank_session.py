"""One rank's part in the rounds, whoever runs them: its steps, its failure, the end of the last round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from lightning_bytescheduler.diloco.messages import RoundEnded
from lightning_bytescheduler.diloco.process_groups import WorkerGroup

__all__ = ["RankSession", "SessionStatistics"]


@dataclass(slots=True)
class SessionStatistics:
    """Where a worker's time went.

    Attributes:
        rounds: That have ended.
        steps: Taken.
        samples: Processed.
        merged_samples: Of all workers, in rounds that have ended.
        exchange_s: That the training thread waited for pseudo-gradients, its own and the others'.
        start_s: That it waited for a round to start.
    """

    rounds: int = 0
    steps: int = 0
    samples: int = 0
    merged_samples: int = 0
    exchange_s: float = 0.0
    start_s: float = 0.0


class RankSession(ABC):
    """One rank of a worker in one training. All but :meth:`fail` is for the training thread.

    Args:
        worker: The worker's name.
        group: The worker's ranks.

    Attributes:
        worker: As given.
        statistics: Of this rank.
        round_end: The last one.
    """

    def __init__(self, *, worker: str, group: WorkerGroup) -> None:
        self.worker = worker
        self.statistics = SessionStatistics()
        self.round_end: RoundEnded | None = None
        self._group = group
        self._failure: BaseException | None = None

    @property
    @abstractmethod
    def round(self) -> int:
        """The round this worker is in."""

    def progress(self) -> dict[str, float]:
        """How the rounds go, by name; what is not known on this rank is left out."""
        if self.round_end is None:
            return {}
        return {"share": self.round_end.shares.get(self.worker, 0.0), **self.round_end.metrics}

    def fail(self, error: BaseException) -> None:
        """Nothing is to be expected of the others any more: raise ``error`` from whatever is waited for."""
        if self._failure is None:
            self._failure = error
        self._group.abort(error)

    def check(self) -> None:
        """Raise what another thread or rank has failed with, if any."""
        if self._failure is not None:
            raise self._failure

    def count(self, *, samples: int, seconds: float, tokens: int = 0, loss: float | None = None) -> None:
        """Take note of a step, and report it without waiting.

        Args:
            samples: Of the step, on all ranks of the worker together.
            seconds: That it took, from the end of the step before.
            tokens: Of the step, where pseudo-gradients are weighted by them.
            loss: Of the step.
        """
        self.check()
        self._report(samples=samples, seconds=seconds, tokens=tokens, loss=loss)
        self.statistics.steps += 1
        self.statistics.samples += samples

    @abstractmethod
    def _report(self, *, samples: int, seconds: float, tokens: int, loss: float | None) -> None:
        """Tell of a step; the worker's other ranks tell nothing."""
