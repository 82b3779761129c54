"""The index of a folder of slices: names, counts and checksums of each, in one file of JSON lines.

The first line says what the file is and has the checksum of all that follows; each other line is a slice, with the
digests of its chunks, so that a chunk can be verified when the rest of its slice is still on its way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated

import msgspec

from lightning_bytescheduler.exceptions import SliceIndexError
from lightning_bytescheduler.slices.checksums import CHUNK_BYTES, ChunkPlan, checksum_of, digests_of
from lightning_bytescheduler.slices.slice import Slice
from lightning_bytescheduler.slices.urls import join

__all__ = ["INDEX_NAME", "IndexedSlice", "indexed_slice", "read_index", "write_index"]

INDEX_NAME = "slices.index"
"""Name of the index in a folder of slices."""

_FORMAT = "lightning-bytescheduler slices"
_VERSION = 1


class _Format(msgspec.Struct):
    """What any version's first line has."""

    format: str
    version: int


class _Head(msgspec.Struct):
    """The first line."""

    format: str
    version: int
    slices: int
    chunk_bytes: Annotated[int, msgspec.Meta(ge=1)]
    checksum: str


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """Each other line."""

    name: str
    size: int
    samples: int
    checksum: str | None
    chunks: str


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
    described = [
        _Line(
            name=entry.slice.key,
            size=entry.slice.size,
            samples=entry.slice.samples,
            checksum=entry.slice.checksum,
            chunks=entry.digests.hex(),
        )
        for entry in entries
    ]
    encoder = msgspec.json.Encoder()
    body = encoder.encode_lines(described)
    head = _Head(
        format=_FORMAT,
        version=_VERSION,
        slices=len(described),
        chunk_bytes=CHUNK_BYTES,
        checksum=checksum_of(body),
    )
    return encoder.encode(head) + b"\n" + body


def read_index(content: bytes, *, folder: str) -> list[IndexedSlice]:
    """Read an index.

    Args:
        content: Of the index file.
        folder: URL of the folder that it is in.

    Raises:
        SliceIndexError: If it is no index, of another version, or damaged.
    """
    first, _, body = content.partition(b"\n")
    place = join(folder, INDEX_NAME)
    try:
        found = msgspec.json.decode(first, type=_Format)
    except (msgspec.DecodeError, UnicodeError):
        found = _Format("", 0)
    if found.format != _FORMAT:
        raise SliceIndexError(
            f"{place} is not an index of slices; make one with 'lightning-bytescheduler slices make'."
        )
    if found.version != _VERSION:
        raise SliceIndexError(
            f"{place} is of version {found.version!r}, and this release reads version {_VERSION}: "
            "make the slices again, or install the release that made them."
        )
    try:
        head = msgspec.json.decode(first, type=_Head)
    except msgspec.DecodeError as error:
        raise SliceIndexError(f"{place} is damaged: {error}. Make the slices again.") from error
    if head.checksum != checksum_of(body):
        raise SliceIndexError(f"{place} is damaged: its checksum is not that of its content. Make the slices again.")
    decoder = msgspec.json.Decoder(_Line)
    entries = []
    for number, line in enumerate(body.splitlines(), start=2):
        try:
            entries.append(_entry(decoder.decode(line), head.chunk_bytes, folder))
        except (msgspec.DecodeError, ValueError) as error:
            raise SliceIndexError(f"{place}, line {number}, does not describe a slice: {error}") from error
    names = {entry.slice.key for entry in entries}
    if len(names) != len(entries) or head.slices != len(entries):
        raise SliceIndexError(
            f"{place} is damaged: it should describe {head.slices} slices, each once, but describes "
            f"{len(names)} in {len(entries)} lines. Make the slices again."
        )
    return entries


def _entry(line: _Line, chunk_bytes: int, folder: str) -> IndexedSlice:
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
    digests = bytes.fromhex(line.chunks)
    ChunkPlan(size=slice_.size, chunk_bytes=chunk_bytes, digests=digests)
    return IndexedSlice(slice=slice_, chunk_bytes=chunk_bytes, digests=digests)


def _stays_in_folder(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and "::" not in name and "://" not in name
