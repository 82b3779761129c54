"""Slices in memory, behind a source whose answers tests choose."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from lightning_bytescheduler.slices.fetch import SliceStatistics, Waiting
from lightning_bytescheduler.slices.formats import format_of
from lightning_bytescheduler.slices.slice import Slice, digests_of
from lightning_bytescheduler.slices.source import SliceSource
from lightning_bytescheduler.slices.store import SliceStore

CHUNK = 1000


class VirtualTime:
    """A clock that moves when a test sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds

    def waiting(self) -> Waiting:
        return Waiting(clock=lambda: self.now, sleep=self.sleep)


def lines(number: int, count: int = 500) -> list[str]:
    return [f"slice {number} line {line}" for line in range(count)]


class Store(SliceStore):
    """A store that tests read slice by slice."""

    def samples(self, slice_: Slice, first: int = 0) -> Iterator[Any]:
        with contextlib.closing(self.open(slice_)) as opened:
            yield from itertools.chain.from_iterable(opened.take(first, slice_.samples))

    @property
    def statistics(self) -> SliceStatistics:
        return self.counters.snapshot()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FaultySource(SliceSource):
    """Text slices; ``fault`` gets the slice, the first byte and the right answer, and returns or raises another."""

    def __init__(self, slices: int, *, indexed: bool = True, count: int = 500) -> None:
        self.contents = {f"s{n}": "".join(f"{line}\n" for line in lines(n, count)).encode() for n in range(slices)}
        made = [
            Slice(
                key=key,
                url=f"test://{key}.txt",
                size=len(content),
                samples=count,
                digests=digests_of(content, CHUNK) if indexed else None,
                chunk_bytes=CHUNK,
            )
            for key, content in self.contents.items()
        ]
        super().__init__(made, {slice_.url: format_of(slice_.url) for slice_ in made}, {})
        self.asked: list[tuple[str, int, int]] = []
        self.fault: Callable[[Slice, int, bytes], bytes] = lambda slice_, start, answer: answer
        self._lock = threading.Lock()

    def read(self, slice_: Slice, start: int, stop: int) -> bytes:
        with self._lock:
            self.asked.append((slice_.key, start, stop))
        return self.fault(slice_, start, self.contents[slice_.key][start:stop])

    def __reduce__(self) -> Any:
        return (FaultySource, (len(self.slices),))
