"""Does compression cost loss? A GPT on real text, exact and compressed, at equal steps and from equal seeds.

Two ranks train over loopback: what is asked is not how long steps take (``python -m benchmarks networks --contenders
"bytescheduler, int8" ...`` measures that), but what the validation loss is at the end, and how many bytes were sent.
Losses are beside that of the exact training of the same seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import lightning as L
from torch.utils.data import DataLoader

from benchmarks.contenders import PowerSGDHook
from benchmarks.models import validation_windows
from benchmarks.rank import fit
from benchmarks.ranks import Job, Place, in_turns
from benchmarks.record import Results, record
from examples.demo.model import CharacterGPT
from examples.demo.size import GPTSize
from examples.demo.text import Windows, training_and_validation_text
from lightning_bytescheduler import ByteSchedulerStrategy

__all__ = ["add_options", "measure", "train"]

_SIZE = GPTSize(context=48, width=96, heads=4, layers=3)
_EXACT = "exact"
_TORCHS = "torch's powersgd"


def train(job: Job) -> Job:
    """One training, on this rank."""
    L.seed_everything(job["seed"], verbose=False)
    training, validation = (Windows(text, _SIZE.context) for text in training_and_validation_text())
    wire = None if job["wire"] == _EXACT else job["wire"]
    strategy: Any = PowerSGDHook() if wire == _TORCHS else ByteSchedulerStrategy(mode="overlapped", compression=wire)
    trainer = fit(
        CharacterGPT(_SIZE, job["steps"]),
        strategy,
        DataLoader(training, batch_size=16, shuffle=True),
        DataLoader(validation_windows(validation, 256), batch_size=16),
        max_steps=job["steps"],
        val_check_interval=job["steps"],
        check_val_every_n_epoch=None,
    )
    known = getattr(strategy, "statistics", None)
    (loss,) = (float(value) for name, value in trainer.callback_metrics.items() if "val" in name)
    sent = {} if known is None else {"sent [MB]": known.bytes_sent / 1e6, "times fewer": known.compression_ratio}
    return {"loss": loss, **sent}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--wires", nargs="+", default=["int8", "int4"], metavar="SPEC", help=f"also {_TORCHS!r}")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=200)


def measure(options: argparse.Namespace) -> Iterator[Results]:
    """Train what was asked for.

    Raises:
        MeasurementFailed: If a rank fails.
    """
    wires = [_EXACT, *options.wires]
    jobs = [{"seed": seed, "wire": wire, "steps": options.steps} for seed in options.seeds for wire in wires]
    answers = [answers[0] for answers in in_turns(Place(ranks=2, each=2), train, jobs, title="trainings")]
    found = {wire: [one for job, one in zip(jobs, answers, strict=True) if job["wire"] == wire] for wire in wires}
    exact = [one["loss"] for one in found[_EXACT]]
    setting = {"seeds": options.seeds, "steps": options.steps}
    records = []
    for wire, some in found.items():
        values = {name: [one[name] for one in some] for name in some[0]}
        over = [one["loss"] / reference for one, reference in zip(some, exact, strict=True)]
        records.append(record("gradient_compression", wire, setting, values, {"loss / exact": over}))
    yield f"a GPT after {options.steps} steps, {len(options.seeds)} seeds", records
