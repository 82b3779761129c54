"""Each worker's batch size: given, from the environment, or found by growing it until memory or throughput stops it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from lightning_bytescheduler.checks import is_whole, require_positive, require_share, require_whole
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError

__all__ = ["BATCH_SIZE_VARIABLE", "find_batch_size", "resolve_batch_size"]

BATCH_SIZE_VARIABLE = "BYTESCHEDULER_BATCH_SIZE"
"""The batch size of one worker: a number, or ``auto``."""

_ALLOWED = "a positive whole number or 'auto'"
_REFINED_TO = 8  # when memory is the limit, the size is found to an eighth


def resolve_batch_size(
    batch_size: int | Sequence[int] | str | None,
    *,
    worker: int = 0,
    environ: Mapping[str, str] | None = None,
) -> int | Literal["auto"] | None:
    """Say which batch size a worker is to use. An argument beats the environment variable.

    Args:
        batch_size: One for all workers, one for each, ``"auto"`` to find it, or ``None``.
        worker: The worker's number, from 0.
        environ: Where the variable is looked up; the process's environment unless given.

    Returns:
        ``None`` if nobody said anything, to leave it as the data loader has it.

    Raises:
        OptionError: Names the argument or variable, its value and what is allowed.
    """
    if batch_size is None:
        env = os.environ if environ is None else environ
        text = env.get(BATCH_SIZE_VARIABLE, "").strip()
        if not text:
            return None
        return _one(BATCH_SIZE_VARIABLE, int(text) if text.isascii() and text.isdigit() else text)
    if isinstance(batch_size, (list, tuple)):
        if worker >= len(batch_size):
            raise OptionError("batch_size", batch_size, f"one for each worker, of which there are {worker + 1} or more")
        return _one("batch_size", batch_size[worker])
    return _one("batch_size", batch_size)


def find_batch_size(
    try_batch: Callable[[int], float | None],
    *,
    start: int = 1,
    limit: int = 1 << 20,
    least_gain: float = 0.05,
) -> int:
    """Find a batch size that a worker computes fast.

    It is doubled until memory is exhausted or the throughput stops to grow. When memory was the limit, sizes between
    the last that fitted and the first that did not are tried, too.

    Args:
        try_batch: Takes a step, or a few, of that size, and returns the seconds of one, or ``None`` if there is not
            enough memory. What it measures should be the median of some steps after a warm-up.
        start: The first size.
        limit: The largest size to try.
        least_gain: A larger size must process this share more samples per second to be chosen.

    Returns:
        The smallest size tried whose throughput no larger one tried exceeds by ``least_gain`` or more.

    Raises:
        OptionError: If an argument is not allowed, or ``try_batch`` returned no positive time.
        UnsupportedError: If memory is not enough for ``start``.
    """
    require_whole("start", start, 1)
    require_whole("limit", limit, start)
    require_share("least_gain", least_gain)
    best, best_rate = 0, 0.0

    def fits(size: int) -> bool:
        """Try a size, and choose it if it is worth it."""
        nonlocal best, best_rate
        seconds = try_batch(size)
        if seconds is None:
            return False
        rate = size / require_positive("try_batch", seconds)
        if rate >= best_rate * (1 + least_gain):
            best, best_rate = size, rate
        return True

    size = start
    while fits(size):
        if best != size or size == limit:
            return best
        size = min(2 * size, limit)
    if not best:
        raise UnsupportedError(f"Memory is not enough for a batch of {start}. Use a smaller start, or a smaller model.")
    fitting, too_large = best, size  # while doubling, each size that fitted was chosen, or the search was over
    while too_large - fitting > max(fitting // _REFINED_TO, 1):
        middle = (fitting + too_large) // 2
        if fits(middle):
            fitting = middle
        else:
            too_large = middle
    return best


def _one(option: str, value: object) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if not is_whole(value, 1):
        raise OptionError(option, value, _ALLOWED)
    return value
