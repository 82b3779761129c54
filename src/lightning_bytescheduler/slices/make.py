"""Makes slices: cuts files into a folder of slices with an index."""

from __future__ import annotations

import io
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from lightning_bytescheduler.exceptions import OptionError, SliceCorruptError, UnsupportedError
from lightning_bytescheduler.slices.fetch import FetchOptions, fetch_chunks
from lightning_bytescheduler.slices.formats import (
    SliceFormat,
    cut_parquet,
    format_of,
    npy_blocks,
    npy_slice,
    parquet_blocks,
)
from lightning_bytescheduler.slices.open_source import (
    INDEX_NAME,
    SLICE_BYTES,
    IndexedSlice,
    cut_lines,
    indexed_slice,
    write_index,
)
from lightning_bytescheduler.slices.slice import Bytes, ChunkPlan, Slice, SliceStream
from lightning_bytescheduler.slices.source import exists, expand, join, local_path, make_folder, read_range, size_of

__all__ = ["make_slices"]

_PIECE_BYTES = 4 * 1024 * 1024


def make_slices(
    urls: str | Sequence[str],
    folder: str,
    *,
    slice_bytes: int = SLICE_BYTES,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    options: FetchOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[IndexedSlice]:
    """Cut files of lines, .npy and Parquet files into slices, with an index that holds counts and checksums.

    Slices of compressed files are not compressed, so that they can be cut and resumed anywhere. The index comes last: a
    folder without one is not finished.

    Args:
        urls: Files, folders or globs, any URL that fsspec opens.
        folder: URL or path of the folder to fill; made if it is missing.
        slice_bytes: Target size of a slice.
        overwrite: Replace the slices of a folder that has an index.
        storage_options: For fsspec's file systems.
        options: How hard to try to read.
        progress: Told how many bytes have been read, and of how many.

    Returns:
        What the index describes.

    Raises:
        OptionError: If an option is not allowed, the folder has an index, or there is not a single sample.
        UnsupportedError: If a file's format cannot be cut.
        SliceCorruptError: If a file cannot be understood.
        SourceUnavailableError: If a source stays away.
        OSError: If the folder cannot be written.
        ImportError: If a library is missing that a URL or a format needs.
    """
    if isinstance(slice_bytes, bool) or not isinstance(slice_bytes, int) or slice_bytes < 1:
        raise OptionError("slice_bytes", slice_bytes, "a positive whole number of bytes")
    known = storage_options or {}
    places = [urls] if isinstance(urls, str) else list(urls)
    files = list(dict.fromkeys(url for place in places for url in expand(place, known)))
    forms = {url: format_of(url) for url in files}
    if exists(join(folder, INDEX_NAME), known):
        if not overwrite:
            raise OptionError("folder", folder, "one without slices, unless they are to be overwritten")
        # What is left of the old slices is no slice of the new ones, so an interrupted run must not leave its index.
        _remove(join(folder, INDEX_NAME), known)
    sizes = {url: size_of(url, known) for url in files}
    total, done = sum(sizes.values()), 0
    entries: list[IndexedSlice] = []
    make_folder(folder, known)

    def pieces(url: str) -> Iterator[bytearray]:
        nonlocal done
        whole = Slice(key=url, url=url, start=0, size=sizes[url], samples=1)
        plan = ChunkPlan(size=whole.size, chunk_bytes=_PIECE_BYTES, digests=None)
        for piece in fetch_chunks(whole, plan, partial(read_range, url, options=known), options=options):
            yield piece
            done += len(piece)
            if progress is not None:
                progress(done, total)

    for url in files:
        form = forms[url]
        try:
            for content, samples in _cut(url, form, pieces(url), slice_bytes):
                name = f"slice-{len(entries):06d}{form.suffix}"
                _write(join(folder, name), content, known)
                entries.append(indexed_slice(name, content, samples, folder=folder))
        except (ValueError, EOFError) as error:
            raise SliceCorruptError(url, url, str(error) or type(error).__name__) from error
    if not entries:
        raise OptionError("urls", urls, "files with at least one sample")
    _write(join(folder, INDEX_NAME), write_index(entries), known)
    return entries


def _cut(url: str, form: SliceFormat, pieces: Iterator[Bytes], slice_bytes: int) -> Iterator[tuple[bytes, int]]:
    """The contents of slices, each with its number of samples."""
    stream = form.opened(SliceStream(pieces))
    if form.count_lines is not None:
        for content in cut_lines(stream.chunks(), slice_bytes):
            samples = form.count_lines(content)
            if samples:
                yield content, samples
    elif form.blocks is npy_blocks:
        yield from _cut_rows(stream, slice_bytes)
    elif form.blocks is parquet_blocks:
        yield from cut_parquet(io.BytesIO(stream.read()), slice_bytes)
    else:
        raise UnsupportedError(f"{url} is of a format that cannot be cut into slices; give the files as they are.")


def _cut_rows(stream: SliceStream, slice_bytes: int) -> Iterator[tuple[bytes, int]]:
    rows: list[Any] = []
    size = 0
    for row in itertools.chain.from_iterable(npy_blocks(stream)):
        rows.append(np.asarray(row))
        size += rows[-1].nbytes
        if size + rows[-1].nbytes > slice_bytes:
            yield npy_slice(np.stack(rows)), len(rows)
            rows, size = [], 0
    if rows:
        yield npy_slice(np.stack(rows)), len(rows)


def _write(url: str, content: bytes, options: Mapping[str, Any]) -> None:
    """Write a file whole or not at all."""
    path = local_path(url)
    if path is None:
        # Object stores show a file when it is complete; one that was not is unknown to any index.
        with fsspec.open(url, "wb", **options) as file:
            file.write(content)
        return
    folder, name = os.path.split(os.path.abspath(path))
    descriptor, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), 0o644)  # others may read it, as they may any new file
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _remove(url: str, options: Mapping[str, Any]) -> None:
    filesystem, path = fsspec.core.url_to_fs(url, **options)
    filesystem.rm_file(path)
