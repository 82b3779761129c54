"""The global weights: the outer optimizer, the means of the last rounds, and copies of all for who needs them.

The coordinator steps along the mean as it is decoded from what workers get, as they do: all have the same bits.
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
"""Before the number of a fragment, in a state that is kept: what its means so far have lost. Workers need none."""
_KEPT_BYTES = 2**30  # of means, but for the last one


def digest_of(payload: Tensor) -> str:
    """xxh3_128 of a payload, in hexadecimal digits."""
    import xxhash

    return xxhash.xxh3_128_hexdigest(view_of(payload))


class GlobalWeights:
    """Global weights of a model. Called on the event loop, one call at a time; the work is done in threads.

    Args:
        model: Its parameters, in order.
        options: The run's.
        tensors: What the run begins or goes on with, as :meth:`snapshot` names it.
        executor: Of the threads.
        keep_rounds: See ``CoordinatorOptions``.

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
        keep_rounds: int = 8,
    ) -> None:
        self.still = asyncio.Lock()  # held while weights change, or are read
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
        # What the means so far have lost, by fragment, where the wire keeps that; replaced, never changed.
        self._residuals = {
            fragment: tensor_in(tensors, key, torch.Size((pieced.elements,)))
            for fragment, pieced in enumerate(self.formats)
            if (key := f"{RESIDUALS}{fragment}") in tensors
        }
        self._lost: Tensor | None = None  # the same after the mean that is to be stepped along
        self._kept: OrderedDict[int, Merge] = OrderedDict()
        self._keep_rounds = keep_rounds

    def sum_of(self, fragment: int) -> UpdateSum:
        """A sum of nothing, for updates of a fragment."""
        return self._spare.pop(fragment, None) or UpdateSum(self.formats[fragment], self._executor)

    async def mean(self, merge: Merge, sums: UpdateSum | None) -> None:
        """Form the mean of a round, encode it for workers, and keep it.

        Args:
            merge: The round; gets the mean.
            sums: Settled; ``None`` if nothing is to be merged.
        """
        pieced = self.formats[merge.fragment]
        self._lost = None
        if sums is not None and sums.weight:
            merge.total, only = sums.weight, sums.only
            if only is not None:
                merge.payload, merge.digest = only.payload, only.digest  # it loses nothing: what was lost stays so
            else:
                merge.payload = payload = buffer_of(pieced.of_means.payload_bytes)
                known = self._residuals.get(merge.fragment)
                if pieced.wire.keeps_residuals:
                    self._lost = torch.empty(pieced.elements, dtype=torch.float32)
                await sums.encode_mean(payload, round=merge.round, known=known, lost=self._lost)
                merge.digest = await asyncio.get_running_loop().run_in_executor(self._executor, digest_of, payload)
        self._kept[merge.round] = merge
        size = sum(_bytes_of(kept) for kept in self._kept.values())
        while len(self._kept) > 1 and (size > _KEPT_BYTES or len(self._kept) > self._keep_rounds):
            _, dropped = self._kept.popitem(last=False)
            size -= _bytes_of(dropped)

    async def step(self, merge: Merge, sums: UpdateSum | None) -> None:
        """Take the outer step along what :meth:`mean` has formed, whose sum is not needed any more."""
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
        """Copies of ``weights.NAME``, ``momentum.NAME`` and, by fragment, ``RESIDUALS``: what a run goes on from."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._snapshot)

    def _snapshot(self) -> dict[str, Tensor]:
        residuals = {f"{RESIDUALS}{fragment}": tensor.clone() for fragment, tensor in self._residuals.items()}
        return named_tensors(self._optimizer.state_dict()) | residuals


def _bytes_of(merge: Merge) -> int:
    return 0 if merge.payload is None else merge.payload.numel()
