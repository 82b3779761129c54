"""The comparison sees every bit, and nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support.compare import bit_differences


def sparse(values: list[float], indices: list[int]) -> torch.Tensor:
    return torch.sparse_coo_tensor([indices], values, (4,), check_invariants=True)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1.0, 1.0 + 2**-52),
        (0.0, -0.0),
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (sparse([1.0, 2.0], [0, 2]), sparse([1.0, 2.0], [0, 3])),
        (sparse([1.0], [0]), sparse([1.0], [0]).to_dense()),
        ([1, 2], [1]),
        ({"a": 1}, {"b": 1}),
        (1, 1.0),
    ],
)
def test_different(one: Any, other: Any) -> None:
    assert bit_differences({"x": [one]}, {"x": [other]})


@pytest.mark.parametrize(
    "make",
    [
        lambda: math.nan,
        lambda: torch.tensor([math.nan, -0.0]),
        lambda: sparse([1.0, 2.0], [0, 2]),
        lambda: {"a": (1, "b", None)},
    ],
)
def test_the_same(make: Any) -> None:
    assert not bit_differences(make(), make())
