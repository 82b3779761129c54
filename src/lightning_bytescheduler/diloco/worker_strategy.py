"""What a strategy needs whose workers train on their own: what they do together, and what becomes of failures.

Where several ranks form one worker, Lightning is kept from telling other ranks about a SIGTERM with collectives: it has
a rank that gets one join a broadcast of the default group from inside the signal handler, wherever its training thread
is, and all ranks join one before each batch. Within a worker that would meet the collectives of a step in another order
on each rank. Here the rank that got the signal ends by itself after its batch, and the fault board tells all others, of
other workers too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_bytescheduler.ddp.rank_strategy import RankStrategy
from lightning_bytescheduler.diloco.process_groups import JointCollectives
from lightning_bytescheduler.lightning_api import TrainerFn

__all__ = ["WorkerStrategy", "shared_metrics"]


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
    """Each worker, of one rank or several, is a Lightning world of its own, and fails with the others.

    Args:
        **options: See DDPStrategy.
    """

    def __init__(self, **options: Any) -> None:
        self._joint: JointCollectives | None = None
        self._validates_together = False
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
