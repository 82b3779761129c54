"""Files behind URLs, through fsspec: what is there, and a range of its bytes.

fsspec's file systems are looked up anew for each call. It keeps them itself, by thread, and a process that was forked
needs ones of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast

from fsspec import asyn
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_bytescheduler.exceptions import OptionError

__all__ = ["exists", "expand", "file_version", "join", "local_path", "make_folder", "read_range", "size_of"]

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
