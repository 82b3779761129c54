"""Verifies slices: every checksum and every count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import xxhash

from lightning_bytescheduler.data.fetch import FetchOptions, fetch_chunks
from lightning_bytescheduler.data.slice import Slice
from lightning_bytescheduler.data.source import SliceSource
from lightning_bytescheduler.exceptions import SliceCorruptError

__all__ = ["verify_slices"]


def verify_slices(
    source: SliceSource,
    *,
    options: FetchOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[tuple[Slice, str]]:
    """Read every slice from its source, compare it with its checksums and count its samples.

    Args:
        source: The slices.
        options: How hard to try to read.
        progress: Told how many bytes have been read, and of how many.

    Returns:
        The slices that are not what they should be, each with what is wrong.

    Raises:
        SourceUnavailableError: If the source stays away.
        ImportError: If a library is missing that a format needs.
    """
    options = options or FetchOptions()
    total = sum(slice_.size for slice_ in source.slices)
    done = 0
    bad = []
    for slice_ in source.slices:
        try:
            chunks = fetch_chunks(slice_, source.plan(slice_), partial(source.read, slice_), options=options)
            whole = xxhash.xxh3_64()
            noted = _noted(chunks, whole)
            for _ in source.samples(slice_, noted):
                pass
            for _ in noted:
                pass  # a reader may stop before the end
            if slice_.checksum not in (None, f"xxh3_64:{whole.hexdigest()}"):
                bad.append((slice_, "its checksum is not that of its chunks."))
        except SliceCorruptError as error:
            bad.append((slice_, error.reason))
        done += slice_.size
        if progress is not None:
            progress(done, total)
    return bad


def _noted(chunks: Iterator[bytearray], whole: xxhash.xxh3_64) -> Iterator[bytearray]:
    for chunk in chunks:
        whole.update(chunk)
        yield chunk
