"""A source: files and folders behind URLs, seen as slices.

A folder with an index, as written by ``lightning-bytescheduler slices make``, describes itself. Without one, files of
lines are read once to find where they can be cut, to count samples and to compute checksums. A .npy file is divided
into ranges of rows by its header alone, so only lengths can be verified. Any other file, and any compressed one, is one
slice, read once to count its samples.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lightning_bytescheduler.checks import require_whole
from lightning_bytescheduler.exceptions import BadSampleError, OptionError, SliceCorruptError, SliceIndexError
from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.fetch import Files, Waiting
from lightning_bytescheduler.slices.formats import (
    NpyHeader,
    SliceFormat,
    SliceReader,
    SliceSamples,
    format_of,
    npy_blocks,
    require_sample,
)
from lightning_bytescheduler.slices.make import INDEX_NAME, SLICE_BYTES, cut_lines, read_index, row_ranges
from lightning_bytescheduler.slices.options import TIMEOUT, require_packages, require_urls
from lightning_bytescheduler.slices.slice import Bytes, ChunkPlan, Slice, SliceStream, digests_of
from lightning_bytescheduler.slices.urls import read_range, require_protocols, require_storage_options

_HEADER_BYTES = 16 * 1024  # more than NumPy reads of a header


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """What the slices of one file share.

    Attributes:
        header: What a reader needs before the bytes of a slice that does not begin with the file.
    """

    form: SliceFormat
    header: bytes = b""


class SliceSource:
    """Slices, and how each is read. Can be pickled if the reader can, and sent to other processes.

    Args:
        plans: The chunks of each slice, in the order of the data.
        files: Files by URL.
        storage_options: For fsspec's file systems.
        places: Number of the given URL that each slice is of; ``None`` if there is only one.

    Attributes:
        slices: The slices in the order of the data; each key once.
        places: As given.
    """

    def __init__(
        self,
        plans: Sequence[ChunkPlan],
        files: Mapping[str, SourceFile],
        storage_options: Mapping[str, Any],
        places: Sequence[int] | None = None,
    ) -> None:
        self.slices = tuple(plan.slice for plan in plans)
        self.places = [0] * len(self.slices) if places is None else list(places)
        self._plans = {plan.slice.key: plan for plan in plans}
        self._files = dict(files)
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
        return self._plans[slice_.key]

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
        file = self._files[slice_.url]
        return SliceSamples(slice_, file.form, chunks, header=file.header, is_here=is_here)


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
    sources = Files(options=known, timeout=timeout, waiting=waiting or Waiting())
    opening = _Opening(option, reader, slice_bytes, sources, needs_index)
    parts = []
    for number, place in enumerate(places):
        prefix = f"{number}:" if len(places) > 1 else ""
        parts += [(number, part) for part in opening.parts_of(place, prefix)]
    # Files are read only now, when all are found and known.
    found = [(number, plan) for number, part in parts for plan in part]
    if not found:
        raise OptionError(option, places, "files with at least one sample")
    return SliceSource([plan for _, plan in found], opening.files, known, [number for number, _ in found])


@dataclass(eq=False, slots=True)
class _Opening:
    _option: str
    _reader: SliceReader | None
    _slice_bytes: int
    _sources: Files
    _needs_index: bool
    files: dict[str, SourceFile] = field(default_factory=dict)

    def parts_of(self, place: str, prefix: str) -> Iterator[Iterable[ChunkPlan]]:
        """Yield the slices of each file at a URL. A file that has to be read is read as its slices are taken."""
        urls = self._sources.expand(place, self._option)
        index = next((url for url in urls if _name(url) == INDEX_NAME), None)
        if index is not None:
            yield self._indexed(index, prefix)
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
            if url in self.files:
                continue  # two globs may match the same file
            form = format_of(url, self._reader, option=self._option)
            size, version = self._sources.size_of(url)
            self.files[url] = SourceFile(form=form)
            if form.blocks is npy_blocks and form.compression is None:
                yield self._rows(url, size, version)
            elif size and form.count_lines is not None and form.compression is None:
                yield self._lines(url, size, form)
            elif size:
                yield self._whole(url, size, form, version)

    def _indexed(self, index: str, prefix: str) -> list[ChunkPlan]:
        first, chain, rest = index.partition("::")
        folder = f"{first[: -len(INDEX_NAME)]}{chain}{rest}"
        size, _ = self._sources.size_of(index)
        plans = read_index(self._sources.start_of(index, size), folder=folder)
        if not plans:
            raise SliceIndexError(f"{index} describes no slices. Make them from files that hold samples.")
        new = [plan for plan in plans if plan.slice.url not in self.files]
        for plan in new:
            url = plan.slice.url
            self.files[url] = SourceFile(form=format_of(url, self._reader, option=self._option))
        return [replace(plan, slice=replace(plan.slice, key=prefix + plan.slice.key)) for plan in new]

    def _lines(self, url: str, size: int, form: SliceFormat) -> Iterator[ChunkPlan]:
        start = 0
        for content, samples in cut_lines(url, form, self._sources.pieces_of(url, size), self._slice_bytes):
            if samples:
                yield ChunkPlan.of(content, key=f"{url}@{start}", url=url, start=start, samples=samples)
            start += len(content)

    def _whole(self, url: str, size: int, form: SliceFormat, version: str) -> Iterator[ChunkPlan]:
        digests = []

        def noted() -> Iterator[bytearray]:
            for piece in self._sources.pieces_of(url, size):
                digests.append(digests_of(piece))  # a piece consists of whole chunks
                yield piece

        stream = noted()
        try:
            samples = 0
            for block in form.blocks_of(SliceStream(stream)):
                if not samples:
                    require_sample(form, url, (block,))
                samples += len(block)
        except BadSampleError:
            raise
        except (ValueError, EOFError) as error:
            raise SliceCorruptError(url, url, str(error) or type(error).__name__) from error
        for _ in stream:
            pass  # a reader may stop early, but the digests cover everything
        if samples:
            slice_ = Slice(key=url, url=url, start=0, size=size, samples=samples)
            yield ChunkPlan(slice=slice_, digests=b"".join(digests), version=version)

    def _rows(self, url: str, size: int, version: str) -> list[ChunkPlan]:
        try:
            header = NpyHeader(io.BytesIO(self._sources.start_of(url, min(_HEADER_BYTES, size))))
        except ValueError as error:
            raise SliceCorruptError(url, url, str(error)) from error
        begin, row = len(header.content), header.row_bytes
        if size != begin + header.rows * row:
            reason = f"its header tells of {header.rows} rows of {row} bytes, but it has {size} bytes."
            raise SliceCorruptError(url, url, reason)
        self.files[url] = replace(self.files[url], header=header.content)
        found = []
        for first, after in row_ranges(header.rows, row, self._slice_bytes):
            at = begin + first * row
            slice_ = Slice(key=f"{url}@{at}", url=url, start=at, size=(after - first) * row, samples=after - first)
            found.append(ChunkPlan(slice=slice_, version=version))
        return found


def _is_slice(url: str) -> bool:
    return re.fullmatch(r"slice-\d{6,}\.\w+", _name(url)) is not None


def _name(url: str) -> str:
    return url.split("::")[0].rsplit("/", 1)[-1]
