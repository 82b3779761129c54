from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_bytescheduler.compression import dense
from lightning_bytescheduler.compression.wire_format import WireFormat
from lightning_bytescheduler.exceptions import OptionError
from tests.support.plain_mean import PlainMean

LEVELS = {"int8": 127, "int4": 7}
BLOCKS = {"int8": 256, "int4": 128}

tensors = st.tuples(st.integers(0, 400), st.integers(0, 10_000), st.integers(-30, 4)).map(
    lambda drawn: torch.randn(drawn[0], generator=torch.Generator().manual_seed(drawn[1])) * 10.0 ** drawn[2]
)


def there_and_back(wire: WireFormat, tensor: Tensor, seed: int = 0) -> Tensor:
    payload = wire.encode(tensor, seed=seed)
    assert payload.dtype == torch.uint8
    assert payload.shape == (wire.payload_bytes(tensor.numel()),)
    return wire.decode(payload, tensor.numel()).reshape(tensor.shape)


def largest_of_block(tensor: Tensor, size: int) -> Tensor:
    """For each element, the largest magnitude among its block."""
    if not tensor.numel():
        return tensor
    return torch.cat([part.abs().max().expand(len(part)) for part in tensor.split(size)])


@given(tensors)
def test_fp32_is_exact(tensor: Tensor) -> None:
    assert torch.equal(there_and_back(WireFormat(), tensor), tensor)


@given(tensors)
def test_bf16_is_within_its_bound(tensor: Tensor) -> None:
    error = (there_and_back(WireFormat(dtype="bf16"), tensor) - tensor).abs()
    assert (error <= tensor.abs() * 2.0**-8).all()


@given(tensor=tensors, dtype=st.sampled_from(["int8", "int4"]), rounding=st.sampled_from(["stochastic", "nearest"]))
def test_integers_are_within_their_bounds(tensor: Tensor, dtype: str, rounding: str) -> None:
    found = there_and_back(WireFormat(dtype=dtype, rounding=rounding), tensor, seed=tensor.numel())
    largest = largest_of_block(tensor, BLOCKS[dtype])
    step = largest / LEVELS[dtype]
    error = (found - tensor).abs()
    assert (error <= step * (1.0 if rounding == "stochastic" else 0.5) + largest * 2.0**-20).all()


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4000), ("bf16", 2000), ("int8", 1016), ("int4", 532)])
def test_sizes(dtype: str, size: int) -> None:
    """A thousand elements are four blocks of int8, with 16 bytes of scales, and eight of int4."""
    assert WireFormat(dtype=dtype).payload_bytes(1000) == size
    assert WireFormat(dtype=dtype).payload_bytes(0) == 0


def test_int4_packs_two_in_a_byte() -> None:
    wire = WireFormat(dtype="int4", rounding="nearest")
    tensor = torch.tensor([7.0, -7.0, 0.0, 3.0, -1.0])
    payload = wire.encode(tensor)
    assert payload[:4].view(torch.float32).item() == 1.0
    assert payload[4:].tolist() == [15 | 1 << 4, 8 | 11 << 4, 7]
    assert wire.decode(payload, 5).tolist() == tensor.tolist()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_stochastic_rounding_is_right_on_average_where_nearest_loses_all(dtype: str) -> None:
    """A weight that moves by a quarter of a step in every round, beside one that moves a lot."""
    step = 1.0 / LEVELS[dtype]
    tensor = torch.tensor([1.0] + [step / 4] * 127)
    rounds = 200
    lossy = WireFormat(dtype=dtype, rounding="nearest")
    nearest = torch.stack([there_and_back(lossy, tensor, seed) for seed in range(rounds)]).mean(dim=0)
    assert torch.count_nonzero(nearest[1:]) == 0
    found = torch.stack([there_and_back(WireFormat(dtype=dtype), tensor, seed) for seed in range(rounds)]).mean(dim=0)
    assert found[1:].mean().item() == pytest.approx(step / 4, rel=0.05)
    assert (found[1:] - step / 4).abs().max() < 6 * step * (0.25 * 0.75 / rounds) ** 0.5
    assert found[0].item() == pytest.approx(1.0)


def test_it_is_a_function_of_the_seed() -> None:
    tensor = torch.randn(500, generator=torch.Generator().manual_seed(0))
    wire = WireFormat(dtype="int4")
    state = torch.get_rng_state()
    assert torch.equal(wire.encode(tensor, seed=3), wire.encode(tensor, seed=3))
    assert not torch.equal(wire.encode(tensor, seed=3), wire.encode(tensor, seed=4))
    assert torch.equal(state, torch.get_rng_state())  # the training's random state is unchanged


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "int4"])
def test_neither_chunks_nor_threads_change_a_byte(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, wire = torch.randn(3001, generator=torch.Generator().manual_seed(0)), WireFormat(dtype=dtype)
    payload = wire.encode(tensor, seed=7)
    found = wire.decode(payload, 3001)
    monkeypatch.setattr(dense, "_CHUNK", 768)
    assert torch.equal(wire.encode(tensor, seed=7), payload)
    assert torch.equal(wire.decode(payload, 3001), found)
    assert torch.equal(torch.cat([part.clone() for part in wire.decode_chunks(payload, 3001)]), found)
    uneven = tensor.split([256, 1280, 1465])
    assert torch.equal(wire.encode_chunks(uneven, 3001, device=tensor.device, seed=7), payload)
    if dtype.startswith("int"):
        with pytest.raises(ValueError, match="A chunk begins at element 64"):
            wire.encode_chunks(tensor.split([64, 2937]), 3001, device=tensor.device, seed=7)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "int4"])
