"""The global weights: the outer optimizer, the means of the last rounds, and copies of all for workers that need them.

The coordinator takes the outer step along the mean that it decodes from the payload for workers. Workers do the same,
so all have the same bits.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor

import torch
from torch import Tensor

from lightning_bytescheduler.coordinator.run import Merge
from lightning_bytescheduler.coordinator.update_sum import PiecedFormat, UpdateSum, buffer_of, view_of
from lightning_bytescheduler.diloco.coordinator_protocol import ModelParameter, RunOptions
from lightning_bytescheduler.diloco.fragments import split_fragments
from lightning_bytescheduler.diloco.outer_optimizer import OuterOptimizer, named_tensors, state_in, tensor_in

RESIDUALS = "residuals."
"""Prefix of a fragment's number in a saved state, for what its means have lost so far. Workers do not need it."""
# Means are kept for workers that are behind; later these fetch the state. The last one is kept in any case.
_KEPT_ROUNDS, _KEPT_BYTES = 8, 2**30


def digest_of(payload: Tensor) -> str:
    """xxh3_128 of a payload, in hexadecimal digits."""
    import xxhash

    return xxhash.xxh3_128_hexdigest(view_of(payload))


class GlobalWeights:
    """Global weights of a model. Called on the event loop, one call at a time; the work is done in threads.

    Args:
        model: The model's parameters, in order.
        options: The run's options.
        tensors: The tensors that the run begins or continues with, named as in :meth:`snapshot`.
        executor: Threads for the work.

    Raises:
        OptionError: If a tensor is missing, has another shape, or is not finite; names it.
    """

    def __init__(
        self,
        model: Sequence[ModelParameter],
        options: RunOptions,
        tensors: Mapping[str, Tensor],
        *,
        executor: Executor,
    ) -> None:
        self.still = asyncio.Lock()  # held while weights are changed or read
        self._executor = executor
        self._shapes = {one.name: torch.Size(one.shape) for one in model}
        weights = {name: tensor_in(tensors, f"weights.{name}", shape) for name, shape in self._shapes.items()}
        self._optimizer = OuterOptimizer(weights, lr=options.outer_lr, momentum=options.outer_momentum)
        self._optimizer.load_state_dict(state_in(tensors, self._optimizer.state_dict()))
        sizes = {name: shape.numel() for name, shape in self._shapes.items()}
        self._fragments = split_fragments(sizes, options.fragments)
        wire = options.wire
        self.formats = [PiecedFormat(wire, sum(sizes[name] for name in names)) for names in self._fragments]
        self.parameters = sum(sizes.values())
        self._spare: dict[int, UpdateSum] = {}  # by fragment
        # What the means have lost so far, by fragment, if the wire format keeps residuals. Tensors are replaced, never
        # changed.
        self._residuals = {
            fragment: tensor_in(tensors, key, torch.Size((pieced.elements,)))
            for fragment, pieced in enumerate(self.formats)
            if (key := f"{RESIDUALS}{fragment}") in tensors
        }
        self._lost: Tensor | None = None  # the fragment's new residual, until its outer step
        self._kept: OrderedDict[int, Merge] = OrderedDict()

    def sum_of(self, fragment: int) -> UpdateSum:
        """An empty sum for updates of a fragment."""
        return self._spare.pop(fragment, None) or UpdateSum(self.formats[fragment], self._executor)

    async def mean(self, merge: Merge, sums: UpdateSum | None) -> None:
        """Form the mean of a round, encode it for workers, and keep it.

        Args:
            merge: The round; its mean is set here.
            sums: The settled sum; ``None`` if there is nothing to merge.
        """
        pieced = self.formats[merge.fragment]
        self._lost = None
        if sums is not None and sums.weight:
            merge.total, only = sums.weight, sums.only
            if only is not None:
                merge.payload, merge.digest = only.payload, only.digest  # nothing is lost: residuals stay
            else:
                merge.payload = payload = buffer_of(pieced.of_means.payload_bytes)
                known = self._residuals.get(merge.fragment)
                if pieced.wire.keeps_residuals:
                    self._lost = torch.empty(pieced.elements, dtype=torch.float32)
                await sums.encode_mean(payload, round=merge.round, known=known, lost=self._lost)
                merge.digest = await asyncio.get_running_loop().run_in_executor(self._executor, digest_of, payload)
        self._kept[merge.round] = merge
        size = sum(_bytes_of(kept) for kept in self._kept.values())
        while len(self._kept) > 1 and (size > _KEPT_BYTES or len(self._kept) > _KEPT_ROUNDS):
            _, dropped = self._kept.popitem(last=False)
            size -= _bytes_of(dropped)

    async def step(self, merge: Merge, sums: UpdateSum | None) -> None:
        """Take the outer step along the mean that :meth:`mean` formed. The sum is free for another round afterwards."""
        if sums is not None:
            await sums.reopen()
            self._spare[merge.fragment] = sums
        if self._lost is not None:
            self._residuals[merge.fragment], self._lost = self._lost, None
        if merge.payload is not None:
            await asyncio.get_running_loop().run_in_executor(self._executor, self._step, merge.fragment, merge.payload)

    def _step(self, fragment: int, payload: Tensor) -> None:
        names, pieced = self._fragments[fragment], self.formats[fragment]
        parts = pieced.of_means.wire.decode(payload, pieced.elements).split(
            [self._shapes[name].numel() for name in names]
        )
        self._optimizer.step({name: part.view(self._shapes[name]) for name, part in zip(names, parts, strict=True)})

    def kept(self, round: int) -> Merge | None:
        """The mean of a round, if it is still kept."""
        return self._kept.get(round)

    @property
    def oldest_mean(self) -> int:
        """The earliest round whose mean is kept."""
        return next(iter(self._kept))

    async def snapshot(self) -> dict[str, Tensor]:
        """Copies of ``weights.NAME``, ``momentum.NAME`` and ``RESIDUALS`` by fragment, to continue a run from."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._snapshot)

    def _snapshot(self) -> dict[str, Tensor]:
        residuals = {f"{RESIDUALS}{fragment}": tensor.clone() for fragment, tensor in self._residuals.items()}
        return named_tensors(self._optimizer.state_dict()) | residuals


def _bytes_of(merge: Merge) -> int:
    return 0 if merge.payload is None else merge.payload.numel()
