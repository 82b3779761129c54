"""Measures steps on one GPU, where one is at hand.

Two ranks share the GPU over gloo, and one rank is alone on NCCL. Each trains a ResNet-50 or a GPT of 124 M parameters
under ``ddp``, ``bytescheduler`` as it is by default, and ``mode="overlapped"``, with the same seed and data. Steps are
those after the first 15; weights count as ``ddp``'s if they are equal bit for bit. Models are torchvision's and
transformers'.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.contenders import contender
from benchmarks.rank import Moments, fit
from benchmarks.ranks import Job, MeasurementFailed, Place, in_turns
from benchmarks.record import Results, record

_CONTENDERS = ("ddp", "bytescheduler", "bytescheduler, overlapped")
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


def train(job: Job) -> Job:
    """One rank's training: its steps, and the digest of its weights."""
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    seed_everything(0)
    network, world = job["network"], _WORLDS[job["backend"]]
    module = _Timed(network)
    batch_size = 8 if network == "gpt" else 32
    data = DataLoader(_Samples(network, job["steps"] * batch_size * world), batch_size, num_workers=4)
    # Ranks share the one device.
    place: dict[str, Any] = {"accelerator": "gpu", "devices": [0], "num_nodes": world}
    strategy = contender(job["contender"]).strategy(process_group_backend=job["backend"])
    moments = Moments()
    fit(module, strategy, data, callbacks=[moments], precision="bf16-mixed", max_steps=job["steps"], **place)
    torch.cuda.synchronize()
    digest = hashlib.sha256()
    for value in module.state_dict().values():
        digest.update(value.cpu().contiguous().view(torch.uint8).numpy().tobytes() if value.ndim else b"")
    return {"steps": moments.steps(_SETTLED), "weights": digest.hexdigest()}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=60, help="steps of each training (default: %(default)s)")


def measure(options: argparse.Namespace) -> Iterator[Results]:
    """Measure all contenders, each in processes of its own."""
    if not torch.cuda.is_available():
        raise MeasurementFailed("There is no CUDA device here.")
    device = torch.cuda.get_device_name(0)
    for backend, network in (("gloo", "resnet50"), ("gloo", "gpt"), ("nccl", "resnet50"), ("nccl", "gpt")):
        setting = {"network": network, "backend": backend, "ranks": _WORLDS[backend], "device": device}
        place = Place(ranks=_WORLDS[backend], threads=2)
        found = {}
        for name in _CONTENDERS:
            job = {"contender": name, "network": network, "backend": backend, "steps": options.steps}
            ((found[name], *_),) = in_turns(place, train, [job], title=f"{network}, {name}", timeout=300.0)
        ddp = found["ddp"]
        records = []
        for name, one in found.items():
            same = {"same weights": float(one["weights"] == ddp["weights"])}
            steps = [1e3 * seconds for seconds in one["steps"]]
            faster = statistics.median(one["steps"]) / statistics.median(ddp["steps"])
            records.append(record("gpu", name, setting, {"step [ms]": steps, **same}, {"/ ddp": faster}))
        yield f"{network}, {backend}, {_WORLDS[backend]} ranks, {device}", records
