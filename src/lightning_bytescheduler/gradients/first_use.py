"""What the first iteration shows: the order in which parameters are used, and which are used without a touch.

The order is ByteScheduler's priority. It is observed, not taken from registration order (DESIGN 3, trap 6): during the
first forward pass every parameter carries a gate that only notes its turn. A parameter that has a gradient after the
backward pass, though nobody touched it, was read by code that a touch gate cannot see, such as an extension that takes
its memory (trap 7).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

from lightning_bytescheduler.gradients.gate import arm, disarm

__all__ = ["FirstUseObserver"]


class FirstUseObserver:
    """Notes the first touch of each parameter during one forward pass.

    Args:
        parameters: In registration order, which is used for parameters the pass did not touch.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._position: dict[int, int] = {}
        self._untouched: list[nn.Parameter] = []  # of the observed pass, until its backward pass has been seen too
        self._compiled: set[int] = set()
        self._seen = 0
        self._observing = False
        self._done = False

    def begin(self, unseen: Collection[int] = ()) -> None:
        """Observe from here on, unless a pass was observed before.

        Args:
            unseen: Ids of parameters whose touches are known not to be seen. They come first: their steps do not wait
                for the forward pass. They are left alone, as compiled code specialises on the class of what it reads.
        """
        if not self._done:
            self._observing = True
            self._position.update(dict.fromkeys(unseen, -1))
            arm((p for p in self._parameters if id(p) not in unseen), self)

    def end(self) -> None:
        """Stop observing; what was not touched comes last, in registration order."""
        if not self._observing:
            return
        self._observing = False
        self._done = self._seen > 0
        disarm(self._parameters)
        self._untouched = [p for p in self._parameters if id(p) not in self._position]
        for parameter in self._parameters:
            self._position.setdefault(id(parameter), len(self._position))

    def touched(self, parameter: nn.Parameter, gradient_only: bool) -> None:
        """See :class:`~lightning_bytescheduler.gradients.gate.Gate`."""
        disarm((parameter,))
        if torch.compiler.is_compiling():
            self._compiled.add(id(parameter))
        if not gradient_only and id(parameter) not in self._position:
            self._position[id(parameter)] = len(self._position)
            self._seen += 1

    def read_unseen(self) -> set[int]:
        """Ids of parameters that the observed pass read without a touch, or in compiled code; call after backward.

        Empty unless a pass was observed since the last call.
        """
        unseen = {id(p) for p in self._untouched if p.grad is not None} | self._compiled
        self._position.update(dict.fromkeys(unseen, -1))
        self._untouched = []
        self._compiled = set()
        return unseen

    def position(self, parameters: Iterable[nn.Parameter]) -> int:
        """The earliest position among ``parameters``: the priority of a bucket that holds them."""
        last = len(self._position)
        return min((self._position.get(id(p), last) for p in parameters), default=last)
