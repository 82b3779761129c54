"""Room for uploads is bounded. The mean of updates has the same bits in any order, cut into any pieces."""

from __future__ import annotations

import asyncio
import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from lightning_bytescheduler.compression.wire_format import WireDtype, WireFormat
from lightning_bytescheduler.coordinator.update_sum import PiecedFormat, Update, UpdateSum, UploadRoom, view_of
from lightning_bytescheduler.diloco.weighted_mean import MOST_WEIGHT
from lightning_bytescheduler.exceptions import OptionError, SchedulerTimeoutError
from tests.support.plain_mean import PlainMean

WIRES: list[WireDtype] = ["fp32", "bf16", "int8", "int4", "sparse"]


def numbers(elements: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(elements, generator=generator)
    return values * torch.exp2(4.0 * torch.randn(elements, generator=generator))


def update_of(payload: Tensor, pieced: PiecedFormat) -> Update:
    async def looked_at() -> Update:
        with ThreadPoolExecutor(1) as executor, await UploadRoom(1 << 20, executor).take(pieced, timeout=1) as upload:
            upload.write(bytes(view_of(payload)))
            return await upload.finish()

    return asyncio.run(looked_at())


def summed(updates: list[Update], weights: list[int], pieced: PiecedFormat) -> UpdateSum:
    """A sum of updates that are added at the same time."""

    async def add() -> UpdateSum:
        with ThreadPoolExecutor(2) as executor:
            sums = UpdateSum(pieced, executor)
            for update, weight in zip(updates, weights, strict=True):
                sums.begin(update, weight=weight)
            await asyncio.gather(*(sums.add(update) for update in updates))
            await sums.settled()
        return sums

    return asyncio.run(add())


def mean_of(sums: UpdateSum, pieced: PiecedFormat) -> Tensor:
    async def encode() -> Tensor:
        with ThreadPoolExecutor(2) as sums._executor:
            mean = torch.empty(pieced.of_means.payload_bytes, dtype=torch.uint8)
            lost = torch.empty(pieced.elements) if pieced.wire.keeps_residuals else None
            await sums.encode_mean(mean, round=0, lost=lost)
        return mean

    return asyncio.run(encode())


def test_an_update_without_room_waits_until_some_is_given_back() -> None:
    async def work() -> None:
        with ThreadPoolExecutor(1) as executor:
            room = UploadRoom(10, executor)
            first = await room.take(6, timeout=1)
            with pytest.raises(SchedulerTimeoutError, match="6 of 10 are taken"):
                await room.take(5, timeout=0.01)
            waiting = asyncio.ensure_future(room.take(5, timeout=30))
            await asyncio.sleep(0)
            first.close()
            first.close()
            with await waiting as second:
                assert room.taken == 5
                second.write(b"abc")
                with pytest.raises(OptionError, match="5 bytes, as announced"):
                    second.write(b"def")
                second.write(b"de")
                assert bytes(view_of((await second.finish()).payload)) == b"abcde"
            assert room.taken == 0

    asyncio.run(work())


@pytest.mark.parametrize("dtype", WIRES)
def test_the_order_does_not_matter(dtype: WireDtype) -> None:
    wire = WireFormat(dtype=dtype)
    pieced = PiecedFormat(wire, 700, 256)
    payloads = [wire.encode(numbers(700, n), seed=n) for n in range(3)]
    found = []
    for order in itertools.permutations(range(3)):
        updates = [update_of(payloads[n], pieced) for n in order]
        sums = summed(updates, [3 * n + 1 for n in order], pieced)
        assert sums.only is None
        found.append(mean_of(sums, pieced))
    assert all(torch.equal(found[0], other) for other in found)
    if dtype == "fp32":
        whole = PlainMean({"all": torch.empty(700)})
        for n, payload in enumerate(payloads):
            whole.add(payload, wire, weight=3 * n + 1)
        assert torch.equal(found[0].view(torch.float32), whole.mean()["all"])


@pytest.mark.parametrize("dtype", WIRES)
def test_the_mean_of_one_update_is_that_update_where_it_travels_alike(dtype: WireDtype) -> None:
    wire = WireFormat(dtype=dtype)
    pieced = PiecedFormat(wire, 700, 256)
    update = update_of(wire.encode(numbers(700, 1)), pieced)
    sums = summed([update], [7], pieced)
    assert sums.weight == 7
    if dtype != "sparse":
        assert sums.only is update
    else:  # a mean has twice as many elements, and what they have left unsent besides
        assert sums.only is None
        decoded = wire.of_means.decode(mean_of(sums, pieced), 700)
        torch.testing.assert_close(decoded, wire.decode(update.payload, 700), rtol=0.1, atol=0.1)


def test_a_sum_begins_anew() -> None:
    pieced = PiecedFormat(WireFormat(), 3)
    updates = [update_of(torch.full((3,), float(n)).view(torch.uint8), pieced) for n in (1, 2)]

    async def work() -> Update | None:
        with ThreadPoolExecutor(1) as executor:
            sums = UpdateSum(pieced, executor)
            for _ in range(2):
                for update in updates:
                    sums.begin(update, weight=1)
                    await sums.add(update)
                await sums.settled()
                mean = torch.empty(12, dtype=torch.uint8)
                await sums.encode_mean(mean, round=0)
                assert mean.view(torch.float32).tolist() == [1.5] * 3
                await sums.reopen()
            with pytest.raises(ValueError, match="There is no mean"):
                await sums.encode_mean(mean, round=0)
            sums.begin(updates[1], weight=1)
            await sums.add(updates[1])
            return sums.only

    assert asyncio.run(work()) is updates[1]


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_is_seen(wrong: float, kind: torch.dtype) -> None:
    pieced = PiecedFormat(WireFormat(dtype="fp32" if kind == torch.float32 else "bf16"), 300, 256)
    tensor = torch.ones(300)
    tensor[270] = wrong
    assert update_of(tensor.to(kind).view(torch.uint8), pieced).largest == math.inf
    assert update_of(torch.full((300,), -3.0).to(kind).view(torch.uint8), pieced).largest == 3.0


def test_a_weight_that_no_sum_can_take_is_refused_before_it_is_announced() -> None:
    with ThreadPoolExecutor(1) as executor:
        pieced = PiecedFormat(WireFormat(), 2)
        sums = UpdateSum(pieced, executor)
        update = update_of(torch.tensor([1e-9, 0.0]).view(torch.uint8), pieced)
        with pytest.raises(OptionError, match="weight="):
            sums.begin(update, weight=MOST_WEIGHT + 1)
        large = update_of(torch.tensor([2.0**37, 0.0]).view(torch.uint8), pieced)
        sums.begin(large, weight=1)
        with pytest.raises(OptionError, match="update="):
            sums.begin(large, weight=1)
        assert sums.weight == 1
