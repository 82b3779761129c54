"""What a strategy needs whose workers train on their own: what they do together, and what becomes of failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bytescheduler.collectives.faults import FaultBoard
from lightning_bytescheduler.exceptions import RankFailedError
from lightning_bytescheduler.outer_loop.joint_collectives import JointCollectives
from lightning_bytescheduler.strategies.scheduled_gradients import ScheduledGradients
from lightning_bytescheduler.strategies.shared_metrics import shared_metrics

__all__ = ["WorkerStrategy"]

_T = TypeVar("_T")


class WorkerStrategy(DDPStrategy):
    """Each worker, of one rank or several, is a Lightning world of its own, and fails with the others.

    Args:
        **options: See DDPStrategy.
    """

    def __init__(self, **options: Any) -> None:
        self._joint: JointCollectives | None = None
        self._board: FaultBoard | None = None
        self._failed = False
        self._validates_together = False
        self._gradients: ScheduledGradients | None = None  # where ByteScheduler carries those of a worker
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

    # ------------------------------------------------------------------ one step, which a worker's ranks take together

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """See DDPStrategy."""
        with self._explained(), nullcontext() if self._gradients is None else self._gradients.forward():
            return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """See DDPStrategy."""
        with self._explained(), nullcontext() if self._gradients is None else self._gradients.backward():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """See DDPStrategy."""
        step = super().optimizer_step
        if self._gradients is None:
            return step(optimizer, closure, model, **kwargs)
        with self._explained():
            return self._gradients.step(
                lambda closure: step(optimizer, closure, model, **kwargs), optimizer, closure, deferrable=not kwargs
            )

    def _register_ddp_hooks(self) -> None:
        if self._gradients is None:
            super()._register_ddp_hooks()
        else:
            self._gradients.take_over(self.model)

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

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """See DDPStrategy. After a failure nobody is waited for: a checkpoint on exception must not hang."""
        if not self._failed:
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: _T, src: int = 0) -> _T:
        """See DDPStrategy; within the worker. After a failure this rank's own ``obj`` has to do."""
        return obj if self._failed else super().broadcast(obj, src)

    # ------------------------------------------------------------------ failures

    def publish_failure(self, exception: BaseException) -> None:
        """Tell the other ranks why this one fails, or say here which other rank is at fault."""
        if self._failed:
            return
        self._failed = True
        board = self._board
        if board is None:
            return
        board.take_over()
        cause = self._explain(exception)
        if not isinstance(cause, RankFailedError):
            board.publish(cause)
        if cause is not exception and hasattr(exception, "add_note"):
            exception.add_note(str(cause))
        if self._gradients is not None and self._gradients.runtime is not None:
            self._gradients.runtime.fail(cause)
        self._stop_rounds(cause)
        board.close()  # here, as teardown is skipped when another callback's on_exception raises

    def on_exception(self, exception: BaseException) -> None:
        """See DDPStrategy."""
        self.publish_failure(exception)
        super().on_exception(exception)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn the consequence of another rank's failure into an error that names the rank."""
        try:
            yield
        except Exception as error:
            cause = self._explain(error)
            if cause is error:
                raise
            raise cause from error

    def _check_others(self) -> None:
        """Raise what another rank has failed with, if it is known."""
        if self._board is not None and self._board.fault is not None:
            raise self._board.fault

    def _explain(self, error: BaseException) -> BaseException:
        if self._gradients is not None and self._gradients.runtime is not None:
            return self._gradients.runtime.explain(error)
        return error if self._board is None else self._board.explain(error)

    def _stop_rounds(self, cause: BaseException) -> None:
        """End what this worker does with the others, because of ``cause``."""
