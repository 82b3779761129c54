"""A few elements instead of all: the largest, with compact positions.

The elements are cut into stretches of 255. One byte per stretch has the number of kept elements in it, and one byte per
kept element has its position there. At one element in fifty that takes 9.6 bits each, where an int32 takes 32 and the
optimal code 7.1. The size depends only on the numbers of elements and of kept elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bytescheduler.checks import is_finite, require_one_of
from lightning_bytescheduler.compression.compressor import Compressor, flat_fp32
from lightning_bytescheduler.compression.dense import Dense, DenseKind, Rounding
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["KEPT_AS", "TopK", "index_bytes", "kept_of", "largest_indices", "pack_indices", "unpack_indices"]

KEPT_AS: tuple[DenseKind, ...] = ("fp32", "bf16", "int8", "int4")
"""Encodings of the kept elements."""
_STRETCH = 255  # elements, so that the number of kept ones, and each position, fit into a byte
_SAMPLE = 64  # one element in so many is sampled to guess a threshold
_FEWEST = 4096  # elements: with fewer, guessing a threshold does not pay
_MAGNITUDE = 0x7FFFFFFF  # a number's bits without its sign: as integers they are ordered by magnitude, NaN last


class TopK(Compressor):
    """The elements of the largest magnitude, with their positions at about 10 bits each.

    With ``density`` d and fp32 values, ``|x - C(x)|^2 <= (1 - d) |x|^2``, so training with error feedback converges as
    without compression (Stich et al., "Sparsified SGD with Memory"). Without error feedback it need not.

    Args:
        density: Fraction of the elements that are kept, above 0 and at most 1; at least one element of a part.
        rounding: Rounding of int8 and int4.

    Raises:
        OptionError: Names the value that is not allowed.
    """

    def __init__(self, density: float, kept_as: DenseKind = "fp32", rounding: Rounding = "stochastic") -> None:
        self.density = _density(density)
        self.kept_as = require_one_of("kept_as", kept_as, KEPT_AS)
        self.values = Dense(kept_as, rounding)

    @property
    def spec(self) -> str:
        """See Compressor."""
        return f"topk:{_in_short(self.density)}" + (f":{self.kept_as}" if self.kept_as != "fp32" else "")

    def kept(self, elements: int) -> int:
        """Return the number of kept elements among ``elements``."""
        return kept_of(elements, self.density)

    def payload_bytes(self, elements: int) -> int:
        """See Compressor."""
        kept = self.kept(elements)
        return self.values.payload_bytes(kept) + index_bytes(elements, kept)

    def compress(self, part: Tensor, *, seed: int = 0, worker: int = 0) -> Tensor:
        """See Compressor."""
        values = flat_fp32(part)
        return self._payload(values, largest_indices(values, self.kept(values.numel())), seed, worker)

    def compress_with(self, residual: Tensor, part: Tensor, *, seed: int = 0, worker: int = 0) -> Tensor:
        """See Compressor; elements that are not sent keep their bits."""
        residual.add_(part)
        indices = largest_indices(residual, self.kept(residual.numel()))
        payload = self._payload(residual, indices, seed, worker)
        values = self.values.decompress(payload[: self.values.payload_bytes(len(indices))], len(indices))
        residual[indices] = residual[indices] - values
        return payload

    def decompress(self, payload: Tensor, elements: int, *, out: Tensor | None = None) -> Tensor:
        """See Compressor."""
        indices, values = self.entries(payload, elements)
        return _scattered(indices, values, elements, out)

    def add(self, payload: Tensor, sums: Tensor) -> None:
        """See Compressor; the work is proportional to the kept elements."""
        indices, values = self.entries(payload, sums.numel())
        sums.index_add_(0, indices, values)

    def entries(self, payload: Tensor, elements: int) -> tuple[Tensor, Tensor]:
        """Return the ascending positions of the kept elements, and their values in fp32.

        Raises:
            ValueError: If the payload does not fit ``elements``.
        """
        self.check(payload, elements)
        kept = self.kept(elements)
        size = self.values.payload_bytes(kept)
        return unpack_indices(payload[size:], elements), self.values.decompress(payload[:size], kept)

    def scales(self, payload: Tensor, elements: int) -> Tensor:
        """Return the scales of the values, see :class:`Dense`."""
        kept = self.kept(elements)
        return self.values.scales(payload[: self.values.payload_bytes(kept)], kept)

    def largest(self, payload: Tensor, elements: int) -> float:
        """Return a bound of the magnitudes in a payload, see :class:`Dense`."""
        kept = self.kept(elements)
        return self.values.largest(payload[: self.values.payload_bytes(kept)], kept)

    def _payload(self, values: Tensor, indices: Tensor, seed: int, worker: int) -> Tensor:
        kept = self.values.compress(values[indices], seed=seed, worker=worker)
        return torch.cat([kept, pack_indices(indices, values.numel())])


def _density(value: float) -> float:
    if not is_finite(value) or not 0 < value <= 1:
        raise OptionError("density", value, "a number above 0, at most 1")
    return float(value)


def _scattered(indices: Tensor, values: Tensor, elements: int, out: Tensor | None) -> Tensor:
    result = torch.zeros(elements, dtype=torch.float32, device=values.device) if out is None else out.zero_()
    result[indices] = values
    return result


def _in_short(density: float) -> str:
    short = f"{density:g}"
    return short if float(short) == density else repr(density)


def kept_of(elements: int, density: float) -> int:
    """Return the number of kept elements: ``density`` times ``elements``, rounded up."""
    return min(elements, -(-int(elements * density * 2**20) // 2**20)) if elements else 0


def largest_indices(values: Tensor, count: int) -> Tensor:
    """Return the ascending positions of the ``count`` elements of the largest magnitude; of equal ones the first.

    Infinities and NaN count as larger than any number, so they are kept first. Only a few candidates are sorted: a
    sample gives a threshold that slightly more than ``count`` elements exceed, and these are found in one pass.

    Args:
        values: Flat, fp32.
        count: From 0 to their number.

    Returns:
        int64, on the device of ``values``.
    """
    size = values.numel()
    if not 0 < count < size:
        return torch.arange(size if count else 0, device=values.device)
    magnitudes = values.detach().view(torch.int32) & _MAGNITUDE
    candidates = _candidates(magnitudes, count)
    if candidates is not None and len(candidates) < count:  # fill up with zeros
        rest = (magnitudes == 0).nonzero().view(-1)[: count - len(candidates)]
        return torch.cat([candidates, rest]).sort().values
    held = magnitudes if candidates is None else magnitudes[candidates]
    least = held.topk(count, sorted=False).values.min()
    above = held > least
    missing = count - int(above.sum())
    above[(held == least).nonzero().view(-1)[:missing]] = True
    found = above.nonzero().view(-1)
    return found if candidates is None else candidates[found]


def _candidates(magnitudes: Tensor, count: int) -> Tensor | None:
    """Return the positions of somewhat more than ``count`` largest elements; ``None`` if the guess was wrong.

    There are fewer only if all other elements are zero.
    """
    size = magnitudes.numel()
    if size < _FEWEST:
        return None
    sample = magnitudes[::_SAMPLE]
    wanted = count / _SAMPLE  # expected in the sample; with five standard deviations more there are enough
    wanted += 5.0 * max(wanted, 1.0) ** 0.5
    if wanted >= 0.5 * sample.numel():
        return None
    guess = int(sample.topk(int(wanted) + 1, sorted=False).values.min())
    found = (magnitudes >= max(guess, 1)).nonzero().view(-1)
    return found if len(found) >= count or guess <= 1 else None


def index_bytes(elements: int, kept: int) -> int:
    """Return the bytes of the positions."""
    return -(-elements // _STRETCH) + kept


def pack_indices(indices: Tensor, elements: int) -> Tensor:
    """Encode positions.

    Args:
        indices: Ascending, distinct, below ``elements``; int64.
        elements: Number of all elements.

    Returns:
        ``index_bytes(elements, len(indices))`` of uint8.
    """
    stretches = indices.div(_STRETCH, rounding_mode="floor")
    counts = torch.bincount(stretches, minlength=-(-elements // _STRETCH))
    return torch.cat([counts.to(torch.uint8), (indices - stretches * _STRETCH).to(torch.uint8)])


def unpack_indices(packed: Tensor, elements: int) -> Tensor:
    """Decode positions.

    Returns:
        Ascending, int64.

    Raises:
        ValueError: If they are damaged: their number is wrong, they are out of order, or beyond the last element.
    """
    stretches = -(-elements // _STRETCH)
    counts = packed[:stretches].long()
    places = packed[stretches:]
    if int(counts.sum()) != len(places):
        raise ValueError("The payload is damaged: it does not hold as many positions as it says.")
    first = torch.arange(stretches, device=packed.device) * _STRETCH
    indices = first.repeat_interleave(counts, output_size=len(places)) + places
    if len(indices) and (int(indices[-1]) >= elements or bool((indices[1:] <= indices[:-1]).any())):
        raise ValueError("The payload is damaged: its positions are out of order, or beyond the last element.")
    return indices
