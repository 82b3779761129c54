"""The options of slices, validated when made."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_bytescheduler.checks import (
    importing,
    is_finite,
    is_whole,
    require_positive,
)
from lightning_bytescheduler.exceptions import OptionError

LEAST_SHARE = 10_000
"""Each source of a mixture has to have more than one in so many of the mixture's samples."""

TIMEOUT = 60.0
"""Default seconds that a source may be unavailable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreOptions:
    """How slices are stored and fetched; validated when made.

    Attributes:
        cache: Folder of the cache, on a disk of this machine, or ``{"dir": ..., "bytes": ...}`` with its limit;
            ``None`` for no cache and no prefetching.
        timeout: Seconds that a source may be unavailable.

    Raises:
        OptionError: If an option is out of its range.
    """

    cache: str | os.PathLike[str] | Mapping[str, Any] | None = None
    timeout: float = TIMEOUT
    cache_dir: str | None = field(init=False)
    cache_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        given = self.cache if isinstance(self.cache, Mapping) else {"dir": self.cache}
        folder, size = given.get("dir"), given.get("bytes", 10 * 1024**3)
        folder = os.fspath(folder) if isinstance(folder, os.PathLike) else folder
        is_folder = folder is None or (isinstance(folder, str) and folder)
        if given.keys() - {"dir", "bytes"} or not is_folder or not is_whole(size, 1):
            allowed = "the path of a folder, or {'dir': FOLDER, 'bytes': a whole number of bytes, such as 10 * 1024**3}"
            raise OptionError("cache", self.cache, allowed)
        object.__setattr__(self, "cache_dir", folder)
        object.__setattr__(self, "cache_bytes", size)
        require_positive("timeout", self.timeout, of="seconds")


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


def require_urls(option: str, urls: object) -> tuple[str, ...]:
    """Return URLs and paths as a tuple of texts.

    Raises:
        OptionError: If there are none, or one is repeated.
    """
    given = tuple(urls) if isinstance(urls, (list, tuple)) else (urls,)
    places = [os.fspath(place) if isinstance(place, (str, os.PathLike)) else None for place in given]
    found = tuple(place for place in places if isinstance(place, str) and place)
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


def default_cache_dir() -> str:
    """Return the default folder for slices, in the user's folder for caches.

    Raises:
        ImportError: If the package that finds it is missing.
    """
    with importing("A cache of slices", extra="data"):
        import platformdirs
    return str(platformdirs.user_cache_path("lightning-bytescheduler", appauthor=False) / "slices")
