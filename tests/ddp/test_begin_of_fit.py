"""A fit that cannot begin leaves nothing behind."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from torch.optim import SGD

from tests.support.fit import Recipe, Run, train
from tests.support.models import Tower
from tests.support.rank_pool import RankPool


def begin_refused(rank: int, recipe: Recipe, run: Run, what: str) -> tuple[str, list[str]]:
    refused = UserWarning("on purpose")
    with patch(what, side_effect=refused), pytest.raises(UserWarning) as raised:
        train(rank, recipe, run)
    return str(raised.value), [
        thread.name for thread in threading.enumerate() if thread.name.startswith("bytescheduler")
    ]


@pytest.mark.parametrize(
    ("what", "options"),
    [
        pytest.param("ddp.decided_fit.rank_zero_warn", {"partition_size": 800, "credit": 400}, id="a warning"),
        pytest.param("ddp.trainer_fit.GradientCompression", {"compression": "int8"}, id="a codec"),
    ],
)
def test_what_fails_as_a_fit_begins_leaves_no_thread(what: str, options: dict[str, Any]) -> None:
    recipe = Recipe(model=partial(Tower, optimizer=partial(SGD, lr=0.1)), steps=2)
    run = Run(options=options, network="plain")
    with RankPool(2) as pool:  # of its own, as threads may be left
        found = pool.run(begin_refused, recipe=recipe, run=run, what=f"lightning_bytescheduler.{what}")
    assert [said for said, _ in found] == ["on purpose"] * 2
    assert [threads for _, threads in found] == [[], []]
