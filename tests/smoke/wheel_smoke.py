"""What an installed wheel has to do, with no source, no tests and no extras around it.

Run by `.ci/run` as a script, in an environment that holds the wheel and what its metadata asks for. Not
collected by pytest. Lightning starts this same script once more for the second process of the fit.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import StrategyRegistry
from torch.utils.data import DataLoader, TensorDataset

import lightning_bytescheduler

DISTRIBUTION = "lightning-bytescheduler"
# What the extras bring: a module of the package may need one of these, and nothing else that is not there.
NEEDS_EXTRA = {"ray"}


def check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise SystemExit(f"wheel smoke test: {otherwise}")


def check_installation() -> None:
    """The code comes from the environment, is complete, typed, and as new as its metadata says."""
    package = Path(lightning_bytescheduler.__file__).resolve().parent
    check(package.is_relative_to(Path(sys.prefix).resolve()), f"{package} is not in {sys.prefix}")
    check((package / "py.typed").is_file(), "py.typed is missing")
    version = metadata.version(DISTRIBUTION)
    own = lightning_bytescheduler.__version__
    check(own == version, f"__version__ is {own}, the metadata say {version}")
    missing = [name for name in lightning_bytescheduler.__all__ if not hasattr(lightning_bytescheduler, name)]
    check(not missing, f"__all__ promises {missing}, which the package does not have")
    for module in pkgutil.walk_packages(lightning_bytescheduler.__path__, "lightning_bytescheduler."):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            check(error.name in NEEDS_EXTRA, f"{module.name} needs {error.name}, which no metadata ask for")


def check_command() -> None:
    """The command is on the path of the environment and answers."""
    command = Path(sys.executable).parent / DISTRIBUTION
    for option, expected in (("--version", metadata.version(DISTRIBUTION)), ("--help", "usage")):
        done = subprocess.run([command, option], capture_output=True, text=True, timeout=120, check=False)
        answer = f"{DISTRIBUTION} {option} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        check(done.returncode == 0, answer)
        check(expected in done.stdout.lower(), f"no {expected!r} in what {answer}")


class Regression(LightningModule):
    """A model as small as can be, of more than one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        self.losses: list[float] = []

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layers(inputs), targets)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit(strategy: str) -> None:
    """Two processes train, the loss falls, and both end with the same weights."""
    torch.manual_seed(0)
    inputs = torch.randn(64, 4)
    data = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=8)
    model = Regression()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=10,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    check(trainer.global_step == 40, f"{strategy}: {trainer.global_step} steps instead of 40")
    first, last = model.losses[0], sum(model.losses[-4:]) / 4
    check(last < first / 2, f"{strategy}: the loss went from {first:.3f} to {last:.3f}")
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    gathered = [torch.empty_like(weights) for _ in range(2)]
    torch.distributed.all_gather(gathered, weights)
    check(torch.equal(*gathered), f"{strategy}: the ranks ended with different weights")
    if trainer.is_global_zero:
        print(f"{strategy}: loss {first:.3f} -> {last:.3f} in {trainer.global_step} steps on 2 processes")


def main() -> None:
    if "LOCAL_RANK" not in os.environ:  # once, not again in the process that Lightning starts
        check_installation()
        check_command()
    registered = StrategyRegistry.available_strategies()
    check("bytescheduler" in registered, "the strategy 'bytescheduler' is not registered")
    fit("bytescheduler")


if __name__ == "__main__":
    main()
