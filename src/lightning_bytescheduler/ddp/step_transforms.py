"""The transforms of one step's gradients, applied to each bucket when it has arrived.

Clipping by norm and loss scaling need a number that is known only when all gradients are reduced. It is waited for when
the first update of the step is applied, under the next forward pass, not when the transform is asked for.

That number comes from the reduction, so it is right only for gradients as they were reduced. If somebody has read
gradients (a logger, on one rank perhaps) it still is, and has to be used, so that all ranks clip alike. If somebody has
changed them, the transform is not taken over: whoever asked for it looks at the gradients themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_bytescheduler.ddp.gradient_transforms import ClipNorm, ClipValue, GradientTransform, Unscale
from lightning_bytescheduler.ddp.partial_step import BucketUpdate, UpdateState
from lightning_bytescheduler.ddp.reduction import Reduction, ShardedReduction
from lightning_bytescheduler.scheduler.task import CommTask

__all__ = ["PendingScale", "StepTransforms"]


class PendingScale(Protocol):
    """A loss scale that is updated when it is known whether the gradients were finite."""

    def settle(self) -> None:
        """Update it; called once, when :meth:`Unscale.found_inf` does not wait any more."""

    def discard(self) -> None:
        """Leave it as it is: the step failed."""


class StepTransforms:
    """See the module; used under the engine's lock.

    Args:
        reduction: What reduces this step's gradients.
        updates: The step's buckets.
        wait: Waits for a task.
    """

    def __init__(
        self, reduction: Reduction | None, updates: Sequence[BucketUpdate], wait: Callable[[CommTask], None]
    ) -> None:
        self._reduction = reduction
        self._updates = updates
        self._wait = wait
        self._transforms: list[GradientTransform] = []
        self._gradients: dict[int, list[torch.Tensor]] = {}  # by index of the bucket: what is transformed
        self._unscale: Unscale | None = None
        self._pending_scale: PendingScale | None = None

    def unscale(self, optimizer: Optimizer, inverse_scale: torch.Tensor) -> Unscale | None:
        """Take over dividing by the loss scale, or return ``None``."""
        parameters = self._take(optimizer, needs_norms=True)
        if parameters is None or any(p.dtype is torch.float16 or p.dtype.is_complex for p in parameters):
            return None
        self._unscale = Unscale(inverse_scale, parameters, self._norm_of)
        self._add(self._unscale)
        return self._unscale

    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> bool:
        """Take over clipping by norm; returns whether it was."""
        parameters = self._take(optimizer, needs_norms=True)
        if parameters is None:
            return False
        self._add(ClipNorm(max_norm, parameters, self._norm_of, after=self._unscale))
        return True

    def clip_value(self, optimizer: Optimizer, limit: float) -> bool:
        """Take over clipping by value; returns whether it was."""
        parameters = self._take(optimizer, needs_norms=False)
        if parameters is None or any(p.dtype.is_complex for p in parameters):
            return False  # torch has an error for complex numbers
        self._add(ClipValue(limit))
        return True

    def scale_later(self, pending: PendingScale) -> None:
        """Update a loss scale as soon as it is known how."""
        self._pending_scale = pending

    def apply(self, update: BucketUpdate) -> None:
        """Transform the gradients of a bucket that has arrived."""
        gradients = self._gradients.get(update.index, [])
        for transform in self._transforms[update.transformed :]:
            transform.apply(gradients)
        update.transformed = len(self._transforms)

    def handed_out(self, update: BucketUpdate) -> None:
        """Remember gradients that somebody may read or change from here on."""
        if isinstance(self._reduction, ShardedReduction):
            update.norm_when_read = _norm(update)

    def leaves_step_out(self) -> bool:
        """Whether gradients are not finite, and the loss scale wants no step then; waits if need be."""
        return self._unscale is not None and self._unscale.found_inf()

    @property
    def known(self) -> bool:
        """Whether everything can be applied without waiting."""
        norms = self._reduction.norms if isinstance(self._reduction, ShardedReduction) else None
        return norms is None or not self._transforms or (norms.done() and norms.error is None)

    @property
    def task(self) -> CommTask | None:
        """What is waited for before anything can be applied."""
        return self._reduction.norms if isinstance(self._reduction, ShardedReduction) and self._transforms else None

    def settle(self) -> None:
        """Update the loss scale, if that is due; waits if need be."""
        if self._pending_scale is not None:
            self.leaves_step_out()
            pending, self._pending_scale = self._pending_scale, None
            pending.settle()

    def discard(self) -> None:
        """Forget a loss scale that was to be updated."""
        pending, self._pending_scale = self._pending_scale, None
        if pending is not None:
            pending.discard()

    def _norm_of(self, parameter: nn.Parameter) -> float:
        reduction = self._reduction
        if not isinstance(reduction, ShardedReduction) or reduction.norms is None:
            raise RuntimeError("Norms were asked for of gradients that are not reduced in shards.")
        self._wait(reduction.norms)
        return reduction.norm(parameter)

    def _add(self, transform: GradientTransform) -> None:
        self._transforms.append(transform)
        for update in self._updates:
            if update.state is UpdateState.REDUCED:
                self.apply(update)
                self.handed_out(update)

    def _take(self, optimizer: Optimizer, *, needs_norms: bool) -> list[nn.Parameter] | None:
        """The optimizer's parameters that have a gradient, if all gradients are what the reduction made of them."""
        if not self._updates:
            return None
        if needs_norms:
            if not isinstance(self._reduction, ShardedReduction):
                return None
            if any(not isinstance(transform, Unscale) for transform in self._transforms):
                return None  # the norm after a transform that is not linear
            if _any_changed(self._updates):
                return None
        update_of = {id(p): update for update in self._updates for p in update.parameters}
        parameters: list[nn.Parameter] = []
        gradients: dict[int, list[torch.Tensor]] = {}
        with torch._C.DisableTorchFunctionSubclass():  # look at p.grad without opening gates
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    gradient = parameter.grad
                    if gradient is None or not gradient.numel():
                        continue
                    update = update_of.get(id(parameter))
                    if update is None or not update.holds(gradient):
                        return None
                    parameters.append(parameter)
                    gradients.setdefault(update.index, []).append(gradient)
        self._gradients = gradients
        return parameters


def _norm(update: BucketUpdate) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        norm: torch.Tensor = torch.linalg.vector_norm(update.buffer)
        return norm.double()


def _any_changed(updates: Sequence[BucketUpdate]) -> bool:
    """Whether the norm of what was handed out has changed; a change that leaves the norm as it was does no harm."""
    norms = [norm for u in updates if u.norm_when_read is not None for norm in (u.norm_when_read, _norm(u))]
    if not norms:
        return False
    known = torch.stack(norms).tolist()  # from a GPU in one transfer
    pairs = zip(known[::2], known[1::2], strict=True)
    return any(then != now and not (then != then and now != now) for then, now in pairs)
