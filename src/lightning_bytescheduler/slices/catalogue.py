"""The catalogue: every slice of the data, in columns, as a million slices as objects would take half a gigabyte.

Its fingerprint identifies the data in a saved state, and says where other data differs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import overload

import numpy as np
import numpy.typing as npt

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices.slice import Slice

__all__ = ["CatalogueFingerprint", "SliceCatalogue", "TextColumn"]

_BLOCKS = 64
_CHECKSUM = "xxh3_64:"


class SliceCatalogue(Sequence[Slice]):
    """The slices of a data set, in an order that is the same in every process and after every restart.

    Args:
        slices: Read once, in order.

    Attributes:
        samples: Samples of each slice, int64, read-only.
        total_samples: Their sum.

    Raises:
        OptionError: If there is no slice, or two have the same key.
    """

    def __init__(self, slices: Iterable[Slice]) -> None:
        self._keys = TextColumn()
        self._urls = TextColumn()
        starts, sizes, samples = array("q"), array("q"), array("q")
        checksums = array("Q")
        self._other_checksums: dict[int, str | None] = {}  # what is not the usual 16 digits
        hashes = array("Q")
        for index, item in enumerate(slices):
            self._keys.append(item.key)
            self._urls.append(item.url)
            starts.append(item.start)
            sizes.append(item.size)
            samples.append(item.samples)
            number = _checksum_number(item.checksum)
            if number is None:
                self._other_checksums[index] = item.checksum
            checksums.append(number or 0)
            hashes.append(_hash(self._keys.raw(index)))
        if not samples:
            raise OptionError("slices", [], "one slice at least")
        if all(checksum is None for checksum in self._other_checksums.values()) and len(self._other_checksums) == len(
            samples
        ):
            checksums, self._other_checksums = array("Q"), {}  # a source without an index has none at all
        self._starts, self._sizes = np.array(starts), np.array(sizes)
        self._checksums = np.array(checksums)
        self.samples: npt.NDArray[np.int64] = np.array(samples)
        self.samples.flags.writeable = False
        self.total_samples = int(self.samples.sum())
        unordered = np.array(hashes)
        self._by_hash = np.argsort(unordered, kind="stable").astype(np.int32)
        self._hashes = unordered[self._by_hash]
        self._refuse_twins()
        self._fingerprint: CatalogueFingerprint | None = None

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, index: int) -> Slice: ...
    @overload
    def __getitem__(self, index: slice) -> list[Slice]: ...
    def __getitem__(self, index: int | slice) -> Slice | list[Slice]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]  # as a list does it, with its error
        return Slice(
            key=self._keys[index],
            url=self._urls[index],
            start=int(self._starts[index]),
            size=int(self._sizes[index]),
            samples=int(self.samples[index]),
            checksum=self._checksum(index),
        )

    def __iter__(self) -> Iterator[Slice]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"SliceCatalogue({len(self)} slices, {self.total_samples} samples)"

    def key(self, index: int) -> str:
        """Key of a slice."""
        return self._keys[index]

    def find(self, key: str) -> int | None:
        """Index of the slice with this key, or None."""
        raw = key.encode("utf-8", "surrogatepass")
        wanted = np.uint64(_hash(raw))
        place = int(np.searchsorted(self._hashes, wanted))
        while place < len(self._hashes) and self._hashes[place] == wanted:
            index = int(self._by_hash[place])
            if self._keys.raw(index) == raw:
                return index
            place += 1
        return None

    @property
    def fingerprint(self) -> CatalogueFingerprint:
        """What identifies the data in a saved state: keys and sample counts, in order."""
        if self._fingerprint is None:
            self._fingerprint = CatalogueFingerprint.of(self._keys.raw, self.samples)
        return self._fingerprint

    def _checksum(self, index: int) -> str | None:
        if not len(self._checksums):
            return None
        if index in self._other_checksums:
            return self._other_checksums[index]
        return f"{_CHECKSUM}{int(self._checksums[index]):016x}"

    def _refuse_twins(self) -> None:
        # Equal keys have equal hashes, so only runs of equal hashes need a look at the keys.
        (twins,) = np.nonzero(self._hashes[1:] == self._hashes[:-1])
        for place in twins.tolist():
            first, second = int(self._by_hash[place]), int(self._by_hash[place + 1])
            if self._keys.raw(first) == self._keys.raw(second):
                raise OptionError("slices", self.key(first), "slices of different keys (this key is there twice)")


def _hash(key: bytes) -> int:
    # Not Python's hash(): that differs between processes, and a catalogue can be sent to one.
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")


def _checksum_number(checksum: str | None) -> int | None:
    if checksum is None or not checksum.startswith(_CHECKSUM):
        return None
    digits = checksum[len(_CHECKSUM) :]
    try:
        number = int(digits, 16)
    except ValueError:
        return None
    return number if f"{number:016x}" == digits else None


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogueFingerprint:
    """Digest of the slices' keys and sample counts, in order.

    Not of their URLs: data may move. Not of their checksums: an index may be added later.

    Attributes:
        slices: How many there are.
        samples: Their samples together.
        blocks: A digest of each of up to 64 runs of neighbouring slices.
    """

    slices: int
    samples: int
    blocks: tuple[str, ...]

    @classmethod
    def of(cls, key: Callable[[int], bytes], samples: npt.NDArray[np.int64]) -> CatalogueFingerprint:
        """Take the fingerprint of slices.

        Args:
            key: Key of the slice of an index.
            samples: Samples of each slice.
        """
        length = _block_length(len(samples))
        blocks = []
        for start in range(0, len(samples), length):
            stop = min(start + length, len(samples))
            digest = blake2b(samples[start:stop].astype("<i8").tobytes(), digest_size=8)
            for index in range(start, stop):
                text = key(index)
                digest.update(len(text).to_bytes(4, "little") + text)
            blocks.append(digest.hexdigest())
        return cls(slices=len(samples), samples=int(samples.sum()), blocks=tuple(blocks))

    def difference(self, saved: CatalogueFingerprint) -> str | None:
        """What a state's fingerprint differs in, in words, or None if it is the same."""
        for name in ("slices", "samples"):
            here, there = getattr(self, name), getattr(saved, name)
            if here != there:
                return f"it is of {there} {name}, and there are {here} {name} now"
        for block, (here, there) in enumerate(zip(self.blocks, saved.blocks, strict=True)):
            if here != there:
                length = _block_length(self.slices)
                start, stop = block * length, min((block + 1) * length, self.slices)
                return f"keys, order or sample counts differ, for the first time among slices {start} to {stop - 1}"
        return None


def _block_length(slices: int) -> int:
    return max(-(-slices // _BLOCKS), 1)


class TextColumn(Sequence[str]):
    """Texts that are only ever added; equal neighbours are stored once.

    Memory per text: its UTF-8 bytes, unless it equals its predecessor, and at most 12 bytes.
    """

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._ends = array("Q")  # of each stored text
        self._stored = array("I")  # which stored text each row has
        self._last: bytes | None = None

    def append(self, text: str) -> None:
        """Add a row."""
        encoded = text.encode("utf-8", "surrogatepass")
        if encoded != self._last:
            self._bytes += encoded
            self._ends.append(len(self._bytes))
            self._last = encoded
        self._stored.append(len(self._ends) - 1)

    def raw(self, row: int) -> bytes:
        """A row's UTF-8 bytes."""
        stored = self._stored[row]
        return bytes(self._bytes[self._ends[stored - 1] if stored else 0 : self._ends[stored]])

    def __len__(self) -> int:
        return len(self._stored)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> list[str]: ...
    def __getitem__(self, row: int | slice) -> str | list[str]:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        return self.raw(row).decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        return (self[row] for row in range(len(self)))
