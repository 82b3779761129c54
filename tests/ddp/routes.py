"""A route on which nothing travels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from lightning_bytescheduler.ddp.fit_report import Record

__all__ = ["idle_route", "idle_wire"]


def idle_route(**besides: Any) -> Any:
    """What a step asks of a route of two ranks, on a CPU."""
    return SimpleNamespace(
        group=SimpleNamespace(size=lambda: 2, rank=lambda: 0),
        streams=None,
        copies=None,
        wire_device=torch.device("cpu"),
        merges=True,
        all_reduce=None,
        wire_share=1.0,
        **besides,
    )


def idle_wire(core: Any, **besides: Any) -> Any:
    """What a fit asks of a wire of two ranks, on a CPU; ``besides`` is of its route."""
    return SimpleNamespace(
        core=core,
        route=idle_route(routing=None, **besides),
        groups=SimpleNamespace(counts=None),
        timeout=5.0,
        servers=None,
        record=Record(),
    )
