"""Torchmetrics that synchronise over all workers while those validate together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn
from torchmetrics import Metric

__all__ = ["shared_metrics"]


@contextmanager
def shared_metrics(module: nn.Module, group: dist.ProcessGroup) -> Iterator[None]:
    """Have the metrics in ``module`` use ``group`` meanwhile, unless they were given one."""
    metrics = [m for m in module.modules() if isinstance(m, Metric) and m.process_group is None]
    for metric in metrics:
        metric.process_group = group
    try:
        yield
    finally:
        for metric in metrics:
            metric.process_group = None
