"""The weighted mean of pseudo-gradients, in memory for one sum and the same for any order of arrival.

The weighted sum of each element is kept in fixed point, as two 64-bit whole numbers: multiples of 2^-24, and what is
left of those in multiples of 2^-64. Whole numbers add up to the same in any order, which floating-point numbers do not;
weights are whole numbers too.

Bound: a pseudo-gradient of weight w adds w times its fp32 value with an error of 2^-65 at most, and of 0 if the value
is 0 or 2^-40 or more. The mean differs from the exact one by ``n * 2^-65 / total weight`` at most for n of them before
it is rounded, relatively by 2^-51, and then to fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_bytescheduler.checks import require_whole
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["LARGEST", "WEIGHTINGS", "WeightedMean", "Weighting", "pseudo_gradient_weight", "require_weighting"]

Weighting = Literal["samples", "tokens", "uniform"]
WEIGHTINGS: tuple[Weighting, ...] = get_args(Weighting)
"""Ways to weight pseudo-gradients."""

_COARSE_BITS, _FINE_BITS = 24, 40
LARGEST = 2.0**38
"""Bound of the weighted sum: 2^62 multiples of 2^-24."""
_MOST_WEIGHT = 2**28  # times the 24 bits of fp32 fits into the 53 of fp64, so that the product is exact
_MOST_ADDED = 2**22  # times 2^40 multiples of 2^-64 fits into a whole number
_CHUNK = 1 << 20  # elements that are worked on at once, so that what is needed besides the sum is small


class WeightedMean:
    """Weighted mean of pseudo-gradients.

    Args:
        like: A tensor of each shape, by name; they are only looked at. Sums are kept on their devices.
    """

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        self._shapes = {name: tensor.shape for name, tensor in like.items()}
        self._coarse = {name: _zeros(tensor) for name, tensor in like.items()}
        self._fine = {name: _zeros(tensor) for name, tensor in like.items()}
        self._largest = dict.fromkeys(like, 0.0)
        self._weight = 0
        self._added = 0

    @property
    def weight(self) -> int:
        """Sum of the weights of what was added."""
        return self._weight

    @property
    def added(self) -> int:
        """How many were added."""
        return self._added

    def add(self, pseudo_gradient: Mapping[str, Tensor], *, weight: int) -> None:
        """Add a pseudo-gradient. If it is refused, nothing of it was added.

        Args:
            pseudo_gradient: A tensor of each shape, by name; taken as fp32.
            weight: Relative to the others', 1 or more.

        Raises:
            OptionError: If the weight is not allowed.
            ValueError: If names or shapes do not fit, or a number is not finite, or too large: the weighted sum must
                stay below 2^38.
        """
        require_whole("weight", weight, 1)
        if weight > _MOST_WEIGHT or self._added >= _MOST_ADDED:
            raise OptionError(
                "weight", weight, f"{_MOST_WEIGHT} at most, and that of {_MOST_ADDED} pseudo-gradients at most"
            )
        largest = {}
        for name in self._check_names(pseudo_gradient):
            tensor = pseudo_gradient[name]
            extent = float(tensor.detach().abs().max()) if tensor.numel() else 0.0
            largest[name] = self._largest[name] + extent * weight
            if not largest[name] < LARGEST:  # NaN is not less, either
                raise ValueError(f"The pseudo-gradient of {name!r} was not added: its largest value is {extent:g}.")
        self._largest = largest
        self._weight += weight
        self._added += 1
        for name in self._shapes:
            coarse, fine = self._coarse[name], self._fine[name]
            values = pseudo_gradient[name].detach().reshape(-1)
            for part in _chunks(values.numel()):
                scaled = values[part].to(device=coarse.device, dtype=torch.float32).to(torch.float64)
                scaled.mul_(weight * 2.0**_COARSE_BITS)
                whole = scaled.trunc()
                coarse[part] += whole.to(torch.int64)
                fine[part] += scaled.sub_(whole).mul_(2.0**_FINE_BITS).round_().to(torch.int64)

    def mean(self) -> dict[str, Tensor]:
        """The weighted mean of what was added, in fp32.

        Raises:
            ValueError: If nothing was added.
        """
        if not self._added:
            raise ValueError("There is no mean: no pseudo-gradient was added.")
        means = {}
        for name, shape in self._shapes.items():
            coarse, fine = self._coarse[name], self._fine[name]
            mean = torch.empty(coarse.shape, dtype=torch.float32, device=coarse.device)
            for part in _chunks(coarse.numel()):
                # The fine part is brought below one coarse unit, so that both parts are a function of their sum.
                carried = fine[part] >> _FINE_BITS
                rest = (fine[part] - (carried << _FINE_BITS)).to(torch.float64).mul_(2.0**-_FINE_BITS)
                total = rest.add_((coarse[part] + carried).to(torch.float64)).mul_(2.0**-_COARSE_BITS)
                mean[part] = total.div_(self._weight).to(torch.float32)
            means[name] = mean.reshape(shape)
        return means

    def _check_names(self, pseudo_gradient: Mapping[str, Tensor]) -> list[str]:
        shapes = {name: tensor.shape for name, tensor in pseudo_gradient.items()}
        if shapes != self._shapes:
            names = sorted(name for name in {*shapes, *self._shapes} if shapes.get(name) != self._shapes.get(name))
            raise ValueError(f"The pseudo-gradient was not added: it does not fit the weights in {', '.join(names)}.")
        return list(shapes)


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.numel(), dtype=torch.int64, device=like.device)


def _chunks(size: int) -> Iterator[slice]:
    for start in range(0, size, _CHUNK):
        yield slice(start, start + _CHUNK)


def require_weighting(option: str, value: object) -> str:
    """Return ``value`` if it is one of ``WEIGHTINGS``.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if value not in WEIGHTINGS:
        raise OptionError(option, value, f"one of {', '.join(map(repr, WEIGHTINGS))}")
    return str(value)


def pseudo_gradient_weight(weighting: str, *, samples: int, tokens: int = 0) -> int:
    """Weight of one worker's pseudo-gradient, relative to the others'.

    Args:
        weighting: One of ``WEIGHTINGS``.
        samples: That the worker processed in the round.
        tokens: The same in tokens.

    Returns:
        0 for a worker that has processed nothing, whatever the weighting.

    Raises:
        OptionError: If a value is not allowed, as when tokens are to count and samples were processed without any.
    """
    require_weighting("weighting", weighting)
    require_whole("samples", samples, 0)
    require_whole("tokens", tokens, 0)
    if weighting == "tokens":
        if samples and not tokens:
            raise OptionError("weighting", weighting, "'samples' or 'uniform' where steps do not say how many tokens")
        return tokens
    return samples if weighting == "samples" else int(samples > 0)
