"""A slice: a piece of the data that is handed out, fetched and trained on as one; and the stream of its bytes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from lightning_bytescheduler.checks import require_whole
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["Bytes", "Slice", "SliceState", "SliceStream"]

Bytes = bytes | bytearray | memoryview


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
