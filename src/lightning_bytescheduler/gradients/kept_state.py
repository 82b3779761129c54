"""Finding out that somebody keeps an optimizer's state, and may read it without asking the optimizer again.

``optimizer.state_dict()`` returns the very dictionaries and tensors the optimizer works with. Whoever keeps one of
them, ``optimizer.state`` itself, or anything over the memory of such a tensor, sees each step's moments under DDP as
soon as the step is taken; a deferred step would show late. Python and PyTorch count references, which tells.

Not seen: a tensor of the state of which only the address is known.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_bytescheduler.gradients.aliases import held_beside
from lightning_bytescheduler.gradients.gated_optimizer import attributes_of

__all__ = ["state_is_kept"]


def state_is_kept(optimizer: Optimizer) -> bool:
    """Whether anybody but ``optimizer`` holds its state, or a dictionary or tensor of it.

    Costs about 0.3 microseconds for each tensor.
    """
    own = attributes_of(optimizer)
    if sys.getrefcount(own["state"]) > _ALONE_AS_ATTRIBUTE:
        return True
    if _most_references(own["state"].values()) > _ALONE_IN_MAPPING:
        return True
    tensors = _tensors(own["state"])
    return _most_references(tensors) > _ALONE_IN_LIST or held_beside(tensors)


def _most_references(values: Iterable[Any]) -> int:
    return max(map(sys.getrefcount, values), default=0)


def _tensors(state: Mapping[Any, Any]) -> list[torch.Tensor]:
    return [
        value
        for values in state.values()
        if isinstance(values, dict)
        for value in values.values()
        if type(value) is torch.Tensor and value.layout is torch.strided and value.numel()
    ]


class _Holder:
    def __init__(self) -> None:
        self.state: dict[int, dict[str, torch.Tensor]] = {0: {"": torch.zeros(1)}}


# What Python itself holds while it counts differs between versions, so it is measured.
_holder = vars(_Holder())
_ALONE_AS_ATTRIBUTE = sys.getrefcount(_holder["state"])
_ALONE_IN_MAPPING = _most_references(_holder["state"].values())
_ALONE_IN_LIST = _most_references(_tensors(_holder["state"]))
