"""A worker's part in the rounds, as each of its ranks goes through it: steps, updates, and standing still with all.

On every rank of a worker the same calls lead to the same places, at the same steps; see ``WorkerGroup`` for why. What
is said to other workers is the leader's business (``LeadingSession``); the worker's other ranks follow it
(``FollowingSession``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from lightning_bytescheduler.outer_loop.control_messages import Boundary
from lightning_bytescheduler.outer_loop.session_statistics import SessionStatistics
from lightning_bytescheduler.outer_loop.worker_group import WorkerGroup

__all__ = ["WorkerSession"]


class WorkerSession(ABC):
    """One rank of a worker, in one training. All but :meth:`fail` is for the training thread.

    Args:
        worker: The worker's name.
        group: The worker's ranks.
        overlap_steps: Steps between sending an update and merging the answer.
        flush: Called on the training thread before weights are read or replaced: brings them up to date.
    """

    def __init__(
        self, *, worker: str, group: WorkerGroup, overlap_steps: int, flush: Callable[[], None] = lambda: None
    ) -> None:
        self.worker = worker
        self.statistics = SessionStatistics()
        self.boundary: Boundary | None = None
        self._group = group
        self._overlap_steps = overlap_steps
        self._flush = flush
        self._failure: BaseException | None = None
        self._sent = False  # an update that is not merged yet
        self._steps_since_sent = 0
        self._halted = False
        self._over = False

    @property
    @abstractmethod
    def round(self) -> int:
        """The round this worker is in."""

    @property
    def over(self) -> bool:
        """Whether training is over for all workers."""
        return self._over

    @property
    def halted(self) -> bool:
        """Whether all workers stand still at the end of a round."""
        return self._halted

    def progress(self) -> dict[str, float]:
        """How the rounds go, by name; what is not known on this rank is left out."""
        if self.boundary is None:
            return {}
        return {"share": self.boundary.shares.get(self.worker, 0.0), **self.boundary.metrics}

    def fail(self, error: BaseException) -> None:
        """Nothing is to be expected of the others any more: raise ``error`` from whatever is waited for."""
        if self._failure is None:
            self._failure = error
        self._group.abort(error)

    def check(self) -> None:
        """Raise what another thread or rank has failed with, if any."""
        if self._failure is not None:
            raise self._failure

    def begin(self) -> None:
        """Join, and wait for all workers and the first round."""
        self._join()
        self._start_round()

    def count(self, *, samples: int, seconds: float, tokens: int = 0, loss: float | None = None) -> None:
        """Take note of a step, and report it without waiting.

        With overlap, this merges what was sent ``overlap_steps`` ago, and waits for it if it must.

        Args:
            samples: Of the step, on all ranks of the worker together.
            seconds: That it took, from the end of the step before.
            tokens: Of the step, where updates are weighted by them.
            loss: Of the step.
        """
        self.check()
        self._report(samples=samples, seconds=seconds, tokens=tokens, loss=loss)
        self.statistics.steps += 1
        self.statistics.samples += samples
        if self._sent:
            self._steps_since_sent += 1
            if self._steps_since_sent >= self._overlap_steps:
                self._conclude()

    def is_due(self) -> bool:
        """Whether the update is to be sent before another step is taken: as the leader knows it now."""
        return self._group.any(self._is_due())

    @abstractmethod
    def ask(self, *, now: bool = False, epoch: bool = False, validate: bool = False, stop: bool = False) -> None:
        """Say what is to happen at the end of this round, and whether that is to be soon."""

    def end_round(self) -> None:
        """Send the update. Without overlap, merge the answer too, and start the next round unless all halt."""
        self.settle()
        if self._halted:
            return
        self._flush()
        self._send_update()
        self._sent = True
        self._steps_since_sent = 0
        if not self._overlap_steps:
            self._conclude()

    def settle(self) -> None:
        """Merge what is under way, if anything is."""
        if self._sent:
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
        self._say_passed(self.boundary.round, stop=stop)
        self._halted = False
        self._start_round()
        return not self._over

    def finish(self) -> None:
        """End the training for all workers."""
        if self._over:
            return
        if self._sent or not self._halted:
            self.end_round_for_all(stop=True)
        if not self._over:
            self.pass_on(stop=True)

    def _conclude(self) -> None:
        self._sent = False
        self._flush()
        boundary = self._merge()
        self.statistics.rounds += 1
        self.statistics.merged_samples += boundary.samples
        self.boundary = boundary
        if not boundary.halts:
            self._start_round()
            return
        # Where all stand still, all fragments are synchronised, and everybody has the global weights.
        self._halted = True
        self._merge_rest(boundary.round)
        self._over = boundary.stop

    def _start_round(self) -> None:
        self._over = self._group.any(self._await_round())

    @abstractmethod
    def _join(self) -> None:
        """Become one of the workers."""

    @abstractmethod
    def _report(self, *, samples: int, seconds: float, tokens: int, loss: float | None) -> None:
        """Tell of a step."""

    @abstractmethod
    def _is_due(self) -> bool:
        """Whether the update is to be sent now, as far as this rank decides it."""

    @abstractmethod
    def _send_update(self) -> None:
        """Begin to send what the round's steps have made of its fragment."""

    @abstractmethod
    def _merge(self) -> Boundary:
        """Wait for the end of the round, and let the trained weights follow."""

    @abstractmethod
    def _merge_rest(self, round: int) -> None:
        """Synchronise the fragments that did not belong to this round."""

    @abstractmethod
    def _say_passed(self, round: int, *, stop: bool) -> None:
        """Say that this worker is through with what all stood still for."""

    @abstractmethod
    def _await_round(self) -> bool:
        """Wait for the next round and begin it; returns whether there is none, as far as this rank decides it."""
