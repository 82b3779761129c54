"""What a worker has goes to where Lightning looks for it."""

from __future__ import annotations

import warnings
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import nn

from lightning_bytescheduler.diloco.worker_restart import put_back


class _Normed(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)


def test_buffers_are_put_back_beside_an_average_of_the_model() -> None:
    """``WeightAveraging`` puts its average in the model's place, and the model elsewhere."""
    module, averaging = _Normed(), WeightAveraging()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    averaging.setup(trainer, module, "fit")
    begin = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.norm(torch.randn(8, 3))
    averaging.on_train_batch_end(SimpleNamespace(global_step=1), module, None, None, 0)  # type: ignore[arg-type]
    now = deepcopy(module.state_dict())
    checkpoint: dict[str, Any] = {"state_dict": deepcopy(now), "loops": {"fit_loop": {}}}
    averaging.on_save_checkpoint(trainer, module, checkpoint)
    average = deepcopy(checkpoint["state_dict"])

    put_back({"loops": {}, "global_step": 4, "schedulers": [], "buffers": begin}, checkpoint)

    averaging.on_load_checkpoint(trainer, module, checkpoint)
    for name, value in module.state_dict().items():
        assert torch.equal(value, begin.get(name, now[name])), name
    assert averaging._average_model is not None
    for name, value in averaging._average_model.module.state_dict().items():
        assert torch.equal(value, average[name]), name
