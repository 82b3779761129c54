"""Makes slices: cuts files of lines, rows or tables into a folder of slices with an index.

The index is one file of JSON lines with names, counts and checksums. The first line identifies the format and has the
checksum of all that follows. Each other line is a slice with the digests of its chunks, so that a chunk can be verified
before the rest of its slice arrives.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
from tqdm import tqdm

from lightning_bytescheduler.checks import require_bool, require_whole
from lightning_bytescheduler.exceptions import (
    OptionError,
    SliceCorruptError,
    SliceIndexError,
)
from lightning_bytescheduler.slices.fetch import Files
from lightning_bytescheduler.slices.formats import (
    SliceFormat,
    format_of,
    import_parquet,
    npy_blocks,
    parquet_blocks,
)
from lightning_bytescheduler.slices.options import require_urls
from lightning_bytescheduler.slices.slice import CHUNK_BYTES, Bytes, Slice, SliceStream, checksum_of
from lightning_bytescheduler.slices.urls import (
    exists,
    expand,
    file_system,
    join,
    local_path,
    require_protocols,
    require_storage_options,
    size_of,
)

SLICE_BYTES = 64 * 1024 * 1024
"""Target size of a slice in bytes."""

INDEX_NAME = "slices.index"
"""Name of the index in a folder of slices."""

_FORMAT = "lightning-bytescheduler slices"
_VERSION = 1


def make_slices(
    urls: str | Sequence[str],
    folder: str,
    *,
    slice_bytes: int = SLICE_BYTES,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    bar: tqdm[Any] | None = None,
) -> list[Slice]:
    """Cut files of lines, .npy and Parquet files into slices, with an index of counts and checksums.

    Slices of compressed files are not compressed, so that they can be cut and resumed anywhere. The index is written
    last: a folder without one is not finished.

    Args:
        urls: Files, folders or globs, any URL that fsspec opens.
        folder: URL or path of the folder to fill; created if missing.
        slice_bytes: Target size of a slice.
        overwrite: Replace the slices of a folder that has an index.
        storage_options: For fsspec's file systems.
        bar: Shows the bytes that were read.

    Returns:
        The slices.

    Raises:
        OptionError: If an option is not allowed, the folder has an index, or there is no sample.
        SliceCorruptError: If a file cannot be read as its format.
        SourceUnavailableError: If a source is unavailable.
        OSError: If the folder cannot be written.
        ImportError: If a library is missing that a URL or a format needs.
    """
    require_whole("slice_bytes", slice_bytes, 1)
    require_bool("overwrite", overwrite)
    places = require_urls("urls", urls)
    if not isinstance(folder, str) or not folder:
        raise OptionError("folder", folder, "a path or a URL")
    require_protocols("urls", places)
    require_protocols("folder", (folder,))
    known = require_storage_options((*places, folder), storage_options)

    sources = Files(options=known)
    files = list(dict.fromkeys(url for place in places for url in sources.ask(expand, place, "urls")))
    _require_other_folder(folder, files)
    forms = {url: format_of(url, option="urls") for url in files}
    index_url = join(folder, INDEX_NAME)
    if sources.ask(exists, index_url):
        if not overwrite:
            allowed = "one without slices, unless they are to be overwritten (--overwrite, or overwrite=True)"
            raise OptionError("folder", folder, allowed)
        # New slices overwrite old ones, so an interrupted run must not leave the old index.
        filesystem, path = file_system(index_url, known)
        filesystem.rm_file(path)
    sizes = {url: sources.ask(size_of, url) for url in files}
    bar = tqdm(disable=True) if bar is None else bar
    bar.total = sum(sizes.values())
    slices: list[Slice] = []
    try:
        filesystem, path = file_system(folder, known)
        filesystem.makedirs(path, exist_ok=True)
    except OSError as error:
        allowed = f"a folder that can be made and written, but {error.strerror or error}"
        raise OptionError("folder", folder, allowed) from error

    def pieces(url: str) -> Iterator[bytearray]:
        for piece in sources.pieces_of(url, sizes[url]):
            yield piece
            bar.update(len(piece))

    for url, form in forms.items():
        try:
            for content, samples in _cut(form, pieces(url), slice_bytes):
                name = f"slice-{len(slices):06d}{form.suffix}"
                slices.append(Slice.of(content, key=name, url=join(folder, name), samples=samples))
                _write(slices[-1].url, content, known)
        except (ValueError, EOFError) as error:
            raise SliceCorruptError(url, url, str(error) or type(error).__name__) from error
    if not slices:
        raise OptionError("urls", urls, "files with at least one sample")
    _write(index_url, write_index(slices), known)
    return slices


def _cut(form: SliceFormat, pieces: Iterator[Bytes], slice_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yield the contents of slices, each with its number of samples."""
    stream = form.opened(SliceStream(pieces))
    if form.blocks is npy_blocks:
        yield from _cut_rows(stream, slice_bytes)
    elif form.blocks is parquet_blocks:
        yield from cut_parquet(io.BytesIO(stream.read()), slice_bytes)
    else:
        for content in cut_lines(stream.chunks(), slice_bytes):
            if samples := sum(map(len, form.blocks(SliceStream(iter((content,)))))):
                yield content, samples


def cut_lines(pieces: Iterable[Bytes], target_bytes: int) -> Iterator[bytes]:
    """Cut a text at line ends.

    Args:
        pieces: The text, in pieces of any size.
        target_bytes: A slice ends with the last line that ends within so many bytes; one longer line is a slice.

    Yields:
        The contents of slices, in order; together they are the text.
    """
    held = bytearray()
    searched = 0  # so that a line of many pieces is searched once
    for piece in pieces:
        held += piece
        while len(held) >= target_bytes:
            end = held.rfind(b"\n", searched, target_bytes) + 1 or held.find(b"\n", max(searched, target_bytes)) + 1
            searched = 0 if end else len(held)
            if not end:
                break
            yield bytes(held[:end])
            del held[:end]
    if held:
        yield bytes(held)


