"""The sizes of partitions, credit and buckets that all ranks use in one fit."""

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
from lightning_bytescheduler.tuning.sizes import LinkEstimate, SchedulerSizes, default_sizes

__all__ = ["AgreedSizes", "agree_on_sizes"]

_FAR_S = 0.01  # start-up time of an empty all-reduce above which a link counts as far
_LEAST_BUCKET_BYTES = 128 * 1024  # for buckets that are not cut
_DDPS_BUCKET_BYTES = 25 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class AgreedSizes:
    """Sizes that hold on every rank, and the link they were chosen for.

    Attributes:
        link: The measured link; ``None`` if it was not measured.
        far: Whether latency is so high that gradients go straight to their targets instead of around a ring.
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
    """Agree on partition size, credit and bucket size. Rank 0's options count.

    Probes the link, unless rank 0 has fixed both sizes. With both sizes fixed and ``mode="auto"``, only the start-up
    time is measured.

    Args:
        groups: The scheduler's groups.
        options: This rank's options.
        parameters: All parameters of the model.
        device: Where gradients live.
        in_shards: Whether this rank expects gradients to be reduced in shards; rank 0's expectation counts.
        ratio: How many times fewer bytes travel because of compression. Partitions become larger by this factor, so
            that each takes the link as long. Must be the same on all ranks.
        architecture: Who averages gradients; must be the same on all ranks.
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
        travels = max(round(width / ratio), 1)  # bytes per parameter
        sizes = default_sizes(
            parameters=count,
            bytes_per_parameter=travels,
            link=link,
            busy_processor=busy_processor,
            in_shards=bool(in_shards),
            architecture=architecture,
            far=far,
        )
        if ratio > 1:  # each partition costs codecs time, so larger ones are faster
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
    """Whether the start-up time still decides something when both sizes are given."""
    return options.mode == "auto"


def _near_or_far(link: LinkEstimate, world_size: int, goes_straight: bool) -> tuple[LinkEstimate, bool]:
    """Return the link as gradients see it, and whether they go straight over it: two messages instead of a ring."""
    if not goes_straight or link.alpha <= _FAR_S:
        return link, False
    return LinkEstimate(alpha=link.alpha / (world_size - 1), beta=link.beta), True
