"""Cutting lines and rows into slices of about a target size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lightning_bytescheduler.data.chunks import Bytes

__all__ = ["cut_lines", "row_ranges"]


def cut_lines(pieces: Iterable[Bytes], target_bytes: int) -> Iterator[bytes]:
    """Cut a text at line ends.

    Args:
        pieces: The text, in pieces of any size.
        target_bytes: A slice ends with the last line that ends within so many bytes; one longer line is a slice.

    Yields:
        The slices, in order; together they are the text.
    """
    held = bytearray()
    searched = 0
    for piece in pieces:
        held += piece
        while len(held) >= target_bytes:
            end = held.rfind(b"\n", 0, target_bytes) + 1 if searched < target_bytes else 0
            if not end:
                end = held.find(b"\n", max(searched, target_bytes)) + 1
            if not end:
                searched = len(held)  # a long line is not searched again for each piece
                break
            yield bytes(held[:end])
            del held[:end]
            searched = 0
    if held:
        yield bytes(held)


def row_ranges(rows: int, row_bytes: int, target_bytes: int) -> Iterator[tuple[int, int]]:
    """Divide rows into ranges of about ``target_bytes``, alike to one row.

    Yields:
        The first row of a range, and the one after its last.
    """
    parts = max(-(-rows * row_bytes // target_bytes), 1) if rows else 0
    parts = min(parts, rows)
    for part in range(parts):
        yield rows * part // parts, rows * (part + 1) // parts
