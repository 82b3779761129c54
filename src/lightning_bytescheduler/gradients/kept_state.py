"""Finding out that an optimizer's state is not the optimizer's alone, or not what it was.

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

__all__ = ["KnownState", "state_is_kept"]


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


class KnownState:
    """Remembers which parameters an optimizer has been seen to step as a whole.

    A state that is made in a deferred step has its entries in the order in which buckets were touched. Whoever walks
    through it would find another order than under DDP, so new state is made in a whole step.
    """

    def __init__(self) -> None:
        self._stepped: set[int] = set()
        self._length = 0

    def note(self, optimizer: Optimizer) -> None:
        """Say that ``optimizer`` has taken a whole step."""
        self._length = len(attributes_of(optimizer)["state"])
        self._stepped = set(_with_gradients(optimizer))

    def is_new(self, optimizer: Optimizer) -> bool:
        """Whether the step of ``optimizer`` may make state that is not there yet."""
        return len(attributes_of(optimizer)["state"]) < self._length or not self._stepped.issuperset(
            _with_gradients(optimizer)
        )


def _with_gradients(optimizer: Optimizer) -> list[int]:
    with torch._C.DisableTorchFunctionSubclass():  # opens no gate
        return [id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


class _Holder:
    def __init__(self) -> None:
        self.state: dict[int, dict[str, torch.Tensor]] = {0: {"": torch.zeros(1)}}


# What Python itself holds while it counts differs between versions, so it is measured.
_holder = vars(_Holder())
_ALONE_AS_ATTRIBUTE = sys.getrefcount(_holder["state"])
_ALONE_IN_MAPPING = _most_references(_holder["state"].values())
_ALONE_IN_LIST = _most_references(_tensors(_holder["state"]))
