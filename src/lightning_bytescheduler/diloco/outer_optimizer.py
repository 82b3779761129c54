"""The outer optimizer: keeps the global weights, and steps them along the merged pseudo-gradient.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", algorithm 1: the pseudo-gradient
is what a worker's weights were at the start of the round less what they are at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_bytescheduler.checks import require_positive, require_share
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["OuterOptimizer", "pseudo_gradient"]


def pseudo_gradient(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a worker's steps have taken off its weights, in fp32: ``before - after``, for the names of ``after``."""
    return {name: before[name].detach().float() - tensor.detach().float() for name, tensor in after.items()}


class OuterOptimizer:
    """SGD with Nesterov momentum by default, or any optimizer of ``torch.optim``.

    Args:
        weights: The weights to start from, by name. Copied, in fp32.
        lr: Outer learning rate, 0.7 by default.
        momentum: From 0 to 1, 0.9 by default; 0 for plain SGD.
        factory: Makes the optimizer for a list of tensors, in place of SGD.

    Raises:
        OptionError: If a value is not allowed, or ``factory`` is given together with ``lr`` or ``momentum``.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        lr: float | None = None,
        momentum: float | None = None,
        factory: Callable[[list[Tensor]], Optimizer] | None = None,
    ) -> None:
        for option, value in (("lr", lr), ("momentum", momentum)):
            if factory is not None and value is not None:
                raise OptionError(option, value, "left out where factory makes the optimizer, and set in there")
        lr = require_positive("lr", 0.7 if lr is None else lr)
        momentum = require_share("momentum", 0.9 if momentum is None else momentum)
        self._weights = {
            name: tensor.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            for name, tensor in weights.items()
        }
        tensors = list(self._weights.values())
        if factory is None:
            self._optimizer: Optimizer = SGD(tensors, lr=lr, momentum=momentum, nesterov=momentum > 0)
        else:
            self._optimizer = factory(tensors)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The global weights, in fp32. To be read only; a step changes them in place."""
        return self._weights

    @property
    def optimizer(self) -> Optimizer:
        """What steps the weights."""
        return self._optimizer

    def step(self, merged: Mapping[str, Tensor]) -> None:
        """Step along a merged pseudo-gradient.

        Args:
            merged: By name. Weights that are not in it stay as they are, and so does their momentum, as between the
                synchronisations of a fragment.

        Raises:
            ValueError: If a name or shape does not fit; nothing was stepped.
        """
        for name, gradient in merged.items():
            if name not in self._weights or gradient.shape != self._weights[name].shape:
                raise ValueError(f"The outer step was not taken: there is no weight like {name!r} {gradient.shape}.")
        try:
            for name, gradient in merged.items():
                self._weights[name].grad = gradient.detach().to(self._weights[name])
            self._optimizer.step()
        finally:
            for name in merged:
                self._weights[name].grad = None

    def state_dict(self) -> dict[str, Any]:
        """Copies of weights and optimizer state: tensors and primitives only."""
        state: dict[str, Any] = {
            "weights": {name: tensor.clone() for name, tensor in self._weights.items()},
            "optimizer": _copied(self._optimizer.state_dict()),
        }
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Carry on from a state.

        Raises:
            ValueError: If its weights have other names or shapes, or it is another optimizer's; nothing was changed.
        """
        weights: Mapping[str, Tensor] = state["weights"]
        ours = {name: tensor.shape for name, tensor in self._weights.items()}
        if {name: tensor.shape for name, tensor in weights.items()} != ours:
            raise ValueError("The outer state does not fit: its weights have other names or shapes.")
        self._optimizer.load_state_dict(_copied(state["optimizer"]))
        for name, tensor in weights.items():
            self._weights[name].copy_(tensor)


def _copied(state: Any) -> Any:
    """The same with copies of its tensors, which the optimizer would go on changing."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return [_copied(value) for value in state] if isinstance(state, list) else state
