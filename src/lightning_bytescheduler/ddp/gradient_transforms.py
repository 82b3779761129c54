"""Clips gradients by value or by norm between their arrival and the optimizer.

Each transform runs torch's operations, but when the gradients have arrived instead of when it is requested. Source:
``torch.nn.utils.clip_grad``.

Clipping by norm needs a number that is known only when all gradients are reduced. The step's first update waits for it,
during the next forward pass. The number comes from the reduction, so it is valid only for all gradients as they were
reduced. If other code only read gradients (a logger, perhaps on one rank), the number is used, so that all ranks clip
alike. If other code changed or dropped some, or the optimizer lacks some, the transform is not deferred, and the caller
uses the gradients themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial, reduce

import torch
from torch.optim import Optimizer

from lightning_bytescheduler.ddp.reduction import GradientBucket, Reduction, ShardedReduction
from lightning_bytescheduler.scheduler.task import CommTask

__all__ = ["ClipNorm", "StepTransforms", "Transforms", "clip_values"]


_OTHERS = (
    "the optimizer does not step with all gradients, and clips by the norm of its own: others were dropped "
    "(gradient=None), or are of parameters that it does not have (freezing these keeps the overlap)"
)


def clip_values(gradients: Sequence[torch.Tensor], *, limit: float) -> None:
    """Clip each value in place; see :func:`torch.nn.utils.clip_grad_value_`."""
    for gradient in gradients:
        gradient.clamp_(min=-limit, max=limit)


class ClipNorm:
    """Scales all gradients down to a total norm; see :func:`torch.nn.utils.clip_grad_norm_`.

    Args:
        kind: Type of the gradients, to which the norm is rounded.
        norm: Returns the norm of all gradients; waits until it is known.
    """

    def __init__(self, max_norm: float, kind: torch.dtype, norm: Callable[[], float]) -> None:
        self._max_norm = float(max_norm)
        self._kind = kind
        self._norm = norm

    @cached_property
    def coefficient(self) -> torch.Tensor:
        """The factor of gradients; the same bits on every rank."""
        return torch.clamp(self._max_norm / (torch.tensor(self._norm(), dtype=self._kind) + 1e-6), max=1.0)

    def __call__(self, gradients: Sequence[torch.Tensor]) -> None:
        """Transform ``gradients`` in place."""
        if self.coefficient.item() != 1.0:
            for gradient in gradients:
                gradient.mul_(self.coefficient)  # a GPU takes a number in host memory with the operation


class Transforms:
    """The transforms of a step whose gradients are final when its backward pass ends: the caller makes them itself."""

    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> bool:
        """Clip gradients by norm when they have arrived; ``False`` if the caller has to do it now."""
        return False

    def clip_value(self, optimizer: Optimizer, limit: float) -> bool:
        """Clip gradients by value when they have arrived; ``False`` if the caller has to do it now."""
        return False


class StepTransforms(Transforms):
    """The transforms of an overlapped step's gradients, applied to each bucket on arrival, under the lock.

    Args:
        reduction: Reduces the step's gradients.
        buckets: The step's buckets.
        wait: Waits for a task.
        lock: Returns the lock, which the caller holds unless it asks for a transform.

    Attributes:
        complete: Whether all buckets of the step are known.
        unused: Ids of parameters without a gradient at the end of the backward pass; the bucket has zeros for them.
        why_now: Why the caller had to clip at once, if that is the optimizer's doing.
    """

    def __init__(
        self,
        reduction: Reduction,
        buckets: Sequence[GradientBucket],
        wait: Callable[[CommTask], None],
        lock: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.complete = False
        self.unused: set[int] = set()
        self.why_now: str | None = None
        self._sharded = reduction if isinstance(reduction, ShardedReduction) else None  # tells norms
        self._buckets = buckets
        self._wait = wait
        self._lock = lock
        self._transforms: list[Callable[[Sequence[torch.Tensor]], None]] = []
        self._gradients: dict[int, list[torch.Tensor]] = {}  # by index of the bucket: the gradients to transform
        self._applied: dict[int, int] = {}  # by index of the bucket: the number of transforms applied
        # By index of the bucket, with its norm, if norms are known.
        self._handed_out: dict[int, tuple[GradientBucket, torch.Tensor | None]] = {}

    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> bool:
        """See :class:`Transforms`."""
        with self._lock():
            # The norm is unknown without shards, and after clipping or other changes.
            if self._sharded is None or self._transforms or _any_changed(self._handed_out.values()):
                return False
            kinds = self._take(optimizer, needs_norm=True)
            if kinds is None:
                return False
            # The norm of complex numbers is real.
            kind = reduce(torch.promote_types, {kind.to_real() for kind in kinds})
            self._add(ClipNorm(max_norm, kind, partial(self._norm_by, self._sharded)))
            return True

    def clip_value(self, optimizer: Optimizer, limit: float) -> bool:
        """See :class:`Transforms`."""
        with self._lock():
            kinds = self._take(optimizer, needs_norm=False)
            if kinds is None or any(kind.is_complex for kind in kinds):
                return False  # torch raises an error for complex numbers
            self._add(partial(clip_values, limit=float(limit)))
            return True

    def apply(self, bucket: GradientBucket) -> None:
        """Transform the gradients of a bucket that has arrived."""
        if self._transforms:
            gradients = self._gradients.get(bucket.index, [])
            for transform in self._transforms[self._applied.get(bucket.index, 0) :]:
                transform(gradients)
            self._applied[bucket.index] = len(self._transforms)

    def hand_out(self, bucket: GradientBucket) -> None:
        """Transform the gradients of an arrived bucket that other code may read or change from here on."""
        self.apply(bucket)
        self._handed_out[bucket.index] = bucket, None if self._sharded is None else _norm(bucket)

    @property
    def known(self) -> bool:
        """Whether everything can be applied without waiting."""
        task = self.norms if self._transforms else None
        return task is None or (task.done() and task.error is None)

    @property
    def norms(self) -> CommTask | None:
        """The task that exchanges norms of shards, whether they are used or not."""
        return None if self._sharded is None else self._sharded.norms

    def let_go(self) -> None:
        """Release all gradients, as a referenced gradient counts as kept by user code."""
        self._gradients = {}

    def _norm_by(self, sharded: ShardedReduction) -> float:
        if sharded.norms is not None:  # otherwise it is not known, and says so
            self._wait(sharded.norms)
        return sharded.norm()

    def _add(self, transform: Callable[[Sequence[torch.Tensor]], None]) -> None:
        self._transforms.append(transform)
        for bucket, _ in list(self._handed_out.values()):
            self.hand_out(bucket)

    def _take(self, optimizer: Optimizer, *, needs_norm: bool) -> list[torch.dtype] | None:
        """Note the optimizer's gradients, and return their types; ``None`` unless they are as they were reduced.

        The norm is that of all reduced gradients, so with ``needs_norm`` each of them has to be the optimizer's.
        """
        if not self.complete or not self._buckets:
            return None
        bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters if id(p) not in self.unused}
        gradients: dict[int, list[torch.Tensor]] = {}
        with torch._C.DisableTorchFunctionSubclass():  # reads p.grad without opening gates
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    gradient = parameter.grad
                    if gradient is None:
                        continue
                    bucket = bucket_of.pop(id(parameter), None)
                    if not gradient.numel():
                        continue  # it has no memory, and no part in a norm
                    if bucket is None or not bucket.holds(gradient):
                        return None
                    gradients.setdefault(bucket.index, []).append(gradient)
        if not gradients:
            return None
        if needs_norm and bucket_of:
            self.why_now = _OTHERS
            return None
        self._gradients = gradients
        return [gradient.dtype for several in gradients.values() for gradient in several]


def _norm(bucket: GradientBucket) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        norm: torch.Tensor = torch.linalg.vector_norm(bucket.buffer)
        return norm.double()


def _any_changed(handed_out: Iterable[tuple[GradientBucket, torch.Tensor | None]]) -> bool:
    """Whether the norm of a bucket that was handed out has changed; a change with equal norm is harmless."""
    norms = [each for bucket, norm in handed_out if norm is not None for each in (norm, _norm(bucket))]
    if not norms:
        return False
    known = torch.stack(norms).tolist()  # one transfer from a GPU
    pairs = zip(known[::2], known[1::2], strict=True)
    return any(then != now and not (then != then and now != now) for then, now in pairs)
