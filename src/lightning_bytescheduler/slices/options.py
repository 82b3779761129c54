"""The options of slices, validated when made."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

from lightning_bytescheduler.checks import importing, is_finite, is_whole
from lightning_bytescheduler.exceptions import OptionError

LEAST_SHARE = 10_000
"""Each source of a mixture has to have more than one in so many of the mixture's samples."""

TIMEOUT = 60.0
"""Default seconds that a source may be unavailable."""


class StoreOptions(NamedTuple):
    """How slices are stored and fetched.

    Attributes:
        cache_dir: Folder of the cache, on a disk of this machine; ``None`` for no cache and no prefetching.
        cache_bytes: Limit of the cache.
        timeout: Seconds that a source may be unavailable.
    """

    cache_dir: str | None = None
    cache_bytes: int = 10 * 1024**3
    timeout: float = TIMEOUT


def require_cache(option: str, value: object) -> tuple[str, int]:
    """Return the folder of a cache, the user's if none is given, and its limit in bytes.

    Raises:
        OptionError: If it is neither a path nor such a folder with its limit.
        ImportError: If the package that finds the user's folder is missing.
    """
    given: Mapping[Any, Any] = value if isinstance(value, Mapping) else {"dir": value}
    folder, size = given.get("dir"), given.get("bytes", StoreOptions().cache_bytes)
    if given.keys() - {"dir", "bytes"} or not (folder is None or _is_path(folder)) or not is_whole(size, 1):
        allowed = "the path of a folder, or {'dir': FOLDER, 'bytes': a whole number of bytes, such as 10 * 1024**3}"
        raise OptionError(option, value, allowed)
    if folder is not None:
        return os.fspath(folder), size
    with importing("A cache of slices", extra="data"):
        import platformdirs
    return str(platformdirs.user_cache_path("lightning-bytescheduler", appauthor=False) / "slices"), size


def require_function(option: str, value: object, *arguments: str) -> None:
    """Require a function that can be called with these arguments, or ``None``.

    Raises:
        OptionError: If it is neither.
    """
    if value is None:
        return
    allowed = f"a function that is called as {option}({', '.join(arguments)}), or None"
    if not callable(value):
        raise OptionError(option, value, allowed)
    try:
        # The function itself, as a decorator may add arguments to those of the function that it wraps.
        signature = inspect.signature(value, follow_wrapped=False)
    except (TypeError, ValueError):  # not known, as of some functions in C
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise OptionError(option, value, f"{allowed}; this one cannot be called so: {error}") from error


def _is_path(value: object) -> TypeGuard[str | os.PathLike[str]]:
    return isinstance(value, (str, os.PathLike)) and isinstance(path := os.fspath(value), str) and bool(path)


def require_urls(option: str, urls: object) -> tuple[str, ...]:
    """Return URLs and paths as a tuple of texts.

    Raises:
        OptionError: If there are none, or one is repeated.
    """
    given = tuple(urls) if isinstance(urls, (list, tuple)) else (urls,)
    found = tuple(os.fspath(place) for place in given if _is_path(place))
    if not found or len(found) != len(given):
        raise OptionError(option, urls, "a path or a URL, or a list of some")
    twice = next((place for place in found if found.count(place) > 1), None)
    if twice is not None:
        allowed = f"a list of different URLs, and {twice!r} is there twice: a sample is in an epoch once"
        raise OptionError(option, urls, allowed)
    return found


def require_mixture(option: str, urls: object) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
    """Return URLs as a tuple of texts, and the weight of each, if they are a mixture.

    Raises:
        OptionError: If there are no URLs, one is repeated, or a weight is at most ``1 / LEAST_SHARE`` of their sum.
    """
    if not isinstance(urls, Mapping):
        return require_urls(option, urls), None
    given = (getattr(value, "item", lambda value=value: value)() for value in urls.values())  # NumPy's as Python's
    weights = [float(value) for value in given if is_finite(value)]
    total = sum(weights)
    if not urls or len(weights) < len(urls) or not math.isfinite(total) or min(weights) <= total / LEAST_SHARE:
        allowed = "a URL, a list of some, or weights by URL, such as {'data/a': 0.7, 'data/b': 0.3}"
        raise OptionError(option, urls, f"{allowed}, each of them more than 1/{LEAST_SHARE} of their sum")
    return require_urls(option, list(urls)), tuple(weights) if len(weights) > 1 else None


def batch_sizes_of(option: str, size: object, ranks: int | None = None) -> tuple[int, ...]:
    """Return the batch size of each rank; ``ranks`` is their number, or ``None`` if it is not known yet.

    Raises:
        OptionError: If it is no batch size, or their number is not that of the ranks.
    """
    sizes: tuple[Any, ...] = tuple(size) if isinstance(size, (list, tuple)) else (size,) * (ranks or 1)
    if not sizes or not all(is_whole(one, 1) for one in sizes):
        raise OptionError(option, size, "a whole number of samples, 1 or more, or a list of one for each rank")
    if ranks is not None and len(sizes) != ranks:
        raise OptionError(option, size, f"one number, or a list of {ranks}, one for each rank of this run")
    return sizes
