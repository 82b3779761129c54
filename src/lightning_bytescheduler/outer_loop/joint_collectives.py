"""Collectives of all ranks together, for the moments in which all workers do the same, such as a validation.

On a gloo group of their own, with tensors in host memory, so that any device and backend will do. For one thread.
Waits end with the group's timeout, the strategy's, or when a rank that has died closes its connections.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bytescheduler.collectives.tensor_calls import broadcast_from_first, reduce_with
from lightning_bytescheduler.exceptions import UnsupportedError

__all__ = ["JointCollectives"]

_DIMENSIONS = 16  # as many as any tensor here may have
_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


class JointCollectives:
    """All-reduce, all-gather and broadcast over all ranks.

    Args:
        group: Over all ranks; gloo.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def reduce(self, tensor: Tensor, operation: Any = "mean") -> Tensor:
        """The reduced tensor, new.

        Args:
            tensor: Of the same shape on all ranks.
            operation: ``"mean"`` (also ``None``), ``"sum"``, ``"max"``, ``"min"``, ``"product"``, or one of torch's.
        """
        name = "mean" if operation is None else str(operation).rsplit(".", 1)[-1].lower()
        copy = tensor.detach().to("cpu", copy=True)
        if name in ("mean", "avg") and not copy.is_floating_point():
            copy = copy.float()
        reduce_with(self.group, copy, _OPERATIONS[name]).wait()
        if name in ("mean", "avg"):
            copy /= self.group.size()
        return copy.to(tensor.device)

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, which must have the same shape, stacked by rank."""
        copy = tensor.detach().to("cpu").contiguous()
        parts = [torch.empty_like(copy) for _ in range(self.group.size())]
        self.group.allgather([parts], [copy]).wait()
        return torch.stack(parts).to(tensor.device)

    def gather_uneven(self, tensor: Tensor, group: object = None) -> list[Tensor]:
        """The tensors of all ranks, of any shape and the same type, by rank.

        Args:
            tensor: This rank's.
            group: Is ignored; torchmetrics passes one.
        """
        shape = torch.full((_DIMENSIONS,), -1)
        shape[: tensor.ndim] = torch.tensor(tensor.shape, dtype=torch.int64)
        shapes = [tuple(size for size in row if size >= 0) for row in self.gather(shape).tolist()]
        sizes = [math.prod(one) for one in shapes]
        padded = tensor.new_zeros(max(sizes))
        padded[: tensor.numel()] = tensor.detach().reshape(-1)
        rows = self.gather(padded)
        return [row[:size].reshape(one) for row, size, one in zip(rows, sizes, shapes, strict=True)]

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Fill tensors with those of rank 0."""
        for tensor in tensors:
            copy = tensor.detach().to("cpu", copy=True).contiguous()
            broadcast_from_first(self.group, copy).wait()
            tensor.copy_(copy)

    def check_alike(self, text: str, what: str) -> None:
        """Make sure that all ranks have the same text.

        Args:
            text: What is to be the same.
            what: The same in words.

        Raises:
            UnsupportedError: If a rank's text differs from rank 0's; on every rank, with the ranks' numbers.
        """
        digest = torch.tensor(list(hashlib.sha256(text.encode()).digest()))
        digests = self.gather(digest)
        different = [rank for rank in range(len(digests)) if not torch.equal(digests[rank], digests[0])]
        if different:
            ranks = ", ".join(map(str, different))
            raise UnsupportedError(f"All processes need {what}, but those of rank {ranks} differ from rank 0's.")
