"""What a strategy needs whose workers train on their own: what they do together, checkpoints, and failures.

A checkpoint has global weights, the outer state, and what each worker alone has.

Where several ranks form one worker, Lightning is kept from telling other ranks about a SIGTERM with collectives: it has
a rank that gets one join a broadcast of the default group from inside the signal handler, wherever its training thread
is, and all ranks join one before each batch. Within a worker that would meet the collectives of a step in another order
on each rank. Here the rank that got the signal ends by itself after its batch, and the fault board tells all others, of
other workers too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_bytescheduler.ddp.epoch_position import loader_resumes
from lightning_bytescheduler.ddp.rank_strategy import RankStrategy
from lightning_bytescheduler.diloco.epoch_shares import share_of, shared_loader
from lightning_bytescheduler.diloco.process_groups import JointCollectives
from lightning_bytescheduler.diloco.runtime import LeadingRuntime, SessionRuntime
from lightning_bytescheduler.diloco.worker_restart import Resumed, WorkerStates
from lightning_bytescheduler.lightning_api import TrainerFn, pl, rank_zero_warn

if TYPE_CHECKING:
    from lightning_bytescheduler.diloco.coordination import Coordination
    from lightning_bytescheduler.diloco.process_groups import WorkerWorld


@contextmanager
def shared_metrics(module: nn.Module, joint: JointCollectives) -> Iterator[None]:
    """Have the metrics in ``module`` gather from all ranks meanwhile, unless they were told how to gather."""
    metrics = [m for m in module.modules() if isinstance(m, Metric) and m.dist_sync_fn is m.process_group is None]
    for metric in metrics:
        metric.dist_sync_fn = joint.gather_uneven
    try:
        yield
    finally:
        for metric in metrics:
            metric.dist_sync_fn = None


class WorkerStrategy(RankStrategy):
    """Each worker, of one rank or several, is a Lightning world of its own, fails with the others, and has checkpoints.

    Args:
        **options: See DDPStrategy.
    """

    def __init__(self, **options: Any) -> None:
        self._joint: JointCollectives | None = None
        self._validates_together = False
        self._coordination: Coordination | None = None
        self._runtime: SessionRuntime | None = None
        self._kept_state: dict[str, Any] | None = None
        self._resumed: Resumed | None = None
        self._states: WorkerStates | None = None
        self._next_epoch: Callable[[], None] | None = None
        self._last_whole: object = None  # path of the last checkpoint that was written in this fit
        self._open = ExitStack()
        super().__init__(**options)

    @property
    def inner_size(self) -> int:
        """Ranks that train together as one worker."""
        return 1

    @property
    def world_size(self) -> int:
        """Ranks that train together as one worker."""
        return self.inner_size

    @property
    def ranks(self) -> int:
        """How many there are in all."""
        return self.num_nodes * self.num_processes

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return self.ranks // self.inner_size

    @property
    def worker(self) -> int:
        """Number of this rank's worker, from 0."""
        return self.global_rank // self.inner_size

    def flush(self) -> None:
        """Bring the weights up to date, where the updates of their last step may still be on their way."""
        if self._gradients is not None and not self._failed:
            with self._explained():
                self._gradients.flush()

    # ------------------------------------------------------------------ what all workers do together

    @contextmanager
    def _validating_together(self) -> Iterator[None]:
        """All workers do the same meanwhile: what is reduced in a validation is reduced over all of them."""
        module, joint = self.lightning_module, self._joint
        if module is None or joint is None:
            yield
            return
        self._validates_together = True
        try:
            with shared_metrics(module, joint):
                yield
        finally:
            self._validates_together = False

    @property
    def _together(self) -> JointCollectives | None:
        """For collectives of all ranks, where all do the same; else ``None``."""
        module = self.lightning_module
        if module is None or self._failed or not self._validates_together:
            return None
        fits = module.trainer.state.fn == TrainerFn.FITTING
        return None if fits and not module.trainer.validating else self._joint

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """See DDPStrategy; over all workers where they validate together."""
        together = self._together
        if together is None or not isinstance(tensor, Tensor):
            return super().reduce(tensor, group, reduce_op)
        with self._explained():
            return together.reduce(tensor, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """See DDPStrategy; over all workers where they validate together."""
        together = self._together
        if together is None:
            return super().all_gather(tensor, group, sync_grads)
        with self._explained():
            return together.gather(tensor)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """See DDPStrategy; over all workers where they validate together."""
        together = self._together
        if together is None:
            return super().reduce_boolean_decision(decision, all)
        with self._explained():
            return bool(together.reduce(torch.tensor(int(decision)), "min" if all else "max"))

    def _check_others(self) -> None:
        """Raise what another rank has failed with, if it is known."""
        if self._board is not None and self._board.fault is not None:
            raise self._board.fault

    # ------------------------------------------------------------------ checkpoints

    def outer_state_dict(self) -> dict[str, Any] | None:
        """What a checkpoint keeps beside the weights."""
        return None if self._runtime is None or self._failed else self._runtime.state_dict()

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
