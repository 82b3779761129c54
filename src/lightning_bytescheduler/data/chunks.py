"""The chunks of a slice: what is checked, and handed on, as one piece while a slice is still on its way."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from lightning_bytescheduler.data.slice import Slice
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["CHUNK_BYTES", "DIGEST_BYTES", "ChunkPlan", "checksum_of", "digests_of"]

CHUNK_BYTES = 1024 * 1024
"""Size of a chunk: small enough that the first sample is there soon, large enough that checks cost nothing."""

DIGEST_BYTES = 8
_ALGORITHM = "xxh3_64"

Bytes = bytes | bytearray | memoryview


def checksum_of(content: Bytes) -> str:
    """The checksum of ``content`` as slices and indexes state it, ``"xxh3_64:<hex>"``."""
    return f"{_ALGORITHM}:{xxhash.xxh3_64_hexdigest(content)}"


def digests_of(content: Bytes, chunk_bytes: int = CHUNK_BYTES) -> bytes:
    """The digests of all chunks of ``content``, one after the other, ``DIGEST_BYTES`` each."""
    view = memoryview(content)
    starts = range(0, len(view), chunk_bytes)
    return b"".join(xxhash.xxh3_64_digest(view[start : start + chunk_bytes]) for start in starts)


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
        return xxhash.xxh3_64_digest(content) == self.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
