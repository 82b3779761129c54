"""The stream that a reader of samples gets: the verified bytes of a slice, in order, as they arrive."""

from __future__ import annotations

import io
from collections.abc import Iterator

from lightning_bytescheduler.data.chunks import Bytes

__all__ = ["SliceStream"]


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
