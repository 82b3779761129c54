"""Averages sparse gradients, which cannot be cut into partitions, during the backward pass.

They are reduced one by one, on their own group with one thread (``collectives/groups.py``). With two threads gloo
stores the name of the last operation without a lock. Names of up to 15 letters survive this, but ``_ALLREDUCE_SPARSE``
is on the heap and may be freed during a write. Sparse and dense all-reduces on one group of torch 2.13 can so end a
process (``malloc(): unaligned tcache chunk detected``).

Ranks agree on the order, as DDP's hooks run on the training thread by index of the bucket.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_bytescheduler.collectives.operations import scale
from lightning_bytescheduler.failures.standstill import break_connections

__all__ = ["SparseGradients", "sparse_layers"]


def sparse_layers(model: nn.Module) -> list[str]:
    """Return the names of layers whose gradients are sparse, by DDP's rule."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    ]


class SparseGradients:
    """Averages sparse buckets.

    Args:
        group: Their group; the default group if ``None``.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._last: dist.Work | None = None

    def reduce(self, buffer: torch.Tensor, factor: float) -> torch.futures.Future[torch.Tensor]:
        """Average a sparse bucket over all ranks; returns a future of it.

        Args:
            buffer: The bucket's buffer.
            factor: This rank's weight in the mean.

        Raises:
            RuntimeError: If the default process group is gone.
        """
        group = dist.group.WORLD if self._group is None else self._group
        if group is None:
            raise RuntimeError("The default process group is gone.")
        if factor == 1.0 / group.size():
            buffer.div_(group.size())  # as DDP does
        else:
            scale(buffer, factor)
        self._last = work = group.allreduce([buffer])
        reduced: torch.futures.Future[torch.Tensor] = work.get_future().then(_first_value)
        return reduced

    @property
    def under_way(self) -> bool:
        """Whether something has been sent and has not arrived."""
        return self._last is not None and not self._last.is_completed()

    def call_off(self) -> None:
        """End all waits for operations in flight; for any thread."""
        if self._group is not None and self.under_way:
            break_connections(self._group)


def _first_value(future: torch.futures.Future[Any]) -> torch.Tensor:
    tensor: torch.Tensor = future.value()[0]
    return tensor
