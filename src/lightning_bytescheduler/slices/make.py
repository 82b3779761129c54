"""Makes slices: cuts files of lines, rows or tables into a folder of slices with an index.

The index is one file of JSON lines with names, counts and checksums. The first line identifies the format and has the
checksum of all that follows. Each other line is a slice with the digests of its chunks, so that a chunk can be verified
before the rest of its slice arrives.
"""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import Annotated, Any, BinaryIO, TypeVar

import msgspec
import numpy as np

from lightning_bytescheduler.checks import require_bool, require_whole
from lightning_bytescheduler.exceptions import OptionError, SliceCorruptError, SliceIndexError, UnsupportedError
from lightning_bytescheduler.slices.fetch import LASTING_AT_FIRST, Waiting, ask, fetch_chunks
from lightning_bytescheduler.slices.formats import SliceFormat, format_of, import_parquet, npy_blocks, parquet_blocks
from lightning_bytescheduler.slices.options import TIMEOUT, require_packages, require_urls
from lightning_bytescheduler.slices.slice import (
    CHUNK_BYTES,
    Bytes,
    ChunkPlan,
    Slice,
    SliceStream,
    checksum_of,
    digests_of,
)
from lightning_bytescheduler.slices.urls import (
    exists,
    expand,
    file_system,
    join,
    local_path,
    read_range,
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

_Result = TypeVar("_Result")
_PIECE_BYTES = 4 * 1024 * 1024


def make_slices(
    urls: str | Sequence[str],
    folder: str,
    *,
    slice_bytes: int = SLICE_BYTES,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    timeout: float = TIMEOUT,
    progress: Callable[[int, int], None] | None = None,
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
        timeout: Seconds that a source may be unavailable.
        progress: Called with the bytes read so far and in all.

    Returns:
        The slices.

    Raises:
        OptionError: If an option is not allowed, the folder has an index, or there is no sample.
        UnsupportedError: If a file's format cannot be cut.
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
    require_packages("Making slices")
    require_protocols("urls", places)
    require_protocols("folder", (folder,))
    known = require_storage_options((*places, folder), storage_options)

    def asked(url: str, question: Callable[[], _Result]) -> _Result:
        return ask(url, question, timeout=timeout, waiting=Waiting(), lasting=LASTING_AT_FIRST)

    found = [asked(place, partial(expand, place, known, "urls")) for place in places]
    files = list(dict.fromkeys(itertools.chain.from_iterable(found)))
    _require_other_folder(folder, files)
    forms = {url: format_of(url, option="urls") for url in files}
    if asked(folder, partial(exists, join(folder, INDEX_NAME), known)):
        if not overwrite:
            allowed = "one without slices, unless they are to be overwritten (--overwrite, or overwrite=True)"
            raise OptionError("folder", folder, allowed)
        # New slices overwrite old ones, so an interrupted run must not leave the old index.
        filesystem, index_path = file_system(join(folder, INDEX_NAME), known)
        filesystem.rm_file(index_path)
    sizes = {url: asked(url, partial(size_of, url, known))[0] for url in files}
    total, done = sum(sizes.values()), 0
    lines: list[IndexLine] = []
    try:
        filesystem, path = file_system(folder, known)
        filesystem.makedirs(path, exist_ok=True)
    except OSError as error:
        allowed = f"a folder that can be made and written, but {error.strerror or error}"
        raise OptionError("folder", folder, allowed) from error

    def pieces(url: str) -> Iterator[bytearray]:
        nonlocal done
        for piece in read_file(url, sizes[url], known, timeout=timeout):
            yield piece
            done += len(piece)
            if progress is not None:
                progress(done, total)

    for url in files:
        form = forms[url]
        try:
            for content, samples in _cut(url, form, pieces(url), slice_bytes):
                name = f"slice-{len(lines):06d}{form.suffix}"
                require_sample(form, url, content)
                _write(join(folder, name), content, known)
                lines.append(IndexLine.of(name, content, samples))
        except (ValueError, EOFError) as error:
            raise SliceCorruptError(url, url, str(error) or type(error).__name__) from error
    if not lines:
        raise OptionError("urls", urls, "files with at least one sample")
    index = write_index(lines)
    _write(join(folder, INDEX_NAME), index, known)
    return [slice_ for slice_, _ in read_index(index, folder=folder)]


def read_file(
    url: str, size: int, options: Mapping[str, Any], *, timeout: float, waiting: Waiting | None = None
) -> Iterator[bytearray]:
    """Yield a whole file, in pieces of whole chunks."""
    whole = Slice(key=url, url=url, start=0, size=size, samples=1)
    plan = ChunkPlan(size=size, chunk_bytes=_PIECE_BYTES)
    return fetch_chunks(whole, plan, partial(read_range, url, options=options), timeout=timeout, waiting=waiting)


def _cut(url: str, form: SliceFormat, pieces: Iterator[Bytes], slice_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yield the contents of slices, each with its number of samples."""
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
                searched = len(held)  # avoids searching a long line again for each piece
                break
            yield bytes(held[:end])
            del held[:end]
            searched = 0
    if held:
        yield bytes(held)


def row_ranges(rows: int, row_bytes: int, target_bytes: int) -> Iterator[tuple[int, int]]:
    """Divide rows into ranges of about ``target_bytes``, equal to within one row.

    Yields:
        The first row of a range, and the one after its last.
    """
    parts = max(-(-rows * row_bytes // target_bytes), 1) if rows else 0
    parts = min(parts, rows)
    for part in range(parts):
        yield rows * part // parts, rows * (part + 1) // parts


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


def require_sample(form: SliceFormat, url: str, content: bytes) -> None:
    """Make the first sample of a slice of lines, as lines are counted and cut without being parsed.

    Raises:
        SliceCorruptError: If the sample is malformed.
    """
    if form.count_lines is None or form.blocks is None:
        return
    try:
        for block in form.blocks(SliceStream(iter((content,)))):
            if len(block):
                block[:1]
                return
    except ValueError as error:
        hint = "Is it in another format than its name says, or not UTF-8?"
        raise SliceCorruptError(url, url, f"its first sample is none of {form.suffix}: {error}. {hint}") from error


def _write(url: str, content: bytes, options: Mapping[str, Any]) -> None:
    """Write a file completely or not at all."""
    path = local_path(url)
    if path is None:
        # Object stores show only complete files, and no index names an incomplete one.
        filesystem, path = file_system(url, options)
        with filesystem.open(path, "wb") as file:
            file.write(content)
        return
    folder, name = os.path.split(os.path.abspath(path))
    part = os.path.join(folder, f".{name}.part")
    with open(part, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


class _Head(msgspec.Struct):
    """The first line."""

    format: str
    version: int
    slices: int
    chunk_bytes: Annotated[int, msgspec.Meta(ge=1)]
    checksum: str


class IndexLine(msgspec.Struct, forbid_unknown_fields=True):
    """Each other line."""

    name: str
    size: int
    samples: int
    checksum: str | None
    chunks: str

    @classmethod
    def of(cls, name: str, content: bytes, samples: int) -> IndexLine:
        """Describe the slice with this content."""
        return cls(name, len(content), samples, checksum_of(content), digests_of(content).hex())


def write_index(lines: Sequence[IndexLine]) -> bytes:
    """Return the content of the index file for these slices."""
    encoder = msgspec.json.Encoder()
    body = encoder.encode_lines(lines)
    head = _Head(
        format=_FORMAT,
        version=_VERSION,
        slices=len(lines),
        chunk_bytes=CHUNK_BYTES,
        checksum=checksum_of(body),
    )
    return encoder.encode(head) + b"\n" + body


def read_index(content: bytes, *, folder: str) -> list[tuple[Slice, ChunkPlan]]:
    """Read an index.

    Returns:
        The slices with their chunks.

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
    decoder = msgspec.json.Decoder(IndexLine)
    entries = []
    for number, line in enumerate(body.splitlines(), start=2):
        try:
            entries.append(_entry(decoder.decode(line), head.chunk_bytes, folder))
        except (msgspec.DecodeError, ValueError) as error:
            raise SliceIndexError(f"{place}, line {number}, does not describe a slice: {error}") from error
    if len({slice_.key for slice_, _ in entries}) < len(entries):
        raise SliceIndexError(f"{place} names a slice twice. Make the slices again.")
    return entries


def _entry(line: IndexLine, chunk_bytes: int, folder: str) -> tuple[Slice, ChunkPlan]:
    if not _stays_in_folder(line.name):
        raise ValueError(f"{line.name!r} is not the name of a file in its folder.")
    slice_ = Slice(
        key=line.name,
        url=join(folder, line.name),
        start=0,
        size=line.size,
        samples=line.samples,
        checksum=line.checksum,
    )
    return slice_, ChunkPlan(size=line.size, digests=bytes.fromhex(line.chunks), chunk_bytes=chunk_bytes)


def _stays_in_folder(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and "::" not in name and "://" not in name
