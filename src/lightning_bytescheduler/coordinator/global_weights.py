"""The global weights: the outer optimizer, the means of the last rounds, and copies of all for who needs them.

The coordinator steps along the mean as it is decoded from what workers get, as they do: all have the same bits.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bytescheduler.coordinator.spool import buffer_of, view_of
from lightning_bytescheduler.coordinator.update_sum import Inspection, PiecedFormat, UpdateSum
from lightning_bytescheduler.diloco.coordinator_protocol import ModelParameter, RunOptions
from lightning_bytescheduler.diloco.fragments import split_fragments
from lightning_bytescheduler.diloco.outer_optimizer import OuterOptimizer
from lightning_bytescheduler.exceptions import OptionError

_WEIGHTS, _MOMENTUM = "weights.", "momentum."


def digest_of(payload: Tensor) -> str:
    """xxh3_128 of a payload, in hexadecimal digits."""
    import xxhash

    return xxhash.xxh3_128_hexdigest(view_of(payload))


class Snapshot(NamedTuple):
    """Copies of what the run goes on from, by name. A worker needs no residuals.

    Attributes:
        weights: In fp32.
        momentum: The same for the outer optimizer's; empty before the first step.
        residuals: What the means so far have lost, flat, by number of the fragment in digits.
    """

    weights: dict[str, Tensor]
    momentum: dict[str, Tensor]
    residuals: dict[str, Tensor]

    def named(self) -> dict[str, Tensor]:
        """As they travel: ``weights.NAME`` and ``momentum.NAME``."""
        weights = {f"{_WEIGHTS}{name}": tensor for name, tensor in self.weights.items()}
        return {**weights, **{f"{_MOMENTUM}{name}": tensor for name, tensor in self.momentum.items()}}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptMean:
    """The mean of a round, as workers get it.

    Attributes:
        round: Of the round.
        fragment: That it is of.
        payload: In the wire format; empty if nothing was merged.
        digest: Of the payload; empty if nothing was merged.
        total: The sum of the weights.
    """

    round: int
    fragment: int
    payload: Tensor
    digest: str
    total: int


class GlobalWeights:
    """Global weights of a model. Called on the event loop, one call at a time; the work is done in threads.

    Args:
        model: Its parameters, in order.
        options: The run's.
        weights: The first ones, by name.
        executor: Of the threads.
        keep_rounds: Means of that many rounds are kept,
        keep_bytes: if together they do not take more than this. The last is always kept.
    """

    def __init__(
        self,
        model: Sequence[ModelParameter],
        options: RunOptions,
        weights: Mapping[str, Tensor],
        *,
        executor: Executor,
        keep_rounds: int = 8,
        keep_bytes: int = 2**30,
    ) -> None:
        self.executor = executor
        self._optimizer = OuterOptimizer(
            {one.name: weights[one.name] for one in model}, lr=options.outer_lr, momentum=options.outer_momentum
        )
        self._shapes = {one.name: torch.Size(one.shape) for one in model}
        sizes = {name: shape.numel() for name, shape in self._shapes.items()}
        self._fragments = split_fragments(sizes, options.fragments)
        wire = options.wire
        self.formats = [PiecedFormat(wire, sum(sizes[name] for name in names)) for names in self._fragments]
        self.parameters = sum(sizes.values())
        self._spare: dict[int, UpdateSum] = {}  # by fragment
        # What the means so far have lost, by fragment, where the wire keeps that; replaced, never changed.
        self._residuals: dict[int, Tensor] = {}
        self._lost: Tensor | None = None  # the same after the mean that is to be stepped along
        self._kept: OrderedDict[int, KeptMean] = OrderedDict()
        self._keep_rounds = keep_rounds
        self._keep_bytes = keep_bytes

    def sum_of(self, fragment: int) -> UpdateSum:
        """A sum of nothing, for updates of a fragment."""
        return self._spare.pop(fragment, None) or UpdateSum(self.formats[fragment], self.executor)

    def inspection_of(self, fragment: int, payload: Tensor) -> Inspection:
        """The check of an update of a fragment, while it comes in."""
        return Inspection(self.formats[fragment], payload, self.executor)

    async def mean(self, round: int, fragment: int, sums: UpdateSum | None) -> KeptMean:
        """The mean of a round, encoded and kept.

        Args:
            round: Of the round.
            fragment: That it synchronises.
            sums: Settled; ``None`` if nothing is to be merged.
        """
        pieced = self.formats[fragment]
        payload, digest, total = torch.empty(0, dtype=torch.uint8), "", 0
        self._lost = None
        if sums is not None and sums.weight:
            total, only = sums.weight, sums.only
            if only is not None:
                payload, digest = only.payload, only.digest  # it loses nothing: what was lost before stays so
            else:
                payload = buffer_of(pieced.of_means.payload_bytes)
                known = self._residuals.get(fragment)
                if pieced.wire.keeps_residuals:
                    self._lost = torch.empty(pieced.elements, dtype=torch.float32)
                await sums.encode_mean(payload, round=round, known=known, lost=self._lost)
                digest = await asyncio.get_running_loop().run_in_executor(self.executor, digest_of, payload)
        mean = KeptMean(round=round, fragment=fragment, payload=payload, digest=digest, total=total)
        self._keep(mean)
        return mean

    async def step(self, mean: KeptMean, sums: UpdateSum | None) -> None:
        """Take the outer step along what :meth:`mean` has returned, whose sum is not needed any more."""
        if sums is not None:
            await sums.reopen()
            self._spare[mean.fragment] = sums
        if self._lost is not None:
            self._residuals[mean.fragment], self._lost = self._lost, None
        if mean.total:
            await asyncio.get_running_loop().run_in_executor(self.executor, self._step, mean)

    def _step(self, mean: KeptMean) -> None:
        names, pieced = self._fragments[mean.fragment], self.formats[mean.fragment]
        decoded = pieced.of_means.wire.decode(mean.payload, pieced.elements)
        parts = decoded.split([self._shapes[name].numel() for name in names])
        self._optimizer.step({name: part.view(self._shapes[name]) for name, part in zip(names, parts, strict=True)})

    def _keep(self, mean: KeptMean) -> None:
        self._kept[mean.round] = mean
        size = sum(kept.payload.numel() for kept in self._kept.values())
        while len(self._kept) > 1 and (size > self._keep_bytes or len(self._kept) > self._keep_rounds):
            _, dropped = self._kept.popitem(last=False)
            size -= dropped.payload.numel()

    def kept(self, round: int) -> KeptMean | None:
        """The mean of a round, if it is still kept."""
        return self._kept.get(round)

    @property
    def oldest_mean(self) -> int:
        """The earliest round whose mean is kept."""
        return next(iter(self._kept))

    async def snapshot(self) -> Snapshot:
        """Copies of weights and momentum."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, self._snapshot)

    def _snapshot(self) -> Snapshot:
        state = self._optimizer.state_dict()
        states = state["optimizer"]["state"]
        momentum = {name: states.get(index, {}).get("momentum_buffer") for index, name in enumerate(self._shapes)}
        residuals = {str(fragment): tensor.clone() for fragment, tensor in self._residuals.items()}
        momentum = {name: tensor for name, tensor in momentum.items() if tensor is not None}
        return Snapshot(state["weights"], momentum, residuals)

    def load_momentum(self, momentum: Mapping[str, Tensor]) -> None:
        """Carry on with the momentum of a snapshot.

        Args:
            momentum: By name.

        Raises:
            OptionError: If it is of another model; names the first tensor that does not fit.
        """
        state = self._optimizer.state_dict()
        indices = {name: index for index, name in enumerate(self._shapes)}
        for name, tensor in momentum.items():
            if self._shapes.get(name) != tensor.shape:
                raise OptionError("state", name, "of the same model as the run's")
            state["optimizer"]["state"][indices[name]] = {"momentum_buffer": tensor}
        self._optimizer.load_state_dict(state)

    def load_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        """Send with the next means what those before a restart have lost.

        Args:
            residuals: Of a snapshot.

        Raises:
            OptionError: If they are of another model, or of other fragments.
        """
        for fragment, tensor in residuals.items():
            known = int(fragment) if fragment.isdecimal() else -1
            if not 0 <= known < len(self.formats) or tensor.shape != (self.formats[known].elements,):
                raise OptionError("state", f"residual of fragment {fragment}", "of the same model as the run's")
            self._residuals[known] = tensor


