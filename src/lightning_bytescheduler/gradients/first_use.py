"""The order in which a forward pass first uses each parameter: ByteScheduler's priority.

Observed, not taken from registration order (DESIGN 3, trap 6): during the first forward pass every parameter carries a
gate that only notes its turn.
"""

from __future__ import annotations

from collections.abc import Iterable

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
        self._seen = 0
        self._observing = False
        self._done = False

    def begin(self) -> None:
        """Observe from here on, unless a pass was observed before."""
        if not self._done:
            self._observing = True
            arm(self._parameters, self)

    def end(self) -> None:
        """Stop observing; what was not touched comes last, in registration order."""
        if not self._observing:
            return
        self._observing = False
        self._done = self._seen > 0
        disarm(self._parameters)
        for parameter in self._parameters:
            self._position.setdefault(id(parameter), len(self._position))

    def touched(self, parameter: nn.Parameter, gradient_only: bool) -> None:
        """See :class:`~lightning_bytescheduler.gradients.gate.Gate`."""
        disarm((parameter,))
        if not gradient_only and id(parameter) not in self._position:
            self._position[id(parameter)] = len(self._position)
            self._seen += 1

    def position(self, parameters: Iterable[nn.Parameter]) -> int:
        """The earliest position among ``parameters``: the priority of a bucket that holds them."""
        last = len(self._position)
        return min((self._position.get(id(p), last) for p in parameters), default=last)
