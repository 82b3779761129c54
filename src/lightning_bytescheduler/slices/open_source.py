"""Finds the slices in files and folders.

A folder that has an index, as ``lightning-bytescheduler slices make`` writes it, says everything itself. Without one,
files of lines are read once from end to end, which finds where they can be cut, counts the samples and notes the
checksums. A .npy file is divided into ranges of rows by its header alone, so that only lengths can be verified. Any
other file, and one that is compressed, is one slice, read once to count its samples.

Cutting lines and rows into slices of about a target size.

The index of a folder of slices: names, counts and checksums of each, in one file of JSON lines.

The first line says what the file is and has the checksum of all that follows; each other line is a slice, with the
digests of its chunks, so that a chunk can be verified when the rest of its slice is still on its way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any, TypeVar

import xxhash

from lightning_bytescheduler.exceptions import OptionError, SliceCorruptError, SliceIndexError
from lightning_bytescheduler.slices.fetch import FetchOptions, Patience, Waiting, fetch_chunks
from lightning_bytescheduler.slices.formats import NpyHeader, SliceFormat, SliceReader, format_of, npy_blocks
from lightning_bytescheduler.slices.slice import (
    CHUNK_BYTES,
    Bytes,
    ChunkPlan,
    Slice,
    SliceStream,
    checksum_of,
    digests_of,
)
from lightning_bytescheduler.slices.source import (
    SliceSource,
    SourceFile,
    expand,
    file_version,
    join,
    read_range,
    size_of,
)

__all__ = [
    "INDEX_NAME",
    "SLICE_BYTES",
    "IndexedSlice",
    "cut_lines",
    "indexed_slice",
    "open_source",
    "read_index",
    "row_ranges",
    "write_index",
]


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


INDEX_NAME = "slices.index"
"""Name of the index in a folder of slices."""

_FORMAT = "lightning-bytescheduler slices"
_VERSION = 1
_FIELDS = {"name", "size", "samples", "checksum", "chunks"}


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexedSlice:
    """A slice and what is known of its chunks.

    Attributes:
        slice: The slice.
        chunk_bytes: Bytes of a chunk.
        digests: Of the chunks, one after the other.
    """

    slice: Slice
    chunk_bytes: int
    digests: bytes


def indexed_slice(name: str, content: bytes, samples: int, *, folder: str) -> IndexedSlice:
    """Describe the slice that ``content`` makes as a file ``name`` in the folder at a URL."""
    slice_ = Slice(
        key=name,
        url=join(folder, name),
        start=0,
        size=len(content),
        samples=samples,
        checksum=checksum_of(content),
    )
    return IndexedSlice(slice=slice_, chunk_bytes=CHUNK_BYTES, digests=digests_of(content))


def write_index(entries: Iterable[IndexedSlice]) -> bytes:
    """The content of the index file for these slices."""
    lines = []
    for entry in entries:
        slice_ = entry.slice
        described = {
            "name": slice_.key,
            "size": slice_.size,
            "samples": slice_.samples,
            "checksum": slice_.checksum,
            "chunks": entry.digests.hex(),
        }
        lines.append(json.dumps(described).encode() + b"\n")
    body = b"".join(lines)
    head = {
        "format": _FORMAT,
        "version": _VERSION,
        "slices": len(lines),
        "chunk_bytes": CHUNK_BYTES,
        "checksum": checksum_of(body),
    }
    return json.dumps(head).encode() + b"\n" + body


def read_index(content: bytes, *, folder: str) -> list[IndexedSlice]:
    """Read an index.

    Args:
        content: Of the index file.
        folder: URL of the folder that it is in.

    Raises:
        SliceIndexError: If it is no index, of another version, or damaged.
    """
    first, _, body = content.partition(b"\n")
    head = _object(first)
    place = join(folder, INDEX_NAME)
    if head is None or head.get("format") != _FORMAT:
        raise SliceIndexError(
            f"{place} is not an index of slices; make one with 'lightning-bytescheduler slices make'."
        )
    if head.get("version") != _VERSION:
        raise SliceIndexError(
            f"{place} is of version {head.get('version')!r}, and this release reads version {_VERSION}: "
            "make the slices again, or install the release that made them."
        )
    if head.get("checksum") != checksum_of(body):
        raise SliceIndexError(f"{place} is damaged: its checksum is not that of its content. Make the slices again.")
    entries = []
    for number, line in enumerate(body.splitlines(), start=2):
        described = _object(line)
        try:
            entries.append(_entry(described, head.get("chunk_bytes"), folder))
        except (OptionError, ValueError, TypeError) as error:
            raise SliceIndexError(f"{place}, line {number}, does not describe a slice: {error}") from error
    names = {entry.slice.key for entry in entries}
    if len(names) != len(entries) or head.get("slices") != len(entries):
        raise SliceIndexError(
            f"{place} is damaged: it should describe {head.get('slices')!r} slices, each once, but describes "
            f"{len(names)} in {len(entries)} lines. Make the slices again."
        )
    return entries


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _entry(described: dict[str, Any] | None, chunk_bytes: Any, folder: str) -> IndexedSlice:
    if described is None or described.keys() != _FIELDS:
        raise ValueError(f"it must be an object with {', '.join(sorted(_FIELDS))}.")
    name = described["name"]
    if not isinstance(name, str) or not _stays_in_folder(name):
        raise ValueError(f"{name!r} is not the name of a file in its folder.")
    if isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int) or chunk_bytes < 1:
        raise ValueError(f"chunk_bytes={chunk_bytes!r} is not a positive whole number.")
    slice_ = Slice(
        key=name,
        url=join(folder, name),
        start=0,
        size=described["size"],
        samples=described["samples"],
        checksum=described["checksum"],
    )
    digests = bytes.fromhex(described["chunks"])
    ChunkPlan(size=slice_.size, chunk_bytes=chunk_bytes, digests=digests)
    return IndexedSlice(slice=slice_, chunk_bytes=chunk_bytes, digests=digests)


def _stays_in_folder(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and "::" not in name and "://" not in name


SLICE_BYTES = 64 * 1024 * 1024
"""Target size of a slice."""

_PIECE_BYTES = 8 * 1024 * 1024
_HEADER_BYTES = 4096
_Result = TypeVar("_Result")

Progress = Callable[[int, int], None]


def open_source(
    urls: str | Sequence[str],
    *,
    reader: SliceReader | None = None,
    slice_bytes: int = SLICE_BYTES,
    storage_options: Mapping[str, Any] | None = None,
    options: FetchOptions | None = None,
    waiting: Waiting | None = None,
    progress: Progress | None = None,
) -> SliceSource:
    """Find the slices in files and folders.

    Args:
        urls: Files, folders, globs or indexes, any URL that fsspec opens; slices keep this order, files are sorted.
        reader: Makes samples of a file's bytes, for a format that is not known by its suffix.
        slice_bytes: Target size of the ranges into which large files are divided.
        storage_options: For fsspec's file systems.
        options: How hard to try.
        waiting: Time and chance.
        progress: Told how many bytes have been read, and of how many, while files are read that have no index.

    Raises:
        OptionError: If a URL stands for no file, a suffix is not known, or there is not a single sample.
        SliceIndexError: If an index is damaged.
        SliceCorruptError: If a file without an index cannot be understood, or is shorter than its source says.
        SourceUnavailableError: If a source stays away.
        ImportError: If a library is missing that a URL or a format needs.
    """
    if isinstance(slice_bytes, bool) or not isinstance(slice_bytes, int) or slice_bytes < 1:
        raise OptionError("slice_bytes", slice_bytes, "a positive whole number of bytes")
    places = [urls] if isinstance(urls, str) else list(urls)
    if not places or not all(isinstance(place, str) and place for place in places):
        raise OptionError("urls", urls, "a URL, or a list of some")
    opening = _Opening(reader, slice_bytes, storage_options or {}, options or FetchOptions(), waiting or Waiting())
    for number, place in enumerate(places):
        opening.add(place, prefix=f"{number}:" if len(places) > 1 else "")
    opening.scan(progress)
    return opening.result(places)


class _Opening:
    def __init__(
        self,
        reader: SliceReader | None,
        slice_bytes: int,
        storage_options: Mapping[str, Any],
        options: FetchOptions,
        waiting: Waiting,
    ) -> None:
        self._reader = reader
        self._slice_bytes = slice_bytes
        self._storage_options = storage_options
        self._options = options
        self._waiting = waiting
        self._found: dict[str, list[Slice]] = {}  # by place, and then file: the order of the result
        self._unread: dict[str, int] = {}  # files that are to be read, and their sizes
        self._files: dict[str, SourceFile] = {}
        self._digests: dict[str, bytes] = {}

    def add(self, place: str, *, prefix: str) -> None:
        """Look what a place is; what has to be read is only noted."""
        urls = self._ask(place, partial(expand, place, self._storage_options))
        index = next((url for url in urls if _name(url) == INDEX_NAME), None)
        if index is not None:
            self._add_index(index, prefix)
            return
        for url in urls:
            if url in self._found:
                continue  # two globs may name the same file
            form = format_of(url, self._reader)
            version = self._ask(url, partial(file_version, url, self._storage_options))
            self._files[url] = SourceFile(form=form, version=version)
            size = self._ask(url, partial(size_of, url, self._storage_options))
            self._found[url] = []
            if form.blocks is npy_blocks and form.compression is None:
                self._add_rows(url, size)
            elif size:
                self._unread[url] = size

    def scan(self, progress: Progress | None) -> None:
        """Read the files that have no index."""
        total = sum(self._unread.values())
        done = 0

        def pieces(whole: Slice) -> Iterator[bytearray]:
            nonlocal done
            plan = ChunkPlan(size=whole.size, chunk_bytes=_PIECE_BYTES, digests=None)
            read = partial(read_range, whole.url, options=self._storage_options)
            for piece in fetch_chunks(whole, plan, read, options=self._options, waiting=self._waiting):
                yield piece
                done += len(piece)
                if progress is not None:
                    progress(done, total)

        for url, size in self._unread.items():
            whole = Slice(key=url, url=url, start=0, size=size, samples=1)
            form = self._files[url].form
            if form.count_lines is not None and form.compression is None:
                self._cut(url, pieces(whole), form.count_lines)
            else:
                self._count(whole, form, pieces(whole))

    def result(self, places: Sequence[str]) -> SliceSource:
        """The source."""
        slices = [slice_ for found in self._found.values() for slice_ in found]
        if not slices:
            raise OptionError("urls", places, "files with at least one sample")
        return SliceSource(slices, self._files, self._digests, self._storage_options)

    def _ask(self, url: str, question: Callable[[], _Result]) -> _Result:
        patience = Patience(url, self._options.timeout, self._waiting)
        while True:
            patience.ask()
            try:
                return question()
            except (OptionError, ImportError, NotImplementedError, TypeError, ValueError, FileNotFoundError):
                raise  # asking again does not help: what is missing now was probably never there
            except Exception as error:  # each file system has its own
                patience.failed(error)

    def _add_index(self, index: str, prefix: str) -> None:
        first, chain, rest = index.partition("::")
        folder = f"{first[: -len(INDEX_NAME)]}{chain}{rest}"
        size = self._ask(index, partial(size_of, index, self._storage_options))
        content = self._ask(index, partial(read_range, index, 0, size, self._storage_options))
        entries = read_index(content, folder=folder)
        if not entries:
            raise SliceIndexError(f"{index} describes no slices. Make them from files that hold samples.")
        for entry in entries:
            slice_ = replace(entry.slice, key=prefix + entry.slice.key)
            form = format_of(slice_.url, self._reader)
            self._files[slice_.url] = SourceFile(form=form, chunk_bytes=entry.chunk_bytes)
            self._digests[slice_.key] = entry.digests
            self._found.setdefault(slice_.url, [slice_])

    def _cut(self, url: str, pieces: Iterator[bytearray], count_lines: Callable[[bytes], int]) -> None:
        start = 0
        for content in cut_lines(pieces, self._slice_bytes):
            samples = count_lines(content)
            if samples:
                slice_ = Slice(
                    key=f"{url}@{start}",
                    url=url,
                    start=start,
                    size=len(content),
                    samples=samples,
                    checksum=checksum_of(content),
                )
                self._found[url].append(slice_)
                self._digests[slice_.key] = digests_of(content)
            start += len(content)

    def _count(self, whole: Slice, form: SliceFormat, pieces: Iterator[bytearray]) -> None:
        digests = []
        total = xxhash.xxh3_64()

        def noted() -> Iterator[bytearray]:
            for piece in pieces:
                digests.append(digests_of(piece))  # a piece is made of whole chunks
                total.update(piece)
                yield piece

        stream = noted()
        try:
            samples = sum(1 for _ in form.samples(SliceStream(stream)))
        except (ValueError, EOFError) as error:
            raise SliceCorruptError(whole.key, whole.url, str(error) or type(error).__name__) from error
        for _ in stream:
            pass  # a reader may stop before the end, but the checksum is of all
        if samples:
            slice_ = replace(whole, samples=samples, checksum=f"xxh3_64:{total.hexdigest()}")
            self._found[whole.url].append(slice_)
            self._digests[whole.key] = b"".join(digests)

    def _add_rows(self, url: str, size: int) -> None:
        wanted = _HEADER_BYTES
        while True:
            start = self._ask(url, partial(read_range, url, 0, min(wanted, size), self._storage_options))
            try:
                header = NpyHeader(start)
                break
            except (ValueError, EOFError) as error:
                if isinstance(error, ValueError) or wanted >= size:
                    raise SliceCorruptError(url, url, str(error)) from error
            wanted *= 16
        begin = len(header.content)
        if size != begin + header.rows * header.row_bytes:
            reason = f"its header tells of {header.rows} rows of {header.row_bytes} bytes, but it has {size} bytes."
            raise SliceCorruptError(url, url, reason)
        self._files[url] = replace(self._files[url], header=header.content)
        for first, after in row_ranges(header.rows, header.row_bytes, self._slice_bytes):
            at = begin + first * header.row_bytes
            length = (after - first) * header.row_bytes
            self._found[url].append(Slice(key=f"{url}@{at}", url=url, start=at, size=length, samples=after - first))


def _name(url: str) -> str:
    return url.split("::")[0].rsplit("/", 1)[-1]
