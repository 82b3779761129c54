"""Gradients that are encoded on a GPU, and travel from host memory: on a device that is simulated, whose tensors meet
those of host memory in copies alone, which are made late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor
from torch.optim import AdamW

from lightning_bytescheduler.collectives.device_streams import PayloadCopies
from lightning_bytescheduler.collectives.route import AllReduce
from lightning_bytescheduler.ddp.compressed_reduction import GradientCompression, LowRankBucket
from tests.parity.checks import DDP, assert_overlapped, assert_same, train_on
from tests.parity.test_compression import INT8, Overflows, max_difference, same_weights, scaled
from tests.parity.test_kinds_of_tensors import Complex
from tests.support.fit import Outcome, Recipe, Run, train
from tests.support.models import Tower
from tests.support.rank_pool import RankPool
from tests.support.simulated_device import LatePayloads, OnDevice

model = partial(Tower, depth=2, optimizer=partial(AdamW, lr=0.005))
SETTLED = [
    *("int8", "topk:0.1", "powersgd:1"),
    *(pytest.param(codec, marks=pytest.mark.slow) for codec in ("bf16", "int4", "onebit")),
]


def train_there(rank: int, recipe: Recipe, run: Run) -> tuple[Outcome, set[str], int]:
    """Returns the outcome, the kinds of tensors that were sent encoded, and how often a bucket stayed on the device."""
    kinds, stayed = set[str](), [0]
    encoded = AllReduce.launch_encoded

    def counting(decides: Callable[..., Any]) -> Callable[..., Any]:
        def counted(self: GradientCompression, bucket: Any, *more: Any) -> Any:
            found = decides(self, bucket, *more)
            stayed[0] += found is not None and isinstance(bucket.buffer, OnDevice)
            return found

        return counted

    def seen(self: AllReduce, *given: Any) -> None:
        kinds.add(type(self.copies).__name__)
        encoded(self, *given)

    with (
        patch.object(GradientCompression, "encoded", counting(GradientCompression.encoded)),
        patch.object(AllReduce, "launch_encoded", seen),
    ):
        return train(rank, recipe, run), kinds, stayed[0]


def both(ranks: RankPool, recipe: Recipe, run: Run) -> tuple[list[Outcome], list[Outcome]]:
    """With codecs in host memory, and on the device."""
    (straight,) = train_on(ranks, recipe, run)
    answers = ranks.run(train_there, recipe=recipe, run=replace(run, on_device=True))
    for _, kinds, stayed in answers:
        assert kinds == {"LatePayloads"}
        assert stayed > 2
    return straight, [outcome for outcome, *_ in answers]


@pytest.mark.slow
@pytest.mark.parametrize("codec", SETTLED)
def test_the_bits_of_codecs_in_host_memory(two_ranks: RankPool, codec: str) -> None:
    run = Run(options={**INT8, "compression": codec}, network="held")
    straight, there = both(two_ranks, Recipe(model=model, steps=4), run)
    assert_overlapped(there, share=0.75)  # all but the first
    assert_same(straight, there)


@pytest.mark.slow
def test_three_ranks(three_ranks: RankPool) -> None:
    straight, there = both(three_ranks, Recipe(model=model, steps=4), Run(options={**INT8, "compression": "int4"}))
    assert_same(straight, there)


@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        pytest.param({"accumulate_grad_batches": 2}, INT8, id="accumulated", marks=pytest.mark.slow),
        pytest.param({"gradient_clip_val": 0.05}, INT8, id="clipped by norm, in shards"),
        pytest.param({"precision": "bf16-true"}, INT8, id="bf16", marks=pytest.mark.slow),
        pytest.param({}, {**INT8, "mode": "ddp"}, id="as DDP", marks=pytest.mark.slow),
        pytest.param(
            {}, {**INT8, "compression": {"*0.weight": "int8"}}, id="some buckets as they are", marks=pytest.mark.slow
        ),
        pytest.param({}, {**INT8, "compression": {"*first*": None, "*": "powersgd:1"}}, id="factors and a rest"),
    ],
)
def test_kinds_of_steps(two_ranks: RankPool, trainer: dict[str, Any], options: dict[str, Any]) -> None:
    straight, there = both(two_ranks, Recipe(model=model, steps=4, trainer=trainer), Run(options=options))
    assert_same(straight, there)


@pytest.mark.slow
def test_a_long_round_trip(two_ranks: RankPool) -> None:
    """Two lanes, whose second halves another thread waits for."""
    straight, there = both(two_ranks, Recipe(model=model, steps=4), Run(options=INT8, far=True))
    assert_same(straight, there)


@pytest.mark.slow
def test_complex_numbers_travel_as_they_are(two_ranks: RankPool) -> None:
    straight, there = train_on(
        two_ranks, Recipe(model=Complex, steps=4), Run(options=INT8), Run(options=INT8, on_device=True)
    )
    assert_same(straight, there)


@pytest.mark.slow
def test_what_is_drawn_there_trains_as_well(two_ranks: RankPool) -> None:
    recipe = Recipe(model=model, steps=4)
    drawn = Run(options={**INT8, "compression": "int8:stochastic"})
    (ddp,) = train_on(two_ranks, recipe, DDP)
    straight, there = both(two_ranks, recipe, drawn)
    assert not same_weights(straight[0], there[0]), "other numbers are drawn there"
    assert same_weights(there[0], there[1])
    assert max_difference(ddp[0], there[0]) < 0.02


@pytest.mark.slow
def test_an_overflow_is_seen_and_what_was_left_is_taken_back(two_ranks: RankPool) -> None:
    straight, there = both(two_ranks, Recipe(model=Overflows, steps=9, plugins=(scaled,)), Run(options=INT8))
    assert_same(straight, there)


@contextmanager
def without_waiting_for_the_device() -> Iterator[None]:
    """What a thread has asked for need not be done."""
    with patch.object(PayloadCopies, "_done", lambda *_, **__: True):
        yield


def train_sabotaged(rank: int, recipe: Recipe, run: Run, sabotage: Callable[[], Any]) -> Outcome:
    with sabotage():
        return train(rank, recipe, run)


def test_a_wait_that_is_left_out_shows(two_ranks: RankPool) -> None:
    recipe, run = Recipe(model=model, steps=4), Run(options=INT8)
    (straight,) = train_on(two_ranks, recipe, run)
    broken = two_ranks.run(
        train_sabotaged, recipe=recipe, run=replace(run, on_device=True), sabotage=without_waiting_for_the_device
    )
    with pytest.raises(AssertionError):
        assert_same(straight, broken)


def fail_there(rank: int, recipe: Recipe, run: Run, method: str) -> str:
    def fail(self: Any, *given: Any) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    of = LowRankBucket if method == "place" else LatePayloads
    with patch.object(of, method, fail), pytest.raises(RuntimeError) as raised:
        train(rank, recipe, run)
    return str(raised.value)


@pytest.mark.parametrize(
    ("codec", "method", "cross_barrier"),
    [
        ("int8", "to_device", True),
        pytest.param("int8", "to_host", False, marks=pytest.mark.slow),
        pytest.param("powersgd:1", "place", True, marks=pytest.mark.slow),
    ],
)
def test_a_device_that_fails_ends_the_fit_on_all_ranks(codec: str, method: str, cross_barrier: bool) -> None:
    options = {**INT8, "compression": codec, "cross_barrier": cross_barrier}
    run = Run(options=options, on_device=True, network="plain")
    with RankPool(2) as pool:  # of its own: it has failed then
        said = pool.run(fail_there, recipe=Recipe(model=model, steps=4), run=run, method=method)
    assert all("illegal memory access" in one for one in said), said
