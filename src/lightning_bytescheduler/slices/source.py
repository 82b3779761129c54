"""A source: files and folders behind URLs, seen as slices.

A folder with an index, as written by ``lightning-bytescheduler slices make``, describes itself. Without one, files of
lines are read once to find where they can be cut, to count samples and to compute checksums. A .npy file is divided
into ranges of rows by its header alone, so only lengths can be verified. Any other file, and any compressed one, is one
slice, read once to count its samples.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

from lightning_bytescheduler.checks import require_whole
from lightning_bytescheduler.exceptions import OptionError, SliceCorruptError, SliceIndexError
from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.fetch import LASTING_AT_FIRST, Waiting, ask
from lightning_bytescheduler.slices.formats import (
    NpyHeader,
    SliceFormat,
    SliceReader,
    format_of,
    npy_blocks,
)
from lightning_bytescheduler.slices.make import (
    INDEX_NAME,
    SLICE_BYTES,
    cut_lines,
    read_file,
    read_index,
    require_sample,
    row_ranges,
)
from lightning_bytescheduler.slices.options import TIMEOUT, require_packages, require_urls
from lightning_bytescheduler.slices.samples import SliceSamples
from lightning_bytescheduler.slices.slice import (
    Bytes,
    ChunkPlan,
    Slice,
    SliceStream,
    WholeChecksum,
    checksum_of,
    digests_of,
)
from lightning_bytescheduler.slices.urls import (
    exists,
    expand,
    read_range,
    require_protocols,
    require_storage_options,
    size_of,
)

_HEADER_BYTES = 4096
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """What the slices of one file share.

    Attributes:
        version: Distinguishes other contents of the same URL, if there are no checksums.
        header: What a reader needs before the bytes of a slice that does not begin with the file.
    """

    form: SliceFormat
    version: str = ""
    header: bytes = b""


class SliceSource:
    """Slices, and how each is read. Can be pickled if the reader can, and sent to other processes.

    Args:
        slices: The slices in the order of the data.
        files: Files by URL.
        plans: Chunks of slices with digests, by the slice's key.
        storage_options: For fsspec's file systems.
        places: Number of the given URL that each slice is of; ``None`` if there is only one.

    Attributes:
        slices: The slices in the order of the data; each key once.
        places: As given.
    """

    def __init__(
        self,
        slices: Sequence[Slice],
        files: Mapping[str, SourceFile],
        plans: Mapping[str, ChunkPlan],
        storage_options: Mapping[str, Any],
        places: Sequence[int] | None = None,
    ) -> None:
        self.slices = tuple(slices)
        self.places = [0] * len(self.slices) if places is None else list(places)
        self._files = dict(files)
        self._plans = dict(plans)
        self._storage_options = dict(storage_options)

    def __repr__(self) -> str:
        samples = sum(slice_.samples for slice_ in self.slices)
        return f"SliceSource({len(self.slices)} slices, {samples} samples, {len(self._files)} files)"

    @cached_property
    def catalogue(self) -> SliceCatalogue:
        """The catalogue of the slices.

        Raises:
            OptionError: If two have the same key.
        """
        return SliceCatalogue(self.slices)

    def plan(self, slice_: Slice) -> ChunkPlan:
        """Return the chunks of a slice."""
        return self._plans.get(slice_.key) or ChunkPlan(size=slice_.size)

    def version(self, slice_: Slice) -> str:
        """Return what distinguishes other contents of the same URL, if there is no checksum; otherwise empty."""
        return self._files[slice_.url].version

    def has_file(self, slice_: Slice, timeout: float) -> bool:
        """Whether the slice's file exists.

        Raises:
            SourceUnavailableError: If the source is unavailable.
        """
        question = partial(exists, slice_.url, self._storage_options)
        return ask(slice_.url, question, timeout=timeout, waiting=Waiting(), lasting=LASTING_AT_FIRST)

    def read(self, slice_: Slice, start: int, stop: int) -> bytes:
        """Read a range of the slice's file from the source.

        Raises:
            Exception: Errors of the file system.
        """
        return read_range(slice_.url, start, stop, self._storage_options)

    def open(
        self, slice_: Slice, chunks: Callable[[], Iterator[Bytes]], *, is_here: Callable[[], bool] = lambda: False
    ) -> SliceSamples:
        """Return the samples of a slice.

        Args:
            slice_: The slice.
            chunks: Begins to read its verified bytes.
            is_here: Whether all of them are on this machine, so that reading them again is cheap.
        """
        form = self._files[slice_.url].form
        return SliceSamples(
            slice_,
            lambda first: form.blocks_of(self._stream(slice_, chunks()), first),
            is_here=None if form.blocks else is_here,
        )

    def _stream(self, slice_: Slice, chunks: Iterator[Bytes]) -> SliceStream:
        header = self._files[slice_.url].header
        return SliceStream(itertools.chain((header,), chunks) if slice_.start and header else chunks)


def open_source(
    urls: str | Sequence[str],
    *,
    option: str = "urls",
    reader: SliceReader | None = None,
    slice_bytes: int = SLICE_BYTES,
    storage_options: Mapping[str, Any] | None = None,
    timeout: float = TIMEOUT,
    waiting: Waiting | None = None,
    needs_index: bool = False,
) -> SliceSource:
    """Find the slices in files and folders.

    Args:
        urls: Files, folders, globs or indexes, any URL that fsspec opens; slices keep this order, files are sorted.
        option: Option with the URLs, for messages.
        reader: Makes samples of a file's bytes, for a format that is not known by its suffix.
        slice_bytes: Target size of the ranges into which large files are divided.
        storage_options: For fsspec's file systems.
        timeout: Seconds that a source may be unavailable.
        waiting: Time and chance.
        needs_index: Refuse sources without an index, before they are read.

    Raises:
        OptionError: If a URL matches no file, a suffix is not known, no source takes one of ``storage_options``, an
            index is needed and missing, or there is no sample.
        SliceIndexError: If an index is damaged, or a folder has slices and none.
        SliceCorruptError: If a file without an index cannot be read as its format, or is shorter than its source says.
        SourceUnavailableError: If a source is unavailable.
        ImportError: If a library is missing that a URL or a format needs.
    """
    require_whole("slice_bytes", slice_bytes, 1)
    places = require_urls(option, urls)
    require_packages("Reading slices")
    require_protocols(option, places)
    known = require_storage_options(places, storage_options)
    opening = _Opening(option, reader, slice_bytes, known, timeout, waiting or Waiting(), needs_index)
    for number, place in enumerate(places):
        opening.add(place, number, prefix=f"{number}:" if len(places) > 1 else "")
    opening.scan()
    return opening.result(places)


@dataclass(eq=False, slots=True)
class _Opening:
    _option: str
    _reader: SliceReader | None
    _slice_bytes: int
    _storage_options: Mapping[str, Any]
    _timeout: float
    _waiting: Waiting
    _needs_index: bool
    _found: dict[str, list[Slice]] = field(default_factory=dict)  # by place and file, in the order of the result
    _places: dict[str, int] = field(default_factory=dict)  # of files
    _unread: dict[str, int] = field(default_factory=dict)  # files to read, with their sizes
    _files: dict[str, SourceFile] = field(default_factory=dict)
    _plans: dict[str, ChunkPlan] = field(default_factory=dict)

    def add(self, place: str, number: int, *, prefix: str) -> None:
        before = len(self._found)
        self._add(place, prefix)
        self._places.update(dict.fromkeys(list(self._found)[before:], number))

    def _add(self, place: str, prefix: str) -> None:
        urls = self._ask(place, partial(expand, place, self._storage_options, self._option))
        index = next((url for url in urls if _name(url) == INDEX_NAME), None)
        if index is not None:
            self._add_index(index, prefix)
            return
        if self._needs_index:
            allowed = "a folder with an index, or the index: without one there are no checksums and counts to compare "
            raise OptionError(self._option, place, f"{allowed}with. 'lightning-bytescheduler slices make' writes one")
        if place not in urls and not any(sign in place for sign in "*?[") and any(map(_is_slice, urls)):
            raise SliceIndexError(
                f"{place} holds slices and no {INDEX_NAME}, so that some may be missing: making or copying them was "
                "not finished. Make them again, or copy the index too; a glob, such as folder/slice-*, takes what is "
                "there."
            )
        for url in urls:
            if url in self._found:
                continue  # two globs may match the same file
            form = format_of(url, self._reader, option=self._option)
            size, version = self._ask(url, partial(size_of, url, self._storage_options))
            self._files[url] = SourceFile(form=form, version=version)
            self._found[url] = []
            if form.blocks is npy_blocks and form.compression is None:
                self._add_rows(url, size)
            elif size:
                self._unread[url] = size

    def scan(self) -> None:
        for url, size in self._unread.items():
            form = self._files[url].form
            pieces = read_file(url, size, self._storage_options, timeout=self._timeout, waiting=self._waiting)
            if form.count_lines is not None and form.compression is None:
                self._cut(url, pieces, form, form.count_lines)
            else:
                self._count(Slice(key=url, url=url, start=0, size=size, samples=1), form, pieces)

    def result(self, places: Sequence[str]) -> SliceSource:
        slices = [slice_ for found in self._found.values() for slice_ in found]
        numbers = [self._places[url] for url, found in self._found.items() for _ in found]
        if not slices:
            raise OptionError(self._option, places, "files with at least one sample")
        return SliceSource(slices, self._files, self._plans, self._storage_options, numbers)

    def _ask(self, url: str, question: Callable[[], _Result]) -> _Result:
        return ask(url, question, timeout=self._timeout, waiting=self._waiting, lasting=LASTING_AT_FIRST)

    def _add_index(self, index: str, prefix: str) -> None:
        first, chain, rest = index.partition("::")
        folder = f"{first[: -len(INDEX_NAME)]}{chain}{rest}"
        size, _ = self._ask(index, partial(size_of, index, self._storage_options))
        content = self._ask(index, partial(read_range, index, 0, size, self._storage_options))
        entries = read_index(content, folder=folder)
        if not entries:
            raise SliceIndexError(f"{index} describes no slices. Make them from files that hold samples.")
        for found, plan in entries:
            slice_ = replace(found, key=prefix + found.key)
            form = format_of(slice_.url, self._reader, option=self._option)
            self._files[slice_.url] = SourceFile(form=form)
            self._plans[slice_.key] = plan
            self._found.setdefault(slice_.url, [slice_])

    def _cut(
        self, url: str, pieces: Iterator[bytearray], form: SliceFormat, count_lines: Callable[[bytes], int]
    ) -> None:
        start = 0
        for content in cut_lines(pieces, self._slice_bytes):
            samples = count_lines(content)
            if samples and not self._found[url]:
                require_sample(form, url, content)
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
                self._plans[slice_.key] = ChunkPlan(size=slice_.size, digests=digests_of(content))
            start += len(content)

    def _count(self, whole: Slice, form: SliceFormat, pieces: Iterator[bytearray]) -> None:
        digests = []
        total = WholeChecksum()

        def noted() -> Iterator[bytearray]:
            for piece in pieces:
                digests.append(digests_of(piece))  # a piece consists of whole chunks
                total.update(piece)
                yield piece

        stream = noted()
        try:
            samples = 0
            for block in form.blocks_of(SliceStream(stream)):
                if not samples:
                    block[:1]  # raises if its format is not that of its name
                samples += len(block)
        except (ValueError, EOFError) as error:
            raise SliceCorruptError(whole.key, whole.url, str(error) or type(error).__name__) from error
        for _ in stream:
            pass  # a reader may stop early, but the checksum covers everything
        if samples:
            slice_ = replace(whole, samples=samples, checksum=str(total))
            self._found[whole.url].append(slice_)
            self._plans[whole.key] = ChunkPlan(size=whole.size, digests=b"".join(digests))

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


def _is_slice(url: str) -> bool:
    return re.fullmatch(r"slice-\d{6,}\.\w+", _name(url)) is not None


def _name(url: str) -> str:
    return url.split("::")[0].rsplit("/", 1)[-1]
