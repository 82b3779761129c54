"""What identifies a data set in a saved state, and says where another one differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

__all__ = ["CatalogueFingerprint"]

_BLOCKS = 64


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
