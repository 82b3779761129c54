"""A loop of Fabric on two ranks: what happens at its end, or when one fails. What to do is JSON in ``sys.argv[1]``."""

from __future__ import annotations

import atexit
import json
import sys

import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_bytescheduler import ByteSchedulerFabricStrategy
from tests.faults.bounds import set_bounds


def make_model() -> nn.Module:
    """The same on all ranks, where they have the same seed."""
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))


def main(how: str) -> None:
    """Train five steps."""
    torch.manual_seed(0)
    set_bounds()
    model = make_model()
    seen: dict[str, int] = {}
    strategy = ByteSchedulerFabricStrategy(mode="overlapped", bucket_cap_mb=0.002, partition_size=400, credit=800)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)

    def report() -> None:
        after = sum(float(p.detach().double().sum()) for p in model.parameters())
        print(f"rank {fabric.global_rank} ends with {after!r}, deferred {seen['deferred']}", flush=True)

    if how == "ends":
        atexit.register(report)
    fabric.launch()
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    is_short = how.startswith("is short") and fabric.global_rank == 0
    for step in range(4 if is_short else 6 if how == "is short, and waits" else 5):
        fabric.backward(wrapped(torch.randn(4, 32)).square().mean())
        if how == f"fails in step {step}" and fabric.global_rank == 1:
            raise ValueError("sample 17 is broken")
        optimizer.step()
        optimizer.zero_grad()
    if how == "is short, and waits":
        fabric.barrier()
    seen["deferred"] = strategy.statistics.overlapped_steps if strategy.statistics else 0


if __name__ == "__main__":
    main(json.loads(sys.argv[1])["how"])
