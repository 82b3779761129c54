"""The global weights and the outer optimizer's state as a worker fetches or provides them: one file of safetensors.

``weights.NAME`` has the weights, in fp32, and ``momentum.NAME`` the momentum of those that have any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_bytescheduler.checks import importing
from lightning_bytescheduler.exceptions import CoordinatorError

__all__ = ["pack_state", "unpack_state"]

_WEIGHTS, _MOMENTUM = "weights.", "momentum."
_BUFFER = "momentum_buffer"


def pack_state(state: Mapping[str, Any]) -> bytes:
    """Write what ``OuterOptimizer.state_dict`` gave, of SGD."""
    with importing("DiLoCoStrategy(coordinator=...)", extra="coordinator"):
        from safetensors.torch import save
    weights: Mapping[str, Tensor] = state["weights"]
    tensors = {f"{_WEIGHTS}{name}": tensor.contiguous() for name, tensor in weights.items()}
    for index, name in enumerate(weights):
        buffer = state["optimizer"]["state"].get(index, {}).get(_BUFFER)
        if buffer is not None:
            tensors[f"{_MOMENTUM}{name}"] = buffer.contiguous()
    return bytes(save(tensors))


def unpack_state(payload: bytes, like: Mapping[str, Any]) -> dict[str, Any]:
    """Read a state.

    Args:
        payload: What :func:`pack_state` wrote, or the coordinator.
        like: The ``state_dict`` of the optimizer that is to take it.

    Returns:
        What that optimizer loads.

    Raises:
        CoordinatorError: If it has not the same weights.
    """
    with importing("DiLoCoStrategy(coordinator=...)", extra="coordinator"):
        from safetensors import SafetensorError
        from safetensors.torch import load
    try:
        tensors: dict[str, Tensor] = load(payload)
    except SafetensorError as error:
        raise CoordinatorError(f"The coordinator's state cannot be read: {error}") from error
    weights: dict[str, Tensor] = {}
    buffers: dict[int, dict[str, Tensor | None]] = {}
    for index, (name, ours) in enumerate(like["weights"].items()):
        theirs = tensors.get(f"{_WEIGHTS}{name}")
        if theirs is None or theirs.shape != ours.shape:
            raise CoordinatorError(
                f"The coordinator's state does not fit this model: it has no {name!r} of {ours.shape}."
            )
        weights[name] = theirs.to(torch.float32)
        buffer = tensors.get(f"{_MOMENTUM}{name}")
        if buffer is not None:
            buffers[index] = {_BUFFER: buffer.to(torch.float32).view_as(ours)}
    optimizer = {"state": buffers, "param_groups": like["optimizer"]["param_groups"]}
    return {"weights": weights, "optimizer": optimizer, "kind": like["kind"]}
