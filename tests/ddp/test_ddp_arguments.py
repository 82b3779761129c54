"""Each DDP option the documentation calls honoured gives DDP's weights, and overlaps where it says so."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel

from tests.support.fit import Recipe, Run, differences, train_all
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

_OVERLAPPED: list[dict[str, Any]] = [
    {"find_unused_parameters": True, "check_reduction": True},
    {"static_graph": True, "broadcast_buffers": False},
    {"process_group_backend": "gloo"},
]
if "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel).parameters:  # not in the oldest torch
    _OVERLAPPED[-1]["bucket_cap_mb_list"] = [1, 2]


@pytest.mark.parametrize("options", _OVERLAPPED, ids=" ".join)
def test_overlap_is_kept(two_ranks: RankPool, options: dict[str, Any]) -> None:
    recipe = Recipe(model=Tower, steps=8, ddp=options)
    for expected, actual in two_ranks.run(train_all, recipe=recipe, runs=[Run(strategy="ddp"), Run()]):
        assert differences(expected, actual) == []
        assert actual.statistics is not None
        assert actual.statistics.deferred_share >= 7 / 8  # all but the first


def test_gradients_copied_by_ddp_are_synchronised(two_ranks: RankPool) -> None:
    recipe = Recipe(model=Tower, steps=4, ddp={"gradient_as_bucket_view": False})
    for expected, actual in two_ranks.run(train_all, recipe=recipe, runs=[Run(strategy="ddp"), Run()]):
        assert differences(expected, actual) == []
        assert actual.statistics is not None
        assert actual.statistics.deferred_share == 0
