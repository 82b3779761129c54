"""The outer optimizer: keeps the global weights, and steps them along the mean of the workers' pseudo-gradients.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", algorithm 1: the pseudo-gradient
is a worker's weights at the start of the round minus those at its end.

The global weights are in host memory, in fp32, whatever the device. Pseudo-gradients and means are sent from and
received in host memory. The same outer step then gives the same bits on every worker, even if their devices differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import SGD

from lightning_bytescheduler.checks import importing, require_positive, require_share
from lightning_bytescheduler.diloco.fragments import TrainedWeights, mix
from lightning_bytescheduler.diloco.weighted_mean import LARGEST
from lightning_bytescheduler.exceptions import CoordinatorError, OptionError, UnsupportedError

if TYPE_CHECKING:
    from lightning_bytescheduler.slices.tracker import TrainedRun

SPARSE_DEFAULTS: Mapping[str, float] = {"outer_lr": 1.0, "outer_momentum": 0.5}
"""Defaults for sparse pseudo-gradients: what these leave unsent acts as momentum, too."""


def pseudo_gradient(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the change of a worker's weights by its steps, in fp32: ``before - after``, for the names of ``after``."""
    return {name: before[name].detach().float() - tensor.detach().float() for name, tensor in after.items()}


class OuterOptimizer:
    """SGD with Nesterov momentum.

    Args:
        weights: The weights to start from, by name; copied in fp32.
        lr: Outer learning rate, 0.7 by default.
        momentum: From 0 to 1, 0.9 by default; 0 for plain SGD.

    Attributes:
        weights: The global weights, in fp32. To be read only; a step changes them in place.

    Raises:
        OptionError: If a value is not allowed.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        lr: float | None = None,
        momentum: float | None = None,
    ) -> None:
        self._given = {name: value for name, value in (("lr", lr), ("momentum", momentum)) if value is not None}
        lr = require_positive("lr", 0.7 if lr is None else lr)
        momentum = require_share("momentum", 0.9 if momentum is None else momentum)
        self.weights: Mapping[str, Tensor] = {
            name: tensor.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            for name, tensor in weights.items()
        }
        self._optimizer = SGD(list(self.weights.values()), lr=lr, momentum=momentum, nesterov=momentum > 0)

    def step(self, merged: Mapping[str, Tensor]) -> None:
        """Step along a merged pseudo-gradient.

        Args:
            merged: By name. Weights that are not in it keep their values and their momentum, as between two
                synchronisations of a fragment.

        Raises:
            ValueError: If a name or shape does not fit; nothing was stepped.
        """
        for name, gradient in merged.items():
            if name not in self.weights or gradient.shape != self.weights[name].shape:
                raise ValueError(f"The outer step was not taken: there is no weight like {name!r} {gradient.shape}.")
        try:
            for name, gradient in merged.items():
                self.weights[name].grad = gradient.detach().to(self.weights[name])
            self._optimizer.step()
        finally:
            for name in merged:
                self.weights[name].grad = None

    def state_dict(self) -> dict[str, Any]:
        """Copies of weights and optimizer state: tensors and primitives only."""
        return {
            "weights": {name: tensor.clone() for name, tensor in self.weights.items()},
            "optimizer": copied(self._optimizer.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state. A given learning rate or momentum replaces the state's.

        Raises:
            ValueError: If its weights have other names or shapes; nothing was changed.
        """
        weights: Mapping[str, Tensor] = state["weights"]
        ours = {name: tensor.shape for name, tensor in self.weights.items()}
        if {name: tensor.shape for name, tensor in weights.items()} != ours:
            raise ValueError("The outer state does not fit: its weights have other names or shapes.")
        self._optimizer.load_state_dict(copied(state["optimizer"]))
        for group in self._optimizer.param_groups:
            group.update(self._given)
            if "momentum" in self._given:
                group["nesterov"] = group["momentum"] > 0
        for name, tensor in weights.items():
            self.weights[name].copy_(tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """A worker's update of a fragment in a round.

    Attributes:
        worker: The worker's name.
        round: The round; 0 for the fragments that a standstill synchronises in addition.
        fragment: The fragment's number.
        pseudo_gradient: Flat, fp32, on the CPU; must not be changed.
        samples: Processed since this fragment was last part of a mean: its weight in the next one.
        steps: Taken in this round.
        round_samples: Processed in this round.
        trained: The samples of slices that it was made of, where a coordinator hands slices out.
    """

    worker: str
    round: int
    fragment: int
    pseudo_gradient: Tensor
    samples: int = 0
    steps: int = 0
    round_samples: int = 0
    trained: tuple[TrainedRun, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """The mean of a round that has ended.

    Attributes:
        values: Flat, fp32; empty if nothing was merged.
        total: The sum of the weights.
        chain: The chain of the weights after it, in a coordinator's run.
    """

    values: Tensor
    total: int
    chain: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class Upload:
    """An update that is being sent.

    Attributes:
        fragment: Its fragment.
        receipt: The result: a coordinator's receipt, ``None`` if it did not accept the update; among peers, the mean.
        residual: What the codec left out; set by the encoding thread before the update is sent.
        former: A coordinator's receipt for the same update, where it was sent before.
    """

    fragment: int
    receipt: Future[Any] = field(default_factory=Future)
    residual: Tensor | None = None
    former: Any = None

    @property
    def answer(self) -> Any:
        """The result, if it is known; the former one, if the update was still there."""
        known = self.receipt.done() and not self.receipt.cancelled() and not self.failed
        found = self.receipt.result() if known else None
        return self.former if self.former is not None and found is not None and found.verdict == "again" else found

    @property
    def failed(self) -> bool:
        """Whether no answer will come, as the connection has ended for good."""
        return self.receipt.done() and not self.receipt.cancelled() and self.receipt.exception() is not None


class OuterState:
    """Makes pseudo-gradients of fragments, and takes outer steps.

    Args:
        trained: What is trained.
        lr: See :class:`OuterOptimizer`.
        momentum: See :class:`OuterOptimizer`.

    Attributes:
        trained: As given.
        samples: Samples that this worker has processed since each fragment was last part of a mean.
        changed: Fragments whose trained weights were replaced; the session clears it.
    """

    def __init__(self, trained: TrainedWeights, *, lr: float | None = None, momentum: float | None = None) -> None:
        self.trained = trained
        self._parameters = trained.parameters
        self._optimizer = OuterOptimizer(
            {name: parameter.detach().cpu() for name, parameter in self._parameters.items()},
            lr=lr,
            momentum=momentum,
        )
        self.samples = [0] * len(trained.fragments)
        self.changed: set[int] = set()

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The global weights, in fp32, by name. To be read only."""
        return self._optimizer.weights

    def count(self, samples: int) -> None:
        """Count the samples of a step."""
        for index in range(len(self.samples)):
            self.samples[index] += samples

    def taken(self, update: Contribution) -> None:
        """Note that the samples of an update are part of a mean, or will be."""
        self.samples[update.fragment] -= update.samples

    def overwritten(self, fragment: int) -> None:
        """Note that a fragment's trained weights now equal the global ones: there is nothing to send of it."""
        self.samples[fragment] = 0

    def pseudo_gradient(self, fragment: int) -> Tensor:
        """The change of a fragment by this worker's steps, since it was last part of a mean; flat.

        Raises:
            UnsupportedError: If a parameter is trained that was not trained at first, as workers would drift apart; or
                if one has diverged.
        """
        self.trained.check()
        names = self.trained.fragments[fragment]
        after = {name: self._parameters[name].detach().cpu() for name in names}
        parts = pseudo_gradient(self._optimizer.weights, after)
        _require_sane(parts, self.samples[fragment])
        return torch.cat([parts[name].reshape(-1) for name in names])

    @torch.no_grad()
    def merge(self, fragment: int, mean: Tensor, *, total: int, exactly: bool) -> None:
        """Take the outer step with the mean of all workers, and set the trained weights from the result.

        Args:
            fragment: The fragment's number.
            mean: The mean of all workers' pseudo-gradients, flat.
            total: Sum of the weights; with 0, the global weights stay as they are.
            exactly: Whether the trained weights become the global ones, even if merges mix the two.
        """
        names = self.trained.fragments[fragment]
        sizes = [self._parameters[name].numel() for name in names]
        if total:
            parts = zip(names, mean.split(sizes), strict=True)
            self._optimizer.step({name: part.view_as(self._parameters[name]) for name, part in parts})
        mixing = 0.0 if exactly else self.trained.mixing
        for name in names:
            parameter = self._parameters[name]
            merged = self._optimizer.weights[name].to(parameter.device)
            parameter.copy_(mix(parameter.float(), merged, mixing))
        self.changed.add(fragment)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Make the trained weights the global ones within this context."""
        own = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        for name, parameter in self._parameters.items():
            parameter.detach().copy_(self._optimizer.weights[name])
        try:
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.detach().copy_(own[name])

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint. The file has the weights anyway, unless they lose precision there."""
        state = self._optimizer.state_dict()
        if all(parameter.dtype == torch.float32 for parameter in self._parameters.values()):
            del state["weights"]
        return state

    def full_state(self) -> dict[str, Any]:
        """Return :meth:`state_dict` with the weights, whatever their type."""
        return {**self.state_dict(), "weights": dict(self.weights)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state. If it has no weights, the global weights stay.

        Raises:
            ValueError: If it does not fit the model; nothing was changed.
        """
        weights = state.get("weights", self._optimizer.state_dict()["weights"])
        self._optimizer.load_state_dict({**state, "weights": weights})


def _require_sane(parts: Mapping[str, Tensor], weight: int) -> None:
    """Refuse a pseudo-gradient that would spoil every worker's weights.

    Raises:
        UnsupportedError: Names the first parameter that is infinite or NaN, or has changed far too much.
    """
    for name, tensor in parts.items():
        extent = float(tensor.abs().max()) if tensor.numel() else 0.0
        if not extent * weight < LARGEST:  # NaN is not less, either
            state = f"has changed by {extent:.1e} in one round" if math.isfinite(extent) else "is infinite or NaN"
            raise UnsupportedError(
                f"Parameter {name!r} of this worker {state}: its training has diverged, and is not averaged with the "
                "others'. Use a lower learning rate, or Trainer(gradient_clip_val=...), or more steps in a round; "
                "Trainer(detect_anomaly=True) finds where NaN begins."
            )


def copied(state: Any) -> Any:
    """Return a copy in host memory, with copies of its tensors, as training goes on changing them."""
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return type(state)(map(copied, state)) if type(state) in (list, tuple) else state


_WEIGHTS, _MOMENTUM = "weights.", "momentum."
_BUFFER = "momentum_buffer"


def pack_state(state: Mapping[str, Any]) -> bytes:
    """Write what ``OuterOptimizer.state_dict`` gave."""
    with importing("DiLoCoStrategy(coordinator=...)", extra="coordinator"):
        from safetensors.torch import save
    return bytes(save(named_tensors(state)))


def named_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """What ``OuterOptimizer.state_dict`` gave, as it travels: ``weights.NAME`` and ``momentum.NAME``."""
    weights: Mapping[str, Tensor] = state["weights"]
    tensors = {f"{_WEIGHTS}{name}": tensor.contiguous() for name, tensor in weights.items()}
    for index, name in enumerate(weights):
        buffer = state["optimizer"]["state"].get(index, {}).get(_BUFFER)
        if buffer is not None:
            tensors[f"{_MOMENTUM}{name}"] = buffer.contiguous()
    return tensors


def state_in(tensors: Mapping[str, Tensor], like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that these tensors hold, for an optimizer to load.

    Args:
        tensors: Named as by :func:`named_tensors`; others are ignored.
        like: A ``state_dict`` of that optimizer.

    Raises:
        OptionError: If a tensor is missing, has another shape, or is not finite; names it.
    """
    weights: dict[str, Tensor] = {}
    buffers: dict[int, dict[str, Tensor | None]] = {}
    for index, (name, ours) in enumerate(like["weights"].items()):
        weights[name] = tensor_in(tensors, f"{_WEIGHTS}{name}", ours.shape).float()
        if (key := f"{_MOMENTUM}{name}") in tensors:
            buffers[index] = {_BUFFER: tensor_in(tensors, key, ours.shape).float()}
    optimizer = {"state": buffers, "param_groups": like["optimizer"]["param_groups"]}
    return {"weights": weights, "optimizer": optimizer}


def tensor_in(tensors: Mapping[str, Tensor], key: str, shape: torch.Size) -> Tensor:
    """Return one of the tensors, checked; see :func:`state_in`."""
    tensor = tensors.get(key)
    if tensor is None or tensor.shape != shape or not tensor.is_floating_point():
        has = "nothing" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise OptionError(key, has, f"floating-point numbers of shape {tuple(shape)}")
    if not bool(torch.isfinite(tensor).all()):
        raise OptionError(key, "infinities or NaN", "finite")
    return tensor


def unpack_state(payload: bytes, like: Mapping[str, Any]) -> dict[str, Any]:
    """Read a state.

    Args:
        payload: The result of :func:`pack_state`, or the coordinator's state.
        like: The ``state_dict`` of the optimizer that is to take it.

    Returns:
        The state that this optimizer loads.

    Raises:
        CoordinatorError: If it cannot be read, or has other weights.
    """
    with importing("DiLoCoStrategy(coordinator=...)", extra="coordinator"):
        from safetensors import SafetensorError
        from safetensors.torch import load
    try:
        return state_in(load(payload), like)
    except (SafetensorError, OptionError) as error:
        raise CoordinatorError(
            f"The coordinator's state cannot be read, or does not fit this model: {error}"
        ) from error
