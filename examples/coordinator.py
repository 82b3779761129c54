"""Workers that come and go train one model on real text, through a coordinator. In three terminals:

    lightning-bytescheduler coordinator --samples-per-round 320 --outer-steps 20 --wire-dtype bf16
    python -m examples.coordinator
    python -m examples.coordinator --slowness 3

The coordinator says where it listens; these commands take its default address. Each worker is a Trainer of its own that
trains a small GPT on the Python standard library's source. The second takes three times as long for a step, as an older
machine would; here it sleeps, and takes fewer steps. Start more of them, or end one with Ctrl-C and start it again: the
others go on. One of them leads: it validates and saves.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Subset

from examples.demo.model import CharacterGPT
from examples.demo.size import SMALL, TINY
from examples.demo.text import Windows, training_and_validation_text
from lightning_bytescheduler import DiLoCoStrategy

BATCH_SIZE = 8
SCHEDULE_STEPS = 1000  # of the learning rate: how many a worker will take is not known


class Slowly(L.Callback):
    """Makes each step take ``slowness`` times as long."""

    def __init__(self, slowness: float) -> None:
        self.slowness = slowness
        self.began = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self.began = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep((self.slowness - 1) * (time.perf_counter() - self.began))


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.coordinator", description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:7077", help="URL of the coordinator (default: %(default)s)")
    parser.add_argument("--ca", help="file of the authority that signed its certificate")
    parser.add_argument("--token-file", help="file with its token")
    parser.add_argument("--name", help="name of this worker in the run")
    parser.add_argument(
        "--slowness", type=float, default=1.0, help="how many times slower this worker is (default: %(default)s)"
    )
    parser.add_argument("--tiny", action="store_true", help="a model to try the example itself with")
    parser.add_argument("--output", type=Path, default=Path("coordinator_output"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    asked = options(arguments)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    torch.set_num_threads(1)
    size = TINY if asked.tiny else SMALL
    training, validation = (Windows(text, size.context) for text in training_and_validation_text())
    coordinator = {"url": asked.url, "authority": asked.ca, "token_file": asked.token_file, "name": asked.name}
    strategy = DiLoCoStrategy(coordinator=coordinator)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_epochs=-1,  # until the coordinator's rounds are over
        val_check_interval=50,
        log_every_n_steps=5,
        callbacks=[Slowly(asked.slowness), ModelCheckpoint(asked.output, monitor="validation_loss")],
        default_root_dir=asked.output,
        logger=False,
        enable_model_summary=False,
    )
    trainer.fit(
        CharacterGPT(size, steps=SCHEDULE_STEPS),
        DataLoader(training, batch_size=BATCH_SIZE, shuffle=True),
        DataLoader(Subset(validation, range(16 * BATCH_SIZE)), batch_size=BATCH_SIZE),
    )
    statistics = strategy.statistics
    if statistics is not None:
        print(f"\n{statistics.steps} steps, {statistics.samples} windows, in {statistics.rounds} rounds")
    if "validation_loss" in trainer.callback_metrics:
        print(f"led the run: validation loss {float(trainer.callback_metrics['validation_loss']):.3f}")


if __name__ == "__main__":
    main()
