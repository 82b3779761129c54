"""Trains on text that is fetched slice by slice from another machine, stops in mid-epoch, and goes on exactly there.

By itself it cuts Python's own library into slices and serves them over http on this machine:

    python -m examples.slices

With slices of your own, wherever they are (`http://`, `s3://`, `gs://`, a folder...):

    lightning-bytescheduler slices make 'texts/*.txt' data/slices
    lightning-bytescheduler slices serve data
    python -m examples.slices --url http://127.0.0.1:8000/slices
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_bytescheduler import SliceDataModule
from lightning_bytescheduler.slices.make import make_slices
from lightning_bytescheduler.slices.serve import SliceServer

CHARACTERS = 64  # of each line


def encode(line: str) -> Tensor:
    """A line as codes of characters, cut or filled up with blanks."""
    codes = line.encode("ascii", "replace")[:CHARACTERS].ljust(CHARACTERS)
    return torch.frombuffer(bytearray(codes), dtype=torch.uint8).long()


class NextCharacter(LightningModule):
    """Predicts each character from the three before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 32)
        self.layers = nn.Sequential(nn.Linear(3 * 32, 128), nn.ReLU(), nn.Linear(128, 128))
        self.samples = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.samples += len(batch)
        codes = self.embedding(batch)
        seen = torch.cat((codes[:, :-3], codes[:, 1:-2], codes[:, 2:-1]), dim=2)
        loss = nn.functional.cross_entropy(self.layers(seen).flatten(0, 1), batch[:, 3:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@contextmanager
def served_library(folder: Path, size: int) -> Iterator[str]:
    """Serve ``size`` bytes of Python's own library over http, in slices; yields the URL."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(source.read_bytes() for source in sources)[:size]
    (folder / "library.txt").write_bytes(text)
    made = make_slices(f"{folder}/library.txt", str(folder / "slices"), slice_bytes=max(size // 20, 1))
    with SliceServer(str(folder / "slices")) as server:
        print(f"{len(made)} slices of {sum(slice_.samples for slice_ in made)} lines at {server.url}")
        yield server.url


def train(url: str, cache: Path, *, batch_size: int, workers: int, **options: Any) -> tuple[Trainer, int]:
    """Fit, from a checkpoint if one is given; returns the Trainer, and how many lines were trained on."""
    data = SliceDataModule(
        url, batch_size=batch_size, num_workers=workers, shuffle="samples", transform=encode, cache=str(cache)
    )
    model = NextCharacter()
    resume = options.pop("resume", None)
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False, **options
    )
    trainer.fit(model, datamodule=data, ckpt_path=resume, weights_only=True)
    costs = data.statistics
    print(
        f"{model.samples} lines in batches of {batch_size}, loss {float(trainer.callback_metrics['loss']):.2f}; "
        f"{costs.bytes_fetched / 1e6:.1f} MB fetched, waited {costs.wait_seconds:.2f} s for batches"
    )
    return trainer, model.samples


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.slices", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", help="slices of text; those of Python's library by default")
    parser.add_argument("--size", type=int, default=1_000_000, help="bytes of the library")
    parser.add_argument("--steps", type=int, default=100, help="steps after which the first fit stops")
    parser.add_argument("--workers", type=int, default=0, help="processes that read")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if options.url is not None:
            return run(options.url, folder, options)
        with served_library(folder, options.size) as url:
            return run(url, folder, options)


def run(url: str, folder: Path, options: argparse.Namespace) -> int:
    trainer, before = train(
        url, folder / "cache", batch_size=32, workers=options.workers, max_steps=options.steps, max_epochs=-1
    )
    stopped = folder / "stopped.ckpt"
    trainer.save_checkpoint(stopped)
    print("Stopped in mid-epoch. Resumed with other batches, and a cache that is empty:")
    _, after = train(
        url, folder / "other-cache", batch_size=50, workers=options.workers, max_epochs=2, resume=str(stopped)
    )
    print(f"{before} + {after} = {before + after} lines: the epoch, each line once")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
