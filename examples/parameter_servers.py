"""Two processes train DDP's training; a third one, which needs no GPU and trains nothing, adds up their gradients.

From the repository's folder:

    python -m examples.parameter_servers --servers 1

It trains with DDP first, compares the weights, and shows what was pushed to which server. On one machine a server has
the same processor and no link of its own, so do not look for speed here: that takes machines on a network.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from examples.advised import make
from lightning_bytescheduler import ByteSchedulerStrategy


@contextmanager
def servers(count: int) -> Iterator[None]:
    """Run parameter servers beside this training; elsewhere you would start each on a machine of its own."""
    if "LOCAL_RANK" in os.environ:  # the second process of the training, which the first one has started
        yield
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    command = [sys.executable, "-m", "lightning_bytescheduler", "server"]
    started = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for server in started:
            server.terminate()
            server.wait()


def train(strategy: str | Strategy, steps: int) -> tuple[Trainer, dict[str, Tensor]]:
    """Train on two processes, and return the trainer and the weights."""
    seed_everything(1, verbose=False)
    model, data = make()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    return trainer, {name: value.clone() for name, value in model.state_dict().items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train twice, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--servers", type=int, default=1, help="processes that only add up (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="steps of each training (default: %(default)s)")
    options = parser.parse_args(arguments)
    # Parts of 100,000 parameters, so that there are some to be placed.
    strategy = ByteSchedulerStrategy(
        servers=options.servers,
        mode="overlapped",
        partition_size=100_000,
        credit=400_000,
    )
    with servers(options.servers):
        _, expected = train("ddp", options.steps)
        trainer, weights = train(strategy, options.steps)
        if trainer.is_global_zero:
            same = all(torch.equal(weights[name], expected[name]) for name in expected)
            print(f"The weights are {'those of DDP, bit for bit' if same else 'NOT those of DDP'}.")
            print(strategy.plan, flush=True)


if __name__ == "__main__":
    main()
