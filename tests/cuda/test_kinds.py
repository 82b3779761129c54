"""On a GPU, with one rank on NCCL or two on gloo that share it: one order for all collectives, fp16 and bf16, compiled
models. What can runs on a CPU too, as a test of the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cuda.steps import Case
from tests.support.rank_pool import RankPool

Train = Callable[..., list[Any]]

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
on_nccl = pytest.mark.skipif(
    not (torch.cuda.is_available() and dist.is_nccl_available()),
    reason="there is no NCCL" if torch.cuda.is_available() else "there is no CUDA device",
)
DEVICES = ["cpu", pytest.param("cuda", marks=on_cuda)]
KINDS = [
    pytest.param({"routed": True}, 1e-6, id="one order"),
    pytest.param({"by_host": True}, 1e-6, id="by host memory"),
    pytest.param({"by_host": True, "mode": "synchronised", "dtype": torch.bfloat16}, 1e-2, id="by host memory, bf16"),
    pytest.param({"dtype": torch.bfloat16}, 1e-2, id="bf16"),
    pytest.param({"dtype": torch.float16}, 1e-3, id="fp16"),
    pytest.param({"compiled": "aot_eager"}, 1e-6, id="compiled", marks=pytest.mark.slow),
    pytest.param({"compiled": "inductor"}, 1e-4, id="compiled for the device", marks=on_cuda),
]


def same(answers: list[Any], tolerance: float, *, synchronised: bool = False) -> None:
    for expected, weights, deferred, _ in answers:
        assert deferred or synchronised
        for one, other in zip(expected, weights, strict=True):
            assert torch.allclose(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("kind", "tolerance"), KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_two_ranks_on_gloo(
    train: Train, two_plain_ranks: RankPool, device: str, kind: dict[str, Any], tolerance: float
) -> None:
    answers = train(two_plain_ranks, Case(device=device, backend="gloo", **kind))
    same(answers, tolerance, synchronised="mode" in kind)


@pytest.mark.parametrize(
    ("codec", "tolerance", "max_norm"),
    [
        pytest.param("bf16", 1e-3, None, marks=pytest.mark.slow),
        ("int8", 1e-2, 0.05),
        pytest.param("int4", 0.1, None, marks=pytest.mark.slow),
        pytest.param("topk:0.5:int8", 0.2, 0.05, marks=pytest.mark.slow),
        ("powersgd:5", 0.3, None),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_two_ranks_that_encode_where_gradients_are(
    train: Train, two_plain_ranks: RankPool, device: str, codec: str, tolerance: float, max_norm: float | None
) -> None:
    case = Case(device=device, backend="gloo", by_host=True, compression=codec, max_norm=max_norm)
    answers = train(two_plain_ranks, case)
    same(answers, tolerance, synchronised=True)
    for one, other in zip(answers[0][1], answers[1][1], strict=True):
        assert torch.equal(one, other), "ranks drift apart"


@on_nccl
@pytest.mark.parametrize(("kind", "tolerance"), KINDS)
def test_one_rank_on_nccl(train: Train, one_rank: RankPool, kind: dict[str, Any], tolerance: float) -> None:
    answers = train(one_rank, Case(device="cuda", backend="nccl", **kind))
    same(answers, tolerance, synchronised="mode" in kind)
