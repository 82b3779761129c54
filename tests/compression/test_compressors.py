"""Each compressor beside plain NumPy over a dozen steps, and what all of them promise."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_bytescheduler.compression import COMPRESSORS, dense, make_codec, make_compressor
from lightning_bytescheduler.exceptions import OptionError
from tests.compression import references

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SIZE = 611
STEPS = 12
WORKERS = 2

SPECS = {
    "bf16": references.bf16,
    "fp16": references.fp16,
    "int8": references.blockwise(127, 256, True),
    "int4": references.blockwise(7, 128, True),
    "int8:nearest": references.blockwise(127, 256, False),
    "int4:nearest": references.blockwise(7, 128, False),
    "onebit": references.onebit,
    "topk:0.05": references.topk(31),
}
ALL = [*SPECS, "topk:0.05:int8", "topk:0.05:int4"]


def gradient(step: int, worker: int, size: int = SIZE) -> Tensor:
    """A gradient with a constant part, and elements of very different magnitude."""
    generator = torch.Generator().manual_seed(1000 * step + worker)
    spread = torch.logspace(-4, 1, size)
    return (torch.randn(size, generator=generator) + 0.3) * spread


def own_seed(spec: str, step: int, worker: int) -> int:
    """Where a worker's random numbers begin."""
    return (step << 32) + worker if worker and spec.startswith("int") else step


def test_what_fp16_cannot_hold_is_sent_later_where_it_is_kept() -> None:
    """It is finite: infinity would stay in the residual for good."""
    compressor, left, sent = make_compressor("fp16"), torch.zeros(3), torch.zeros(3)
    values = torch.tensor([1e5, -2e5, 1.0])
    for step in range(4):
        part = values if step == 0 else torch.zeros(3)
        sent += compressor.decompress(compressor.compress_with(left, part), 3)
        assert torch.equal(left + sent, values)
    assert left.tolist() == [0.0, 0.0, 0.0]
    assert compressor.decompress(compressor.compress(values), 3).tolist() == [torch.inf, -torch.inf, 1.0]


