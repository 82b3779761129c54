"""A slice: a piece of the data that is handed out, fetched and trained on as one; its stream of bytes and checksums.

A chunk is what is verified, and handed on, as one piece while the rest of its slice is still on its way.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from types import ModuleType

from lightning_bytescheduler.checks import importing, require_whole
from lightning_bytescheduler.exceptions import OptionError

Bytes = bytes | bytearray | memoryview

CHUNK_BYTES = 1024 * 1024
"""Size of a chunk: small enough that the first sample is there soon, large enough that checks cost nothing."""

DIGEST_BYTES = 8
_ALGORITHM = "xxh3_64"


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A file, or a range of one, with a known number of samples.

    Attributes:
        key: Identity of the slice, the same in every process and after every restart.
        url: Where its bytes are, any URL that fsspec opens.
        start: First byte of the range in the file at ``url``.
        size: Length of the range in bytes.
        samples: Samples in it, at least one.
        checksum: ``"xxh3_64:<hex>"`` of the range's bytes, or None where the source has no index.

    Raises:
        OptionError: If the key or the URL is empty, or a number is out of its range.
    """

    key: str
    url: str
    start: int
    size: int
    samples: int
    checksum: str | None = None

    def __post_init__(self) -> None:
        for option, text in (("key", self.key), ("url", self.url)):
            if not isinstance(text, str) or not text:
                raise OptionError(option, text, "a text that is not empty")
        require_whole("start", self.start, 0)
        require_whole("size", self.size, 0)
        require_whole("samples", self.samples, 1)


class SliceState(IntEnum):
    """State of a slice in the running epoch, as the tracker keeps it in one byte.

    ``AVAILABLE -> ASSIGNED -> USED``; back to ``AVAILABLE`` when its holder dies or leaves, and with a new epoch.
    ``QUARANTINED`` slices cannot be read; they are left out of this epoch and of those that follow.
    """

    AVAILABLE = 0
    ASSIGNED = 1
    USED = 2
    QUARANTINED = 3


class SliceStream(io.BufferedIOBase):
    """A binary file that is read once, from its start; seeking is not possible.

    It can be given to whatever reads binary files. ``chunks()`` hands the bytes over without a copy; a reader uses
    either that or the methods of a file, not both.

    Args:
        chunks: The bytes, in pieces of any size. A piece is not written to later, but a reader may do so.
    """

    def __init__(self, chunks: Iterator[Bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")

    def chunks(self) -> Iterator[Bytes]:
        """The bytes that were not read yet, piece by piece."""
        if self._rest:
            rest, self._rest = self._rest, memoryview(b"")
            yield rest
        yield from self._chunks

    def readable(self) -> bool:
        """Always true."""
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
        """Read up to ``size`` bytes, of one piece."""
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
        digests: Of the chunks, ``DIGEST_BYTES`` each; None where only lengths can be checked.
        chunk_bytes: Bytes of a chunk; the last one may be shorter.

    Raises:
        OptionError: If there are not as many digests as chunks.
    """

    size: int
    digests: bytes | None = None
    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        if self.digests is not None and len(self.digests) != self.count * DIGEST_BYTES:
            raise OptionError("digests", self.digests, f"{self.count} times {DIGEST_BYTES} bytes")

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
    content: memoryview, plan: ChunkPlan, first: int = 0, *, together: bool = False
) -> Iterator[memoryview]:
    """The chunks of a slice whose bytes are all here, without a copy; ends before one that is damaged.

    Args:
        content: The slice's bytes.
        plan: Its chunks.
        first: Number of the first chunk that is wanted.
        together: Yield them in one piece.
    """
    begin = plan.bounds(first)[0]
    for number in range(first, plan.count):
        start, stop = plan.bounds(number)
        if not plan.is_right(number, content[start:stop]):
            if together and begin < start:
                yield content[begin:start]
            return
        if not together:
            yield content[start:stop]
    if together and begin < plan.size:
        yield content[begin : plan.size]
