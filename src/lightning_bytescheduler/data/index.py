"""The index of a folder of slices: names, counts and checksums of each, in one file of JSON lines.

The first line says what the file is and has the checksum of all that follows; each other line is a slice, with the
digests of its chunks, so that a chunk can be verified when the rest of its slice is still on its way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from lightning_bytescheduler.data.chunks import CHUNK_BYTES, ChunkPlan, checksum_of, digests_of
from lightning_bytescheduler.data.locations import join
from lightning_bytescheduler.data.slice import Slice
from lightning_bytescheduler.exceptions import OptionError, SliceIndexError

__all__ = ["INDEX_NAME", "IndexedSlice", "indexed_slice", "read_index", "write_index"]

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
