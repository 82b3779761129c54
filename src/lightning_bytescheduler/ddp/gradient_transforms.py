"""What is done to gradients between their arrival and the optimizer: unscaling, clipping by value or by norm.

Each transform does what torch does at that place, with the same operations, but when the gradients are there and not
when it is asked for. Sources: ``torch.nn.utils.clip_grad``, ``torch.amp.GradScaler``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import nn

__all__ = ["ClipNorm", "ClipValue", "GradientTransform", "NormOf", "Unscale", "total_norm"]

NormOf = Callable[[nn.Parameter], float]
"""Norm of a parameter's reduced gradient, as it travelled; waits until it is known."""


def total_norm(norms: Iterable[float]) -> float:
    """Norm of a vector from the norms of its parts; as in torch, not a number if any of them is not."""
    parts = list(norms)
    return math.nan if any(map(math.isnan, parts)) else math.hypot(*parts)  # C's says infinity for (nan, inf)


class GradientTransform(Protocol):
    """A step on the way from the reduced gradient to the one the optimizer sees."""

    def apply(self, gradients: Sequence[torch.Tensor]) -> None:
        """Transform ``gradients`` in place."""


class ClipValue:
    """Clips each value; see :func:`torch.nn.utils.clip_grad_value_`.

    Args:
        limit: Largest magnitude.
    """

    def __init__(self, limit: float) -> None:
        self._limit = float(limit)

    def apply(self, gradients: Sequence[torch.Tensor]) -> None:
        """See :class:`GradientTransform`."""
        for gradient in gradients:
            gradient.clamp_(min=-self._limit, max=self._limit)


class Unscale:
    """Divides by the loss scale, and tells whether any gradient is not finite; see :class:`torch.amp.GradScaler`.

    Args:
        inverse_scale: One number, single precision.
        parameters: Whose gradients are unscaled.
        norm_of: Of the scaled gradients.
    """

    def __init__(self, inverse_scale: torch.Tensor, parameters: Sequence[nn.Parameter], norm_of: NormOf) -> None:
        self._inverse_scale = inverse_scale
        self._parameters = parameters
        self._norm_of = norm_of
        self._found_inf: bool | None = None

    @cached_property
    def factor(self) -> float:
        """What gradients are multiplied with; waits for a GPU that has not come that far."""
        return self._inverse_scale.item()

    def found_inf(self) -> bool:
        """Whether any gradient is not finite, and the step is to be left out; the same on every rank."""
        if self._found_inf is None:
            self._found_inf = not all(math.isfinite(self._norm_of(p)) for p in self._parameters)
        return self._found_inf

    def apply(self, gradients: Sequence[torch.Tensor]) -> None:
        """See :class:`GradientTransform`."""
        for gradient in gradients:
            torch._amp_foreach_non_finite_check_and_unscale_(
                [gradient],
                torch.zeros(1, dtype=torch.float32, device=gradient.device),
                self._inverse_scale.to(gradient.device),
            )


class ClipNorm:
    """Scales all gradients down to a total norm; see :func:`torch.nn.utils.clip_grad_norm_`.

    Each parameter's norm is rounded to its gradient's type, as torch's is.

    Args:
        max_norm: Largest total norm.
        parameters: Whose gradients the norm is of.
        norm_of: Of the gradients as they travelled.
        after: What is done to them after that, before they are clipped.
    """

    def __init__(
        self, max_norm: float, parameters: Sequence[nn.Parameter], norm_of: NormOf, *, after: Unscale | None = None
    ) -> None:
        self._max_norm = float(max_norm)
        self._parameters = parameters
        self._norm_of = norm_of
        self._after = after
        self._coefficient: torch.Tensor | None = None
        self._on_device: torch.Tensor | None = None

    def coefficient(self) -> torch.Tensor:
        """What gradients are multiplied with; the same bits on every rank."""
        if self._coefficient is None:
            factor = 1.0 if self._after is None else self._after.factor
            with torch._C.DisableTorchFunctionSubclass():
                # The norm of complex numbers is a real one.
                kinds = {p.dtype.to_real() for p in self._parameters}
                norms = [_rounded(self._norm_of(p) * factor, p.dtype.to_real()) for p in self._parameters]
            kind = torch.float32 if not kinds else kinds.pop()
            for other in kinds:
                kind = torch.promote_types(kind, other)
            total = torch.tensor(total_norm(norms), dtype=kind)
            self._coefficient = torch.clamp(self._max_norm / (total + 1e-6), max=1.0)
        return self._coefficient

    def apply(self, gradients: Sequence[torch.Tensor]) -> None:
        """See :class:`GradientTransform`."""
        coefficient = self.coefficient()
        if coefficient.item() == 1.0:
            return
        for gradient in gradients:
            if self._on_device is None or self._on_device.device != gradient.device:
                # So that the host does not wait: it is not pinned memory, so a GPU has its copy before this returns.
                self._on_device = coefficient.to(gradient.device, non_blocking=True)
            gradient.mul_(self._on_device)


def _rounded(value: float, kind: torch.dtype) -> float:
    return value if kind is torch.float64 else torch.tensor(value, dtype=kind).item()
