"""Sparse gradients, which cannot be cut into partitions, and are reduced as DDP reduces them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["reduce_sparse"]


def reduce_sparse(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Average a sparse bucket over all ranks; returns a future of it.

    The default group is in order here: hooks run on the training thread, by bucket index.
    """
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("The default process group is gone.")
    buffer.div_(group.size())
    reduced: torch.futures.Future[torch.Tensor] = group.allreduce([buffer]).get_future().then(_first_value)
    return reduced


def _first_value(future: torch.futures.Future[Any]) -> torch.Tensor:
    tensor: torch.Tensor = future.value()[0]
    return tensor
