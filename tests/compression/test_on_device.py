"""Codecs on a device: only data there is encoded, and decoding gives the bits of a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_bytescheduler.compression import make_compressor
from tests.support.simulated_device import OnDevice, simulated

SEED = (1 << 56) - 3  # as a fit's are, and larger than what torch's generators take once there is a worker's number
SIZES = [1, 127, 611, 9000]
DRAWN = ("int8", "int4", "topk:0.05:int4")
SETTLED = ("bf16", "fp16", "int8:nearest", "int4:nearest", "onebit", "topk:0.05")


def part_of(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spec", [*SETTLED, *DRAWN])
def test_what_is_read_and_added_up_there_has_the_bits_of_a_cpu(spec: str, size: int) -> None:
    codec, values = make_compressor(spec), part_of(size)
    payload = codec.compress(values, seed=SEED, worker=1)
    expected = codec.decompress(payload, size)
    sums = torch.ones(size)
    codec.add(payload, sums)
    with simulated():
        there = OnDevice(payload)
        read = codec.decompress(there, size)
        into = codec.decompress(there, size, out=OnDevice(torch.empty(size)))
        added = OnDevice(torch.ones(size))
        codec.add(there, added)
    for found in (read, into):
        assert isinstance(found, OnDevice)
        assert torch.equal(found.contents, expected)
    assert torch.equal(added.contents, sums)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spec", SETTLED)
def test_what_is_made_there_has_the_bits_of_a_cpu_where_nothing_is_drawn(spec: str, size: int) -> None:
    residual, values = part_of(size + 1)[1:] / 8, part_of(size)
    left = residual.clone()
    payload = make_compressor(spec).compress_with(left, values, seed=SEED, worker=1)
    with simulated():
        there = OnDevice(residual.clone())
        made = make_compressor(spec).compress_with(there, OnDevice(values), seed=SEED, worker=1)
    assert isinstance(made, OnDevice)
    assert torch.equal(made.contents, payload)
    assert torch.equal(there.contents, left)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spec", DRAWN)
def test_what_is_drawn_there_is_drawn_again_and_leaves_what_it_says(spec: str, size: int) -> None:
    values = part_of(size)
    with simulated():
        left = [OnDevice(torch.zeros(size)) for _ in range(3)]
        made = [
            make_compressor(spec).compress_with(one, OnDevice(values), seed=SEED + other, worker=1)
            for one, other in zip(left, (0, 0, 1), strict=True)
        ]
        read = make_compressor(spec).decompress(made[0], size)
    assert torch.equal(made[0].contents, made[1].contents)
    if size > 600:
        assert not torch.equal(made[0].contents, made[2].contents)
    assert torch.equal(left[0].contents, values - read.contents)
    assert (values - read.contents).norm() <= values.norm() * 1.5


def test_what_a_device_would_not_do_is_not_done() -> None:
    with simulated():
        there = OnDevice(torch.ones(3))
        with pytest.raises(RuntimeError, match="same device"):
            there.add_(torch.ones(3))
        with pytest.raises((RuntimeError, TypeError)):
            there.numpy()
        assert isinstance(torch.zeros(3, device=there.device), OnDevice)
    there.add_(1)
    assert there.tolist() == [2.0] * 3
