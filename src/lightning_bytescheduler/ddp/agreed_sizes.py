"""The sizes that all ranks use in one fit: of partitions, of the credit and of buckets, and what they rest on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from lightning_bytescheduler.collectives.groups import SchedulerGroups
from lightning_bytescheduler.collectives.link_probe import probe_link, probe_start_up
from lightning_bytescheduler.collectives.operations import shards_over
from lightning_bytescheduler.scheduler.options import SchedulerOptions
from lightning_bytescheduler.tuning.default_sizes import LinkEstimate, SchedulerSizes, default_sizes

__all__ = ["AgreedSizes", "agree_on_sizes"]

_FAR_S = 0.01  # of an all-reduce of nothing
_LEAST_BUCKET_BYTES = 128 * 1024  # where buckets are not cut
_DDPS_BUCKET_BYTES = 25 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class AgreedSizes:
    """Sizes that hold on every rank, and the link they were made for, if it was measured.

    Attributes:
        sizes: Of partitions, of the credit and of buckets.
        link: ``None`` if it was not measured.
        far: Whether messages are so long under way that gradients go straight to where they are wanted, not around a
            ring.
    """

    sizes: SchedulerSizes
    link: LinkEstimate | None
    far: bool = False


def agree_on_sizes(
    groups: SchedulerGroups,
    options: SchedulerOptions,
    parameters: Iterable[nn.Parameter],
    device: torch.device,
    *,
    in_shards: bool = False,
    ratio: float = 1.0,
    architecture: str = "allreduce",
) -> AgreedSizes:
    """Settle partition, credit and bucket size; rank 0's options count, as its environment may differ from others'.

    Probes the link, but for no more than its start-up time if rank 0 has both sizes fixed; not at all if the mode
    is fixed, too.

    Args:
        groups: The scheduler's.
        options: This rank's.
        parameters: All of the model.
        device: Where gradients live.
        in_shards: Whether this rank expects gradients to be reduced in shards; rank 0's expectation counts.
        ratio: How many times fewer bytes travel, as gradients are compressed: so much larger are partitions that take
            the link as long. The same on all ranks.
        architecture: Who averages gradients; the same on all ranks.
    """
    busy_processor, device = device.type == "cpu", groups.wire_device(device)
    groups.warm_up(device)
    trainable = [p for p in parameters if p.requires_grad]
    count = sum(p.numel() for p in trainable)
    width = max((p.element_size() for p in trainable), default=4)
    partition, credit = options.partition_size or 0, options.credit or 0
    own = options.policy.own_partition_size(count)
    if own is not None:
        partition = credit = partition or own
    message = torch.tensor([partition, credit, int(in_shards), _chooses(options)], device="cpu")
    dist.broadcast(message, src=0, group=groups.control)
    partition, credit, in_shards, chooses = message.tolist()
    link, far = None, False
    goes_straight = architecture == "allreduce" and device.type == "cpu" and shards_over(groups.data, device)
    if partition and credit:
        if goes_straight and chooses:
            far = probe_start_up(groups.data, device) > _FAR_S
        least = partition * width if partition < count or options.partition_size else _LEAST_BUCKET_BYTES
        bucket = max(least, min(count * width // 64, _DDPS_BUCKET_BYTES))
        sizes = SchedulerSizes(partition_size=min(partition, credit), credit=credit, bucket_bytes=bucket)
    else:
        link, far = _near_or_far(probe_link(groups.data, device), groups.world_size, goes_straight)
        travels = max(round(width / ratio), 1)  # bytes of a parameter
        sizes = default_sizes(
            parameters=count,
            bytes_per_parameter=travels,
            link=link,
            busy_processor=busy_processor,
            in_shards=bool(in_shards),
            architecture=architecture,
            far=far,
        )
        if ratio > 1:  # codecs, too, have work with each partition: twice as large ones were seen to be faster
            larger, bucket = 2 * sizes.partition_size, sizes.bucket_bytes * width // travels
            sizes = replace(
                sizes, partition_size=larger, credit=2 * sizes.credit, bucket_bytes=max(bucket, larger * width)
            )
        if credit:
            sizes = replace(sizes, partition_size=min(sizes.partition_size, credit), credit=credit)
        elif partition:
            bucket = max(sizes.bucket_bytes, min(partition * width, _DDPS_BUCKET_BYTES))
            sizes = SchedulerSizes(
                partition_size=partition, credit=max(sizes.credit, 2 * partition), bucket_bytes=bucket
            )
    return AgreedSizes(sizes=sizes, link=link, far=far)


def _chooses(options: SchedulerOptions) -> bool:
    """Whether how long a message is under way decides anything, where sizes are given."""
    return options.mode == "auto"


def _near_or_far(link: LinkEstimate, world_size: int, goes_straight: bool) -> tuple[LinkEstimate, bool]:
    """The link as gradients find it, and whether they go straight over it: two messages instead of the ring's."""
    if not goes_straight or link.alpha <= _FAR_S:
        return link, False
    return LinkEstimate(alpha=link.alpha / (world_size - 1), beta=link.beta), True
