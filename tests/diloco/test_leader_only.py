"""What is the leader's alone: the others say what of it they pass over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_bytescheduler.diloco.leader_only import for_leader_only


def test_a_plateau_that_has_nothing_to_go_by_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    leads = False
    updated: list[list[str]] = []
    configs = [
        SimpleNamespace(reduce_on_plateau=True, monitor="validation_loss"),
        SimpleNamespace(reduce_on_plateau=True, monitor="loss"),
        SimpleNamespace(reduce_on_plateau=False, monitor="steps"),
    ]
    loop = SimpleNamespace()
    trainer: Any = SimpleNamespace(
        callbacks=[],
        loggers=[],
        callback_metrics={"loss": 1.0},
        strategy=SimpleNamespace(lr_scheduler_configs=configs),
        fit_loop=SimpleNamespace(epoch_loop=loop),
    )
    loop._update_learning_rates = lambda: updated.append([c.monitor for c in trainer.strategy.lr_scheduler_configs])
    with for_leader_only(trainer, lambda: leads):
        loop._update_learning_rates()
        loop._update_learning_rates()
        leads = True
        loop._update_learning_rates()
    assert updated == [["loss", "steps"], ["loss", "steps"], ["validation_loss", "loss", "steps"]]
    assert trainer.strategy.lr_scheduler_configs is configs
    (said,) = caplog.messages
    assert "'validation_loss' is of the leader's validation alone" in said
