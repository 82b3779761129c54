"""What sizes are asked for, before the model is wrapped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision

from lightning_bytescheduler.ddp import fit_report, scheduled_gradients
from lightning_bytescheduler.ddp.agreed_sizes import AgreedSizes
from lightning_bytescheduler.ddp.scheduled_gradients import ScheduledGradients
from lightning_bytescheduler.scheduler.options import SchedulerOptions
from lightning_bytescheduler.tuning.sizes import SchedulerSizes


class _Asked(Exception):
    """Ends the preparation where sizes are asked for."""


class _Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)


@pytest.mark.parametrize(("clips", "in_shards"), [({}, False), ({"gradient_clip_val": 1.0}, True)])
def test_sizes_are_for_shards_where_a_norm_is_needed(
    clips: dict[str, Any], in_shards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: Any, **options: Any) -> None:
        raise _Asked(options)

    monkeypatch.setattr(scheduled_gradients, "agree_on_sizes", asked)
    monkeypatch.setattr(scheduled_gradients, "SchedulerGroups", SimpleNamespace(create=lambda **_: None))
    module = _Model()
    module.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **clips)
    strategy: Any = SimpleNamespace(
        lightning_module=module, root_device=torch.device("cpu"), precision_plugin=Precision(), _ddp_kwargs={}
    )
    gradients = ScheduledGradients(strategy, SchedulerOptions(), timeout=None, own_buckets=False)
    board: Any = None
    with pytest.raises(_Asked) as raised:
        gradients.prepare(board)
    expected = {"in_shards": in_shards, "ratio": 1.0, "architecture": "allreduce"}
    assert raised.value.args[0] == expected


def test_buckets_that_were_chosen_are_those_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*_: Any, agreed: AgreedSizes, **__: Any) -> None:
        raise _Asked(agreed.sizes)

    sizes = SchedulerSizes(partition_size=10, credit=20, bucket_bytes=1000)
    monkeypatch.setattr(scheduled_gradients, "agree_on_sizes", lambda *_, **__: AgreedSizes(sizes=sizes, link=None))
    monkeypatch.setattr(scheduled_gradients, "SchedulerGroups", SimpleNamespace(create=lambda **_: None))
    monkeypatch.setattr(fit_report, "SchedulerRuntime", made)
    module = _Model()
    module.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    strategy: Any = SimpleNamespace(
        lightning_module=module,
        root_device=torch.device("cpu"),
        precision_plugin=Precision(),
        _ddp_kwargs={"bucket_cap_mb": 2},
    )
    board: Any = None
    with pytest.raises(_Asked) as raised:
        ScheduledGradients(strategy, SchedulerOptions(), timeout=None, own_buckets=True).prepare(board)
    assert raised.value.args[0].bucket_bytes == 2 * 2**20
    assert strategy._ddp_kwargs == {"bucket_cap_mb": 2}


@pytest.mark.parametrize("what", ["an epoch", "a validation", "a checkpoint"])
def test_a_step_with_something_else_in_it_says_nothing_of_layers(what: str) -> None:
    strategy: Any = SimpleNamespace(lightning_module=None, precision_plugin=Precision())
    gradients = ScheduledGradients(strategy, SchedulerOptions(), timeout=None, own_buckets=False)
    gradients._compression = compression = Mock()
    compression.not_applied.return_value = ()
    if what == "an epoch":
        gradients.begin_epoch()
    elif what == "a validation":
        gradients.validate()
    else:
        gradients.all_left(lambda total: None, keep=False)
    compression.layers.disturb.assert_called_once_with()
