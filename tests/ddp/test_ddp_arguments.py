"""Each DDP option the documentation calls honoured gives DDP's weights, and overlaps where it says so."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel

from tests.support.fit import Recipe, Run, differences, train_all
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

_OVERLAPPED: dict[str, dict[str, Any]] = {
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "no_buffer_broadcast": {"broadcast_buffers": False},
    "check_reduction": {"check_reduction": True},
    "backend": {"process_group_backend": "gloo"},
}
if "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel).parameters:  # not in the oldest torch
    _OVERLAPPED["bucket_cap_mb_list"] = {"bucket_cap_mb_list": [1, 2]}


@pytest.mark.parametrize("option", _OVERLAPPED)
def test_overlap_is_kept(two_ranks: RankPool, option: str) -> None:
    recipe = Recipe(model=Tower, steps=20, ddp=_OVERLAPPED[option])
    for expected, actual in two_ranks.run(train_all, recipe=recipe, runs=[Run(strategy="ddp"), Run()]):
        assert differences(expected, actual) == []
        assert actual.statistics is not None
        assert actual.statistics.deferred_share >= 0.95


def test_gradients_copied_by_ddp_are_synchronised(two_ranks: RankPool) -> None:
    recipe = Recipe(model=Tower, ddp={"gradient_as_bucket_view": False})
    for expected, actual in two_ranks.run(train_all, recipe=recipe, runs=[Run(strategy="ddp"), Run()]):
        assert differences(expected, actual) == []
        assert actual.statistics is not None
        assert actual.statistics.deferred_share == 0
