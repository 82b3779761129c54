"""What the weights have to be when more than two ranks add up: plain DDP that reduces the same partitions, at once.

With three or more addends the order of summation depends on where a tensor is cut, so DDP itself, which does not cut,
is no reference to the last bit. Everything else is DDP's: its buckets, its step, nothing deferred, no scheduler.

No postponed annotations here: DDP looks at those of a comm hook as objects.
"""

from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from lightning_bytescheduler.scheduler.task import part_size

__all__ = ["SumsOfNodes", "SynchronousPartitions", "same_sizes"]


class SynchronousPartitions(DDPStrategy):
    """DDP with a comm hook that averages one partition after the other.

    Args:
        partition_size: In parameters.
        options: Options of DDPStrategy.
    """

    def __init__(self, *, partition_size: int, **options: Any) -> None:
        super().__init__(**options)
        self._partition_size = partition_size

    def _register_ddp_hooks(self) -> None:
        # Lightning passes hooks on for CUDA only.
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(self._partition_size, _average)


def _average(partition_size: int, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    buffer.mul_(1.0 / dist.get_world_size())
    for part in buffer.split(part_size(buffer.numel(), partition_size)):
        dist.all_reduce(part)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


class SumsOfNodes(DDPStrategy):
    """DDP with a comm hook that adds up the ranks of each node, in their order, and then the nodes' sums.

    Where a tensor is cut makes no difference then.

    Args:
        nodes: The ranks of each node.
        options: Options of DDPStrategy.
    """

    def __init__(self, *, nodes: tuple[tuple[int, ...], ...], **options: Any) -> None:
        super().__init__(**options)
        self._nodes = nodes

    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(self._nodes, _sum_by_node)


def _sum_by_node(nodes: tuple[tuple[int, ...], ...], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    buffer.mul_(1.0 / dist.get_world_size())
    gathered = [torch.empty_like(buffer) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, buffer)
    sums = [reduce(torch.add, [gathered[rank] for rank in ranks]) for ranks in nodes]
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer.copy_(reduce(torch.add, sums)))
    return future


def same_sizes(sizes: Any) -> partial[SynchronousPartitions]:
    """The reference for a run with these options of ByteSchedulerStrategy."""
    return partial(
        SynchronousPartitions,
        partition_size=sizes["partition_size"],
        bucket_cap_mb=sizes["bucket_cap_mb"],
        gradient_as_bucket_view=True,
    )
