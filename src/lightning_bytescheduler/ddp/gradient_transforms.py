"""Clips gradients by value or by norm between their arrival and the optimizer.

Each transform runs torch's operations, but when the gradients have arrived instead of when it is requested. Sources:
``torch.nn.utils.clip_grad``.

Clipping by norm needs a number that is known only when all gradients are reduced. The step's first
update waits for it, during the next forward pass. The number comes from the reduction, so it is valid only for
gradients as they were reduced. If other code only read gradients (a logger, perhaps on one rank), the number is used,
so that all ranks clip alike. If other code changed them, the transform is not deferred, and the caller uses the
gradients themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_bytescheduler.ddp.reduction import GradientBucket, Reduction, ShardedReduction, total_norm
from lightning_bytescheduler.scheduler.task import CommTask

__all__ = ["ClipNorm", "ClipValue", "StepTransforms"]

NormOf = Callable[[nn.Parameter], float]
"""Returns the norm of a parameter's reduced gradient; waits until it is known."""


class ClipValue:
    """Clips each value; see :func:`torch.nn.utils.clip_grad_value_`."""

    def __init__(self, limit: float) -> None:
        self._limit = float(limit)

    def apply(self, gradients: Sequence[torch.Tensor]) -> None:
        """Transform ``gradients`` in place."""
        for gradient in gradients:
            gradient.clamp_(min=-self._limit, max=self._limit)


class ClipNorm:
    """Scales all gradients down to a total norm; see :func:`torch.nn.utils.clip_grad_norm_`.

    Each parameter's norm is rounded to its gradient's type, as in torch.
    """

    def __init__(self, max_norm: float, parameters: Sequence[nn.Parameter], norm_of: NormOf) -> None:
        self._max_norm = float(max_norm)
        self._parameters = parameters
        self._norm_of = norm_of
        self._coefficient: torch.Tensor | None = None
        self._on_device: torch.Tensor | None = None

    def coefficient(self) -> torch.Tensor:
        """Return the factor of gradients; the same bits on every rank."""
        if self._coefficient is None:
            with torch._C.DisableTorchFunctionSubclass():
                # The norm of complex numbers is real.
                kinds = {p.dtype.to_real() for p in self._parameters}
                norms = [_rounded(self._norm_of(p), p.dtype.to_real()) for p in self._parameters]
            kind = torch.float32 if not kinds else kinds.pop()
            for other in kinds:
                kind = torch.promote_types(kind, other)
            total = torch.tensor(total_norm(norms), dtype=kind)
            self._coefficient = torch.clamp(self._max_norm / (total + 1e-6), max=1.0)
        return self._coefficient

    def apply(self, gradients: Sequence[torch.Tensor]) -> None:
        """Transform ``gradients`` in place."""
        coefficient = self.coefficient()
        if coefficient.item() == 1.0:
            return
        for gradient in gradients:
            if self._on_device is None or self._on_device.device != gradient.device:
                # The host does not wait; unpinned memory is copied before this returns.
                self._on_device = coefficient.to(gradient.device, non_blocking=True)
            gradient.mul_(self._on_device)


def _rounded(value: float, kind: torch.dtype) -> float:
    return value if kind is torch.float64 else torch.tensor(value, dtype=kind).item()


class StepTransforms:
    """The transforms of one step's gradients, applied to each bucket on arrival; used under the step's lock."""

    def __init__(
        self, reduction: Reduction, buckets: Sequence[GradientBucket], wait: Callable[[CommTask], None]
    ) -> None:
        self._reduction = reduction
        self._buckets = buckets
        self._wait = wait
        self._transforms: list[ClipNorm | ClipValue] = []
        self._gradients: dict[int, list[torch.Tensor]] = {}  # by index of the bucket: the gradients to transform
        self._applied: dict[int, int] = {}  # by index of the bucket: the number of transforms applied
        self._handed_out: dict[
            int, tuple[GradientBucket, torch.Tensor | None]
        ] = {}  # with its norm, if norms are known

    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> bool:
        """Defer clipping by norm; returns whether that is possible."""
        parameters = self._take(optimizer, needs_norms=True)
        if parameters is None:
            return False
        self._add(ClipNorm(max_norm, parameters, self._norm_of))
        return True

    def clip_value(self, optimizer: Optimizer, limit: float) -> bool:
        """Defer clipping by value; returns whether that is possible."""
        parameters = self._take(optimizer, needs_norms=False)
        if parameters is None or any(p.dtype.is_complex for p in parameters):
            return False  # torch raises an error for complex numbers
        self._add(ClipValue(limit))
        return True

    def apply(self, bucket: GradientBucket) -> None:
        """Transform the gradients of a bucket that has arrived."""
        if self._transforms:
            gradients = self._gradients.get(bucket.index, [])
            for transform in self._transforms[self._applied.get(bucket.index, 0) :]:
                transform.apply(gradients)
            self._applied[bucket.index] = len(self._transforms)

    def hand_out(self, bucket: GradientBucket) -> None:
        """Transform the gradients of an arrived bucket that other code may read or change from here on."""
        self.apply(bucket)
        norm = _norm(bucket) if isinstance(self._reduction, ShardedReduction) else None
        self._handed_out[bucket.index] = bucket, norm

    @property
    def known(self) -> bool:
        """Whether everything can be applied without waiting."""
        task = self.task
        return task is None or (task.done() and task.error is None)

    @property
    def norms(self) -> CommTask | None:
        """The task that exchanges norms of shards, whether they are used or not."""
        return self._reduction.norms if isinstance(self._reduction, ShardedReduction) else None

    @property
    def task(self) -> CommTask | None:
        """The task that has to end before anything can be applied."""
        return self.norms if self._transforms else None

    def let_go(self) -> None:
        """Release all gradients, as a referenced gradient counts as kept by user code."""
        self._gradients = {}

    def _norm_of(self, parameter: nn.Parameter) -> float:
        reduction = self._reduction
        if not isinstance(reduction, ShardedReduction) or reduction.norms is None:
            raise RuntimeError("Norms are known only for gradients that are reduced in shards.")
        self._wait(reduction.norms)
        return reduction.norm(parameter)

    def _add(self, transform: ClipNorm | ClipValue) -> None:
        self._transforms.append(transform)
        for bucket, _ in list(self._handed_out.values()):
            self.hand_out(bucket)

    def _take(self, optimizer: Optimizer, *, needs_norms: bool) -> list[nn.Parameter] | None:
        """Return the optimizer's parameters with gradients; ``None`` unless all gradients are as they were reduced."""
        if not self._buckets:
            return None
        if needs_norms:
            if not isinstance(self._reduction, ShardedReduction):
                return None
            if self._transforms:
                return None  # norms are unknown after a transform
            if _any_changed(self._handed_out.values()):
                return None
        bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        parameters: list[nn.Parameter] = []
        gradients: dict[int, list[torch.Tensor]] = {}
        with torch._C.DisableTorchFunctionSubclass():  # reads p.grad without opening gates
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    gradient = parameter.grad
                    if gradient is None or not gradient.numel():
                        continue
                    bucket = bucket_of.get(id(parameter))
                    if bucket is None or not bucket.holds(gradient):
                        return None
                    parameters.append(parameter)
                    gradients.setdefault(bucket.index, []).append(gradient)
        self._gradients = gradients
        return parameters


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
