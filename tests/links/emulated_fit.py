"""Fits an emulated accelerator's model as one rank on a shaped link; run by ``test_trace_on_link.py``.

A layer sleeps for its compute time, with real gradients over the real network: the processor stays free, as a GPU would
leave it (DESIGN 6).
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn

from lightning_bytescheduler import ByteSchedulerStrategy

LAYERS = 12
PARAMETERS = 131_072
FIRST_STEP, LAST_STEP = 4, 16


class _Emulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, seconds: float) -> Any:
        ctx.gradient, ctx.seconds = gradient, seconds
        first = weight[0]  # a layer reads its weights before it computes: here its gate opens
        time.sleep(seconds)
        return x + first

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return outputs[0], ctx.gradient, None, None


class EmulatedLayer(nn.Module):
    def __init__(self, parameters: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(parameters))
        self.gradient = torch.full((parameters,), 1e-3)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Emulated.apply(x, self.weight, self.gradient, self.seconds)


class EmulatedModel(L.LightningModule):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(EmulatedLayer(PARAMETERS, seconds) for _ in range(LAYERS)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layers(batch[0].requires_grad_()).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class CountBytes(L.Callback):
    """Reads the interface's counter at two steps at which nothing is in flight."""

    def __init__(self) -> None:
        self.sent: dict[int, int] = {}

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step in (FIRST_STEP, LAST_STEP):
            trainer.strategy.flush()
            self.sent[trainer.global_step] = _sent_bytes("eth0")


def _sent_bytes(interface: str) -> int:
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise LookupError(f"no interface {interface}")


def main(folder: str, seconds: str) -> None:
    torch.set_num_threads(1)
    counter = CountBytes()
    strategy = ByteSchedulerStrategy(timeline=f"{folder}/trace.json", mode="overlapped")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy=strategy,
        max_steps=LAST_STEP + 2,
        callbacks=[counter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = torch.utils.data.TensorDataset(torch.zeros(64, 4))
    trainer.fit(EmulatedModel(float(seconds)), torch.utils.data.DataLoader(rows))
    assert strategy.statistics is not None
    result = {
        "interface": counter.sent[LAST_STEP] - counter.sent[FIRST_STEP],
        "deferred_share": strategy.statistics.deferred_share,
    }
    Path(folder, f"rank{trainer.global_rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
