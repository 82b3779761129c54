"""A source: files behind fsspec URLs, seen as slices.

URLs of files, through fsspec: what is there, and a range of its bytes.

fsspec's file systems are looked up anew for each call. It keeps them itself, by thread, and a process that was forked
needs ones of its own.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import length_hint
from typing import Any, cast

from fsspec import asyn
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_bytescheduler.exceptions import OptionError, SliceCorruptError
from lightning_bytescheduler.slices.formats import SampleBlock, SliceFormat
from lightning_bytescheduler.slices.slice import CHUNK_BYTES, Bytes, ChunkPlan, Slice, SliceStream

__all__ = [
    "SliceSource",
    "SourceFile",
    "exists",
    "expand",
    "file_version",
    "join",
    "local_path",
    "make_folder",
    "read_range",
    "size_of",
]

Options = Mapping[str, Any]

if hasattr(os, "register_at_fork") and not hasattr(asyn, "reset_after_fork"):
    # fsspec before 2024.10 leaves a forked process waiting for the event loop of a thread that it does not have.
    def _forget_event_loop() -> None:
        asyn.iothread[0] = None
        asyn.loop[0] = None
        asyn.reset_lock()

    os.register_at_fork(after_in_child=_forget_event_loop)


def expand(url: str, options: Options) -> list[str]:
    """The URLs of the files that a URL, a glob or a folder stands for, sorted.

    Raises:
        OptionError: If there is no such file.
    """
    filesystem, path = url_to_fs(url, **options)
    if any(sign in path for sign in "*?[") and not (_is_http(url) and "*" not in path):
        found = [name for name, about in filesystem.glob(path, detail=True).items() if about["type"] == "file"]
    elif filesystem.isdir(path):
        found = [name for name in filesystem.find(path) if not (name.endswith("/") or _is_hidden(name, path))]
    else:
        found = [path] if filesystem.exists(path) else []
    if not found:
        raise OptionError("url", url, "a file, a folder with files, or a glob that some file fits")
    return sorted(_url_of(filesystem, name, url) for name in found)


def join(folder: str, name: str) -> str:
    """The URL of ``name`` in the folder at a URL."""
    first, chain, rest = folder.partition("::")
    return f"{first.rstrip('/') + '/' if not first.endswith('://') else first}{name}{chain}{rest}"


def size_of(url: str, options: Options) -> int:
    """Bytes of the file at ``url``.

    Raises:
        OSError: If there is none, or its size is not known.
    """
    filesystem, path = url_to_fs(url, **options)
    size = filesystem.info(path).get("size")
    if size is None:
        raise OSError(f"{url} does not say how large it is.")
    return int(size)


def file_version(url: str, options: Options) -> str:
    """What changes when the file does, as far as the source tells: its etag, or the time of its last change."""
    filesystem, path = url_to_fs(url, **options)
    about = filesystem.info(path)
    known = [about.get(name) for name in ("ETag", "etag", "LastModified", "last_modified", "mtime", "created")]
    return f"{next((value for value in known if value), '')}/{about.get('size')}"


def read_range(url: str, start: int, stop: int, options: Options) -> bytes:
    """The bytes of the file at ``url`` from ``start`` up to, but not including, ``stop``; fewer where it ends before.

    Raises:
        Exception: Whatever the file system raises.
    """
    filesystem, path = url_to_fs(url, **options)
    try:
        return cast(bytes, filesystem.cat_file(path, start=start, end=stop))
    except Exception as error:
        if getattr(error, "status", None) == 416:  # "range not satisfiable": the file ends before the start
            return b""
        raise


def local_path(url: str) -> str | None:
    """The path of a file on this machine, or None if the URL is not one of such a file."""
    if "::" in url or ("://" in url and not url.startswith(("file://", "local://"))):
        return None
    return cast(str, LocalFileSystem._strip_protocol(url))


def exists(url: str, options: Options) -> bool:
    """Whether there is something at a URL."""
    filesystem, path = url_to_fs(url, **options)
    return bool(filesystem.exists(path))


def make_folder(url: str, options: Options) -> None:
    """Make the folder at a URL, where the file system has folders."""
    filesystem, path = url_to_fs(url, **options)
    filesystem.makedirs(path, exist_ok=True)


def _url_of(filesystem: Any, path: str, origin: str) -> str:
    _, chain, rest = origin.partition("::")
    return f"{filesystem.unstrip_protocol(path)}{chain}{rest}"


def _is_http(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def _is_hidden(name: str, folder: str) -> bool:
    return any(part.startswith(".") for part in name[len(folder) :].strip("/").split("/"))


_END = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """What the slices of one file have in common.

    Attributes:
        form: Its format.
        version: Tells other contents of the same URL apart, where there are no checksums.
        header: What a reader needs before the bytes of a slice that does not begin with the file.
        chunk_bytes: Bytes of a chunk.
    """

    form: SliceFormat
    version: str = ""
    header: bytes = b""
    chunk_bytes: int = CHUNK_BYTES


class SliceSource:
    """Slices, and how each is read. Can be pickled if the reader can, and handed to other processes.

    Args:
        slices: In the order of the data.
        files: By URL.
        digests: Of chunks, by the key of a slice.
        storage_options: For fsspec's file systems.

    Attributes:
        slices: In the order of the data; each key once.
    """

    def __init__(
        self,
        slices: Sequence[Slice],
        files: Mapping[str, SourceFile],
        digests: Mapping[str, bytes],
        storage_options: Mapping[str, Any],
    ) -> None:
        self.slices = tuple(slices)
        self._files = dict(files)
        self._digests = dict(digests)
        self._storage_options = dict(storage_options)

    def __repr__(self) -> str:
        samples = sum(slice_.samples for slice_ in self.slices)
        return f"SliceSource({len(self.slices)} slices, {samples} samples, {len(self._files)} files)"

    def plan(self, slice_: Slice) -> ChunkPlan:
        """The chunks of a slice."""
        return ChunkPlan.of(slice_, self._files[slice_.url].chunk_bytes, self._digests.get(slice_.key))

    def version(self, slice_: Slice) -> str:
        """What tells other contents of the same URL apart, where there is no checksum; else empty."""
        return self._files[slice_.url].version

    def read(self, slice_: Slice, start: int, stop: int) -> bytes:
        """Ask the source for a range of the slice's file.

        Raises:
            Exception: Whatever the file system raises.
        """
        return read_range(slice_.url, start, stop, self._storage_options)

    def has_blocks(self, slice_: Slice) -> bool:
        """Whether samples of the slice are found without making them: not by a reader that is a user's function."""
        return self._files[slice_.url].form.blocks is not None

    def blocks(self, slice_: Slice, chunks: Iterator[Bytes]) -> Iterator[SampleBlock[Any]]:
        """The samples of the slice's chunks, in blocks; whether there are as many as there should be is not checked.

        Args:
            slice_: The slice.
            chunks: Its verified bytes.

        Raises:
            ValueError: If the data is malformed.
            EOFError: If it is cut short.
        """
        return self._files[slice_.url].form.blocks_of(self._stream(slice_, chunks))

    def samples(self, slice_: Slice, chunks: Iterator[Bytes], first: int = 0) -> Iterator[Any]:
        """Make samples of the slice's chunks.

        Args:
            slice_: The slice.
            chunks: Its verified bytes.
            first: Number of the first sample that is wanted.

        Yields:
            The samples from there on.

        Raises:
            SliceCorruptError: If the data is malformed, or there are not as many samples as there should be.
        """
        file = self._files[slice_.url]
        stream = self._stream(slice_, chunks)
        # What is between the reader and the training is counted without a Python frame: this is paid for each sample.
        missing = itertools.repeat(True, slice_.samples - first)
        try:
            samples = iter(file.form.samples(stream, first))
            yield from itertools.compress(itertools.islice(samples, slice_.samples - first), missing)
            number = slice_.samples - length_hint(missing)
            if number < slice_.samples:
                raise ValueError(f"it holds {number} samples, where {slice_.samples} were counted.")
            if next(samples, _END) is _END:  # which also takes the reader to the end of its bytes
                return
        except (ValueError, EOFError) as error:
            number = slice_.samples - length_hint(missing)
            reason = str(error) or type(error).__name__
            raise SliceCorruptError(slice_.key, slice_.url, f"after sample {number}: {reason}") from error
        raise SliceCorruptError(
            slice_.key, slice_.url, f"it holds more than the {slice_.samples} samples that were counted."
        )

    def _stream(self, slice_: Slice, chunks: Iterator[Bytes]) -> SliceStream:
        header = self._files[slice_.url].header
        return SliceStream(itertools.chain((header,), chunks) if slice_.start and header else chunks)
