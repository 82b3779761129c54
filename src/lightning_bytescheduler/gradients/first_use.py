"""What the first iteration shows: the order in which parameters are used, and which are used without a touch.

The order is ByteScheduler's priority. It is observed, not taken from registration order (DESIGN 3, trap 6): during the
first forward pass every parameter carries a gate that only notes its turn. A parameter that has a gradient after the
backward pass, though nobody touched it, was read by code that a touch gate cannot see, such as an extension that takes
its memory (trap 7).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lightning_bytescheduler.gradients.gate import arm, disarm, gate_of, is_armed

__all__ = ["FirstUseObserver"]


class FirstUseObserver:
    """Notes the first touch of each parameter during one forward pass.

    Args:
        parameters: In registration order, which is used for parameters the pass did not touch.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._registration = {id(p): index for index, p in enumerate(self._parameters)}
        self._position: dict[int, int] = {}
        self._unseen: set[int] = set()
        self._compiled: set[int] = set()
        self._untouched: list[nn.Parameter] = []  # of the observed pass, until its backward pass has been seen too
        self._observing = False
        self._done = False

    def begin(self, unseen: Iterable[int] = ()) -> None:
        """Observe from here on, unless a pass was observed before.

        Args:
            unseen: Ids of parameters whose touches are known not to be seen. They are left alone, as compiled code
                specialises on the class of what it reads.
        """
        if not self._done:
            self._observing = True
            self._unseen.update(unseen)
            # A pass that used nothing did not count, but there may be updates on their way all the same.
            arm((p for p in self._parameters if id(p) not in self._unseen and not is_armed(p)), self)

    def end(self) -> None:
        """Stop observing."""
        if not self._observing:
            return
        self._observing = False
        self._done = bool(self._position)
        observed = [p for p in self._parameters if gate_of(p) is self]
        disarm(observed)
        self._untouched = [p for p in observed if id(p) not in self._position]

    def touched(self, parameter: nn.Parameter, gradient_only: bool) -> None:
        """See :class:`~lightning_bytescheduler.gradients.gate.Gate`."""
        if gradient_only:
            return
        disarm((parameter,))
        if torch.compiler.is_compiling():
            self._compiled.add(id(parameter))
        self._position.setdefault(id(parameter), len(self._position))

    def open_all(self, reason: str) -> None:
        """See :class:`~lightning_bytescheduler.gradients.gate.Gate`: look away until :meth:`resume`."""
        disarm([p for p in self._parameters if gate_of(p) is self])

    def resume(self, read: Iterable[int]) -> None:
        """Look on; parameters with the ids ``read`` were used meanwhile."""
        if not self._observing:
            return
        for parameter in read:
            if parameter in self._registration and parameter not in self._unseen:
                self._position.setdefault(parameter, len(self._position))
        known = self._unseen | self._position.keys()
        arm((p for p in self._parameters if id(p) not in known and not is_armed(p)), self)

    def read_unseen(self) -> set[int]:
        """Ids of parameters that the observed pass read without a touch, or in compiled code; call after backward.

        Empty unless a pass was observed since the last call.
        """
        found = {id(p) for p in self._untouched if p.grad is not None} | self._compiled
        self._untouched = []
        self._compiled = set()
        self._unseen |= found
        return found

    def note_unseen(self, parameters: Iterable[nn.Parameter]) -> None:
        """``parameters`` are read without a touch, as was found later."""
        self._unseen.update(map(id, parameters))

    def position(self, parameters: Iterable[nn.Parameter]) -> int:
        """The earliest position among ``parameters``: the priority of a bucket that holds them.

        Whatever is read unseen comes first, as its step does not wait for the forward pass; what was not used comes
        last, in the order of registration.
        """
        return min(map(self._position_of, parameters), default=0)

    def _position_of(self, parameter: nn.Parameter) -> int:
        key = id(parameter)
        if key in self._unseen:
            return -1
        return self._position.get(key, len(self._position) + self._registration.get(key, 0))
