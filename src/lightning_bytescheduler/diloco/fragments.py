"""Fragments of the model that are synchronised in turn, while training goes on.

Douillard et al., "Streaming DiLoCo with overlapping communication": the model is cut into P fragments, and each round
ends with the synchronisation of one of them, in turn. Its mean is merged into the local weights ``overlap_steps`` steps
later.

- *The global weights depend only on what was sent.* A pseudo-gradient is complete when it is sent, and the round is
  merged from what was sent. Each worker takes the same outer steps with the same means in the order of the rounds,
  because it sends nothing before it has merged what is in flight. This holds for each fragment by itself, as a merge
  touches no other fragment.
- *Steps taken before the merge count for the next round*, whenever that begins here. ``RoundCounter`` counts anew after
  each send, and reports carry the next round's number. The scheduler counts them as soon as it has begun that round. If
  it decides that round's end before the merge, the worker ignores that, and is told again after ``RoundStarted``.
- *Before all workers stand still*, for a validation or the end of an epoch, the worker that asks for it merges first. A
  worker that still waits for the mean of such a round does not wait for a next round, as none begins before all have
  passed.
- *A checkpoint* is of the beginning of a round or of a standstill, thus after a merge. A worker's weights and counts at
  the beginning of a round are its own. A worker is at most one merge behind the worker that writes.

With a coordinator, a worker that learns that it is late or was cut off waits for nothing: it catches up at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_bytescheduler.checks import require_whole
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError


def fragment_of(round: int, *, fragments: int) -> int:
    """The fragment that a round ends with, where each round, numbered from 1, synchronises one.

    So workers of unequal speed go through the fragments together: H steps of a worker are P rounds, and the batch
    scheduler chooses the end of each.

    Args:
        round: Its number.
        fragments: Into how many the model is cut.
    """
    return (require_whole("round", round, 1) - 1) % fragments


class TrainedWeights:
    """A module's parameters that require gradients now.

    Args:
        module: Must have the same parameters on every rank.
        fragments: Into how many the model is cut.
        overlaps: Whether workers train on while a pseudo-gradient travels.

    Attributes:
        mixing: Share of the local weights that a merge keeps: half with overlap, so that steps during the transfer are
            not lost.

    Raises:
        UnsupportedError: If there is nothing to train, or a parameter is complex.
    """

    def __init__(self, module: nn.Module, *, fragments: int = 1, overlaps: bool = False) -> None:
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not parameters:
            raise UnsupportedError("Strategy 'diloco' has nothing to do: no parameter of the model requires gradients.")
        for name, parameter in parameters.items():
            if not parameter.is_floating_point():
                raise UnsupportedError(f"Strategy 'diloco' cannot average parameter {name!r}: it is {parameter.dtype}.")
        self._module = module
        self.parameters: Mapping[str, nn.Parameter] = parameters
        self.fragments: Sequence[Sequence[str]] = split_fragments(
            {name: parameter.numel() for name, parameter in parameters.items()}, fragments
        )
        self.mixing = 0.5 if overlaps else 0.0

    def fragment_of(self, round: int) -> int:
        """The fragment that a round ends with."""
        return fragment_of(round, fragments=len(self.fragments))

    def of(self, fragment: int) -> list[nn.Parameter]:
        """The parameters of a fragment, in an order that is the same on every rank."""
        return [self.parameters[name] for name in self.fragments[fragment]]

    @property
    def sizes(self) -> list[int]:
        """Elements of each fragment."""
        return [sum(self.parameters[name].numel() for name in names) for names in self.fragments]

    def check(self) -> None:
        """Check that no other parameter is trained by now.

        Raises:
            UnsupportedError: If a parameter is trained that was not at first: the workers' would drift apart.
        """
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and name not in self.parameters:
                raise UnsupportedError(
                    f"Parameter {name!r} requires gradients now, and did not when training began, so its changes would "
                    "not be shared. Unfreeze it before fit, and keep it from changing with a learning rate of 0."
                )


def split_fragments(sizes: Mapping[str, int], fragments: int) -> tuple[tuple[str, ...], ...]:
    """Cut a model into fragments of about the same size, so that the link is used evenly.

    Parameters stay whole. Larger ones go first, each to the fragment that is smallest so far. This spreads neighbours
    over fragments, as the paper's strided pattern does.

    Args:
        sizes: The parameters' sizes in any unit, by name, in the order of the model.
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
    """Return ``mixing * local + (1 - mixing) * merged``; with 1 or 0 exactly one of the two."""
    return torch.lerp(merged.to(local), local, mixing)
