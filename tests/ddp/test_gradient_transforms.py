"""Each transform against torch's own function, also where values are large, tiny or not numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from lightning_bytescheduler.ddp.gradient_transforms import ClipNorm, clip_values
from lightning_bytescheduler.ddp.reduction import total_norm
from tests.support.compare import bit_differences

NAN, INF = math.nan, math.inf
ODD = [[0.0, 0.0], [1e-30, 2e-30], [1e18, -1e18], [NAN, 1.0], [INF, 1.0], [INF, NAN], [-INF, INF]]


def parameters(kind: torch.dtype, extra: Sequence[Sequence[float]] = ()) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(n, 5, generator=generator).to(kind) for n in (1, 4, 9)] + [
        torch.tensor(values, dtype=kind) for values in extra
    ]
    found = []
    for gradient in made:
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient.clone()
        found.append(parameter)
    return found


def norm_of(parameters: Sequence[nn.Parameter]) -> Callable[[], float]:
    norm = total_norm(float(torch.linalg.vector_norm(gradient.double())) for gradient in gradients(parameters))
    return lambda: norm


def gradients(of: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad for p in of if p.grad is not None]


@pytest.mark.parametrize("extra", [[], *([values] for values in ODD)], ids=str)
@pytest.mark.parametrize("limit", [0.1, 1e6])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_clip_norm(kind: torch.dtype, limit: float, extra: list[list[float]]) -> None:
    torchs, ours = parameters(kind, extra), parameters(kind, extra)
    torch.nn.utils.clip_grad_norm_(torchs, limit)
    ClipNorm(limit, kind, norm_of(ours))(gradients(ours))
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-15, torch.bfloat16: 8e-3}[kind]
    for expected, actual in zip(gradients(torchs), gradients(ours), strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=0.0, equal_nan=True)


def test_norms_below_the_limit_leave_every_bit() -> None:
    before, after = parameters(torch.float32), parameters(torch.float32)
    ClipNorm(1e6, torch.float32, norm_of(after))(gradients(after))
    assert not bit_differences(gradients(before), gradients(after))


@pytest.mark.parametrize("extra", [[], *([values] for values in ODD)], ids=str)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_clip_value_has_torchs_bits(kind: torch.dtype, extra: list[list[float]]) -> None:
    torchs, ours = parameters(kind, extra), parameters(kind, extra)
    torch.nn.utils.clip_grad_value_(torchs, 0.3)
    clip_values(gradients(ours), limit=0.3)
    assert not bit_differences(gradients(torchs), gradients(ours))