@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_is_of_no_account(spec: str, dtype: torch.dtype) -> None:
    """A forward pass in another precision changes it for all threads."""

    def all_of_it() -> list[Tensor]:
        dense._Scratch._idle.clear()
        left, sums = zeros.clone(), zeros.clone()
        payload = make_compressor(spec).compress_with(left, part, seed=3)
        make_compressor(spec).add(payload, sums)
        return [payload, left, sums, make_compressor(spec).decompress(payload, SIZE)]

    part, zeros = gradient(0, 0), torch.zeros(SIZE)
    expected = all_of_it()
    torch.set_default_dtype(dtype)
    try:
        found = all_of_it()
    finally:
        torch.set_default_dtype(torch.float32)
        dense._Scratch._idle.clear()
    for one, other in zip(expected, found, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("spec", SPECS)
def test_workers_and_their_sum_are_those_of_plain_numpy(spec: str) -> None:
    """With error feedback."""
    compressor = make_compressor(spec)
    residuals = [torch.zeros(SIZE) for _ in range(WORKERS)]
    sums, expected = torch.zeros(SIZE), np.zeros(SIZE, np.float32)
    for step in range(STEPS):
        for worker, residual in enumerate(residuals):
            part = gradient(step, worker)
            values = residual.numpy() + part.numpy()
            payload = compressor.compress_with(residual, part, seed=step, worker=worker)
            assert payload.dtype == torch.uint8
            assert payload.shape == (compressor.payload_bytes(SIZE),)
            sent = SPECS[spec](values, own_seed(spec, step, worker))
            found = compressor.decompress(payload, SIZE).numpy()
            # The residual of two roundings differs in its last digit, and so may what is made of it.
            largest = np.abs(values).max()
            np.testing.assert_allclose(found, sent, rtol=2.0**-20, atol=2.0**-20 * largest)
            np.testing.assert_allclose(residual.numpy(), values - sent, rtol=0.0, atol=2.0**-20 * largest)
            compressor.add(payload, sums)
            expected += sent
    np.testing.assert_allclose(sums.numpy(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("spec", ALL)
def test_error_feedback_keeps_within_bounds_what_is_left(spec: str) -> None:
    """Over more steps of normal numbers than the sparsest needs to have sent each of them."""
    compressor, size = make_compressor(spec), 4_000
    residual = torch.zeros(size)
    for seed in range(60):
        part = torch.randn(size, generator=torch.Generator().manual_seed(seed))
        compressor.compress_with(residual, part, seed=seed)
    grown = float(residual.norm() / part.norm())
    assert grown < 12, grown


@given(
    st.sampled_from(ALL),
    st.lists(st.tuples(st.integers(0, 1000), st.integers(-20, 20)), min_size=1, max_size=3),
    st.integers(1, 700),
)
def test_what_is_sent_and_what_is_not_are_the_gradient(spec: str, steps: list[tuple[int, int]], size: int) -> None:
    compressor, residual = make_compressor(spec), torch.zeros(size)
    for seed, power in steps:
        power = min(power, 10) if spec == "fp16" else power  # beyond 65504 it is infinite
        part = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 2.0**power
        values = residual + part
        sent = compressor.decompress(compressor.compress_with(residual, part, seed=seed), size)
        # What fp32 makes of values - sent, exactly; and so the sum is right to half its last digit, or theirs.
        assert torch.equal(residual, values - sent)
        error = (residual.double() + sent.double() - values.double()).abs()
        assert (error <= torch.maximum(residual.abs(), sent.abs()).double() * 2.0**-24).all()


@pytest.mark.parametrize("spec", ["int8", "int4", "int8:nearest", "int4:nearest"])
def test_what_is_below_the_smallest_normal_number_keeps_its_sign(spec: str) -> None:
    """Divided by a step that is rounded to a denormal number, it would be beyond the largest integer."""
    compressor = make_compressor(spec)
    for part in (torch.linspace(-1.0, 1.0, 256) * 2.6e-43, torch.linspace(-1.0, 1.0, 256) * 1e-37):
        found = compressor.decompress(compressor.compress(part, seed=3), 256)
        assert (found * part >= 0).all()
        step = max(float(part.max()) / (127 if "8" in spec else 7), torch.finfo(torch.float32).tiny)
        assert float((found - part).abs().max()) <= step * (1 + 1e-6)


ADVERSARIAL = {
    "zeros": torch.zeros(700),
    "one": torch.ones(1),
    "denormals": torch.full((700,), 1e-40),
    "huge": torch.cat([torch.full((699,), 1e-3), torch.tensor([1e30])]),
    "largest": torch.full((700,), 3e38),
    "nothing": torch.zeros(0),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_parts(spec: str, name: str, device: str) -> None:
    """What is finite stays finite, and no element becomes larger than twice the largest."""
    part = ADVERSARIAL[name].to(device)
    compressor = make_compressor(spec)
    found = compressor.decompress(compressor.compress(part, seed=1), len(part))
    if spec == "fp16" and name in ("huge", "largest"):
        assert torch.isinf(found).any()  # which it cannot hold
        return
    if spec == "bf16" and name == "largest":
        assert torch.isfinite(found).all()
    assert found.shape == part.shape
    largest = float(part.abs().max()) if len(part) else 0.0
    assert torch.isfinite(found).all()
    assert not len(part) or float(found.double().abs().max()) <= 2 * largest
    if name == "zeros":
        assert torch.count_nonzero(found) == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_an_overflow_is_seen(spec: str, value: float, device: str) -> None:
    compressor = make_compressor(spec)
    bad = gradient(0, 0).to(device)
    bad[17] = value
    assert not torch.isfinite(compressor.decompress(compressor.compress(bad, seed=2), SIZE)).all()


@pytest.mark.parametrize(("spec", "delta"), [("topk:0.05", 31 / SIZE), ("onebit", None)])
def test_how_much_of_a_gradient_is_kept(spec: str, delta: float | None) -> None:
    """|x - C(x)|^2 <= (1 - delta) |x|^2."""
    compressor, shares = make_compressor(spec), []
    for step in range(200):
        part = gradient(step, 0)
        lost = part - compressor.decompress(compressor.compress(part, seed=step), SIZE)
        kept = 1 - float(lost.square().sum() / part.square().sum())
        if delta is None:
            assert kept == pytest.approx(float(part.abs().sum() ** 2 / (SIZE * part.square().sum())), rel=1e-3)
        shares.append(kept)
    if delta is not None:
        assert min(shares) >= delta * 0.9


@pytest.mark.parametrize("spec", ["int8", "int4"])
def test_the_smallest_numbers_keep_their_sign(spec: str) -> None:
    """A scale below the normal numbers is coarse, so that an element is up to twice the largest level."""
    for multiple in range(1, 1024, 7):
        part = torch.full((256,), multiple * 2.0**-149)
        found = make_compressor(spec).decompress(make_compressor(spec).compress(part, seed=3), 256)
        assert (found >= 0).all()


@pytest.mark.parametrize("spec", ["int8", "int4"])
def test_what_is_drawn_is_right_on_average(spec: str) -> None:
    part = torch.linspace(-1.0, 1.0, 128)
    compressor, rounds = make_compressor(spec), 400
    found = torch.stack([compressor.decompress(compressor.compress(part, seed=seed), 128) for seed in range(rounds)])
    assert ((found.mean(dim=0) - part).abs() <= 5 * (found.std(dim=0) / rounds**0.5) + 1e-6).all()


def test_workers_draw_different_numbers() -> None:
    part = gradient(0, 0)
    for spec in ("int8", "int4"):
        compressor = make_compressor(spec)
        one, other = (compressor.compress(part, seed=3, worker=worker) for worker in (0, 1))
        assert not torch.equal(one, other)
        assert torch.equal(one, compressor.compress(part, seed=3, worker=0))


@pytest.mark.parametrize("spec", ALL)
def test_damaged_payloads(spec: str) -> None:
    compressor = make_compressor(spec)
    payload = compressor.compress(gradient(0, 0))
    for damaged in (payload[:-1], payload[:1], torch.cat([payload, payload])):
        with pytest.raises(ValueError, match="payload is"):
            compressor.decompress(damaged, SIZE)


@pytest.mark.parametrize("spec", ALL)
def test_chunks_and_offsets_change_nothing(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part = gradient(0, 0)
    payload = make_compressor(spec).compress(part, seed=2)
    found = make_compressor(spec).decompress(payload, SIZE)
    monkeypatch.setattr(dense, "_CHUNK", 256)
    assert torch.equal(make_compressor(spec).compress(part, seed=2), payload)
    shifted = torch.cat([payload[:3], payload])[3:]
    out = torch.empty(SIZE)
    assert make_compressor(spec).decompress(shifted, SIZE, out=out) is out
    assert torch.equal(out, found)


def test_specs() -> None:
    for spec in [*ALL, "topk:0.5:bf16", "powersgd:4"]:
        assert make_codec(spec).spec == spec
    assert {spec.split(":")[0] for spec in ALL} == {*COMPRESSORS} - {"powersgd"}


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("top", "Did you mean 'topk'"),
        ("int6", "one of 'bf16'"),
        ("topk", "'topk' takes 1 to 2 parameters"),
        ("topk:0", "density=0.0 is not allowed"),
        ("topk:many", "A parameter is no number"),
        ("topk:0.1:fp16", "kept_as='fp16' is not allowed"),
        ("onebit:1", "'onebit' takes 0 parameters"),
        ("int8:up", "rounding='up'"),
        ("powersgd:0", "rank=0"),
        ("powersgd", "takes whole matrices, of all ranks at once"),
        (8, "a text"),
    ],
)
def test_what_is_no_compressor(spec: object, says: str) -> None:
    with pytest.raises(OptionError, match=r"^compression=") as caught:
        make_compressor(spec)
    assert says in str(caught.value)


@pytest.mark.parametrize("spec", ALL)
def test_it_can_be_sent_to_ranks_that_are_spawned(spec: str) -> None:
    compressor = make_compressor(spec)
    assert pickle.loads(pickle.dumps(compressor)).spec == compressor.spec
