"""How slices are stored and fetched."""

from __future__ import annotations

import os
from dataclasses import dataclass

from lightning_bytescheduler.data.fetch import FetchOptions
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["StoreOptions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreOptions:
    """How slices are stored and fetched; validated when made.

    Attributes:
        cache_dir: Folder of the cache, on a disk of this machine; None for no cache, which means no prefetching.
        cache_bytes: Bound of the cache.
        prefetch: Slices to keep ahead of the one being read; None follows the speeds, 0 is none.
        most_prefetch: Bound of what ``prefetch=None`` chooses.
        fetch_threads: Slices that are fetched at once before they are wanted.
        timeout: Seconds that a source may stay away.
        attempts: How often a chunk is fetched that is short or wrong.
        request_bytes: Largest range asked for at once.

    Raises:
        OptionError: If an option is out of its range.
    """

    cache_dir: str | None = None
    cache_bytes: int = 10 * 1024**3
    prefetch: int | None = None
    most_prefetch: int = 8
    fetch_threads: int = 4
    timeout: float = 60.0
    attempts: int = 3
    request_bytes: int = 16 * 1024 * 1024

    def __post_init__(self) -> None:
        if self.cache_dir is not None:
            folder = os.fspath(self.cache_dir) if isinstance(self.cache_dir, (str, os.PathLike)) else None
            if not isinstance(folder, str) or not folder:
                raise OptionError("cache_dir", self.cache_dir, "the path of a folder, or None")
            object.__setattr__(self, "cache_dir", folder)
        for option, least in (("cache_bytes", 1), ("prefetch", 0), ("most_prefetch", 1), ("fetch_threads", 1)):
            value = getattr(self, option)
            if option == "prefetch" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise OptionError(option, value, f"a whole number, {least} or more")
        self.fetch_options()

    def fetch_options(self) -> FetchOptions:
        """The part that fetching needs."""
        return FetchOptions(timeout=self.timeout, attempts=self.attempts, request_bytes=self.request_bytes)
