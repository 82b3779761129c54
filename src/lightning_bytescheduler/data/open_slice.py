"""A slice that is being read in parts, and what that has cost."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

from lightning_bytescheduler.data.chunks import Bytes
from lightning_bytescheduler.data.reading import Reading
from lightning_bytescheduler.data.slice_samples import SliceSamples

__all__ = ["OpenSlice"]


class OpenSlice:
    """A slice between two of its batches; to be closed.

    Args:
        on_close: Told how many seconds were waited for bytes, and whether the slice was gone through.

    Attributes:
        samples: Its samples.
    """

    samples: SliceSamples

    def __init__(self, on_close: Callable[[float, bool], None]) -> None:
        self._on_close: Callable[[float, bool], None] | None = on_close
        self._reading: Reading | None = None
        self._chunks: Generator[Bytes, None, None] | None = None
        self._stalled = 0.0

    @property
    def is_read(self) -> bool:
        """Whether its bytes were asked for."""
        return self._reading is not None

    def reads(self, reading: Reading, chunks: Generator[Bytes, None, None]) -> Iterator[Bytes]:
        """Its bytes are read from now on in this way, and no longer in the one before."""
        self._let_go()
        self._reading, self._chunks = reading, chunks
        return chunks

    def close(self, *, consumed: bool) -> None:
        """Let go of the slice.

        Args:
            consumed: Whether its samples were gone through, by this process and those that share them.
        """
        self._let_go()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close(self._stalled, consumed)

    def _let_go(self) -> None:
        if self._chunks is not None and self._reading is not None:
            self._chunks.close()
            self._stalled += self._reading.stalled
            self._chunks = None
