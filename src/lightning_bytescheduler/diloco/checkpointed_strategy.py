"""What a checkpoint of a training in rounds has: global weights, the outer state, and what each worker alone has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_bytescheduler.ddp.epoch_position import loader_resumes
from lightning_bytescheduler.diloco.coordinated_runtime import CoordinatedRuntime
from lightning_bytescheduler.diloco.epoch_shares import share_of, shared_loader
from lightning_bytescheduler.diloco.runtime import FollowingRuntime, LeadingRuntime
from lightning_bytescheduler.diloco.worker_restart import Resumed, WorkerStates
from lightning_bytescheduler.diloco.worker_strategy import WorkerStrategy
from lightning_bytescheduler.lightning_api import TrainerFn, pl, rank_zero_warn

if TYPE_CHECKING:
    from lightning_bytescheduler.diloco.coordination import Coordination
    from lightning_bytescheduler.diloco.process_groups import WorkerWorld

__all__ = ["CheckpointedStrategy"]


class CheckpointedStrategy(WorkerStrategy):
    """Writes checkpoints from which a training goes on, and goes on from them.

    Args:
        **options: See DDPStrategy.
    """

    def __init__(self, **options: Any) -> None:
        self._coordination: Coordination | None = None
        self._runtime: LeadingRuntime | FollowingRuntime | CoordinatedRuntime | None = None
        self._kept_state: dict[str, Any] | None = None
        self._resumed: Resumed | None = None
        self._states: WorkerStates | None = None
        self._next_epoch: Callable[[], None] | None = None
        self._last_whole: object = None  # path of the last checkpoint that was written in this fit
        self._open = ExitStack()
        super().__init__(**options)

    def outer_state_dict(self) -> dict[str, Any] | None:
        """What a checkpoint keeps beside the weights."""
        if not isinstance(self._runtime, LeadingRuntime | CoordinatedRuntime) or self._failed:
            return None
        return self._runtime.state_dict()

    def load_outer_state_dict(self, state: dict[str, Any] | None) -> None:
        """Have the rounds carry on from what a checkpoint kept."""
        self._kept_state = state

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """See DDPStrategy; during a fit, with the global weights."""
        state = None if self._runtime is None or not self.is_global_zero else self._runtime.state
        if state is None:
            return super().lightning_module_state_dict()
        self.flush()
        with state.shown():
            weights: dict[str, Any] = super().lightning_module_state_dict()
            return {name: value.clone() if isinstance(value, Tensor) else value for name, value in weights.items()}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """See DDPStrategy. However long it takes, another rank's failure does not end this process meanwhile.

        A fit that fails writes none: amid a round, weights are those of its begin, and the optimizer is steps ahead.
        """
        if self._failed:
            self._say_not_written()
            return
        with nullcontext() if self._board is None else self._board.patient():
            if self._states is not None:
                self._states.complete(checkpoint)
            if self._coordination is None or self._coordination.leads:
                super().save_checkpoint(checkpoint, filepath, storage_options)
                self._last_whole = filepath

    def _end_with(self, cause: BaseException) -> None:
        module = self.lightning_module
        for callback in () if module is None else module.trainer.checkpoint_callbacks:
            if getattr(callback, "save_on_exception", True):
                # It would take note of a file that is not written, and remove or link others because of it.
                vars(callback)["on_exception"] = self._say_not_written
                self._open.callback(vars(callback).pop, "on_exception", None)

    def _say_not_written(self, *_: object) -> None:
        last = f" The last whole one is {self._last_whole}." if self._last_whole else ""
        rank_zero_warn(f"diloco: a fit that fails writes no checkpoint, as it would be of no one moment.{last}")

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """See DDPStrategy; with what this rank's worker had."""
        checkpoint = super().load_checkpoint(*args, **kwargs)
        module = self.lightning_module
        if module is not None and module.trainer.state.fn == TrainerFn.FITTING:
            alone = self._coordination is not None  # each worker is a training of its own
            self._resumed = Resumed.from_checkpoint(checkpoint, 0 if alone else self.worker, self.workers)
        return checkpoint

    def validated(self) -> None:
        """A validation is over."""
        if self._states is not None:
            self._states.validated()

    def _resumable(self, loader: object, trainer: pl.Trainer) -> object:
        """The same loader of training data, if it can go on in the middle of an epoch."""
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        return shared_loader(loader, self.global_rank, self.ranks, lambda: progress.current.processed)

    def _begin_states(self, trainer: pl.Trainer, world: WorkerWorld, *, full: bool, timeout: float) -> None:
        """Go on from the checkpoint, if there is one, and begin to keep what the next one is to have."""
        resumed, self._resumed = self._resumed, None
        runtime = self._runtime
        numbers = None
        if resumed is not None:
            leads = isinstance(runtime, LeadingRuntime)
            self._next_epoch = resumed.go_on(trainer, leads=leads)
            if resumed.positions and share_of(trainer) is not None:
                self._open.enter_context(loader_resumes())
            if resumed.own is not None and leads:
                numbers = resumed.own["random"]
        if isinstance(runtime, LeadingRuntime):
            if resumed is not None and resumed.own is not None and resumed.alike:
                runtime.load_own_counts(resumed.own)
            self._states = WorkerStates(trainer, runtime, world, full=full, timeout=timeout, numbers=numbers)
            self._states.begun()

    def _begin_next_epoch(self) -> None:
        """An epoch begins, and not in its middle."""
        then, self._next_epoch = self._next_epoch, None
        if then is not None:
            then()

    def _all_is_over(self) -> None:
        """The last round has ended."""
        if self._states is not None:
            self._states.over()

    def _end_states(self) -> None:
        """The fit is over."""
        states, self._states = self._states, None
        self._resumed = self._next_epoch = None
        if states is not None:
            states.leave(failed=self._failed)
