"""A slice: a piece of the data that is handed out, fetched and trained on as a unit; its stream of bytes and checksums.

A chunk is the unit of verification, and is available before the rest of its slice arrives.
"""

from __future__ import annotations

import functools
import hashlib
import io
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from types import ModuleType

from lightning_bytescheduler.checks import importing
from lightning_bytescheduler.exceptions import OptionError

Bytes = bytes | bytearray | memoryview

Chunks = Generator[Bytes, None, int]
"""Verified chunks of a slice from a number on; returns the number of the chunk after the last one."""

CHUNK_BYTES = 1024 * 1024
"""Bytes of a chunk: small enough for an early first sample, large enough for cheap checks."""

DIGEST_BYTES = 8
_ALGORITHM = "xxh3_64"


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A file with a known number of samples, divided into chunks, which are verified one by one.

    Attributes:
        key: Identity of the slice, the same in every process and after every restart.
        url: URL of its bytes, any that fsspec opens.
        size: Its length in bytes.
        samples: Samples in it, at least one.
        digests: Digests of the chunks, ``DIGEST_BYTES`` each; ``None`` if only lengths can be checked.

    Raises:
        OptionError: If the digests are not as many as the chunks.
    """

    key: str
    url: str
    size: int
    samples: int
    digests: bytes | None = field(default=None, repr=False)
    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        if self.digests is not None and len(self.digests) != self.count * DIGEST_BYTES:
            raise OptionError("digests", self.digests, f"{self.count} times {DIGEST_BYTES} bytes")

    @classmethod
    def of(cls, content: Bytes, *, key: str, url: str, samples: int) -> Slice:
        """Describe the slice with this content."""
        return cls(key=key, url=url, size=len(content), samples=samples, digests=digests_of(content))

    @property
    def name(self) -> str:
        """Name of the slice in a cache; other contents have another name."""
        identity = repr((self.url, self.size, self.digests))
        return hashlib.sha256(identity.encode()).hexdigest()[:40]

    @property
    def count(self) -> int:
        """Number of chunks."""
        return -(-self.size // self.chunk_bytes)

    def bounds(self, number: int) -> tuple[int, int]:
        """Return the first byte of chunk ``number`` and the one after its last, counted from the slice's start."""
        start = number * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.size)

    def is_right(self, number: int, content: Bytes) -> bool:
        """Whether ``content`` is chunk ``number``, as far as can be checked."""
        start, stop = self.bounds(number)
        if len(content) != stop - start:
            return False
        at = number * DIGEST_BYTES
        return self.digests is None or digests_of(content, self.chunk_bytes) == self.digests[at : at + DIGEST_BYTES]


Runs = list[tuple[int, int]]
"""Runs of samples of a slice: start and stop of each, in order, with other samples between one run and the next."""


def joined(runs: Iterable[tuple[int, int]]) -> Runs:
    """Return the samples of runs in any order, which may touch or overlap."""
    found: Runs = []
    for start, stop in sorted(runs):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def without(runs: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> Runs:
    """Return the samples of some runs that are not in others."""
    kept = joined(runs)
    for begin, end in joined(others):
        parts = (part for start, stop in kept for part in ((start, min(stop, begin)), (max(start, end), stop)))
        kept = [(start, stop) for start, stop in parts if start < stop]
    return kept


def samples_of(runs: Iterable[tuple[int, int]]) -> int:
    """Return the number of samples in runs that do not overlap."""
    return sum(stop - start for start, stop in runs)


class SliceState(IntEnum):
    """State of a slice in the current epoch, which the tracker keeps in one byte.

    ``AVAILABLE -> ASSIGNED -> USED``; back to ``AVAILABLE`` when its holder dies or leaves, and with a new epoch.
    ``QUARANTINED`` slices cannot be read; they are left out of this epoch and of later ones.
    """

    AVAILABLE = 0
    ASSIGNED = 1
    USED = 2
    QUARANTINED = 3


class SliceStream(io.BufferedIOBase):
    """A binary file that is read once, from its start; it cannot seek.

    Any code that reads binary files can use it. ``chunks()`` yields the bytes without a copy; a reader uses either that
    or the methods of a file, not both.

    Args:
        chunks: The bytes, in pieces of any size. The source does not write to a piece later, but a reader may.
    """

    def __init__(self, chunks: Iterator[Bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")

    def chunks(self) -> Iterator[Bytes]:
        """Yield the bytes that were not read yet, piece by piece."""
        if self._rest:
            rest, self._rest = self._rest, memoryview(b"")
            yield rest
        yield from self._chunks

    def readable(self) -> bool:
        """Return true."""
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        """Read ``size`` bytes, fewer only at the end; without a size, all."""
        if size is None or size < 0:
            return b"".join(self.chunks())
        parts = []
        while size and (part := self.read1(size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def read1(self, size: int = -1, /) -> bytes:
        """Read up to ``size`` bytes of one piece."""
        while not self._rest:
            piece = next(self._chunks, None)
            if piece is None:
                return b""
            self._rest = memoryview(piece)
        part = bytes(self._rest if size < 0 else self._rest[:size])
        self._rest = self._rest[len(part) :]
        return part


@functools.cache
def xxhash() -> ModuleType:
    """Import the package for checksums, at its first use.

    Raises:
        ImportError: If it is not installed; names the extra.
    """
    with importing("Verifying slices", extra="data"):
        import xxhash
    return xxhash


def checksum_of(content: Bytes) -> str:
    """Return the checksum of ``content`` as in indexes, ``"xxh3_64:<hex>"``."""
    return f"{_ALGORITHM}:{xxhash().xxh3_64_hexdigest(content)}"


def digests_of(content: Bytes, chunk_bytes: int = CHUNK_BYTES) -> bytes:
    """Return the digests of all chunks of ``content``, joined, ``DIGEST_BYTES`` each."""
    view = memoryview(content)
    starts = range(0, len(view), chunk_bytes)
    return b"".join(xxhash().xxh3_64_digest(view[start : start + chunk_bytes]) for start in starts)
