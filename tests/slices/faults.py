"""Slices in memory, behind a source whose answers tests choose."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from lightning_bytescheduler.slices.fetch import Waiting
from lightning_bytescheduler.slices.formats import format_of
from lightning_bytescheduler.slices.slice import ChunkPlan, Slice, checksum_of, digests_of
from lightning_bytescheduler.slices.source import SliceSource, SourceFile

CHUNK = 1000


class VirtualTime:
    """A clock that sleeping moves on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds

    def waiting(self) -> Waiting:
        return Waiting(clock=lambda: self.now, sleep=self.sleep, chance=lambda: 0.5)


def lines(number: int, count: int = 500) -> list[str]:
    return [f"slice {number} line {line}" for line in range(count)]


class FaultySource(SliceSource):
    """Text slices; ``fault`` gets the slice, the first byte and the right answer, and returns or raises another."""

    def __init__(self, slices: int, *, indexed: bool = True, count: int = 500) -> None:
        self.contents = {f"s{n}": "".join(f"{line}\n" for line in lines(n, count)).encode() for n in range(slices)}
        made = [
            Slice(
                key=key,
                url=f"test://{key}.txt",
                start=0,
                size=len(content),
                samples=count,
                checksum=checksum_of(content) if indexed else None,
            )
            for key, content in self.contents.items()
        ]
        files = {slice_.url: SourceFile(form=format_of(slice_.url)) for slice_ in made}
        plans = [
            ChunkPlan(
                slice=slice_,
                digests=digests_of(content, CHUNK) if indexed else None,
                chunk_bytes=CHUNK,
                version="1",
            )
            for slice_, content in zip(made, self.contents.values(), strict=True)
        ]
        super().__init__(plans, files, {})
        self.asked: list[tuple[str, int, int]] = []
        self.fault: Callable[[Slice, int, bytes], bytes] = lambda slice_, start, answer: answer
        self._lock = threading.Lock()

    def read(self, slice_: Slice, start: int, stop: int) -> bytes:
        with self._lock:
            self.asked.append((slice_.key, start, stop))
        return self.fault(slice_, start, self.contents[slice_.key][start:stop])

    def __reduce__(self) -> Any:
        return (FaultySource, (len(self.slices),))
