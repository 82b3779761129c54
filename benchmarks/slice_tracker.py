"""The slice tracker at a million slices: ``python -m benchmarks.slice_tracker``."""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.slice import Slice
from lightning_bytescheduler.slices.tracker import Assignment, JoinTracker, ReportProgress, RequestSlice, SliceTracker


@dataclass(frozen=True, kw_only=True)
class TrackerFigures:
    """What was measured.

    Attributes:
        slices: How many there were.
        request_microseconds: Median time of a request that hands a slice out.
        done_microseconds: Median time of a report that one is done.
        memory_megabytes: What the process grew by, with the catalogue of all slices.
        checkpoint_seconds: ``state_dict`` and ``torch.save`` in the middle of the epoch.
        checkpoint_megabytes: What was saved.
        load_seconds: ``torch.load`` and ``load_state_dict``.
        epoch_seconds: Start of the next epoch, with its shuffle.
    """

    slices: int
    request_microseconds: float
    done_microseconds: float
    memory_megabytes: float
    checkpoint_seconds: float
    checkpoint_megabytes: float
    load_seconds: float
    epoch_seconds: float


def _slices(count: int) -> Iterator[Slice]:
    for index in range(count):
        file = index // 2
        yield Slice(
            key=f"train/shard-{file:07d}.jsonl.zst#{index % 2}",
            url=f"s3://a-bucket-of-some-name/data/train/shard-{file:07d}.jsonl.zst",
            start=(index % 2) * 67_108_864,
            size=67_108_864,
            samples=4_000 + index % 200,
            checksum=f"xxh3_64:{index * 0x9E3779B97F4A7C15 % 2**64:016x}",
        )


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def measure(count: int, workers: int = 16) -> TrackerFigures:
    """Hand every slice out to workers that keep them, and save and load the state on the way."""
    before = _resident_bytes()
    tracker = SliceTracker(SliceCatalogue(_slices(count)), clock=time.monotonic)
    memory = _resident_bytes() - before
    sessions = []
    for worker in range(workers):
        sessions.append(tracker.join(JoinTracker(worker=str(worker), incarnation="a", keeps=count)).session)
    requests, dones, saved = [], [], io.BytesIO()
    checkpoint = 0.0
    for turn in range(count):
        session = sessions[turn % workers]
        start = time.perf_counter()
        answer = tracker.request(RequestSlice(session=session, epoch=0))
        requests.append(time.perf_counter() - start)
        if not isinstance(answer, Assignment):
            raise RuntimeError(f"Expected a slice, got {answer}.")
        tracker.progress(ReportProgress(session=session, grant=answer.grant, trained=0))
        if turn == count // 2:
            start = time.perf_counter()
            torch.save(tracker.state_dict(), saved)
            checkpoint = time.perf_counter() - start
        start = time.perf_counter()
        tracker.progress(ReportProgress(session=session, grant=answer.grant, trained=answer.slice.samples))
        dones.append(time.perf_counter() - start)
    memory = max(memory, _resident_bytes() - before - sys.getsizeof(requests) - sys.getsizeof(dones) - count * 48)
    start = time.perf_counter()
    tracker.request(RequestSlice(session=sessions[0], epoch=1))
    epoch = time.perf_counter() - start
    size = saved.tell()
    saved.seek(0)
    start = time.perf_counter()
    tracker.load_state_dict(torch.load(saved, weights_only=True))
    return TrackerFigures(
        slices=count,
        request_microseconds=1e6 * median(requests),
        done_microseconds=1e6 * median(dones),
        memory_megabytes=memory / 1e6,
        checkpoint_seconds=checkpoint,
        checkpoint_megabytes=size / 1e6,
        load_seconds=time.perf_counter() - start,
        epoch_seconds=epoch,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slice_tracker", description=__doc__)
    parser.add_argument("--slices", type=int, default=1_000_000)
    found = measure(parser.parse_args(arguments).slices)
    print(f"{found.slices:,} slices")
    print(f"  a request   {found.request_microseconds:8.1f} microseconds (median)")
    print(f"  a done      {found.done_microseconds:8.1f} microseconds (median)")
    print(f"  memory      {found.memory_megabytes:8.0f} MB, with the catalogue: keys, URLs, ranges, checksums")
    print(f"  checkpoint  {found.checkpoint_seconds:8.2f} s for {found.checkpoint_megabytes:.1f} MB")
    print(f"  loading it  {found.load_seconds:8.2f} s")
    print(f"  next epoch  {found.epoch_seconds:8.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
