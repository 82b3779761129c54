from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.compression import dense
from lightning_bytescheduler.compression.wire_format import WireFormat
from lightning_bytescheduler.exceptions import OptionError
from tests.support.plain_mean import PlainMean

numbers = st.one_of(
    st.floats(-1e4, 1e4, width=32),
    st.floats(-(2.0**-20), 2.0**-20, width=32),
    st.sampled_from([0.0, 1.0, -1.0, 1e-30, 3e-39, -(2.0**-40), 1 + 2.0**-23]),
)
updates = st.integers(1, 6).flatmap(
    lambda size: st.lists(
        st.tuples(st.integers(1, 2**20), st.lists(numbers, min_size=size, max_size=size)), min_size=1, max_size=6
    )
)


def merged(drawn) -> torch.Tensor:
    accumulator = PlainMean({"x": torch.empty(len(drawn[0][1]))})
    for weight, values in drawn:
        accumulator.add_plain({"x": torch.tensor(values)}, weight=weight)
    return accumulator.mean()["x"]


@given(drawn=updates, data=st.data())
def test_the_order_of_arrival_does_not_matter(drawn, data) -> None:
    """Bit for bit."""
    again = data.draw(st.permutations(drawn))
    assert torch.equal(merged(drawn).view(torch.int32), merged(again).view(torch.int32))


def test_nor_does_it_where_plain_sums_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """In several chunks."""
    monkeypatch.setattr(dense, "_CHUNK", 1024)
    generator = torch.Generator().manual_seed(0)
    size = 5007
    parts = [torch.randn(size, generator=generator) * 10.0**power for power in (-6, 0, -3, 3)]
    weights = [7, 123_456, 1, 99_999]
    plain = [sum(part * weight for part, weight in order) for order in _orders(parts, weights)]
    assert not torch.equal(*plain)
    means = []
    for order in _orders(parts, weights):
        accumulator = PlainMean({"x": parts[0]})
        for part, weight in order:
            accumulator.add_plain({"x": part}, weight=weight)
        means.append(accumulator.mean()["x"])
    assert torch.equal(*means)
    exact = sum(part.double() * weight for part, weight in zip(parts, weights, strict=True)) / sum(weights)
    assert torch.equal(means[0], exact.float())


def _orders(parts, weights):
    pairs = list(zip(parts, weights, strict=True))
    return pairs, pairs[::-1]


@given(drawn=updates)
def test_the_stated_bound(drawn) -> None:
    total = sum(weight for weight, _ in drawn)
    found = merged(drawn)
    for index, value in enumerate(found.tolist()):
        exact = sum(Fraction(weight) * Fraction(torch.tensor(values)[index].item()) for weight, values in drawn) / total
        size = sum(weight * abs(Fraction(torch.tensor(values)[index].item())) for weight, values in drawn) / total
        before_rounding = Fraction(len(drawn), total * 2**57) + size / 2**51
        # Rounding to fp32: half of its last digit, of which the smallest is 2^-149.
        bound = before_rounding + max((abs(exact) + before_rounding) / 2**24, Fraction(1, 2**150))
        assert abs(Fraction(value) - exact) <= bound


