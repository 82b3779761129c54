"""What reading slices costs: counted by the threads that fetch and by whoever reads."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass

__all__ = ["SliceCounters", "SliceStatistics"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceStatistics:
    """Sums since the start.

    Attributes:
        stall_seconds: How long readers waited for bytes.
        cache_hits: Slices that were local when they were wanted.
        cache_misses: Slices that were not, or not wholly.
        uncached: Slices that found no room in the cache and went past it.
        bytes_fetched: From sources, those fetched again included; nothing for files of this machine.
        retries: Requests that were made again, after no answer or a wrong one.
        corrupt_chunks: Chunks that were not what the index says, from a source or from the cache.
        prefetched: Slices that were fetched before they were wanted.
    """

    stall_seconds: float = 0.0
    cache_hits: int = 0
    cache_misses: int = 0
    uncached: int = 0
    bytes_fetched: int = 0
    retries: int = 0
    corrupt_chunks: int = 0
    prefetched: int = 0


class SliceCounters:
    """Statistics that any thread may add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, float] = asdict(SliceStatistics())

    def add(self, **amounts: float) -> None:
        """Add to the sums named as the attributes of ``SliceStatistics``."""
        with self._lock:
            for name, amount in amounts.items():
                self._sums[name] += amount

    def sums(self) -> dict[str, float]:
        """The sums as they are now, by the names of ``SliceStatistics``."""
        with self._lock:
            return dict(self._sums)

    def snapshot(self) -> SliceStatistics:
        """The sums as they are now."""
        return SliceStatistics(**self.sums())  # type: ignore[arg-type]
