"""Does compression cost loss? A GPT on real text, exact and compressed, at equal steps and from equal seeds.

Two ranks train over loopback. This measures the validation loss at the end and the bytes sent, not the time of steps
(``python -m benchmarks networks --contenders "bytescheduler, int8" ...`` measures that). Each loss is compared with
that of the exact training of the same seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import lightning as L
from torch.utils.data import DataLoader

from benchmarks.contenders import contender
from benchmarks.models import validation_windows
from benchmarks.rank import fit
from benchmarks.ranks import Job, Place, in_turns
from benchmarks.record import Results, record
from examples.demo.model import CharacterGPT
from examples.demo.size import GPTSize
from examples.demo.text import Windows, training_and_validation_text

_SIZE = GPTSize(context=48, width=96, heads=4, layers=3)
_EXACT = "bytescheduler, overlapped"


def train(job: Job) -> Job:
    """One training, on this rank."""
    L.seed_everything(job["seed"], verbose=False)
    training, validation = (Windows(text, _SIZE.context) for text in training_and_validation_text())
    strategy = contender(job["contender"]).strategy()
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
    compressed = ["bytescheduler, int8", "bytescheduler, int4"]
    parser.add_argument("--contenders", nargs="+", default=compressed, metavar="NAME", help="also 'ddp, powersgd'")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=200)


def measure(options: argparse.Namespace) -> Iterator[Results]:
    """Train each contender with each seed."""
    names = [_EXACT, *options.contenders]
    jobs = [{"seed": seed, "contender": name, "steps": options.steps} for seed in options.seeds for name in names]
    answers = [answers[0] for answers in in_turns(Place(ranks=2, each=2), train, jobs, title="trainings")]
    found = {name: [one for job, one in zip(jobs, answers, strict=True) if job["contender"] == name] for name in names}
    exact = [one["loss"] for one in found[_EXACT]]
    setting = {"seeds": options.seeds, "steps": options.steps}
    records = []
    for name, some in found.items():
        values = {column: [one[column] for one in some] for column in some[0]}
        over = [one["loss"] / reference for one, reference in zip(some, exact, strict=True)]
        records.append(record("gradient_compression", name, setting, values, {"loss / exact": over}))
    yield f"a GPT after {options.steps} steps, {len(options.seeds)} seeds", records
