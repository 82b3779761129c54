"""The speed of slices, beside other loaders.

``loaders``: epochs of slices, litdata and MosaicML streaming on the same local data, with 0, 2 and 4 processes that
read. Each lives in a process of its own and reads an epoch when it is its turn, so that no threads or caches of one are
in the way of another. Samples are shuffled by all of them; the others have their own formats, their own sizes of
chunks, and workers that persist. What is not installed is left out.

``fit``: a fit of two epochs whose steps take a fixed time, on an emulated source: each request takes a round trip, all
requests together the bandwidth, which is twice what is consumed. The cache is smaller than the data.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import multiprocessing
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

from benchmarks.rank import fit
from benchmarks.ranks import MeasurementFailed
from benchmarks.record import Record, Results, record
from lightning_bytescheduler import SliceDataModule
from lightning_bytescheduler.slices.make import make_slices
from lightning_bytescheduler.slices.slice import Slice
from lightning_bytescheduler.slices.source import SliceSource, open_source

_BLOCK = 512  # tokens of a sample, of four bytes each
_ANSWER_SECONDS = 300.0


def _tokens(samples: int) -> Iterator[np.ndarray[Any, Any]]:
    generator = np.random.default_rng(0)
    return (generator.integers(0, 50_000, _BLOCK, dtype=np.int32) for _ in range(samples))


class _Slices:
    def __init__(self, folder: Path, samples: int) -> None:
        raw, self.folder = folder / "tokens.npy", f"{folder}/slices"
        np.save(raw, np.stack(list(_tokens(samples))))
        make_slices(str(raw), self.folder, slice_bytes=16 * 1024 * 1024)

    def loader(self, batch_size: int, workers: int) -> Any:
        data = SliceDataModule(self.folder, batch_size=batch_size, num_workers=workers, shuffle="samples")
        data.setup("fit")
        return data.train_dataloader()


class _Litdata:
    def __init__(self, folder: Path, samples: int) -> None:
        self.litdata: Any = importlib.import_module("litdata")
        cached: Any = importlib.import_module("litdata.streaming").Cache
        self.folder = f"{folder}/litdata"
        item_loader = self.litdata.TokensLoader(block_size=_BLOCK)
        cache = cached(self.folder, chunk_size=_BLOCK * 8192, item_loader=item_loader)  # in tokens: 16 MB
        for number, block in enumerate(_tokens(samples)):
            cache[number] = torch.from_numpy(block)
        cache.done()
        cache.merge()

    def loader(self, batch_size: int, workers: int) -> Any:
        item_loader = self.litdata.TokensLoader(block_size=_BLOCK)
        data = self.litdata.StreamingDataset(self.folder, item_loader=item_loader, shuffle=True)
        return self.litdata.StreamingDataLoader(
            data, batch_size=batch_size, num_workers=workers, persistent_workers=workers > 0, drop_last=False
        )


class _Streaming:
    def __init__(self, folder: Path, samples: int) -> None:
        self.streaming: Any = importlib.import_module("streaming")
        self.folder = f"{folder}/streaming"
        with self.streaming.MDSWriter(out=self.folder, columns={"tokens": f"ndarray:int32:{_BLOCK}"}) as writer:
            for block in _tokens(samples):
                writer.write({"tokens": block})

    def loader(self, batch_size: int, workers: int) -> Any:
        data = self.streaming.StreamingDataset(local=self.folder, shuffle=True, batch_size=batch_size)
        return DataLoader(data, batch_size=batch_size, num_workers=workers, persistent_workers=workers > 0)


_CONTENDERS: dict[str, tuple[str, Callable[[Path, int], Any]]] = {  # each with the package that it needs
    "slices": ("lightning_bytescheduler", _Slices),
    "litdata": ("litdata", _Litdata),
    "streaming": ("streaming", _Streaming),
}


def _samples_of(batch: Any) -> int:
    if isinstance(batch, dict):
        return len(next(iter(batch.values())))
    return len(batch)


def _serve(contender: str, folder: str, samples: int, pipe: Any) -> None:
    """Prepare the data once, and then read an epoch for each batch size and number of workers that is asked for."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of libraries, about processors and arrays
    multiprocessing.set_start_method("fork", force=True)  # of processes that read, as is the default on Linux
    made = _CONTENDERS[contender][1](Path(folder), samples)
    pipe.send("ready")
    loaders: dict[tuple[int, int], Any] = {}
    while (asked := pipe.recv()) is not None:
        if asked not in loaders:
            loaders = {asked: made.loader(*asked)}  # the last one's workers end
        started = time.perf_counter()
        first, seen = 0.0, 0
        for batch in loaders[asked]:
            seen += _samples_of(batch)
            first = first or time.perf_counter() - started
        pipe.send({"seconds": time.perf_counter() - started, "first batch [s]": first, "seen": seen})
    os._exit(0)  # threads of the libraries need not end


