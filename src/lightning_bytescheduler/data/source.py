"""A source: files behind fsspec URLs, seen as slices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import length_hint
from typing import Any

from lightning_bytescheduler.data.chunks import CHUNK_BYTES, Bytes, ChunkPlan
from lightning_bytescheduler.data.formats import SliceFormat
from lightning_bytescheduler.data.locations import read_range
from lightning_bytescheduler.data.sample_blocks import SampleBlock
from lightning_bytescheduler.data.slice import Slice
from lightning_bytescheduler.data.stream import SliceStream
from lightning_bytescheduler.exceptions import SliceCorruptError

__all__ = ["SliceSource", "SourceFile"]

_END = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """What the slices of one file have in common.

    Attributes:
        form: Its format.
        version: Tells other contents of the same URL apart, where there are no checksums.
        header: What a reader needs before the bytes of a slice that does not begin with the file.
        chunk_bytes: Bytes of a chunk.
    """

    form: SliceFormat
    version: str = ""
    header: bytes = b""
    chunk_bytes: int = CHUNK_BYTES


class SliceSource:
    """Slices, and how each is read. Can be pickled if the reader can, and handed to other processes.

    Args:
        slices: In the order of the data.
        files: By URL.
        digests: Of chunks, by the key of a slice.
        storage_options: For fsspec's file systems.

    Attributes:
        slices: In the order of the data; each key once.
    """

    def __init__(
        self,
        slices: Sequence[Slice],
        files: Mapping[str, SourceFile],
        digests: Mapping[str, bytes],
        storage_options: Mapping[str, Any],
    ) -> None:
        self.slices = tuple(slices)
        self._files = dict(files)
        self._digests = dict(digests)
        self._storage_options = dict(storage_options)

    def __repr__(self) -> str:
        samples = sum(slice_.samples for slice_ in self.slices)
        return f"SliceSource({len(self.slices)} slices, {samples} samples, {len(self._files)} files)"

    def plan(self, slice_: Slice) -> ChunkPlan:
        """The chunks of a slice."""
        return ChunkPlan.of(slice_, self._files[slice_.url].chunk_bytes, self._digests.get(slice_.key))

    def version(self, slice_: Slice) -> str:
        """What tells other contents of the same URL apart, where there is no checksum; else empty."""
        return self._files[slice_.url].version

    def read(self, slice_: Slice, start: int, stop: int) -> bytes:
        """Ask the source for a range of the slice's file.

        Raises:
            Exception: Whatever the file system raises.
        """
        return read_range(slice_.url, start, stop, self._storage_options)

    def has_blocks(self, slice_: Slice) -> bool:
        """Whether samples of the slice are found without making them: not by a reader that is a user's function."""
        return self._files[slice_.url].form.blocks is not None

    def blocks(self, slice_: Slice, chunks: Iterator[Bytes]) -> Iterator[SampleBlock[Any]]:
        """The samples of the slice's chunks, in blocks; whether there are as many as there should be is not checked.

        Args:
            slice_: The slice.
            chunks: Its verified bytes.

        Raises:
            ValueError: If the data is malformed.
            EOFError: If it is cut short.
        """
        return self._files[slice_.url].form.blocks_of(self._stream(slice_, chunks))

    def samples(self, slice_: Slice, chunks: Iterator[Bytes], first: int = 0) -> Iterator[Any]:
        """Make samples of the slice's chunks.

        Args:
            slice_: The slice.
            chunks: Its verified bytes.
            first: Number of the first sample that is wanted.

        Yields:
            The samples from there on.

        Raises:
            SliceCorruptError: If the data is malformed, or there are not as many samples as there should be.
        """
        file = self._files[slice_.url]
        stream = self._stream(slice_, chunks)
        # What is between the reader and the training is counted without a Python frame: this is paid for each sample.
        missing = itertools.repeat(True, slice_.samples - first)
        try:
            samples = iter(file.form.samples(stream, first))
            yield from itertools.compress(itertools.islice(samples, slice_.samples - first), missing)
            number = slice_.samples - length_hint(missing)
            if number < slice_.samples:
                raise ValueError(f"it holds {number} samples, where {slice_.samples} were counted.")
            if next(samples, _END) is _END:  # which also takes the reader to the end of its bytes
                return
        except (ValueError, EOFError) as error:
            number = slice_.samples - length_hint(missing)
            reason = str(error) or type(error).__name__
            raise SliceCorruptError(slice_.key, slice_.url, f"after sample {number}: {reason}") from error
        raise SliceCorruptError(
            slice_.key, slice_.url, f"it holds more than the {slice_.samples} samples that were counted."
        )

    def _stream(self, slice_: Slice, chunks: Iterator[Bytes]) -> SliceStream:
        header = self._files[slice_.url].header
        return SliceStream(itertools.chain((header,), chunks) if slice_.start and header else chunks)
