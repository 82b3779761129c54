"""Torchmetrics that synchronise over all workers while those validate together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torchmetrics import Metric

from lightning_bytescheduler.outer_loop.joint_collectives import JointCollectives

__all__ = ["shared_metrics"]


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