def test_into_memory_that_is_there(dtype: str) -> None:
    """As behind the header of a message."""
    tensor, wire = torch.randn(301, generator=torch.Generator().manual_seed(0)), WireFormat(dtype=dtype)
    message, found = torch.zeros(8 + wire.payload_bytes(301), dtype=torch.uint8), torch.zeros(301)
    payload = wire.encode(tensor, seed=7, out=message[8:])
    assert payload.data_ptr() == message[8:].data_ptr()
    assert torch.equal(payload, wire.encode(tensor, seed=7))
    assert wire.decode(message[8:], 301, out=found) is found
    assert torch.equal(found, wire.decode(payload.clone(), 301))
    askew = torch.cat([message[:1], payload])[1:]  # as bytes may lie in a received message
    assert torch.equal(wire.decode(askew, 301), found)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "int4"])
def test_the_largest_in_a_payload(dtype: str) -> None:
    tensor, wire = torch.randn(301, generator=torch.Generator().manual_seed(0)), WireFormat(dtype=dtype)
    payload = wire.encode(tensor)
    largest = float(wire.decode(payload, 301).abs().max())
    assert largest <= wire.largest(payload, 301) <= largest * 8 / 7
    assert WireFormat(dtype=dtype).largest(wire.encode(tensor[:0]), 0) == 0.0
    payload[:4] = 255
    assert math.isnan(wire.largest(payload, 301))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_payloads_are_read_side_by_side(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another is encoded, and beside one that is not read to its end: none shares scratch memory."""
    monkeypatch.setattr(dense, "_CHUNK", 256)
    wire = WireFormat(dtype=dtype)
    tensors = [torch.randn(1000, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    payloads = [wire.encode(tensor) for tensor in tensors]
    next(wire.decode_chunks(payloads[2], 1000))
    found: list[list[Tensor]] = [[], []]
    for chunks in zip(*(wire.decode_chunks(payload, 1000) for payload in payloads[:2]), strict=True):
        assert torch.equal(wire.encode(tensors[2]), payloads[2])
        for kept, chunk in zip(found, chunks, strict=True):
            kept.append(chunk.clone())
    for kept, payload in zip(found, payloads[:2], strict=True):
        assert torch.equal(torch.cat(kept), wire.decode(payload, 1000))


def test_what_stochastic_rounding_adds_favours_nothing() -> None:
    """Whole numbers stay as they are with every seed, and halves go up as often as down."""
    tensor = torch.arange(-127.0, 129.0).clamp(max=127.0)
    wire = WireFormat(dtype="int8")
    assert all(torch.equal(there_and_back(wire, tensor, seed), tensor) for seed in range(20))
    halves = torch.cat([torch.full((100_000,), 3.5).view(-1, 100), torch.full((1000, 28), 127.0)], dim=1)
    ups = int((there_and_back(wire, halves)[:, :100] == 4.0).sum())
    assert abs(ups - 50_000) < 5 * 158


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40, 3e38])
def test_blocks_of_one_value(dtype: str, rounding: str, value: float) -> None:
    tensor = torch.full((130,), value)
    found = there_and_back(WireFormat(dtype=dtype, rounding=rounding), tensor)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, tensor, rtol=1e-5, atol=1e-38)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "int4"])
def test_shapes_strides_and_other_floats(dtype: str) -> None:
    tensor = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).bfloat16().t()
    found = there_and_back(WireFormat(dtype=dtype), tensor)
    torch.testing.assert_close(found, tensor.float(), rtol=0.0, atol=float(tensor.abs().max()) / 7 + 1e-6)


@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
def test_sums_are_made_in_fp32_or_better(dtype: str) -> None:
    """Many small updates beside a large one: in bf16, adding them up would lose all of them."""
    wire = WireFormat(dtype=dtype, rounding="nearest")
    accumulator = PlainMean({"x": torch.empty(1)})
    for value in [256.0] + [1.0] * 200:
        accumulator.add_plain({"x": wire.decode(wire.encode(torch.tensor([value])), 1)}, weight=1)
    assert accumulator.mean()["x"].item() * 201 == pytest.approx(456.0, rel=1e-6)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(dtype: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"cannot be sent as {dtype}"):
        WireFormat(dtype=dtype).encode(torch.tensor([1.0, value]))


def test_means_of_sparse_payloads_are_denser() -> None:
    assert WireFormat(dtype="sparse", density=0.1).of_means == WireFormat(dtype="sparse", density=0.2)
    assert WireFormat(dtype="sparse", density=0.7).of_means.density == 1.0
    sent, int4 = WireFormat(dtype="sparse"), WireFormat(dtype="int4")
    there_and_back = sent.payload_bytes(10**6) + sent.of_means.payload_bytes(10**6)
    assert there_and_back < 2 * int4.payload_bytes(10**6) / 10
    assert int4.of_means is int4


def test_what_bf16_cannot_hold() -> None:
    with pytest.raises(ValueError, match="bf16"):
        WireFormat(dtype="bf16").encode(torch.tensor([3.4e38]))


def test_damaged_payloads_are_refused() -> None:
    wire = WireFormat(dtype="int8")
    payload = wire.encode(torch.ones(5))
    with pytest.raises(ValueError, match="not that of 5 elements in int8"):
        wire.decode(payload[:-1], 5)
    with pytest.raises(ValueError, match="not that of 5"):
        wire.decode(payload.float(), 5)
    payload[:4] = 255
    with pytest.raises(ValueError, match="damaged"):
        wire.decode(payload, 5)


@pytest.mark.parametrize("options", [{"dtype": "fp16"}, {"rounding": "up"}])
def test_what_is_no_format(options: dict) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        WireFormat(**options)
    with pytest.raises(OptionError, match="seed"):
        WireFormat(dtype="int8").encode(torch.ones(1), seed=-1)
