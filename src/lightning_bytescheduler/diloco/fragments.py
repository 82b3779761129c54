"""Fragments of the model that are synchronised in turn, while training goes on.

Douillard et al., "Streaming DiLoCo with overlapping communication": each of P fragments is sent every H steps, at
offsets spread over those; what the others make of it is merged into the local weights ``overlap_steps`` later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_bytescheduler.checks import require_share, require_whole
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["FragmentAction", "FragmentOptions", "FragmentSchedule", "mix", "split_fragments"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FragmentOptions:
    """How a model is synchronised; validated when made.

    Attributes:
        fragments: Into how many the model is cut.
        overlap_steps: Steps between sending a fragment and merging the answer; 0 waits for it.
        mixing: Share of the local weights that a merge keeps, from 0 to 1. 0 takes the global weights, as without
            overlap; by default 0.5 with overlap, so that what was learnt meanwhile is not thrown away.

    Raises:
        OptionError: Names the value that is not allowed.
    """

    fragments: int = 1
    overlap_steps: int = 0
    mixing: float | None = None

    def __post_init__(self) -> None:
        require_whole("fragments", self.fragments, 1)
        require_whole("overlap_steps", self.overlap_steps, 0)
        if self.mixing is None:
            object.__setattr__(self, "mixing", 0.5 if self.overlap_steps else 0.0)
        require_share("mixing", self.mixing)

    def fragment_of(self, round: int) -> int:
        """The fragment that a round ends with, where each round, numbered from 1, synchronises one.

        This is how workers of unequal speed go through the fragments together: H steps of a worker are then P rounds,
        each with an end that the batch scheduler chooses.
        """
        return (require_whole("round", round, 1) - 1) % self.fragments


@dataclass(frozen=True, kw_only=True, slots=True)
class FragmentAction:
    """What to do with a fragment after a step.

    Attributes:
        do: ``"send"`` its pseudo-gradient, or ``"merge"`` the answer into the local weights.
        fragment: Its number, from 0.
        sent: The step after which it is, or was, sent.
    """

    do: Literal["send", "merge"]
    fragment: int
    sent: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FragmentSchedule:
    """When each fragment is sent and merged, for a worker that sends each one every ``steps`` steps.

    Attributes:
        options: Fragments and overlap.
        steps: H, at least the number of fragments.

    Raises:
        OptionError: If there are fewer steps than fragments, or a fragment would be sent again before it was merged.
    """

    options: FragmentOptions
    steps: int

    def __post_init__(self) -> None:
        require_whole("steps", self.steps, 1)
        if self.options.fragments > self.steps:
            allowed = f"{self.steps} at most, the number of steps, so that one fragment is sent after a step"
            raise OptionError("fragments", self.options.fragments, allowed)
        if self.options.overlap_steps >= self.steps:
            allowed = f"less than {self.steps}, the number of steps after which a fragment is sent again"
            raise OptionError("overlap_steps", self.options.overlap_steps, allowed)

    def offset(self, fragment: int) -> int:
        """The step after which a fragment is sent for the first time, from 1 to ``steps``."""
        return -(-(fragment + 1) * self.steps // self.options.fragments)

    def actions(self, step: int) -> tuple[FragmentAction, ...]:
        """What to do after a step, in this order.

        An answer is merged before another fragment is sent. Without overlap, a fragment is sent and then merged.

        Args:
            step: Counted from 1, over all of the training.
        """
        late = step - self.options.overlap_steps
        merges = [FragmentAction(do="merge", fragment=fragment, sent=late) for fragment in self._sent_after(late)]
        sends = [FragmentAction(do="send", fragment=fragment, sent=step) for fragment in self._sent_after(step)]
        return (*merges, *sends) if self.options.overlap_steps else (*sends, *merges)

    def _sent_after(self, step: int) -> list[int]:
        return [
            fragment
            for fragment in range(self.options.fragments)
            if step >= self.offset(fragment) and (step - self.offset(fragment)) % self.steps == 0
        ]


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
