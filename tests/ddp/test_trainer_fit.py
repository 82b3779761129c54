"""What sizes are asked for, before the model is wrapped."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision

from lightning_bytescheduler.ddp import decided_fit, trainer_fit
from lightning_bytescheduler.ddp.compression_rules import CompressionRules
from lightning_bytescheduler.ddp.decided_fit import FitOptions, FitTuning
from lightning_bytescheduler.ddp.fit_report import Record
from lightning_bytescheduler.ddp.trainer_fit import TrainerFit
from lightning_bytescheduler.ddp.wire import AgreedSizes
from lightning_bytescheduler.exceptions import UnsupportedError
from lightning_bytescheduler.scheduler.options import SchedulerOptions
from lightning_bytescheduler.tuning.sizes import SchedulerSizes

_GROUPS = SimpleNamespace(create=lambda **_: SimpleNamespace(by_host=False))


class _Asked(Exception):
    """Ends the preparation where sizes are asked for."""


class _Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)


def _options(*, own_buckets: bool) -> FitOptions:
    scheduler = SchedulerOptions()
    tuning = FitTuning(scheduler, timeout=None)
    return FitOptions(scheduler=scheduler, timeout=None, own_buckets=own_buckets, tuning=tuning)


@pytest.mark.parametrize(("clips", "in_shards"), [({}, False), ({"gradient_clip_val": 1.0}, True)])
def test_sizes_are_for_shards_where_a_norm_is_needed(
    clips: dict[str, Any], in_shards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: Any, **options: Any) -> None:
        raise _Asked(options)

    monkeypatch.setattr(decided_fit, "agree_on_sizes", asked)
    monkeypatch.setattr(decided_fit, "SchedulerGroups", _GROUPS)
    module = _Model()
    module.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **clips)
    strategy: Any = SimpleNamespace(
        lightning_module=module, root_device=torch.device("cpu"), precision_plugin=Precision(), _ddp_kwargs={}
    )
    board: Any = SimpleNamespace(rank=0)
    with pytest.raises(_Asked) as raised:
        TrainerFit.begin(strategy, _options(own_buckets=False), board)
    expected = {"in_shards": in_shards, "ratio": 1.0, "architecture": "allreduce"}
    assert raised.value.args[0] == expected


def test_manual_optimization_is_not_compressed() -> None:
    """The next gradient may be that of another loss, as in a GAN, and would take along what was left of this one."""
    module = _Model()
    module.automatic_optimization = False
    strategy: Any = SimpleNamespace(lightning_module=module, root_device=torch.device("cpu"))
    options = replace(_options(own_buckets=False), rules=CompressionRules.resolve("int8"))
    board: Any = SimpleNamespace(rank=0)
    with pytest.raises(UnsupportedError, match=r"compression='int8.*' needs automatic optimization"):
        TrainerFit.begin(strategy, options, board)


def test_compression_that_makes_nothing_smaller_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def counter(rank: int) -> Any:
        raise _Asked(rank)

    wire = SimpleNamespace(
        record=Record(),
        route=SimpleNamespace(copies=None),
        groups=SimpleNamespace(rank=0),
        close=lambda *, failed: None,
    )
    monkeypatch.setattr(trainer_fit, "open_wire", lambda *_, **__: wire)
    module = _Model()
    module.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    strategy: Any = SimpleNamespace(lightning_module=module, root_device=torch.device("cpu"))
    options = replace(_options(own_buckets=False), rules=CompressionRules.resolve("int8"), counter=counter)
    board: Any = SimpleNamespace(rank=0)
    with pytest.warns(UserWarning, match="compression=.int8.* makes none of the gra"), pytest.raises(_Asked):
        TrainerFit.begin(strategy, options, board)


def test_buckets_that_were_chosen_are_those_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(groups: Any, board: Any, agreed: AgreedSizes, *_: Any, **__: Any) -> None:
        raise _Asked(agreed.sizes)

    sizes = SchedulerSizes(partition_size=10, credit=20, bucket_bytes=1000)
    monkeypatch.setattr(decided_fit, "agree_on_sizes", lambda *_, **__: AgreedSizes(sizes=sizes, link=None))
    monkeypatch.setattr(decided_fit, "SchedulerGroups", _GROUPS)
    monkeypatch.setattr(decided_fit, "Wire", made)
    module = _Model()
    module.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    strategy: Any = SimpleNamespace(
        lightning_module=module,
        root_device=torch.device("cpu"),
        precision_plugin=Precision(),
        _ddp_kwargs={"bucket_cap_mb": 2},
    )
    board: Any = SimpleNamespace(rank=0)
    with pytest.raises(_Asked) as raised:
        TrainerFit.begin(strategy, _options(own_buckets=True), board)
    assert raised.value.args[0].bucket_bytes == 2 * 2**20
    assert strategy._ddp_kwargs == {"bucket_cap_mb": 2}
