"""A transport on which nothing travels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["idle_transport", "idle_wire"]


def idle_transport(**besides: Any) -> Any:
    """What a step asks of a transport of two ranks, on a CPU."""
    return SimpleNamespace(
        group=SimpleNamespace(size=lambda: 2, rank=lambda: 0),
        streams=None,
        host_copies=None,
        wire_device=torch.device("cpu"),
        push_pull=None,
        all_reduce=None,
        wire_share=1.0,
        **besides,
    )


def idle_wire(core: Any, **besides: Any) -> Any:
    """What a fit asks of a wire of two ranks, on a CPU; ``besides`` is of its transport."""
    return SimpleNamespace(
        core=core,
        transport=idle_transport(routing=None, **besides),
        groups=SimpleNamespace(sparse=None, counts=None),
        timeout=5.0,
        servers=None,
    )
