"""Loaders of the same local data side by side: slices, litdata and MosaicML streaming, with processes that read.

Each lives in a process of its own and reads an epoch when it is its turn, so that no threads or caches of one are in
the way of another. Samples are shuffled by all of them; the others have their own formats, their own sizes of chunks,
and workers that persist. What is not installed is left out.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.ranks import MeasurementFailed
from benchmarks.record import Record, record
from lightning_bytescheduler import SliceDataModule
from lightning_bytescheduler.slices.make import make_slices

__all__ = ["compare_loaders"]

_BLOCK = 512  # tokens of a sample, of four bytes each
_ANSWER_SECONDS = 300.0
_REQUIRES = {"slices": "lightning_bytescheduler", "litdata": "litdata", "streaming": "streaming"}


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


_CONTENDERS: dict[str, Callable[[Path, int], Any]] = {
    "slices": _Slices,
    "litdata": _Litdata,
    "streaming": _Streaming,
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
    made = _CONTENDERS[contender](Path(folder), samples)
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
    """Read the same samples by all loaders that are installed, in turns.

    Args:
        samples: In an epoch.
        batch_size: Samples of a batch.
        workers: Numbers of processes that read.
        rounds: Epochs that are timed; one more comes first.

    Returns:
        By loader and number of workers: samples a second, seconds to the first batch, and what slices reach of the
        better of the others.

    Raises:
        MeasurementFailed: If a loader does not answer.
    """
    names = [name for name, module in _REQUIRES.items() if importlib.util.find_spec(module) is not None]
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
            for name in reversed(names):  # slices last, beside the better of the others
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