def weights_in(tensors: Mapping[str, Tensor], model: Sequence[ModelParameter]) -> dict[str, Tensor]:
    """The weights among tensors of a state, checked against the model.

    Raises:
        OptionError: If one is missing, has another shape, or is not finite; names it.
    """
    return {one.name: _checked(f"{_WEIGHTS}{one.name}", tensors, one) for one in model}


def momentum_in(tensors: Mapping[str, Tensor], model: Sequence[ModelParameter]) -> dict[str, Tensor]:
    """The momentum among tensors of a state, in fp32: of those weights that have one, checked as they are.

    Raises:
        OptionError: If one has another shape than its weights, or is not finite; names it.
    """
    having = [one for one in model if f"{_MOMENTUM}{one.name}" in tensors]
    return {one.name: _checked(f"{_MOMENTUM}{one.name}", tensors, one).float() for one in having}


def _checked(key: str, tensors: Mapping[str, Tensor], like: ModelParameter) -> Tensor:
    tensor = tensors.get(key)
    if tensor is None or tuple(tensor.shape) != like.shape or not tensor.is_floating_point():
        has = "nothing" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise OptionError(key, has, f"floating-point numbers of shape {like.shape}")
    if not bool(torch.isfinite(tensor).all()):
        raise OptionError(key, "infinities or NaN", "finite")
    return tensor
