"""What slices cost, and what others do.

``loaders``: epochs of slices, litdata and MosaicML streaming on the same local data, with 0, 2 and 4 processes that
read, in turns, see ``slice_loaders.py``. What is not installed is left out.

``fit``: a fit of two epochs whose steps take a fixed time, on an emulated source: each request takes a round trip, all
requests together the bandwidth, which is twice what is consumed. The cache is smaller than the data.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer

from benchmarks.record import Results, record
from benchmarks.slice_loaders import compare_loaders
from lightning_bytescheduler import SliceDataModule
from lightning_bytescheduler.slices.make import make_slices
from lightning_bytescheduler.slices.slice import Slice
from lightning_bytescheduler.slices.source import SliceSource, open_source

__all__ = ["add_options", "fit_stall", "measure"]


class DistantSource(SliceSource):
    """A source behind a long way of limited bandwidth, which all requests share."""

    way: float
    bandwidth: float
    link: threading.Lock
    free_at: float

    @classmethod
    def behind(cls, source: SliceSource, *, seconds: float, bandwidth: float) -> DistantSource:
        """Put ``source`` at a round trip of ``seconds``, and ``bandwidth`` in bytes a second."""
        self = cls.__new__(cls)
        self.__dict__.update(source.__dict__)
        self.way, self.bandwidth = seconds, bandwidth
        self.link, self.free_at = threading.Lock(), 0.0
        return self

    def read(self, slice_: Slice, start: int, stop: int) -> bytes:
        content = super().read(slice_, start, stop)
        with self.link:
            begins = max(time.monotonic() + self.way, self.free_at)
            self.free_at = begins + len(content) / self.bandwidth
        time.sleep(max(self.free_at - time.monotonic(), 0.0))
        return content


class _TimedSteps(LightningModule):
    """Steps that take a fixed time, as on an accelerator."""

    def __init__(self, seconds_per_row: float) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seconds_per_row = seconds_per_row
        self.waited: list[float] = []  # until each step
        self.began = self.stalled = 0.0
        self.first_slice = self.rows = 0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.waited.append(self.trainer.datamodule.statistics.wait_seconds)  # type: ignore[attr-defined]
        self.rows += len(batch)
        if not self.began and self.rows > self.first_slice:
            self.began, self.waited = time.perf_counter(), self.waited[-1:]
            self.stalled = self.trainer.datamodule.statistics.stall_seconds  # type: ignore[attr-defined]
        time.sleep(self.seconds_per_row * len(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_stall(
    *, slices: int, slice_bytes: int, seconds_per_slice: float, latency: float = 0.05, workers: int = 0
) -> dict[str, float]:
    """Share of the time that a fit of two epochs waits for batches after the first slice."""
    columns = 256
    rows = slices * slice_bytes // (4 * columns)
    memory = fsspec.filesystem("memory")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.npy"
        np.save(path, np.zeros((rows, columns), dtype=np.float32))
        make_slices(str(path), "memory://stall", slice_bytes=slice_bytes + 4096, overwrite=True)
        bandwidth = 2 * slice_bytes / seconds_per_slice
        data = SliceDataModule(
            "memory://stall",
            batch_size=256,
            num_workers=workers,
            cache={"dir": f"{folder}/cache", "bytes": max(slices // 2, 4) * (slice_bytes + 100_000)},
        )
        source = DistantSource.behind(open_source("memory://stall"), seconds=latency, bandwidth=bandwidth)
        data._sources["train"] = source
        model = _TimedSteps(seconds_per_slice / source.slices[0].samples)
        model.first_slice = source.slices[0].samples
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, datamodule=data)
        total = time.perf_counter() - model.began
        counted = data.statistics
        memory.rm("/stall", recursive=True)
    return {
        "first slice [s]": model.waited[0],
        "after it [s]": total,
        "waited for batches after it [%]": 100 * (model.waited[-1] - model.waited[0]) / total,
        "of that, for bytes [%]": 100 * (counted.stall_seconds - model.stalled) / total,
        "hits": counted.cache_hits,
        "misses": counted.cache_misses,
        "prefetched": counted.prefetched,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("what", nargs="*", choices=("loaders", "fit"), default=["loaders", "fit"])
    parser.add_argument("--samples", type=int, default=40_000, help="of an epoch of loaders (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="epochs of loaders that count (default: %(default)s)")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2, 4], help="processes that read for loaders")
    parser.add_argument("--slices", type=int, default=16, help="of the fit (default: %(default)s)")
    parser.add_argument("--slice-mb", type=float, default=4.0, help="of the fit (default: %(default)g)")
    parser.add_argument("--seconds-per-slice", type=float, default=0.4, help="of the fit (default: %(default)g)")
    parser.add_argument("--fit-workers", type=int, default=0, help="processes that read for the fit")


def measure(options: argparse.Namespace) -> Iterator[Results]:
    """Measure what was asked for.

    Raises:
        MeasurementFailed: If a loader does not answer.
    """
    if "loaders" in options.what:
        yield (
            f"an epoch of {options.samples:,} blocks of 512 tokens",
            compare_loaders(samples=options.samples, workers=options.workers, rounds=options.rounds),
        )
    if "fit" in options.what:
        distant: dict[str, Any] = {
            "slices": options.slices,
            "slice_bytes": int(options.slice_mb * 1024 * 1024),
            "seconds_per_slice": options.seconds_per_slice,
            "workers": options.fit_workers,
        }
        yield "a fit with a distant source", [record("slices fit", "two epochs", distant, fit_stall(**distant))]
