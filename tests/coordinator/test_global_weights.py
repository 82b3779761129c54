"""The means that workers get: what one of them loses is part of the next, also after a restart."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from lightning_bytescheduler.coordinator.global_weights import GlobalWeights, digest_of
from lightning_bytescheduler.coordinator.run import Merge
from lightning_bytescheduler.coordinator.update_sum import Update
from lightning_bytescheduler.diloco.coordinator_protocol import ModelParameter, run_options
from lightning_bytescheduler.exceptions import OptionError

ELEMENTS = 400
MODEL = [ModelParameter(name="a", shape=(20, 20), dtype="float32")]
SMALL: list[dict[str, Any]] = [{"wire_dtype": "int8"}, {"wire_dtype": "int4"}, {"wire_dtype": "sparse:0.1"}]


def updates(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(ELEMENTS, generator=generator) for _ in range(count)]


async def means(weights: GlobalWeights, rounds: range, sent: list[Tensor]) -> list[Tensor]:
    """The mean of each of some rounds, to which each worker sends the same as in the others, exactly."""
    decoded = []
    pieced = weights.formats[0]
    for round in rounds:
        sums = weights.sum_of(0)
        for seed, update in enumerate(sent):
            payload = pieced.wire.encode(update, seed=seed)
            largest = max(pieced.largest(payload, index) for index in range(len(pieced.pieces)))
            given = Update(payload, largest, digest_of(payload))
            sums.begin(given, weight=seed + 1)
            await sums.add(given)
        await sums.settled()
        merge = Merge(round=round, fragment=0, counts=True, record=Mock())
        await weights.mean(merge, sums)
        assert merge.payload is not None
        decoded.append(pieced.of_means.wire.decode(merge.payload, ELEMENTS).clone())
        await weights.step(merge, sums)
    return decoded


@pytest.mark.parametrize("options", SMALL, ids=lambda options: options["wire_dtype"])
def test_what_a_mean_loses_is_sent_with_the_next_one(options: dict[str, Any]) -> None:
    rounds = 24
    with ThreadPoolExecutor(1) as executor:
        weights = GlobalWeights(MODEL, run_options(**options), {"weights.a": torch.zeros(20, 20)}, executor=executor)
        wire = weights.formats[0].wire
        sent = updates(2)
        arrived = [wire.decode(wire.encode(one, seed=seed), ELEMENTS) for seed, one in enumerate(sent)]
        exact = (arrived[0] + 2 * arrived[1]) / 3
        got = asyncio.run(means(weights, range(1, rounds + 1), sent))
        residual = asyncio.run(weights.snapshot())["residuals.0"]
    torch.testing.assert_close(sum(got) + residual, rounds * exact, rtol=1e-4, atol=1e-4)
    assert float((sum(got) / rounds - exact).abs().max()) < float((got[0] - exact).abs().max())


@pytest.mark.parametrize("options", SMALL, ids=lambda options: options["wire_dtype"])
def test_it_is_kept_over_a_restart(options: dict[str, Any]) -> None:
    sent = updates(2)
    with ThreadPoolExecutor(1) as executor:

        def made(**tensors: Tensor) -> GlobalWeights:
            return GlobalWeights(MODEL, run_options(**options), tensors, executor=executor)

        start = {"weights.a": torch.zeros(20, 20)}
        without = made(**start)
        expected = asyncio.run(means(without, range(1, 5), sent))
        first = made(**start)
        asyncio.run(means(first, range(1, 3), sent))
        kept = asyncio.run(first.snapshot())
        second = made(**kept)
        for one, other in zip(asyncio.run(means(second, range(3, 5), sent)), expected[2:], strict=True):
            assert torch.equal(one, other)
        ends = [asyncio.run(weights.snapshot()) for weights in (second, without)]
        assert {"weights.a", "momentum.a", "residuals.0"} <= ends[0].keys() == ends[1].keys()
        assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
        with pytest.raises(OptionError, match=r"residuals\.0"):
            made(**{**kept, "residuals.0": torch.zeros(ELEMENTS - 1)})


def test_exact_means_have_nothing_to_keep() -> None:
    with ThreadPoolExecutor(1) as executor:
        weights = GlobalWeights(MODEL, run_options(), {"weights.a": torch.zeros(20, 20)}, executor=executor)
        asyncio.run(means(weights, range(1, 3), updates(1)))
        assert asyncio.run(weights.snapshot()).keys() == {"weights.a", "momentum.a"}
