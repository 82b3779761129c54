"""The options of a data module of slices, checked before anything is opened."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices.lock_step import SHORTAGES

__all__ = ["LoaderOptions", "batch_sizes_of", "default_cache_dir", "require_batch_size", "require_urls"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderOptions:
    """How batches are made; validated when made.

    Attributes:
        num_workers: Processes that read, of each rank.
        prefetch_factor: Batches that each of them reads ahead.
        pin_memory: Copy batches to pinned memory.
        shuffle: Take the slices in another order in each epoch.
        shuffle_samples: And the samples of each slice.
        seed: Of these orders.
        shortage: What is done where a step has fewer samples than there are ranks.
        transform: Applied to each sample.
        collate: Makes a batch of samples.

    Raises:
        OptionError: If a value is not allowed.
    """

    num_workers: int
    prefetch_factor: int
    pin_memory: bool
    shuffle: bool
    shuffle_samples: bool
    seed: int
    shortage: str
    transform: Callable[[Any], Any] | None
    collate: Callable[[list[Any]], Any] | None

    def __post_init__(self) -> None:
        for option, least in (("num_workers", 0), ("prefetch_factor", 1), ("seed", 0)):
            value = getattr(self, option)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise OptionError(option, value, f"a whole number, {least} or more")
        if self.seed >= 2**64:
            raise OptionError("seed", self.seed, "a whole number from 0 to 2**64 - 1")
        for option in ("pin_memory", "shuffle", "shuffle_samples"):
            if not isinstance(getattr(self, option), bool):
                raise OptionError(option, getattr(self, option), "True or False")
        if self.shortage not in SHORTAGES:
            raise OptionError("shortage", self.shortage, f"one of {', '.join(map(repr, SHORTAGES))}")
        for option in ("transform", "collate"):
            if getattr(self, option) is not None and not callable(getattr(self, option)):
                raise OptionError(option, getattr(self, option), "a function, or None")


def require_urls(option: str, urls: object) -> tuple[str, ...] | None:
    """URLs as a tuple.

    Raises:
        OptionError: If they are none.
    """
    if urls is None:
        return None
    places = (urls,) if isinstance(urls, str) else tuple(urls) if isinstance(urls, (list, tuple)) else ()
    if not places or not all(isinstance(place, str) and place for place in places):
        raise OptionError(option, urls, "a URL, or a list of some")
    return places


def require_batch_size(option: str, size: object) -> int | list[int]:
    """A batch size of all ranks, or one of each.

    Raises:
        OptionError: If it is neither.
    """
    sizes: list[int] = list(size) if isinstance(size, (list, tuple)) else [size]  # type: ignore[list-item]
    if not sizes or any(isinstance(one, bool) or not isinstance(one, int) or one < 1 for one in sizes):
        raise OptionError(option, size, "a whole number of samples, 1 or more, or a list of one for each rank")
    return sizes if isinstance(size, (list, tuple)) else sizes[0]


def batch_sizes_of(option: str, size: int | Sequence[int], ranks: int) -> tuple[int, ...]:
    """The batch size of each rank.

    Raises:
        OptionError: If there are not as many as ranks.
    """
    sizes = (size,) * ranks if isinstance(size, int) else tuple(size)
    if len(sizes) != ranks:
        raise OptionError(option, size, f"one number, or a list of {ranks}, one for each rank of this run")
    return sizes


def default_cache_dir() -> str:
    """Where slices are kept if nothing else is said: the user's folder for caches."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return str(Path(base).expanduser() / "lightning-bytescheduler" / "slices")
