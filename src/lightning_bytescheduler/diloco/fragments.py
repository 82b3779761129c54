"""Fragments of the model that are synchronised in turn, while training goes on.

Douillard et al., "Streaming DiLoCo with overlapping communication": the model is cut into P fragments, and each round
ends with one of them, in turn. What the others make of it is merged into the local weights ``overlap_steps`` later, or
once it is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_bytescheduler.checks import require_whole
from lightning_bytescheduler.diloco.overlap import Overlap, OverlapSteps
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError

__all__ = ["FragmentOptions", "TrainedWeights", "mix", "split_fragments"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FragmentOptions:
    """How a model is synchronised; validated when made.

    Attributes:
        fragments: Into how many the model is cut.
        overlap_steps: Steps between sending a fragment and merging the answer; 0 waits for it, and ``"auto"`` merges it
            once it is there, see ``overlap.py``.

    Raises:
        OptionError: Names the value that is not allowed.
    """

    fragments: int = 1
    overlap_steps: OverlapSteps = 0

    def __post_init__(self) -> None:
        require_whole("fragments", self.fragments, 1)
        Overlap(steps=self.overlap_steps)

    @property
    def mixing(self) -> float:
        """Share of the local weights that a merge keeps: with overlap half, so that what was learnt meanwhile stays."""
        return 0.5 if self.overlap_steps else 0.0

    def fragment_of(self, round: int) -> int:
        """The fragment that a round ends with, where each round, numbered from 1, synchronises one.

        This is how workers of unequal speed go through the fragments together: H steps of a worker are then P rounds,
        each with an end that the batch scheduler chooses.
        """
        return (require_whole("round", round, 1) - 1) % self.fragments


class TrainedWeights:
    """A module's parameters that require gradients now.

    Args:
        module: Must have the same parameters on every rank.
        fragments: How they are synchronised.

    Raises:
        UnsupportedError: If there is nothing to train, or a parameter is complex.
    """

    def __init__(self, module: nn.Module, fragments: FragmentOptions) -> None:
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not parameters:
            raise UnsupportedError("Strategy 'diloco' has nothing to do: no parameter of the model requires gradients.")
        for name, parameter in parameters.items():
            if not parameter.is_floating_point():
                raise UnsupportedError(f"Strategy 'diloco' cannot average parameter {name!r}: it is {parameter.dtype}.")
        self._module = module
        self._options = fragments
        self.parameters: Mapping[str, nn.Parameter] = parameters
        self.fragments: Sequence[Sequence[str]] = split_fragments(
            {name: parameter.numel() for name, parameter in parameters.items()}, fragments.fragments
        )
        self.mixing = fragments.mixing

    def fragment_of(self, round: int) -> int:
        """The fragment that a round ends with."""
        return self._options.fragment_of(round)

    def others(self, round: int) -> list[int]:
        """All other fragments."""
        return [fragment for fragment in range(len(self.fragments)) if fragment != self.fragment_of(round)]

    def of(self, fragment: int) -> list[nn.Parameter]:
        """The parameters of a fragment, in an order that is the same on every rank."""
        return [self.parameters[name] for name in self.fragments[fragment]]

    def check(self) -> None:
        """Make sure that nothing else is trained by now.

        Raises:
            UnsupportedError: If a parameter is trained that was not at first: the workers' would drift apart.
        """
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and name not in self.parameters:
                raise UnsupportedError(
                    f"Parameter {name!r} requires gradients now, and did not when training began, so that workers "
                    "would not share it. Unfreeze it before fit, and keep it from changing with a learning rate of 0."
                )


def split_fragments(sizes: Mapping[str, int], fragments: int) -> tuple[tuple[str, ...], ...]:
    """Cut a model into fragments of about the same size, so that the link is used evenly.

    Parameters stay whole. The larger go first, each to the fragment that is smallest so far; neighbours are so spread
    over fragments, as in the paper's strided pattern.

    Args:
        sizes: Of the parameters, in any unit, by name, in the order of the model.
        fragments: How many, at most one per parameter.

    Returns:
        The names in each fragment, in the order of the model.

    Raises:
        OptionError: If ``fragments`` is not a whole number from 1 to the number of parameters.
    """
    require_whole("fragments", fragments, 1)
    if fragments > len(sizes):
        raise OptionError("fragments", fragments, f"{len(sizes)} at most, the number of parameters")
    filled = [(0, 0, index) for index in range(fragments)]  # size, parameters, number
    home: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        size, count, index = min(filled)
        home[name] = index
        filled[index] = (size + sizes[name], count + 1, index)
    return tuple(tuple(name for name in sizes if home[name] == index) for index in range(fragments))


def mix(local: Tensor, merged: Tensor, mixing: float) -> Tensor:
    """What a worker goes on with: ``mixing * local + (1 - mixing) * merged``; exactly one of them for 1 and 0."""
    return torch.lerp(merged.to(local), local, mixing)
