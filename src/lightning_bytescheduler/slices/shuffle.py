"""The order of slices in an epoch, and of samples in a slice: a function of seed and epoch, the same everywhere.

The raw stream of numpy's Philox generator never changes between versions and platforms (NEP 19), unlike
``Generator.permutation``; sorting its numbers, equal ones by index, gives a permutation that does not change either.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lightning_bytescheduler.checks import is_whole
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["require_seed", "sample_order", "slice_order"]

_WORD = 2**64


def slice_order(slices: int, *, seed: int, epoch: int, shuffle: bool = True) -> npt.NDArray[np.int32]:
    """Indices of the slices in the order in which an epoch hands them out.

    Args:
        slices: How many there are, less than 2**31.
        seed: From 0 to 2**64 - 1.
        epoch: From 0 to 2**64 - 1.
        shuffle: False keeps the order of the catalogue.

    Returns:
        A permutation of ``range(slices)``.

    Raises:
        OptionError: If a number is out of its range.
    """
    if slices >= 2**31:
        raise OptionError("slices", slices, "less than 2**31")
    if not shuffle:
        return np.arange(slices, dtype=np.int32)
    return _permutation(slices, seed, epoch, stream=0).astype(np.int32)


def sample_order(samples: int, *, seed: int, epoch: int, slice_index: int) -> npt.NDArray[np.int64]:
    """Indices of a slice's samples in the order in which an epoch trains on them.

    A slice's position counts along this order, so a worker that continues another's slice repeats and leaves out
    nothing.

    Args:
        samples: Samples of the slice.
        seed: From 0 to 2**64 - 1.
        epoch: From 0 to 2**64 - 1.
        slice_index: The slice's index in its catalogue.

    Returns:
        A permutation of ``range(samples)``.

    Raises:
        OptionError: If a number is out of its range.
    """
    return _permutation(samples, seed, epoch, stream=slice_index + 1)


def require_seed(option: str, value: object) -> None:
    """Require what the generator can be seeded with.

    Raises:
        OptionError: If it is no whole number of 64 bits.
    """
    if not is_whole(value) or value >= _WORD:
        raise OptionError(option, value, "a whole number from 0 to 2**64 - 1")


def _permutation(count: int, seed: int, epoch: int, *, stream: int) -> npt.NDArray[np.int64]:
    for option, value in (("count", count), ("seed", seed), ("epoch", epoch), ("stream", stream)):
        require_seed(option, value)
    key = np.array([seed, epoch], dtype=np.uint64)
    # Each stream has 2**128 numbers of the generator's 2**256 to itself.
    counter = np.array([0, 0, stream, 0], dtype=np.uint64)
    numbers = np.random.Philox(key=key, counter=counter).random_raw(count)
    order = np.argsort(numbers)  # several times as fast as a stable sort
    drawn = numbers[order]
    if (drawn[1:] == drawn[:-1]).any():  # hardly ever
        order = np.argsort(numbers, kind="stable")
    return order.astype(np.int64, copy=False)
