"""Does compression cost loss? A GPT on real text, exact and compressed, at equal steps and from equal seeds.

``python -m benchmarks.gradient_compression --steps 200 --seeds 1 2 3`` trains on two ranks over loopback: what is asked
is not how long steps take (``python -m benchmarks --contenders "bytescheduler, int8" ...`` measures that), but what the
validation loss is at the end, and how many bytes were sent. A line for each training, and the loss relative to that of
the exact training of the same seed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Subset

from benchmarks.contenders import PowerSGDHook
from benchmarks.measure import free_port, ranks_of
from examples.demo.model import CharacterGPT
from examples.demo.size import GPTSize
from examples.demo.text import Windows, training_and_validation_text
from lightning_bytescheduler import ByteSchedulerStrategy

__all__: list[str] = []

_SIZE = GPTSize(context=48, width=96, heads=4, layers=3)
_VALIDATION_WINDOWS = 256
_RANKS = 2
_EXACT = "exact"
_TORCHS = "torch's powersgd"


def train(asked: dict[str, Any]) -> dict[str, Any]:
    """One training, on this rank."""
    L.seed_everything(asked["seed"], verbose=False)
    training, validation = (Windows(text, _SIZE.context) for text in training_and_validation_text())
    wire = None if asked["wire"] == _EXACT else asked["wire"]
    strategy: Any = PowerSGDHook() if wire == _TORCHS else ByteSchedulerStrategy(mode="overlapped", compression=wire)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=_RANKS,
        strategy=strategy,
        max_steps=asked["steps"],
        max_epochs=-1,
        val_check_interval=asked["steps"],
        check_val_every_n_epoch=None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    apart = max(len(validation) // _VALIDATION_WINDOWS, 1)
    trainer.fit(
        CharacterGPT(_SIZE, asked["steps"]),
        DataLoader(training, batch_size=16, shuffle=True),
        DataLoader(Subset(validation, range(0, apart * _VALIDATION_WINDOWS, apart)), batch_size=16),
    )
    statistics = getattr(strategy, "statistics", None)
    losses = {name: float(value) for name, value in trainer.callback_metrics.items() if "val" in name}
    return {
        **asked,
        "losses": losses,
        "megabytes": 0.0 if statistics is None else statistics.bytes_sent / 1e6,
        "ratio": 1.0 if statistics is None else statistics.compression_ratio,
    }


def _rank(specification: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for asked in json.loads(specification):
        os.environ["MASTER_PORT"] = str(asked.pop("port"))
        result = train(asked)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
        print(json.dumps(result), flush=True)


def main() -> int:
    """Train what was asked for; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gradient_compression", description=__doc__)
    parser.add_argument("--wires", nargs="+", default=["int8", "int4"], metavar="SPEC", help=f"also {_TORCHS!r}")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, help="a file for the results, as JSON")
    options = parser.parse_args()
    jobs = [
        {"seed": seed, "wire": wire, "steps": options.steps}
        for seed in options.seeds
        for wire in (_EXACT, *options.wires)
    ]
    for job in jobs:
        job["port"] = free_port()
    command = [sys.executable, "-m", "benchmarks.gradient_compression", "--rank", json.dumps(jobs)]
    results: list[dict[str, Any]] = []
    exact: dict[int, float] = {}
    with ranks_of(command, _RANKS, None) as (ranks, _):
        for line in ranks[0].stdout or ():
            if not line.startswith(b"{"):
                continue
            result = json.loads(line)
            results.append(result)
            (loss,) = result["losses"].values()
            exact.setdefault(result["seed"], loss)
            off = loss / exact[result["seed"]] - 1
            print(
                f"seed {result['seed']}  {result['wire']:>12}  loss {loss:.4f} ({off:+.2%})  "
                f"{result['megabytes']:8.1f} MB ({result['ratio']:.2f} times fewer)",
                flush=True,
            )
            if options.out is not None:
                options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        codes = [rank.wait() for rank in ranks]
    return int(any(codes))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        _rank(sys.argv[2])
    else:
        raise SystemExit(main())
