"""The mean of a few payloads at once has the bits of sums in fixed point, whichever way it is formed."""

from __future__ import annotations

import asyncio
import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_bytescheduler.compression.wire_format import WireDtype, WireFormat
from lightning_bytescheduler.coordinator import update_sum
from lightning_bytescheduler.coordinator.update_sum import (
    Extent,
    PiecedFormat,
    Update,
    UpdateSum,
    Weighted,
    exact_mean,
    extent_of,
    is_exact,
)
from lightning_bytescheduler.diloco.weighted_mean import MOST_WEIGHT, WeightedMean
from lightning_bytescheduler.exceptions import OptionError

WIRES: list[WireDtype] = ["fp32", "bf16", "int8", "int4"]


def numbers(elements: int, seed: int, *, spread: float = 0.0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(elements, generator=generator) * scale
    return values * torch.exp2(spread * torch.randn(elements, generator=generator))


def reference(payloads: list[Tensor], weights: list[int], wire: WireFormat, elements: int) -> Tensor:
    sums = WeightedMean({"all": torch.empty(elements)})
    for payload, weight in zip(payloads, weights, strict=True):
        sums.add_encoded(payload, wire, weight=weight)
    return sums.mean()["all"]


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(WIRES),
    weights=st.lists(st.integers(1, 2**20), min_size=1, max_size=6),
    elements=st.integers(1, 700),
    # From one unit in doubles, over two, to what is below the unit of the sums.
    kind=st.sampled_from([(0.0, 1.0), (6.0, 1.0), (12.0, 2.0**-20), (0.0, 2.0**-45), (3.0, 2.0**-130), (0.0, 0.0)]),
    seed=st.integers(0, 100),
)
def test_it_has_the_bits_of_sums_in_fixed_point(
    dtype: WireDtype, weights: list[int], elements: int, kind: tuple[float, float], seed: int
) -> None:
    wire = WireFormat(dtype=dtype)
    pieced = PiecedFormat(wire, elements)
    payloads = [
        wire.encode(numbers(elements, seed + n, spread=kind[0], scale=kind[1]), seed=n) for n in range(len(weights))
    ]
    parts = [
        Weighted(payload, weight, pieced.extent(payload, 0)) for payload, weight in zip(payloads, weights, strict=True)
    ]
    if not is_exact((part.weight, part.extent) for part in parts):
        return
    mean = torch.cat([chunk.clone() for chunk in exact_mean(parts, wire, elements)])
    assert torch.equal(mean, reference(payloads, weights, wire, elements))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("values", [[0.0, -0.0], [1.5, -3.0, 0.0], [2.0**-130, 1.0], [-(2.0**100), 2.0**-20]])
def test_extents_are_of_all_numbers(values: list[float], kind: torch.dtype) -> None:
    tensor = torch.tensor(values).to(kind)
    extent = extent_of(tensor.view(torch.uint8), bits=32 if kind == torch.float32 else 16)
    exact = [abs(float(value)) for value in tensor]
    assert extent.largest == max(exact)
    units = [value / extent.unit for value in exact]
    assert all(unit == math.floor(unit) for unit in units)
    digits = 24 if kind == torch.float32 else 8
    smallest = [unit for unit in units if unit]
    # No finer than the last digit of the smallest, where that is no subnormal number.
    assert not smallest or min(smallest) < 2.0**digits


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_is_seen(wrong: float, kind: torch.dtype) -> None:
    tensor = torch.tensor([1.0, wrong, 0.0]).to(kind)
    assert extent_of(tensor.view(torch.uint8), bits=32 if kind == torch.float32 else 16) == Extent(math.inf, 0.0)


def update_of(payload: Tensor, pieced: PiecedFormat) -> Update:
    return Update(payload, [pieced.extent(payload, index) for index in range(len(pieced.pieces))], "digest")


def summed(updates: list[Tensor], weights: list[int], pieced: PiecedFormat, *, held: int | None = None) -> Tensor:
    """The encoded mean of updates that are added one after the other."""

    async def add() -> Tensor:
        with ThreadPoolExecutor(2) as executor:
            sums = UpdateSum(pieced, executor)
            if held is not None:
                sums._most_held = held
            for payload, weight in zip(updates, weights, strict=True):
                update = update_of(payload, pieced)
                sums.begin(update, weight=weight)
                await sums.add(update)
            await sums.settled()
            mean = torch.empty(pieced.payload_bytes, dtype=torch.uint8)
            await sums.encode_mean(mean, round=0)
            return mean

    return asyncio.run(add())


@pytest.mark.parametrize("dtype", WIRES)
def test_neither_order_nor_how_many_are_held_matters(dtype: WireDtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_sum, "PIECE", 256)
    wire = WireFormat(dtype=dtype)
    pieced = PiecedFormat(wire, 700)
    updates = [wire.encode(numbers(700, n, spread=4.0), seed=n) for n in range(3)]
    found = [
        summed([updates[n] for n in order], [3 * n + 1 for n in order], pieced, held=held)
        for order in itertools.permutations(range(3))
        for held in (0, 1, None)
    ]
    assert all(torch.equal(found[0], other) for other in found)


def test_sums_that_are_too_large_for_doubles_are_formed_in_fixed_point() -> None:
    pieced = PiecedFormat(WireFormat(), 3)
    updates = [
        torch.tensor([2.0**30, 1.0, 2.0**-20]).view(torch.uint8),
        torch.tensor([1.0, 1.0, 2.0**-20]).view(torch.uint8),
    ]
    mean = summed(updates, [1, 1], pieced).view(torch.float32)
    assert torch.equal(mean, reference(updates, [1, 1], pieced.wire, 3))


@pytest.mark.parametrize(("value", "is_only"), [(1.0, True), (0.0, True), (2.0**-50, False)])
def test_the_mean_of_one_update_is_that_update(value: float, is_only: bool) -> None:
    async def only() -> Update | None:
        with ThreadPoolExecutor(1) as executor:
            pieced = PiecedFormat(WireFormat(), 2)
            sums = UpdateSum(pieced, executor)
            update = update_of(torch.tensor([value, 0.3]).view(torch.uint8), pieced)
            sums.begin(update, weight=7)
            await sums.add(update)
            await sums.settled()
            return sums.only

    assert (asyncio.run(only()) is not None) == is_only


def test_a_weight_that_no_sum_can_take_is_refused_before_it_is_announced() -> None:
    with ThreadPoolExecutor(1) as executor:
        pieced = PiecedFormat(WireFormat(), 2)
        sums = UpdateSum(pieced, executor)
        update = update_of(torch.tensor([1e-9, 0.0]).view(torch.uint8), pieced)
        with pytest.raises(OptionError, match="weight="):
            sums.begin(update, weight=MOST_WEIGHT + 1)
        assert sums.weight == 0
