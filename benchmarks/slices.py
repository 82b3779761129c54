"""What slices cost: ``python -m benchmarks.slices``.

- Throughput of local slices against a plain ``DataLoader`` over the same rows, mapped into memory; the best of rounds
  that take turns.
- Waiting with an emulated source: each request takes a round trip, all requests together the bandwidth, which is twice
  what is consumed. The cache is smaller than the data, which is read twice.
- Both through ``SliceDataModule``: its loader against the ``DataLoader``, and a fit whose steps take a fixed time.
- With ``--only loaders``: slices, litdata and MosaicML streaming on the same local data, with 0, 2 and 4 processes that
  read, see ``slice_loaders``.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset, IterableDataset

from benchmarks.slice_loaders import SHAPES, compare_loaders
from lightning_bytescheduler import SliceDataModule
from lightning_bytescheduler.slices.make import make_slices
from lightning_bytescheduler.slices.options import StoreOptions
from lightning_bytescheduler.slices.slice import Slice
from lightning_bytescheduler.slices.source import SliceSource, open_source
from lightning_bytescheduler.slices.store import SliceStore


class _MappedRows(Dataset):
    def __init__(self, path: Path) -> None:
        # As a plain array, whose rows are made twice as fast as those of a memmap.
        self.rows = np.asarray(np.load(path, mmap_mode="c"))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class _SlicedRows(IterableDataset):
    def __init__(self, folder: Path) -> None:
        self.store = SliceStore(open_source(str(folder)))

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(map(self.store.samples, self.store.source.slices))


def throughput(*, rows: int, columns: int, batch_size: int = 64, rounds: int = 5) -> dict[str, float]:
    """Rows a second from mapped memory and from slices, each the median of the rounds, and the ratios."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.npy"
        np.save(path, np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32))
        make_slices(str(path), f"{folder}/slices", slice_bytes=16 * 1024 * 1024)
        data = SliceDataModule(f"{folder}/slices", batch_size=batch_size, shuffle=False)
        data.setup("fit")
        loaders: dict[str, Any] = {
            "mapped": DataLoader(_MappedRows(path), batch_size=batch_size),
            "slices": DataLoader(_SlicedRows(Path(folder) / "slices"), batch_size=batch_size),
            "data module": data.train_dataloader(),
        }
        seconds: dict[str, list[float]] = {name: [] for name in loaders}
        for _ in range(rounds + 1):
            for name, loader in loaders.items():
                started = time.perf_counter()
                seen = sum(len(batch) for batch in loader)
                seconds[name].append(time.perf_counter() - started)
                if seen != rows:
                    raise RuntimeError(f"{name} gave {seen} of {rows} rows.")
    rates = {name: rows / statistics.median(times[1:]) for name, times in seconds.items()}
    ratios = {f"{name} / mapped": rates[name] / rates["mapped"] for name in ("slices", "data module")}
    return {**rates, **ratios}


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


def stall(*, slices: int, slice_bytes: int, seconds_per_slice: float, latency: float = 0.05) -> dict[str, float]:
    """Share of the time that training waits for data after the first slice, over two epochs."""
    import fsspec

    columns = 256
    rows = slices * slice_bytes // (4 * columns)
    memory = fsspec.filesystem("memory")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.npy"
        np.save(path, np.zeros((rows, columns), dtype=np.float32))
        make_slices(str(path), "memory://stall", slice_bytes=slice_bytes + 4096, overwrite=True)
        bandwidth = 2 * slice_bytes / seconds_per_slice
        source = DistantSource.behind(open_source("memory://stall"), seconds=latency, bandwidth=bandwidth)
        cache = {"dir": f"{folder}/cache", "bytes": max(slices // 2, 4) * (slice_bytes + 100_000)}
        options = StoreOptions(cache=cache)
        order = [*source.slices, *source.slices]
        waited = first = stalled = 0.0
        started = began = time.perf_counter()
        with SliceStore(source, options) as store:
            for number, slice_ in enumerate(order):
                store.prefetch(order[number + 1 : number + 1 + store.depth])
                samples = store.samples(slice_)
                for batch in range(0, slice_.samples, 64):
                    asked = time.perf_counter()
                    for _ in range(min(64, slice_.samples - batch)):
                        next(samples)
                    waited += time.perf_counter() - asked
                    time.sleep(seconds_per_slice * min(64, slice_.samples - batch) / slice_.samples)
                asked = time.perf_counter()
                for _ in samples:
                    raise RuntimeError("There are more samples than counted.")
                waited += time.perf_counter() - asked
                if number == 0:
                    first, waited, began = waited, 0.0, time.perf_counter()
                    stalled = store.statistics.stall_seconds
            counted = store.statistics
        total = time.perf_counter() - began
        memory.rm("/stall", recursive=True)
    return {
        "first slice [s]": first,
        "after it [s]": total,
        "spent on reading after it [%]": 100 * waited / total,  # waiting, and the work of making samples
        "waited after it [%]": 100 * (counted.stall_seconds - stalled) / total,
        "hits": counted.cache_hits,
        "misses": counted.cache_misses,
        "prefetched": counted.prefetched,
        "all [s]": time.perf_counter() - started,
    }


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
    import fsspec

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
        "workers": workers,
        "first slice [s]": model.waited[0],
        "after it [s]": total,
        "waited for batches after it [%]": 100 * (model.waited[-1] - model.waited[0]) / total,
        "of that, for bytes [%]": 100 * (counted.stall_seconds - model.stalled) / total,
        "hits": counted.cache_hits,
        "misses": counted.cache_misses,
        "prefetched": counted.prefetched,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slices", description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--columns", type=int, default=256)
    parser.add_argument("--slices", type=int, default=16)
    parser.add_argument("--slice-mb", type=float, default=4.0)
    parser.add_argument("--seconds-per-slice", type=float, default=0.4)
    parser.add_argument("--workers", type=int, default=0, help="that read for the fit")
    parser.add_argument("--only", choices=("throughput", "stall", "fit", "loaders"))
    parser.add_argument(
        "--shape", choices=SHAPES, action="append", help="of the data, for the loaders; both if left out"
    )
    parser.add_argument("--samples", type=int, default=40_000, help="of an epoch, for the loaders")
    parser.add_argument("--rounds", type=int, default=5, help="epochs that are timed, for the loaders")
    options = parser.parse_args(arguments)
    distant: dict[str, Any] = {
        "slices": options.slices,
        "slice_bytes": int(options.slice_mb * 1024 * 1024),
        "seconds_per_slice": options.seconds_per_slice,
    }
    if options.only in (None, "throughput"):
        print("throughput", throughput(rows=options.rows, columns=options.columns))
    if options.only in (None, "stall"):
        print("stall", stall(**distant))
    if options.only in (None, "fit"):
        print("fit", fit_stall(**distant, workers=options.workers))
    for shape in (options.shape or SHAPES) if options.only == "loaders" else ():
        compared = compare_loaders(shape, samples=options.samples, rounds=options.rounds)
        for name, figures in compared.items():
            print(shape, name, {what: float(f"{figure:.4g}") for what, figure in figures.items()}, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
