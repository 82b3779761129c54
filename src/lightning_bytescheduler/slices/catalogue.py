"""The catalogue: every slice of the data, the same in every process and after every restart; and orders of it.

The order of slices in an epoch, and of samples in a slice, depends only on seed and epoch. The raw stream of numpy's
Philox generator never changes between versions and platforms (NEP 19), unlike ``Generator.permutation``. Sorting its
numbers, equal ones by index, gives a stable permutation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b

import msgspec
import numpy as np
import numpy.typing as npt

from lightning_bytescheduler.checks import is_whole
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices.slice import Slice

_WORD = 2**64


class SliceCatalogue:
    """The slices of a data set.

    Args:
        slices: The slices in order, at least one; each has a key of its own.

    Attributes:
        samples: Samples of each slice, int64, read-only.
        total_samples: Their sum.
    """

    def __init__(self, slices: Iterable[Slice]) -> None:
        self._slices = tuple(slices)
        self._indices = {slice_.key: index for index, slice_ in enumerate(self._slices)}
        self.samples: npt.NDArray[np.int64] = np.array([slice_.samples for slice_ in self._slices], dtype=np.int64)
        self.samples.flags.writeable = False
        self.total_samples = int(self.samples.sum())

    def __len__(self) -> int:
        return len(self._slices)

    def __getitem__(self, index: int) -> Slice:
        return self._slices[index]

    def __iter__(self) -> Iterator[Slice]:
        return iter(self._slices)

    def __repr__(self) -> str:
        return f"SliceCatalogue({len(self)} slices, {self.total_samples} samples, {self.digest})"

    def find(self, key: str) -> int | None:
        """Return the index of the slice with this key, or ``None``."""
        return self._indices.get(key)

    def order(self, *, seed: int, shuffle: bool) -> DataOrder:
        """Return what identifies the data and their order in a saved state."""
        return DataOrder(slices=len(self), samples=self.total_samples, keys=self.digest, seed=seed, shuffle=shuffle)

    @cached_property
    def digest(self) -> str:
        """Digest of the slices' keys and sample counts, in order.

        It leaves out URLs, as data may move, and checksums, as an index may be added later.
        """
        digest = blake2b(self.samples.astype("<i8").tobytes(), digest_size=16)
        for slice_ in self._slices:
            key = slice_.key.encode("utf-8", "surrogatepass")
            digest.update(len(key).to_bytes(4, "little") + key)
        return digest.hexdigest()


class DataOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The data and their order, in a saved state."""

    slices: int
    samples: int
    keys: str
    seed: int
    shuffle: bool

    def difference(self, saved: DataOrder) -> str | None:
        """Return the difference to a saved one in words, or ``None`` if there is none."""
        for name in ("slices", "samples", "seed", "shuffle"):
            here, there = getattr(self, name), getattr(saved, name)
            if here != there:
                return f"{name} was {there}, is {here} now"
        return None if self.keys == saved.keys else "the slices' keys, order or sample counts"


def corrupt_on_any(
    slices: Sequence[Slice], found: Mapping[str, str], total: Callable[[Sequence[float]], Sequence[float]]
) -> dict[str, str]:
    """Return all slices that any rank has found corrupt, as reasons by key; all ranks call this together.

    Args:
        slices: The slices, the same on all ranks.
        found: This rank's reasons by key.
        total: Sums numbers over all ranks.
    """
    if not total([float(bool(found))])[0]:
        return {}
    marks = total([float(slice_.key in found) for slice_ in slices])
    keys = [slice_.key for slice_, mark in zip(slices, marks, strict=True) if mark]
    return {key: found.get(key, "Another rank found it to be corrupt.") for key in keys}


def slice_order(slices: int, *, seed: int, epoch: int, shuffle: bool = True) -> npt.NDArray[np.int32]:
    """Return indices of the slices in the order in which an epoch hands them out.

    Args:
        slices: Number of slices, less than 2**31.
        seed: From 0 to 2**64 - 1.
        epoch: From 0 to 2**64 - 1.
        shuffle: False keeps the order of the catalogue.

    Returns:
        A permutation of ``range(slices)``.
    """
    if not shuffle:
        return np.arange(slices, dtype=np.int32)
    return _permutation(slices, seed, epoch, stream=0).astype(np.int32)


def sample_order(samples: int, *, seed: int, epoch: int, slice_index: int) -> npt.NDArray[np.int64]:
    """Return indices of a slice's samples in the order in which an epoch trains on them.

    A slice's position counts in this order, so a worker that continues another's slice repeats and skips nothing.

    Args:
        samples: Samples of the slice.
        seed: From 0 to 2**64 - 1.
        epoch: From 0 to 2**64 - 1.
        slice_index: Index of the slice in its catalogue.

    Returns:
        A permutation of ``range(samples)``.
    """
    return _permutation(samples, seed, epoch, stream=slice_index + 1)


def require_seed(option: str, value: object) -> None:
    """Require a valid seed of the generator.

    Raises:
        OptionError: If it is not a whole number of 64 bits.
    """
    if not is_whole(value) or value >= _WORD:
        raise OptionError(option, value, "a whole number from 0 to 2**64 - 1")


def _permutation(count: int, seed: int, epoch: int, *, stream: int) -> npt.NDArray[np.int64]:
    key = np.array([seed, epoch], dtype=np.uint64)
    # Each stream has 2**128 of the generator's 2**256 counters.
    counter = np.array([0, 0, stream, 0], dtype=np.uint64)
    numbers = np.random.Philox(key=key, counter=counter).random_raw(count)
    return np.argsort(numbers, kind="stable").astype(np.int64, copy=False)
