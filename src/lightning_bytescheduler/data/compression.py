"""Compressed sources: .gz, and .zst with the extra "data"."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from typing import BinaryIO, cast

from lightning_bytescheduler.data.stream import SliceStream

__all__ = ["COMPRESSIONS", "decompressed"]

COMPRESSIONS = (".gz", ".zst")
"""Suffixes of what is decompressed on reading."""

_PIECE_BYTES = 256 * 1024


def decompressed(stream: SliceStream, suffix: str) -> SliceStream:
    """What ``stream`` holds, decompressed as it is read.

    Args:
        stream: The compressed bytes.
        suffix: One of ``COMPRESSIONS``.

    Raises:
        ImportError: If it is ``".zst"`` and zstandard is not installed.
    """
    return SliceStream(_gzip_pieces(stream) if suffix == ".gz" else _zstandard_pieces(stream))


def _gzip_pieces(stream: SliceStream) -> Iterator[bytearray]:
    try:
        with gzip.GzipFile(fileobj=cast(BinaryIO, stream)) as file:
            while piece := file.read(_PIECE_BYTES):
                yield bytearray(piece)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"It cannot be decompressed: {error}") from error


def _zstandard_pieces(stream: SliceStream) -> Iterator[bytearray]:
    try:
        import zstandard
    except ImportError as error:
        raise ImportError(
            "Files in .zst need zstandard, which is not installed: pip install 'lightning-bytescheduler[data]'"
        ) from error
    # The library's own reader takes a frame that is cut short for its end, so frames are followed here.
    decompressor = zstandard.ZstdDecompressor()
    frame = None
    try:
        for chunk in stream.chunks():
            content = bytes(chunk)
            while content:
                frame = frame or decompressor.decompressobj()
                if piece := frame.decompress(content):
                    yield bytearray(piece)
                content = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise ValueError(f"It cannot be decompressed: {error}") from error
    if frame is not None:
        raise ValueError("It cannot be decompressed: it is cut short.")
