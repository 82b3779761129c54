"""A fit that cannot begin leaves nothing behind."""

from __future__ import annotations

import threading
from functools import partial
from unittest.mock import patch

import pytest
from torch.optim import SGD

from lightning_bytescheduler.ddp import decided_fit
from tests.support.fit import Recipe, Run, train
from tests.support.models import Tower
from tests.support.rank_pool import RankPool


def begin_refused(rank: int, recipe: Recipe, run: Run) -> tuple[str, list[str]]:
    refused = UserWarning("on purpose")
    with patch.object(decided_fit, "rank_zero_warn", side_effect=refused), pytest.raises(UserWarning) as raised:
        train(rank, recipe, run)
    return str(raised.value), [
        thread.name for thread in threading.enumerate() if thread.name.startswith("bytescheduler")
    ]


def test_a_warning_that_is_an_error_leaves_no_thread() -> None:
    recipe = Recipe(model=partial(Tower, optimizer=partial(SGD, lr=0.1)), steps=2)
    run = Run(options={"partition_size": 800, "credit": 400}, network="plain")
    with RankPool(2) as pool:  # of its own, as threads may be left
        found = pool.run(begin_refused, recipe=recipe, run=run)
    assert [said for said, _ in found] == ["on purpose"] * 2
    assert [threads for _, threads in found] == [[], []]