def _cut_rows(stream: SliceStream, slice_bytes: int) -> Iterator[tuple[bytes, int]]:
    held: list[np.ndarray[Any, Any]] = []
    rows = 0
    for block in npy_blocks(stream):
        held.append(block)
        rows += len(block)
        most = max(slice_bytes // block[:1].nbytes, 1)
        if rows >= most:
            whole = np.concatenate(held)
            for start in range(0, rows - most + 1, most):
                yield npy_slice(whole[start : start + most]), most
            rows %= most
            held = [whole[len(whole) - rows :]]
    if rows:
        yield npy_slice(np.concatenate(held)), rows


def npy_slice(rows: np.ndarray[Any, Any]) -> bytes:
    """Return the content of a .npy file with these rows."""
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(rows), allow_pickle=False)
    return file.getvalue()


def cut_parquet(file: BinaryIO, slice_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Cut a Parquet file into smaller ones of about ``slice_bytes``, by the average size of rows.

    Yields:
        The content of a file, and its number of rows.

    Raises:
        ImportError: If pyarrow is not installed.
        ValueError: If it is not a Parquet file.
    """
    parquet = import_parquet()
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    source = parquet.ParquetFile(file)
    total = source.metadata.num_rows
    rows = max(slice_bytes * total // max(size, 1), 1)
    table = source.read()
    for first in range(0, total, rows):
        part = table.slice(first, rows)
        content = io.BytesIO()
        parquet.write_table(part, content)
        yield content.getvalue(), part.num_rows


def _require_other_folder(folder: str, files: Iterable[str]) -> None:
    path = local_path(folder)
    if path is None:
        return
    if os.path.isfile(path):
        raise OptionError("folder", folder, "a folder, and is a file: the last argument is where the slices go")
    inside = [url for url in files if os.path.dirname(local_path(url) or "") == os.path.abspath(path)]
    if inside:
        raise OptionError("folder", folder, f"another folder than that of the files, such as that of {inside[0]}")


def _write(url: str, content: bytes, options: Mapping[str, Any]) -> None:
    """Write a file. If that is interrupted, no index names it, or the index has another checksum."""
    filesystem, path = file_system(url, options)
    with filesystem.open(path, "wb") as file:
        file.write(content)
    filesystem.invalidate_cache()
    if (size := filesystem.info(path)["size"]) != len(content):
        raise OSError(f"{url} has {size} bytes after {len(content)} were written there.")


class _Head(msgspec.Struct):
    """The first line."""

    format: str
    version: int
    slices: int
    chunk_bytes: Annotated[int, msgspec.Meta(ge=1)]
    checksum: str


class _Line(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Each other line."""

    name: str
    size: Annotated[int, msgspec.Meta(ge=0)]
    samples: Annotated[int, msgspec.Meta(ge=1)]
    chunks: str
    checksum: str | None = None  # of all chunks, which is not needed

    def slice_in(self, folder: str, chunk_bytes: int) -> Slice:
        """Return the slice in a folder."""
        path = PurePosixPath(self.name)
        if not self.name or path.is_absolute() or ".." in path.parts or "::" in self.name or "://" in self.name:
            raise ValueError(f"{self.name!r} is not the name of a file in its folder.")
        return Slice(
            key=self.name,
            url=join(folder, self.name),
            size=self.size,
            samples=self.samples,
            digests=bytes.fromhex(self.chunks),
            chunk_bytes=chunk_bytes,
        )


def write_index(slices: Sequence[Slice]) -> bytes:
    """Return the content of the index file for these slices."""
    encoder = msgspec.json.Encoder()
    lines = [_Line(one.key, one.size, one.samples, (one.digests or b"").hex()) for one in slices]
    body = encoder.encode_lines(lines)
    head = _Head(_FORMAT, _VERSION, slices=len(lines), chunk_bytes=CHUNK_BYTES, checksum=checksum_of(body))
    return encoder.encode(head) + b"\n" + body


def read_index(content: bytes, *, folder: str) -> list[Slice]:
    """Read an index.

    Returns:
        The slices.

    Raises:
        SliceIndexError: If it is not an index, of another version, or damaged.
    """
    first, _, body = content.partition(b"\n")
    place = join(folder, INDEX_NAME)
    try:
        head = msgspec.json.decode(first, type=_Head)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise SliceIndexError(
            f"{place} is damaged, or no index of slices: {error}. Make the slices again, with 'lightning-bytescheduler "
            "slices make'."
        ) from error
    if (head.format, head.version) != (_FORMAT, _VERSION):
        raise SliceIndexError(
            f"{place} is of version {head.version!r}, and this release reads version {_VERSION}: "
            "make the slices again, or install the release that made them."
        )
    if head.checksum != checksum_of(body) or head.slices != len(body.splitlines()):
        raise SliceIndexError(f"{place} is damaged: its checksum is not that of its content. Make the slices again.")
    decoder = msgspec.json.Decoder(_Line)
    slices = []
    for number, line in enumerate(body.splitlines(), start=2):
        try:
            slices.append(decoder.decode(line).slice_in(folder, head.chunk_bytes))
        except (msgspec.DecodeError, ValueError) as error:
            raise SliceIndexError(f"{place}, line {number}, does not describe a slice: {error}") from error
    if len({slice_.key for slice_ in slices}) < len(slices):
        raise SliceIndexError(f"{place} names a slice twice. Make the slices again.")
    return slices
