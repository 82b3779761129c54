"""Sizes that every rank uses, settled once at the start of a fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from lightning_bytescheduler.collectives.groups import SchedulerGroups
from lightning_bytescheduler.collectives.link_probe import probe_link
from lightning_bytescheduler.scheduler.options import SchedulerOptions
from lightning_bytescheduler.tuning.link import LinkEstimate, SchedulerSizes, default_sizes

__all__ = ["AgreedSizes", "agree_on_sizes"]


@dataclass(frozen=True, slots=True)
class AgreedSizes:
    """Sizes that hold on every rank, and the link they were made for, if it was measured."""

    sizes: SchedulerSizes
    link: LinkEstimate | None


def agree_on_sizes(
    groups: SchedulerGroups,
    options: SchedulerOptions,
    parameters: Iterable[nn.Parameter],
    device: torch.device,
    *,
    in_shards: bool = False,
) -> AgreedSizes:
    """Settle partition, credit and bucket size; rank 0's options count, as its environment may differ from others'.

    Probes the link unless rank 0 has both sizes fixed.

    Args:
        groups: The scheduler's.
        options: This rank's.
        parameters: All of the model.
        device: Where gradients live.
        in_shards: Whether this rank expects gradients to be reduced in shards; rank 0's expectation counts.
    """
    groups.warm_up(device)
    message = torch.tensor([options.partition_size or 0, options.credit or 0, int(in_shards)])
    dist.broadcast(message, src=0, group=groups.control)
    partition, credit, in_shards = message.tolist()
    link = None
    trainable = [p for p in parameters if p.requires_grad]
    count = sum(p.numel() for p in trainable)
    width = max((p.element_size() for p in trainable), default=4)
    if partition and credit:
        bucket = max(partition * width, min(count * width // 64, 25 * 1024 * 1024))
        sizes = SchedulerSizes(partition_size=min(partition, credit), credit=credit, bucket_bytes=bucket)
    else:
        link = probe_link(groups.data, device)
        sizes = default_sizes(
            parameters=count,
            bytes_per_parameter=width,
            link=link,
            busy_processor=device.type == "cpu",
            in_shards=bool(in_shards),
        )
        if credit:
            sizes = SchedulerSizes(
                partition_size=min(sizes.partition_size, credit), credit=credit, bucket_bytes=sizes.bucket_bytes
            )
        elif partition:
            sizes = SchedulerSizes(
                partition_size=partition,
                credit=max(sizes.credit, 2 * partition),
                bucket_bytes=max(sizes.bucket_bytes, min(partition * width, 25 * 1024 * 1024)),
            )
    return AgreedSizes(sizes=sizes, link=link)
