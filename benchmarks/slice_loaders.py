"""Loaders of the same local data side by side: slices, litdata and MosaicML streaming, with processes that read.

Each lives in a process of its own and reads an epoch when it is its turn, so that no threads or caches of one are in
the way of another. Samples are shuffled by all of them; the others have their own formats, their own sizes of chunks,
and workers that persist. What is not installed is left out.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from lightning_bytescheduler import SliceDataModule
from lightning_bytescheduler.slices.make import make_slices

__all__ = ["SHAPES", "compare_loaders"]

SHAPES = ("tokens", "records")
"""Blocks of 512 tokens of four bytes; and records in JSON, of a text of about 60 words and two numbers."""

_BLOCK = 512
_ANSWER_SECONDS = 300.0
_REQUIRES = {"slices": "lightning_bytescheduler", "litdata": "litdata", "streaming": "streaming"}


def _tokens(samples: int) -> Iterator[np.ndarray[Any, Any]]:
    generator = np.random.default_rng(0)
    return (generator.integers(0, 50_000, _BLOCK, dtype=np.int32) for _ in range(samples))


def _records(samples: int) -> Iterator[dict[str, Any]]:
    generator = np.random.default_rng(0)
    words = np.array(["slice", "of", "the", "data", "worker", "a", "gradient", "and", "bytes", "in"])
    for number in range(samples):
        text = " ".join(words[generator.integers(0, len(words), generator.integers(30, 90))].tolist())
        yield {"text": text, "label": number % 10, "weight": number / samples}


class _Slices:
    def __init__(self, shape: str, folder: Path, samples: int) -> None:
        if shape == "tokens":
            raw = folder / "tokens.npy"
            np.save(raw, np.stack(list(_tokens(samples))))
        else:
            raw = folder / "records.jsonl"
            with raw.open("w") as file:
                file.writelines(json.dumps(record) + "\n" for record in _records(samples))
        make_slices(str(raw), f"{folder}/slices", slice_bytes=16 * 1024 * 1024)
        self.folder = f"{folder}/slices"

    def loader(self, batch_size: int, workers: int) -> Any:
        data = SliceDataModule(self.folder, batch_size=batch_size, num_workers=workers, shuffle="samples")
        data.setup("fit")
        return data.train_dataloader()


class _Litdata:
    def __init__(self, shape: str, folder: Path, samples: int) -> None:
        import torch

        litdata: Any = importlib.import_module("litdata")
        cached: Any = importlib.import_module("litdata.streaming").Cache

        self.shape, self.folder = shape, f"{folder}/litdata"
        if shape == "tokens":
            loader = litdata.TokensLoader(block_size=_BLOCK)
            cache = cached(self.folder, chunk_size=_BLOCK * 8192, item_loader=loader)  # in tokens: 16 MB
            made: Iterator[Any] = map(torch.from_numpy, _tokens(samples))
        else:
            cache = cached(self.folder, chunk_bytes="64MB")
            made = _records(samples)
        for number, item in enumerate(made):
            cache[number] = item
        cache.done()
        cache.merge()

    def loader(self, batch_size: int, workers: int) -> Any:
        litdata: Any = importlib.import_module("litdata")
        item_loader = litdata.TokensLoader(block_size=_BLOCK) if self.shape == "tokens" else None
        data = litdata.StreamingDataset(self.folder, item_loader=item_loader, shuffle=True)
        return litdata.StreamingDataLoader(
            data, batch_size=batch_size, num_workers=workers, persistent_workers=workers > 0, drop_last=False
        )


class _Streaming:
    def __init__(self, shape: str, folder: Path, samples: int) -> None:
        streaming: Any = importlib.import_module("streaming")
        self.folder = f"{folder}/streaming"
        if shape == "tokens":
            columns = {"tokens": f"ndarray:int32:{_BLOCK}"}
            made: Iterator[dict[str, Any]] = ({"tokens": block} for block in _tokens(samples))
        else:
            columns = {"text": "str", "label": "int", "weight": "float64"}
            made = _records(samples)
        with streaming.MDSWriter(out=self.folder, columns=columns) as writer:
            for record in made:
                writer.write(record)

    def loader(self, batch_size: int, workers: int) -> Any:
        streaming: Any = importlib.import_module("streaming")
        data = streaming.StreamingDataset(local=self.folder, shuffle=True, batch_size=batch_size)
        return DataLoader(data, batch_size=batch_size, num_workers=workers, persistent_workers=workers > 0)


_CONTENDERS: dict[str, Callable[[str, Path, int], Any]] = {
    "slices": _Slices,
    "litdata": _Litdata,
    "streaming": _Streaming,
}


def _private_megabytes() -> float:
    """The most memory that a process that reads has for itself."""
    most = 0.0
    for child in multiprocessing.active_children():
        try:
            about = Path(f"/proc/{child.pid}/smaps_rollup").read_text()
        except OSError:
            continue
        sizes = [int(line.split()[1]) for line in about.splitlines() if line.startswith("Private_")]
        most = max(most, sum(sizes) / 1024)
    return most


def _samples_of(batch: Any) -> int:
    if isinstance(batch, dict):
        return len(next(iter(batch.values())))
    return len(batch)


def _serve(contender: str, shape: str, folder: str, samples: int, pipe: Any) -> None:
    """Prepare the data once, and then read an epoch for each batch size and number of workers that is asked for."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of libraries, about processors and arrays
    multiprocessing.set_start_method("fork", force=True)  # of processes that read, as is the default on Linux
    made = _CONTENDERS[contender](shape, Path(folder), samples)
    pipe.send("ready")
    loaders: dict[tuple[int, int], Any] = {}
    while (asked := pipe.recv()) is not None:
        batch_size, workers, closes = asked
        if asked[:2] not in loaders:
            loaders[asked[:2]] = made.loader(batch_size, workers)
        started = time.perf_counter()
        first = memory = 0.0
        seen = 0
        for number, batch in enumerate(loaders[asked[:2]]):
            seen += _samples_of(batch)
            if number == 0:
                first = time.perf_counter() - started
        seconds = time.perf_counter() - started
        if closes:  # once more, to look at memory
            for number, _ in enumerate(itertools.islice(loaders[asked[:2]], samples // batch_size // 2)):
                if number % 64 == 32:
                    memory = max(memory, _private_megabytes())
            del loaders[asked[:2]]
        pipe.send({"seconds": seconds, "first batch [s]": first, "private [MB]": memory, "seen": seen})
    os._exit(0)  # threads of the libraries need not end


def compare_loaders(
    shape: str, *, samples: int = 40_000, batch_size: int = 64, workers: tuple[int, ...] = (0, 2, 4), rounds: int = 5
) -> dict[str, dict[str, float]]:
    """Read the same samples by all loaders that are installed, in turns.

    Args:
        shape: One of ``SHAPES``.
        samples: In an epoch.
        batch_size: Samples of a batch.
        workers: Numbers of processes that read.
        rounds: Epochs that are timed; one more comes first.

    Returns:
        By loader and number of workers: samples a second (median), seconds to the first batch (median), the memory that
        the largest process that reads has for itself, in MB, and what slices reach of the better of the others.
    """
    names = [name for name, module in _REQUIRES.items() if importlib.util.find_spec(module) is not None]
    context = multiprocessing.get_context("spawn")
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as root:
        pipes, processes = {}, []
        for name in names:
            folder = Path(root) / name
            folder.mkdir()
            pipes[name], theirs = context.Pipe()
            process = context.Process(target=_serve, args=(name, shape, str(folder), samples, theirs))
            process.start()
            theirs.close()
            processes.append(process)
            _answer(pipes[name])  # the data is there
        for number in workers:
            told: dict[str, list[dict[str, float]]] = {name: [] for name in names}
            for turn in range(rounds + 1):
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    pipes[name].send((batch_size, number, turn == rounds))
                    told[name].append(_answer(pipes[name]))
            for name in names:
                timed = told[name][1:]
                results[f"{name}, {number} workers"] = {
                    "samples/s": statistics.median(one["seen"] / one["seconds"] for one in timed),
                    "first batch [s]": statistics.median(one["first batch [s]"] for one in timed),
                    "private [MB]": timed[-1]["private [MB]"],
                    "samples": timed[-1]["seen"],
                }
            if len(names) > 1:
                best = max(results[f"{name}, {number} workers"]["samples/s"] for name in names[1:])
                ours = results[f"{names[0]}, {number} workers"]
                ours["of the better of the others"] = ours["samples/s"] / best
        for name, process in zip(names, processes, strict=True):
            pipes[name].send(None)
            process.join(_ANSWER_SECONDS)
    return results


def _answer(pipe: Any) -> Any:
    if not pipe.poll(_ANSWER_SECONDS):
        raise TimeoutError(f"A loader has not answered for {_ANSWER_SECONDS:g} s.")
    return pipe.recv()
