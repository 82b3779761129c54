"""Few elements of many: which are the largest, and how little says where they are.

Positions are written as in a table of contents: the elements are cut into stretches of 255, a byte for each stretch
says how many of its elements are kept, and a byte for each kept element says where in its stretch it is. One element in
fifty takes 9.6 bits so, where a whole number takes 32 and no code less than 7.1. The size follows from the number of
elements and of those that are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["INDEX_STRETCH", "index_bytes", "kept_of", "largest_indices", "pack_indices", "unpack_indices"]

INDEX_STRETCH = 255  # elements whose number of kept ones, and the place of each, fit into a byte
_SAMPLE = 64  # one element in so many is looked at to guess how large the largest are
_FEWEST = 4096  # elements that are worth a guess
_MAGNITUDE = 0x7FFFFFFF  # a number's bits without its sign: as whole numbers in the order of magnitudes, NaN above all


def kept_of(elements: int, density: float) -> int:
    """How many elements are kept of so many: ``density`` of them, rounded up to a whole one."""
    return min(elements, -(-int(elements * density * 2**20) // 2**20)) if elements else 0


def largest_indices(values: Tensor, count: int) -> Tensor:
    """Positions of the ``count`` elements of the largest magnitude, ascending; of equal ones the first.

    Infinities and NaN are larger than any number, so that they are kept before anything else.

    Nothing is sorted but a few candidates: a sample says which magnitude a few more than ``count`` will have, and these
    are found in one pass.

    Args:
        values: Flat, in fp32.
        count: From 0 to their number.

    Returns:
        Of int64, on the device of ``values``.
    """
    size = values.numel()
    if not 0 < count < size:
        return torch.arange(size if count else 0, device=values.device)
    magnitudes = values.detach().view(torch.int32) & _MAGNITUDE
    candidates = _candidates(magnitudes, count)
    if candidates is not None and len(candidates) < count:  # of nought besides
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
    """Positions of somewhat more than ``count`` elements that are the largest; ``None`` if the guess was wrong.

    Fewer only if they are all that are not nought.
    """
    size = magnitudes.numel()
    if size < _FEWEST:
        return None
    sample = magnitudes[::_SAMPLE]
    wanted = count / _SAMPLE  # of the sample, on average; five deviations more, and there are enough
    wanted += 5.0 * max(wanted, 1.0) ** 0.5
    if wanted >= 0.5 * sample.numel():
        return None
    guess = int(sample.topk(int(wanted) + 1, sorted=False).values.min())
    found = (magnitudes >= max(guess, 1)).nonzero().view(-1)
    return found if len(found) >= count or guess <= 1 else None


def index_bytes(elements: int, kept: int) -> int:
    """Size of the positions of so many kept elements."""
    return -(-elements // INDEX_STRETCH) + kept


def pack_indices(indices: Tensor, elements: int) -> Tensor:
    """Write positions.

    Args:
        indices: Ascending, each once, below ``elements``; of int64.
        elements: Of which these are kept.

    Returns:
        ``index_bytes(elements, len(indices))`` of uint8.
    """
    stretches = indices.div(INDEX_STRETCH, rounding_mode="floor")
    counts = torch.bincount(stretches, minlength=-(-elements // INDEX_STRETCH))
    return torch.cat([counts.to(torch.uint8), (indices - stretches * INDEX_STRETCH).to(torch.uint8)])


def unpack_indices(packed: Tensor, elements: int) -> Tensor:
    """Read positions.

    Args:
        packed: What :func:`pack_indices` made.
        elements: Of which they are kept.

    Returns:
        Ascending, of int64.

    Raises:
        ValueError: If they are damaged: not as many as there are places, out of order, or beyond the last element.
    """
    stretches = -(-elements // INDEX_STRETCH)
    counts = packed[:stretches].long()
    places = packed[stretches:]
    if int(counts.sum()) != len(places):
        raise ValueError("The payload is damaged: it does not hold as many positions as it says.")
    first = torch.arange(stretches, device=packed.device) * INDEX_STRETCH
    indices = first.repeat_interleave(counts, output_size=len(places)) + places
    if len(indices) and (int(indices[-1]) >= elements or bool((indices[1:] <= indices[:-1]).any())):
        raise ValueError("The payload is damaged: its positions are out of order, or beyond the last element.")
    return indices
