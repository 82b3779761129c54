"""A column of texts in one piece of memory: a Python object per text would cost more than the text."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import overload

__all__ = ["TextColumn"]


class TextColumn(Sequence[str]):
    """Texts that are only ever added; equal neighbours are stored once.

    Memory per text: its UTF-8 bytes, unless it equals its predecessor, and at most 12 bytes.
    """

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._ends = array("Q")  # of each stored text
        self._stored = array("I")  # which stored text each row has
        self._last: bytes | None = None

    def append(self, text: str) -> None:
        """Add a row."""
        encoded = text.encode("utf-8", "surrogatepass")
        if encoded != self._last:
            self._bytes += encoded
            self._ends.append(len(self._bytes))
            self._last = encoded
        self._stored.append(len(self._ends) - 1)

    def raw(self, row: int) -> bytes:
        """A row's UTF-8 bytes."""
        stored = self._stored[row]
        return bytes(self._bytes[self._ends[stored - 1] if stored else 0 : self._ends[stored]])

    def __len__(self) -> int:
        return len(self._stored)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> list[str]: ...
    def __getitem__(self, row: int | slice) -> str | list[str]:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        return self.raw(row).decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        return (self[row] for row in range(len(self)))

    @property
    def memory(self) -> int:
        """Bytes of memory held."""
        return len(self._bytes) + sum(len(part) * part.itemsize for part in (self._ends, self._stored))
