"""Measures steps on one GPU: ``python -m benchmarks.gpu``, where one is at hand (minutes).

Two ranks share the GPU over gloo, and one rank is alone on NCCL. Each trains a ResNet-50 or a GPT of 124 M parameters
under ``ddp``, ``bytescheduler`` as it is by default, and ``mode="overlapped"``, with the same seed and data. A line for
each gives the median of the last steps, over that of ``ddp``, and whether the weights are the same, bit for bit.
Models are torchvision's and transformers'.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.measure import MeasurementFailed
from lightning_bytescheduler import ByteSchedulerStrategy
from lightning_bytescheduler.lightning_api import DDPStrategy

_CONTENDERS = ("ddp", "bytescheduler", "overlapped")
_SETTLED = 15  # steps before those that count
_WORLDS = {"gloo": 2, "nccl": 1}


class _Samples(Dataset[Tensor]):
    def __init__(self, network: str, count: int) -> None:
        self.network, self.count = network, count
        self.image = torch.randn(3, 224, 224, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        # Cheap to make, so that no step waits for it.
        if self.network == "gpt":
            return (torch.arange(256) * (2 * index + 1)) % 50257
        return self.image * (1.0 + index % 16)


class _Timed(LightningModule):
    def __init__(self, network: str) -> None:
        super().__init__()
        self.network = network
        self.steps: list[float] = []
        self._began = 0.0
        if network == "gpt":
            from transformers import GPT2Config, GPT2LMHeadModel

            self.model: nn.Module = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
        else:
            from torchvision.models import resnet50

            self.model = resnet50()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.network == "gpt":
            loss: Tensor = self.model(input_ids=batch, labels=batch).loss
            return loss
        out = self.model(batch)
        return nn.functional.cross_entropy(out, torch.arange(len(out), device=out.device))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx >= _SETTLED and not self._began:
            torch.cuda.synchronize()
            self._began = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        if self._began:
            self.steps.append(now - self._began)
            self._began = now


def _strategy(contender: str, backend: str) -> Any:
    if contender == "ddp":
        return DDPStrategy(process_group_backend=backend)
    return ByteSchedulerStrategy(
        process_group_backend=backend, mode="overlapped" if contender == "overlapped" else "auto"
    )


def _train(contender: str, network: str, backend: str, steps: int) -> None:
    """One rank's training; rank 0 prints its times and the digest of its weights."""
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    seed_everything(0)
    module = _Timed(network)
    batch_size = 8 if network == "gpt" else 32
    world = _WORLDS[backend]
    trainer = Trainer(
        accelerator="gpu",
        devices=[0],
        num_nodes=world,
        strategy=_strategy(contender, backend),
        precision="bf16-mixed",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(_Samples(network, steps * batch_size * world), batch_size, num_workers=4))
    torch.cuda.synchronize()
    digest = hashlib.sha256()
    for value in module.state_dict().values():
        digest.update(value.cpu().contiguous().view(torch.uint8).numpy().tobytes() if value.ndim else b"")
    if trainer.is_global_zero:
        print("FOUND", json.dumps({"steps": module.steps, "weights": digest.hexdigest()}), flush=True)


def _measure(contender: str, network: str, backend: str, steps: int) -> dict[str, Any]:
    world = _WORLDS[backend]
    port = str(29600 + os.getpid() % 300)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu", "--rank", contender, network, backend, "--steps", str(steps)],
            env={
                **os.environ,
                "NODE_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "2",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [rank.communicate(timeout=300.0)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    lines = [line for line in said[0].splitlines() if line.startswith("FOUND ")]
    if not lines:
        raise MeasurementFailed(f"{contender}, {network}, {backend}: a rank failed:\n{said[0]}")
    found: dict[str, Any] = json.loads(lines[0].partition(" ")[2])
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--steps", type=int, default=60, help="of each training (default: %(default)s)")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank:
        contender, network, backend = options.rank
        _train(contender, network, backend, options.steps)
        return
    if not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device here.")
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}", flush=True)
    for backend, network in (("gloo", "resnet50"), ("gloo", "gpt"), ("nccl", "resnet50"), ("nccl", "gpt")):
        found = {one: _measure(one, network, backend, options.steps) for one in _CONTENDERS}
        ddp = statistics.median(found["ddp"]["steps"])
        for contender, one in found.items():
            median = statistics.median(one["steps"])
            same = "the same weights" if one["weights"] == found["ddp"]["weights"] else "other weights"
            print(
                f"{backend}, {_WORLDS[backend]} ranks, {network}, {contender}: {1000 * median:.1f} ms, "
                f"{median / ddp:.3f} of ddp's, {same}",
                flush=True,
            )


if __name__ == "__main__":
    main()
