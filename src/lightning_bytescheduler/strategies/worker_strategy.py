"""What a strategy needs whose processes train on their own: what they do together, and what becomes of failures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_bytescheduler.collectives.faults import FaultBoard
from lightning_bytescheduler.exceptions import RankFailedError
from lightning_bytescheduler.outer_loop.joint_collectives import JointCollectives
from lightning_bytescheduler.strategies.shared_metrics import shared_metrics

__all__ = ["WorkerStrategy"]

_T = TypeVar("_T")


class WorkerStrategy(DDPStrategy):
    """Each process is a Lightning world of its own, and fails with the others.

    Args:
        **options: See DDPStrategy.
    """

    def __init__(self, **options: Any) -> None:
        self._joint: JointCollectives | None = None
        self._board: FaultBoard | None = None
        self._failed = False
        self._validates_together = False
        super().__init__(**options)

    @property
    def world_size(self) -> int:
        """Ranks that train together as one worker: one."""
        return 1

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return self.num_nodes * self.num_processes

    @property
    def worker(self) -> int:
        """Number of this rank's worker, from 0."""
        return self.global_rank

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
        return error if self._board is None else self._board.explain(error)

    def _stop_rounds(self, cause: BaseException) -> None:
        """End what this worker does with the others, because of ``cause``."""
