"""Files behind URLs, through fsspec: their existence, size and ranges of bytes.

fsspec's file systems are looked up anew for each call. It caches them itself, by thread, and a forked process needs new
ones.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

from fsspec import available_protocols, get_filesystem_class
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_bytescheduler.checks import importing
from lightning_bytescheduler.exceptions import OptionError

Options = Mapping[str, Any]

_EXTRAS = {"s3": "s3", "s3a": "s3", "http": "data", "https": "data"}
"""The extra of a protocol; other protocols need separate packages."""

_PLACE = "a file, a folder with files, or a glob that some file fits"


def require_protocols(option: str, urls: Iterable[str]) -> None:
    """Require the file systems of URLs; sends no request to sources.

    Raises:
        OptionError: If a protocol is unknown; names ``option``.
        ImportError: If a package that a protocol needs is missing; names it and the extra.
    """
    for url in urls:
        for protocol in _protocols(url):
            try:
                with importing(f"{protocol}://", extra=_EXTRAS.get(protocol)):
                    get_filesystem_class(protocol)
            except ValueError as error:
                raise OptionError(option, url, "a path, or a URL such as https://, s3://, gs:// or hf://") from error


def require_storage_options(urls: Iterable[str], options: object) -> dict[str, Any]:
    """Return checked options for the file systems of URLs; each must be for at least one of them.

    Raises:
        OptionError: If they are not a dict, or no source takes one. Names them without their values, which may be
            secret.
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise OptionError("storage_options", type(options).__name__, "a dict of options by name, or None")
    places = list(urls)
    unknown = [name for name in options if not any(takes(place, name) for place in places)]
    if unknown:
        protocols = ", ".join(sorted({_protocols(place)[0] for place in places}))
        allowed = f"a dict of options that a source takes; the sources are of {protocols}, which does not take these"
        raise OptionError("storage_options", unknown, allowed)
    return dict(options)


def takes(url: str, option: str) -> bool:
    """Whether an option is for the file system of a URL."""
    protocol = _protocols(url)[0]
    if option in available_protocols():  # its value is the options of that protocol
        return option == protocol or "::" in url
    return "::" in url or protocol not in ("file", "local")  # in a chain, each link has its own


def _protocols(url: str) -> list[str]:
    """Return the protocols of a chain's links; a link may be a bare protocol, as in simplecache::https://..."""
    links = url.split("::")
    found = []
    for link in links:
        protocol, sign, _ = link.partition("://")
        is_bare = len(links) > 1 and re.fullmatch("[a-z]+", link) is not None
        found.append(protocol if sign or is_bare else "file")
    return found


def file_system(url: str, options: Options) -> tuple[Any, str]:
    """Return the file system of a URL, with the options that it takes, and the path in it."""
    filesystem, path = url_to_fs(url, **{name: value for name, value in options.items() if takes(url, name)})
    return filesystem, path


def expand(url: str, option: str, options: Options) -> list[str]:
    """Return the sorted URLs of the files that a URL, a glob or a folder stands for.

    Raises:
        OptionError: If there is no such file.
    """
    filesystem, path = file_system(url, options)
    is_glob = any(sign in path for sign in "*?[") and not (is_http(url) and "*" not in path)
    if is_glob:
        found = [name for name, about in filesystem.glob(path, detail=True).items() if about["type"] == "file"]
    elif filesystem.isdir(path):
        found = [name for name in filesystem.find(path) if not (name.endswith("/") or _is_hidden(name, path))]
    else:
        found = [path] if exists(url, options) else []
    if not found:
        raise OptionError(option, url, f"{_PLACE}; {_what_is_there(url, filesystem, path, is_glob)}")
    return sorted(_url_of(filesystem, name, url) for name in found)


def _about(filesystem: Any, path: str) -> dict[str, Any]:
    try:
        return cast(dict[str, Any], filesystem.info(path))
    except FileNotFoundError as error:
        # Over HTTP every error is reported as a missing file, with its real cause behind it.
        if error.__cause__ is None or getattr(error.__cause__, "status", None) == 404:
            raise
        raise error.__cause__ from None


def _what_is_there(url: str, filesystem: Any, path: str, is_glob: bool) -> str:
    if is_glob:
        return "no file fits it"
    local = local_path(url)
    if local is None:
        return "its source answers that there is nothing" if not filesystem.isdir(path) else "the folder is empty"
    if os.path.isdir(local):
        return f"the folder {local} has no files"
    folder = os.path.dirname(local)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return f"there is no {local}, only the folder {folder}"


def join(folder: str, name: str) -> str:
    """Return the URL of ``name`` in the folder at a URL."""
    first, chain, rest = folder.partition("::")
    return f"{first.rstrip('/') + '/' if not first.endswith('://') else first}{name}{chain}{rest}"


def size_of(url: str, options: Options) -> int:
    """Return the bytes of a file.

    Raises:
        OSError: If it does not exist, or its size is not known.
    """
    size = _about(*file_system(url, options)).get("size")
    if size is None:
        raise OSError(f"{url} does not say how large it is.")
    return int(size)


_REQUEST_SECONDS = 300.0
"""Longest request in seconds, if fsspec accepts a limit: some of its file systems have none."""


def read_range(url: str, start: int, stop: int, options: Options) -> bytes:
    """Return the bytes of a file from ``start`` up to, but not including, ``stop``; fewer if it ends before.

    Raises:
        Exception: Errors of the file system.
    """
    filesystem, path = file_system(url, options)
    # Without a timeout, fsspec would wait forever for an asynchronous method.
    is_bounded = filesystem.async_impl and hasattr(filesystem.cat_file, "__wrapped__")
    bound = {"timeout": _REQUEST_SECONDS} if is_bounded else {}
    try:
        return cast(bytes, filesystem.cat_file(path, start=start, end=stop, **bound))
    except Exception as error:
        if getattr(error, "status", None) == 416:  # range not satisfiable: the file ends before the start
            return b""
        raise


def is_http(url: str) -> bool:
    """Whether a URL is http or https."""
    return url.startswith(("http://", "https://"))


def local_path(url: str) -> str | None:
    """Return the path of a file on this machine, or ``None`` for other URLs."""
    if "::" in url or ("://" in url and not url.startswith(("file://", "local://"))):
        return None
    return cast(str, LocalFileSystem._strip_protocol(url))


def exists(url: str, options: Options) -> bool:
    """Whether there is a file at a URL; a folder does not count.

    Raises:
        Exception: Errors of the file system other than a missing file, which fsspec's own function hides.
    """
    try:
        return bool(_about(*file_system(url, options))["type"] != "directory")
    except (FileNotFoundError, NotADirectoryError):
        return False


def _url_of(filesystem: Any, path: str, origin: str) -> str:
    _, chain, rest = origin.partition("::")
    return f"{filesystem.unstrip_protocol(path)}{chain}{rest}"


def _is_hidden(name: str, folder: str) -> bool:
    return any(part.startswith(".") for part in name[len(folder) :].strip("/").split("/"))
