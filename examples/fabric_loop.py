"""A loop of one's own with Fabric, on two processes: train, validate, save; then the same with DDP, and compare.

From the repository's folder:

    python -m examples.fabric_loop
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bytescheduler import ByteSchedulerFabricStrategy


def make_data(samples: int) -> TensorDataset:
    """Points in the plane, and in which of three rings they are."""
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(samples, 2, generator=generator)
    return TensorDataset(points, points.norm(dim=1).clamp(max=2.9).long())


def train(fabric: Fabric, epochs: int, checkpoint: Path) -> dict[str, Tensor]:
    """Train, and return the weights."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(2, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 3)
    )
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer = fabric.setup(model, optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    batches = fabric.setup_dataloaders(DataLoader(make_data(1024), batch_size=32, shuffle=True))
    held_out = fabric.setup_dataloaders(DataLoader(make_data(256), batch_size=128))
    for epoch in range(epochs):
        model.train()
        for points, rings in batches:
            loss = nn.functional.cross_entropy(model(points), rings)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, clip_val=0.5)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        model.eval()
        with torch.no_grad():
            right = [(model(points).argmax(dim=1) == rings).float().mean() for points, rings in held_out]
        accuracy = fabric.all_reduce(torch.stack(right).mean())
        fabric.print(f"epoch {epoch}: {accuracy:.1%} right")
    fabric.save(checkpoint, {"model": model, "optimizer": optimizer})
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def main() -> None:
    """Train twice, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--epochs", type=int, default=3)
    epochs = parser.parse_args().epochs
    torch.set_num_threads(1)
    ours = ByteSchedulerFabricStrategy(mode="overlapped")
    with tempfile.TemporaryDirectory() as folder:
        weights = []
        for strategy in (ours, "ddp"):
            fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
            fabric.launch()
            fabric.seed_everything(2, verbose=False)
            weights.append(train(fabric, epochs, Path(folder, "state.ckpt")))
    fabric.print(ours.plan)
    same = all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    fabric.print(f"the weights are {'DDP' if same else 'not DDP'}'s, bit for bit")


if __name__ == "__main__":
    main()