@pytest.mark.parametrize("threads", [1, 2])
def test_any_number_of_threads_makes_the_same_mean(threads: int) -> None:
    before = torch.get_num_threads()
    parts = [torch.randn(70_001, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    torch.set_num_threads(threads)
    try:
        accumulator = PlainMean({"x": parts[0]})
        for weight, part in enumerate(parts, 1):
            accumulator.add_plain({"x": part}, weight=weight)
        exact = sum(part.double() * weight for weight, part in enumerate(parts, 1)) / 6
        assert torch.equal(accumulator.mean()["x"], exact.float())
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "int4"])
def test_what_has_travelled_is_added_as_if_it_were_decoded(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the mean is encoded as if it were formed first; over several chunks, and over several tensors."""
    monkeypatch.setattr(dense, "_CHUNK", 256)
    wire, like = WireFormat(dtype=dtype), {"x": torch.empty(13, 50), "none": torch.empty(0), "y": torch.empty(131)}
    travelled, plain = PlainMean(like), PlainMean(like)
    for weight in (3, 2**20, 1):
        flat = torch.randn(781, generator=torch.Generator().manual_seed(weight))
        payload = wire.encode(flat, seed=weight)
        travelled.add(payload, wire, weight=weight)
        x, none, y = wire.decode(payload, 781).split([650, 0, 131])
        plain.add_plain({"x": x.view(13, 50), "none": none, "y": y}, weight=weight)
    assert (travelled.weight, travelled.added) == (plain.weight, plain.added)
    means = plain.mean()
    for name, mean in travelled.mean().items():
        assert torch.equal(mean, means[name])
    together = torch.cat([mean.reshape(-1) for mean in means.values()])
    assert torch.equal(travelled.encode_mean(wire, seed=5), wire.encode(together, seed=5))


def test_a_damaged_payload_leaves_no_trace() -> None:
    wire = WireFormat(dtype="int8")
    accumulator = PlainMean({"x": torch.empty(5)})
    payload = wire.encode(torch.ones(5))
    accumulator.add(payload, wire, weight=1)
    for damaged in (payload[:-1], torch.cat([torch.full((4,), 255, dtype=torch.uint8), payload[4:]])):
        with pytest.raises(ValueError, match=r"not that of 5 elements|was not added"):
            accumulator.add(damaged, wire, weight=1)
    with pytest.raises(ValueError, match="no pseudo-gradient was added"):
        PlainMean({"x": torch.empty(5)}).encode_mean(wire)
    assert (accumulator.weight, accumulator.added) == (1, 1)
    assert accumulator.mean()["x"].tolist() == [1.0] * 5


@given(st.lists(numbers, min_size=1, max_size=5), st.integers(1, 2**24))
def test_one_worker_is_merged_into_itself(values: list[float], weight: int) -> None:
    alone = torch.tensor(values)
    expected = torch.where((alone.abs() >= 2.0**-33) | (alone == 0), alone, torch.nan)
    found = merged([(weight, values)])
    kept = ~expected.isnan()
    assert torch.equal(found[kept], alone[kept])
    assert (found - alone).abs().max() <= 2.0**-57


def test_memory_does_not_grow_with_the_workers() -> None:
    accumulator = PlainMean({"x": torch.empty(3), "y": torch.empty(2, 2)})
    held = [accumulator._coarse.data_ptr(), accumulator._fine.data_ptr()]
    for _ in range(20):
        accumulator.add_plain({"x": torch.ones(3), "y": torch.ones(2, 2)}, weight=2)
    assert held == [accumulator._coarse.data_ptr(), accumulator._fine.data_ptr()]
    assert accumulator._coarse.numel() == 7
    assert (accumulator.weight, accumulator.added) == (40, 20)
    assert torch.equal(accumulator.mean()["y"], torch.ones(2, 2))


def test_nothing_has_no_mean() -> None:
    accumulator = PlainMean({"x": torch.empty(1)})
    with pytest.raises(ValueError, match="no pseudo-gradient was added"):
        accumulator.mean()
    accumulator.add_plain({"x": torch.tensor([-2.0])}, weight=1)
    assert accumulator.mean()["x"].item() == -2.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_what_cannot_be_added_leaves_no_trace(bad: float) -> None:
    accumulator = PlainMean({"x": torch.empty(2), "y": torch.empty(1)})
    accumulator.add_plain({"x": torch.ones(2), "y": torch.ones(1)}, weight=1)
    with pytest.raises(ValueError, match="was not added"):
        accumulator.add_plain({"x": torch.full((2,), 9.0), "y": torch.tensor([bad])}, weight=1)
    assert accumulator.mean()["x"].tolist() == [1.0, 1.0]
    assert accumulator.added == 1


def test_the_sum_never_overflows() -> None:
    accumulator = PlainMean({"x": torch.empty(1)})
    large = {"x": torch.tensor([2.0**36])}
    for _ in range(3):
        accumulator.add_plain(large, weight=1)
    with pytest.raises(ValueError, match="was not added"):
        accumulator.add_plain(large, weight=1)
    assert accumulator.mean()["x"].item() == 2.0**36


@pytest.mark.parametrize("weight", [0, -1, 0.5, True, 2**28 + 1])
def test_what_is_no_weight(weight) -> None:
    with pytest.raises(OptionError, match="weight"):
        PlainMean({"x": torch.empty(1)}).add_plain({"x": torch.ones(1)}, weight=weight)


def test_empty_tensors_and_other_dtypes() -> None:
    accumulator = PlainMean({"none": torch.empty(0), "half": torch.empty(2)})
    accumulator.add_plain({"none": torch.empty(0), "half": torch.tensor([0.5, 3.0]).bfloat16()}, weight=4)
    assert accumulator.mean()["none"].shape == (0,)
    assert accumulator.mean()["half"].tolist() == [0.5, 3.0]
