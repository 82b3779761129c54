"""Fragments of the model that are synchronised in turn, while training goes on.

Douillard et al., "Streaming DiLoCo with overlapping communication": the model is cut into P fragments, and each round
ends with the synchronisation of one of them, in turn. Its mean is merged into the local weights ``overlap_steps`` steps
later, or as soon as it has arrived. This module also decides how long a worker trains on while its pseudo-gradient
travels.

With ``"auto"`` a worker merges at the first step boundary at which it need not wait: the mean has arrived, and the
worker knows that its round has ended and that the next has begun, or that there is none. After half as many steps as
its last round had, it waits for these. So the bound follows each worker's own pace, and at least half of a round is
trained on top of the merge. A fast worker may take more steps than a slow one of the same run before it merges.

Workers may merge at different steps, and a worker at a different step in each round:

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
  the beginning of a round are its own, as with a fixed number of steps. A worker is at most one merge behind the worker
  that writes.
- *No worker waits longer than with a fixed number.* The scheduler's reports include the samples of steps before the
  merge, and a worker that merges as soon as it can is ready for the next end as soon as it can be.

With a coordinator, a worker that learns that it is late or was cut off waits for nothing: it catches up at once.

A worker's own weights between two rounds do depend on the step of the merge, and on the number of steps that it takes
in a round. So two runs with ``"auto"`` are not equal bit for bit, and neither are two runs by pace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from lightning_bytescheduler.checks import is_whole, require_whole
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError

OverlapSteps: TypeAlias = int | Literal["auto"]

_AUTO = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """How a worker decides when to merge; validated when made.

    Attributes:
        steps: Steps between sending a pseudo-gradient and merging the mean; 0 waits for the mean, ``"auto"`` merges
            once it is there.
        inner_steps: Most steps of a round; ``None`` where samples end it.

    Raises:
        OptionError: If ``steps`` is neither, or the merge would come after the next pseudo-gradient is sent.
    """

    steps: OverlapSteps = 0
    inner_steps: int | None = None

    def __post_init__(self) -> None:
        if self.steps != _AUTO and not is_whole(self.steps):
            raise OptionError("overlap_steps", self.steps, f"a whole number, 0 or more, or {_AUTO!r}")
        if self.inner_steps is None:
            return
        if self.steps == _AUTO and self.inner_steps == 1:
            raise OptionError("overlap_steps", _AUTO, "left out with inner_steps=1: each step ends a round")
        if isinstance(self.steps, int) and self.steps >= self.inner_steps:
            raise OptionError(
                "overlap_steps",
                self.steps,
                f"less than the steps between two sends, inner_steps={self.inner_steps}",
            )

    def __bool__(self) -> bool:
        """Whether a worker trains on at all."""
        return self.steps != 0

    @property
    def follows_mean(self) -> bool:
        """Whether a worker merges as soon as the mean is there."""
        return self.steps == _AUTO

    def longest(self, taken: int) -> int:
        """Steps after which a worker waits for the mean.

        Args:
            taken: The worker's steps in the round that it has sent.
        """
        if isinstance(self.steps, int):
            return self.steps
        # A round lasts while the coordinator is away, and may have had many more steps than the next will.
        most = taken if self.inner_steps is None else min(taken, self.inner_steps)
        return max(most // 2, 1)


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
