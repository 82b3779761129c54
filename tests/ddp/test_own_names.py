"""Hints of Lightning and torch name this package's strategies; its own hints that send to DDP stay as they are."""

from __future__ import annotations

import re
from typing import Any

import pytest
from lightning.fabric.strategies.launchers import multiprocessing
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.strategies.launchers import multiprocessing as launchers
from lightning.pytorch.trainer.connectors import accelerator_connector

from lightning_bytescheduler import ByteSchedulerStrategy, DiLoCoStrategy, UnsupportedError
from lightning_bytescheduler.diloco.strategy import DiLoCoStrategy as _DiLoCo

_UNUSED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that "
    "your module has parameters that were not used in producing loss."
)


def hinted(strategy: Any, message: str) -> str:
    error = RuntimeError(message)
    strategy.on_exception(error)
    return str(error)


def test_unused_parameters_are_hinted_at_in_our_names() -> None:
    ours = hinted(ByteSchedulerStrategy(), _UNUSED)
    assert "`strategy='bytescheduler_find_unused_parameters_true'`" in ours
    assert "`strategy=ByteSchedulerStrategy(find_unused_parameters=True)`" in ours
    assert not re.search(r"'ddp|\bDDPStrategy", ours)
    assert "bytescheduler_find_unused_parameters_true" in StrategyRegistry

    diloco = hinted(DiLoCoStrategy(samples_per_round=100), _UNUSED)
    assert "`strategy=DiLoCoStrategy(..., inner_options={'find_unused_parameters': True})`" in diloco
    assert not re.search(r"'ddp|\bDDPStrategy|string value", diloco)


def test_a_hint_is_given_before_others_are_told() -> None:
    strategy, error = ByteSchedulerStrategy(), RuntimeError(_UNUSED)
    strategy.publish_failure(error)
    assert "bytescheduler_find_unused_parameters_true" in str(error)
    strategy.on_exception(error)
    assert str(error).count("bytescheduler_find_unused_parameters_true") == 1


def test_static_graphs_are_an_option() -> None:
    message = "Expected to mark a variable ready only once. ... or try to use _set_static_graph() as a workaround"
    assert "`strategy=ByteSchedulerStrategy(static_graph=True)` as a workaround" in hinted(
        ByteSchedulerStrategy(), message
    )


def test_other_messages_stay() -> None:
    error = UnsupportedError("bytescheduler cannot honour this: use strategy='ddp'.")
    ByteSchedulerStrategy().on_exception(error)
    assert str(error) == "bytescheduler cannot honour this: use strategy='ddp'."


@pytest.mark.parametrize("name", ["bytescheduler", "bytescheduler_spawn", "diloco"])
def test_in_a_notebook_our_own_variant_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    family = name.partition("_")[0]
    given: Any = _DiLoCo(samples_per_round=100) if name == "diloco" else name
    with pytest.raises(MisconfigurationException, match=f"strategy='{family}_notebook'") as caught:
        Trainer(strategy=given, accelerator="cpu", devices=2, logger=False)
    assert "ddp" not in str(caught.value)
    assert f"{family}_notebook" in StrategyRegistry
    Trainer(strategy="bytescheduler_notebook", accelerator="cpu", devices=2, logger=False)


def test_a_missing_main_guard_names_our_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        monkeypatch.setattr(multiprocessing.mp.current_process(), "_inheriting", True, raising=False)
        multiprocessing._check_missing_main_guard()

    monkeypatch.setattr(launchers, "_check_missing_main_guard", refused)
    trainer = Trainer(strategy="bytescheduler_spawn", accelerator="cpu", devices=2, logger=False)
    with pytest.raises(RuntimeError, match='you can run with `strategy="bytescheduler"`'):
        trainer.strategy.launcher.launch(lambda: None, trainer=trainer)
