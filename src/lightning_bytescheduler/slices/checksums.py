"""Checksums: what a slice's bytes are compared with, chunk by chunk, before anybody gets them.

A chunk is what is verified, and handed on, as one piece while the rest of its slice is still on its way. Which chunks
were found to be right is known to all processes that read for a rank, so that none verifies them a second time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_bytescheduler.checks import importing
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices.slice import Bytes, Slice

CHUNK_BYTES = 1024 * 1024
"""Size of a chunk: small enough that the first sample is there soon, large enough that checks cost nothing."""

DIGEST_BYTES = 8
_ALGORITHM = "xxh3_64"
_LEAST_MARKS, _MOST_MARKS = 2**6, 2**20  # marks, of 8 bytes
_MARK_BITS = 2**63 - 1
_MARK_STEP = 0x9E3779B97F4A7C15  # odd: neighbours have marks that have nothing in common


@functools.cache
def xxhash() -> ModuleType:
    """The package that makes checksums, imported when the first one is wanted.

    Raises:
        ImportError: If it is not installed; names the extra.
    """
    with importing("Verifying slices", extra="data"):
        import xxhash
    return xxhash


def checksum_of(content: Bytes) -> str:
    """The checksum of ``content`` as slices and indexes state it, ``"xxh3_64:<hex>"``."""
    return f"{_ALGORITHM}:{xxhash().xxh3_64_hexdigest(content)}"


class WholeChecksum:
    """The checksum of bytes that come in pieces."""

    def __init__(self) -> None:
        self._state = xxhash().xxh3_64()

    def update(self, piece: Bytes) -> None:
        """Take the next piece."""
        self._state.update(piece)

    def __str__(self) -> str:
        return f"{_ALGORITHM}:{self._state.hexdigest()}"


def digests_of(content: Bytes, chunk_bytes: int = CHUNK_BYTES) -> bytes:
    """The digests of all chunks of ``content``, one after the other, ``DIGEST_BYTES`` each."""
    view = memoryview(content)
    starts = range(0, len(view), chunk_bytes)
    return b"".join(xxhash().xxh3_64_digest(view[start : start + chunk_bytes]) for start in starts)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPlan:
    """How a slice is divided into chunks, and what is known of each.

    Attributes:
        size: Bytes of the slice.
        chunk_bytes: Bytes of a chunk; the last one may be shorter.
        digests: Of the chunks, ``DIGEST_BYTES`` each; None where only lengths can be checked.

    Raises:
        OptionError: If there are not as many digests as chunks.
    """

    size: int
    chunk_bytes: int
    digests: bytes | None

    def __post_init__(self) -> None:
        if self.digests is not None and len(self.digests) != self.count * DIGEST_BYTES:
            raise OptionError("digests", self.digests, f"{self.count} times {DIGEST_BYTES} bytes")

    @classmethod
    def of(cls, slice_: Slice, chunk_bytes: int, digests: bytes | None) -> ChunkPlan:
        """Plan a slice; one that has a checksum, but no digests of chunks, is a single chunk.

        Raises:
            OptionError: If the checksum is not ``"xxh3_64:<hex>"``, or the digests do not fit the size.
        """
        if digests is not None or slice_.checksum is None:
            return cls(size=slice_.size, chunk_bytes=chunk_bytes, digests=digests)
        algorithm, _, digest = slice_.checksum.partition(":")
        try:
            whole = bytes.fromhex(digest)
        except ValueError:
            whole = b""
        if algorithm != _ALGORITHM or len(whole) != DIGEST_BYTES:
            raise OptionError("checksum", slice_.checksum, f"'{_ALGORITHM}:' and {2 * DIGEST_BYTES} hexadecimal digits")
        return cls(size=slice_.size, chunk_bytes=max(slice_.size, 1), digests=whole if slice_.size else b"")

    @property
    def count(self) -> int:
        """Number of chunks."""
        return -(-self.size // self.chunk_bytes)

    def bounds(self, number: int) -> tuple[int, int]:
        """First byte of chunk ``number``, and the one after its last, counted from the slice's start."""
        start = number * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.size)

    def is_right(self, number: int, content: Bytes) -> bool:
        """Whether ``content`` is chunk ``number``, as far as is known."""
        start, stop = self.bounds(number)
        if len(content) != stop - start:
            return False
        if self.digests is None:
            return True
        return bool(
            xxhash().xxh3_64_digest(content) == self.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        )


def right_chunks(
    content: memoryview, plan: ChunkPlan, first: int = 0, *, seals: ChunkSeals | None = None, together: bool = False
) -> Iterator[memoryview]:
    """The chunks of a slice whose bytes are all here, without a copy; ends before one that is damaged.

    Args:
        content: The slice's bytes.
        plan: Its chunks.
        first: Number of the first chunk that is wanted.
        seals: Chunks that need not be verified again; kept up to date.
        together: Yield them in one piece.
    """
    begin = plan.bounds(first)[0]
    for number in range(first, plan.count):
        start, stop = plan.bounds(number)
        if seals is None or not seals.is_set(number):
            if not plan.is_right(number, content[start:stop]):
                if together and begin < start:
                    yield content[begin:start]
                return
            if seals is not None:
                seals.set(number)
        if not together:
            yield content[start:stop]
    if together and begin < plan.size:
        yield content[begin : plan.size]


class VerifiedChunks:
    """Marks of chunks in shared memory, which processes inherit that are forked or sent this object.

    A mark depends on the chunk and on the file that it was seen in, so that a file that changes has none. Where two
    chunks have the same place, the later one takes it, and the earlier is verified again; nobody waits for anybody.

    Args:
        chunks: How many there are, about.
    """

    def __init__(self, chunks: int) -> None:
        places = min(max(1 << (2 * chunks - 1).bit_length(), _LEAST_MARKS), _MOST_MARKS) if chunks > 0 else _LEAST_MARKS
        self._marks = torch.zeros(places, dtype=torch.int64)
        with contextlib.suppress(RuntimeError, OSError):  # without shared memory each process verifies for itself
            self._marks.share_memory_()

    def of(self, *identity: Any) -> ChunkSeals:
        """The marks of a slice's chunks.

        Args:
            identity: Of the slice and of the file that it is in, of texts and numbers.
        """
        return ChunkSeals(self._marks.numpy(), repr(identity).encode())


class ChunkSeals:
    """The marks of the chunks of one slice in one file."""

    def __init__(self, marks: npt.NDArray[np.int64], identity: bytes) -> None:
        self._marks = marks
        number: int = xxhash().xxh3_128_intdigest(identity)
        self._place, self._mark = number >> 64, number

    def is_set(self, chunk: int) -> bool:
        """Whether some process has found a chunk to be right."""
        return bool(self._marks[self._place_of(chunk)] == self._mark_of(chunk))

    def set(self, chunk: int) -> None:
        """A chunk is right."""
        self._marks[self._place_of(chunk)] = self._mark_of(chunk)

    def _place_of(self, chunk: int) -> int:
        return (self._place + chunk) & (len(self._marks) - 1)

    def _mark_of(self, chunk: int) -> int:
        return (self._mark + chunk * _MARK_STEP) & _MARK_BITS | 1