def compare_loaders(
    *, samples: int, batch_size: int = 64, workers: Sequence[int] = (0, 2, 4), rounds: int = 5
) -> list[Record]:
    """Read the same samples by all loaders that are installed, in turns: epochs of which the first does not count.

    Returns:
        By loader and number of processes: samples a second, seconds to the first batch, and the speed of slices over
        that of the better other loader.
    """
    names = [name for name, (module, _) in _CONTENDERS.items() if importlib.util.find_spec(module) is not None]
    context = multiprocessing.get_context("spawn")
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as root:
        pipes, processes = {}, []
        for name in names:
            folder = Path(root) / name
            folder.mkdir()
            pipes[name], theirs = context.Pipe()
            process = context.Process(target=_serve, args=(name, str(folder), samples, theirs))
            process.start()
            theirs.close()
            processes.append(process)
            _answer(pipes[name])  # the data is there
        for number in workers:
            told: dict[str, list[dict[str, float]]] = {name: [] for name in names}
            for turn in range(rounds + 1):  # the first does not count
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    pipes[name].send((batch_size, number))
                    told[name].append(_answer(pipes[name]))
            setting = {"samples": samples, "batch_size": batch_size, "workers": number}
            best = 0.0
            for name in reversed(names):  # slices last, to compare them with the better other loader
                timed = told[name][1:]
                values = {"samples/s": [one["seen"] / one["seconds"] for one in timed]}
                values |= {key: [one[key] for one in timed] for key in ("first batch [s]", "seen")}
                made = record("slices", f"{name}, {number} workers", setting, values)
                if name == names[0] and best:
                    made.ratios["/ better of the others"] = made.medians["samples/s"] / best
                best = max(best, made.medians["samples/s"])
                records.append(made)
        for name, process in zip(names, processes, strict=True):
            pipes[name].send(None)
            process.join(_ANSWER_SECONDS)
    return records


def _answer(pipe: Any) -> Any:
    if not pipe.poll(_ANSWER_SECONDS):
        raise MeasurementFailed(f"A loader has not answered for {_ANSWER_SECONDS:g} s.")
    return pipe.recv()


class DistantSource(SliceSource):
    """A distant source, whose limited bandwidth all requests share."""

    def __init__(self, source: SliceSource, *, seconds: float, bandwidth: float) -> None:
        self.__dict__.update(source.__dict__)
        self.way, self.bandwidth = seconds, bandwidth
        self.link, self.free_at = threading.Lock(), 0.0

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
        source = DistantSource(open_source("memory://stall"), seconds=latency, bandwidth=bandwidth)
        data._sources["train"] = source
        model = _TimedSteps(seconds_per_slice / source.slices[0].samples)
        model.first_slice = source.slices[0].samples
        fit(model, SingleDeviceStrategy(device="cpu"), data, max_epochs=2)
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
    parser.add_argument("what", nargs="?", choices=("loaders", "fit"), help="one of them (default: both)")
    parser.add_argument(
        "--samples", type=int, default=40_000, help="samples of an epoch of loaders (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="epochs of loaders that count (default: %(default)s)")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2, 4], help="processes that read for loaders")
    parser.add_argument("--slices", type=int, default=16, help="slices of the fit (default: %(default)s)")
    parser.add_argument("--slice-mb", type=float, default=4.0, help="size of a slice of the fit (default: %(default)g)")
    parser.add_argument(
        "--seconds-per-slice", type=float, default=0.4, help="compute of a slice of the fit (default: %(default)g)"
    )
    parser.add_argument("--fit-workers", type=int, default=0, help="processes that read for the fit")


def measure(options: argparse.Namespace) -> Iterator[Results]:
    if options.what != "fit":
        yield (
            f"an epoch of {options.samples:,} blocks of 512 tokens",
            compare_loaders(samples=options.samples, workers=options.workers, rounds=options.rounds),
        )
    if options.what != "loaders":
        distant: dict[str, Any] = {
            "slices": options.slices,
            "slice_bytes": int(options.slice_mb * 1024 * 1024),
            "seconds_per_slice": options.seconds_per_slice,
            "workers": options.fit_workers,
        }
        yield "a fit with a distant source", [record("slices fit", "two epochs", distant, fit_stall(**distant))]
