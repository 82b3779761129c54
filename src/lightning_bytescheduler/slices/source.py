"""A source: files and folders behind URLs, seen as slices.

A folder with an index, as written by ``lightning-bytescheduler slices make``, describes itself. Without one, a file is
a slice, read once to count its samples and to compute checksums.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lightning_bytescheduler.exceptions import OptionError, SliceCorruptError, SliceIndexError
from lightning_bytescheduler.slices import urls
from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.fetch import Files
from lightning_bytescheduler.slices.formats import SliceFormat, SliceReader, SliceSamples, format_of
from lightning_bytescheduler.slices.make import INDEX_NAME, read_index
from lightning_bytescheduler.slices.options import TIMEOUT, require_urls
from lightning_bytescheduler.slices.slice import Bytes, Slice, SliceStream, digests_of


@dataclass(eq=False)
class SliceSource:
    """Slices, and how each is read. Can be pickled if the reader can, and sent to other processes.

    Attributes:
        slices: The slices in the order of the data; each key once.
        files: The format of each file, by URL.
        storage_options: For fsspec's file systems.
        places: For each slice, the number of the given URL that it comes from; none if they are not known.
    """

    slices: Sequence[Slice]
    files: Mapping[str, SliceFormat]
    storage_options: Mapping[str, Any]
    places: Sequence[int] = ()

    @cached_property
    def catalogue(self) -> SliceCatalogue:
        """The catalogue of the slices."""
        return SliceCatalogue(self.slices)

    def read(self, slice_: Slice, start: int, stop: int) -> bytes:
        """Read a range of a slice from the source.

        Raises:
            Exception: Errors of the file system.
        """
        return urls.read_range(slice_.url, start, stop, self.storage_options)

    def open(self, slice_: Slice, chunks: Callable[[], Iterator[Bytes]]) -> SliceSamples:
        """Return the samples of a slice.

        Args:
            slice_: The slice.
            chunks: Begins to read its verified bytes.
        """
        return SliceSamples(slice_, self.files[slice_.url], chunks)


def open_source(
    places: str | Sequence[str],
    *,
    option: str = "urls",
    reader: SliceReader | None = None,
    storage_options: Mapping[str, Any] | None = None,
    timeout: float = TIMEOUT,
    needs_index: bool = False,
) -> SliceSource:
    """Find the slices in files and folders.

    Args:
        places: Files, folders, globs or indexes, any URL that fsspec opens; slices keep this order, files are sorted.
        option: Option with the URLs, for messages.
        reader: Makes samples of a file's bytes, for a format that is not known by its suffix.
        storage_options: For fsspec's file systems; each is given to those of the URLs that take it.
        timeout: Seconds that a source may be unavailable.
        needs_index: Refuse sources without an index, before they are read.

    Raises:
        OptionError: If a URL matches no file, a suffix is not known, an
            index is needed and missing, or there is no sample.
        SliceIndexError: If an index is damaged, or a folder has slices but no index.
        SliceCorruptError: If a file without an index cannot be read as its format, or is shorter than its source says.
        SourceUnavailableError: If a source is unavailable.
        ImportError: If a library is missing that a URL or a format needs.
    """
    places = require_urls(option, places)
    urls.require_protocols(option, places)
    known = storage_options or {}
    sources = Files(options=known, timeout=timeout)
    opening = _Opening(option, reader, sources, needs_index)
    parts = []
    for number, place in enumerate(places):
        prefix = f"{number}:" if len(places) > 1 else ""
        parts += [(number, part) for part in opening.parts_of(place, prefix)]
    # Files are read only now, when all are found and known.
    found = [(number, slice_) for number, part in parts for slice_ in part]
    if not found:
        raise OptionError(option, places, "files with at least one sample")
    return SliceSource([slice_ for _, slice_ in found], opening.files, known, [number for number, _ in found])


@dataclass(eq=False, slots=True)
class _Opening:
    _option: str
    _reader: SliceReader | None
    _sources: Files
    _needs_index: bool
    files: dict[str, SliceFormat] = field(default_factory=dict)

    def parts_of(self, place: str, prefix: str) -> Iterator[Iterable[Slice]]:
        """Yield the slices of each file at a URL. A file that has to be read is read as its slices are taken."""
        found = self._sources.ask(urls.expand, place, self._option)
        index = next((url for url in found if _name(url) == INDEX_NAME), None)
        if index is not None:
            yield self._indexed(index, prefix)
            return
        if self._needs_index:
            allowed = "a folder with an index, or the index: without one there are no checksums and counts to compare "
            raise OptionError(self._option, place, f"{allowed}with. 'lightning-bytescheduler slices make' writes one")
        if place not in found and not any(sign in place for sign in "*?[") and any(map(_is_slice, found)):
            raise SliceIndexError(
                f"{place} holds slices and no {INDEX_NAME}, so that some may be missing: making or copying them was "
                "not finished. Make them again, or copy the index too; a glob, such as folder/slice-*, takes what is "
                "there."
            )
        for url in found:
            if url in self.files:
                continue  # two globs may match the same file
            self.files[url] = format_of(url, self._reader, option=self._option)
            if size := self._sources.ask(urls.size_of, url):
                yield self._whole(url, size, self.files[url])

    def _indexed(self, index: str, prefix: str) -> list[Slice]:
        first, chain, rest = index.partition("::")
        folder = f"{first[: -len(INDEX_NAME)]}{chain}{rest}"
        content = self._sources.ask(urls.read_range, index, 0, self._sources.ask(urls.size_of, index))
        slices = read_index(content, folder=folder)
        if not slices:
            raise SliceIndexError(f"{index} describes no slices. Make them from files that hold samples.")
        new = [slice_ for slice_ in slices if slice_.url not in self.files]
        self.files.update({one.url: format_of(one.url, self._reader, option=self._option) for one in new})
        return [replace(one, key=prefix + one.key) for one in new]

    def _whole(self, url: str, size: int, form: SliceFormat) -> Iterator[Slice]:
        digests = []

        def noted() -> Iterator[bytearray]:
            for piece in self._sources.pieces_of(url, size):
                digests.append(digests_of(piece))  # a piece consists of whole chunks
                yield piece

        stream = noted()
        try:
            samples = sum(len(block) for block in form.blocks_of(SliceStream(stream)))
        except (ValueError, EOFError) as error:
            raise SliceCorruptError(url, url, str(error) or type(error).__name__) from error
        for _ in stream:
            pass  # a reader may stop early, but the digests cover everything
        if samples:
            yield Slice(key=url, url=url, size=size, samples=samples, digests=b"".join(digests))


def _is_slice(url: str) -> bool:
    return re.fullmatch(r"slice-\d{6,}\.\w+", _name(url)) is not None


def _name(url: str) -> str:
    return url.split("::")[0].rsplit("/", 1)[-1]
