from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.compression.sparse import (
    index_bytes,
    kept_of,
    largest_indices,
    pack_indices,
    unpack_indices,
)


@given(
    size=st.integers(0, 20_000),
    share=st.floats(0, 1),
    kind=st.sampled_from(["normal", "few", "ties", "spread"]),
    seed=st.integers(0, 1000),
)
def test_they_are_those_of_a_stable_sort(size: int, share: float, kind: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator)
    if kind == "few":  # most are nought
        values = torch.where(values > 2.0, values, 0.0)
    elif kind == "ties":
        values = values.round()
    elif kind == "spread":
        values *= torch.exp(5 * torch.randn(size, generator=generator))
    count = int(share * size)
    found = largest_indices(values, count).numpy()
    expected = np.sort(np.argsort(-values.abs().numpy(), kind="stable")[:count])
    if kind != "few":
        assert np.array_equal(found, expected)
    assert len(set(found)) == count
    assert np.array_equal(np.sort(values[found].abs().numpy()), np.sort(values[expected].abs().numpy()))


@pytest.mark.parametrize("size", [100, 10_000])
def test_what_is_not_finite_comes_first(size: int) -> None:
    values = torch.arange(float(size))
    values[[3, 7, 11]] = torch.tensor([torch.nan, -torch.inf, -torch.nan])
    assert largest_indices(values, 4).tolist() == [3, 7, 11, size - 1]


@given(st.integers(1, 3000), st.floats(0, 1), st.integers(0, 1000))
def test_there_and_back(size: int, share: float, seed: int) -> None:
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    indices = order[: int(share * size)].sort().values
    packed = pack_indices(indices, size)
    assert packed.shape == (index_bytes(size, len(indices)),)
    assert torch.equal(unpack_indices(packed, size), indices)


def test_one_in_fifty_takes_ten_bits() -> None:
    kept = kept_of(1_000_000, 0.02)
    assert kept == 20_000
    assert index_bytes(1_000_000, kept) * 8 / kept < 9.6


def test_some_are_kept_of_anything() -> None:
    assert [kept_of(size, 0.02) for size in (0, 1, 49, 50, 51, 100)] == [0, 1, 1, 1, 2, 2]
    assert kept_of(10, 1.0) == 10


def test_damaged_positions() -> None:
    packed = pack_indices(torch.tensor([0, 254, 255, 500]), 600)
    for place, value in ((0, 3), (3, 254), (4, 0), (-1, 255)):
        damaged = packed.clone()
        damaged[place] = value
        with pytest.raises(ValueError, match="damaged"):
            unpack_indices(damaged, 501)
