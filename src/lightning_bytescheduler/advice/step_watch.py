"""When each parameter is first used in a forward pass, and when its gradient is complete.

Seen as the strategy sees them: a touch of the parameter itself, wherever that happens, and the end of its accumulation.
Both are watched for single steps only and leave nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_bytescheduler.advice.clock import DeviceClock
from lightning_bytescheduler.gradients.gate import arm, can_be_gated, disarm, gate_of, is_armed

__all__ = ["StepWatch"]


class StepWatch:
    """Notes moments of one step at a time.

    Args:
        parameters: Those that are trained.
        unseen: Ids of those whose touches cannot be seen; only their gradients are watched.
        clock: Of the device that computes.

    Attributes:
        first_use: By id of a parameter, the moment of its first use in the step.
        gradient: By id of a parameter, the moment when its gradient was complete.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], unseen: Iterable[int], clock: DeviceClock) -> None:
        self._parameters = list(parameters)
        self._unseen = set(unseen)
        self._clock = clock
        self._handles: list[RemovableHandle] = []
        self.first_use: dict[int, Any] = {}
        self.gradient: dict[int, Any] = {}

    def begin_forward(self) -> None:
        """Watch the forward pass that comes."""
        self.first_use, self.gradient = {}, {}
        seen = (p for p in self._parameters if id(p) not in self._unseen and can_be_gated(p) and not is_armed(p))
        arm(seen, self)

    def end_forward(self) -> None:
        """Stop watching it."""
        disarm([p for p in self._parameters if gate_of(p) is self])

    def begin_backward(self) -> None:
        """Watch the backward pass that comes."""
        self._handles = [p.register_post_accumulate_grad_hook(self._accumulated) for p in self._parameters]

    def end_backward(self) -> None:
        """Stop watching it."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def touched(self, parameter: nn.Parameter, gradient_only: bool) -> None:
        """See :class:`~lightning_bytescheduler.gradients.gate.Gate`."""
        if gradient_only:
            return
        disarm((parameter,))
        if torch.compiler.is_compiling():
            # Compiled code is specialised on what it met; in its next run there would be no touch.
            self._unseen.add(id(parameter))
        else:
            self.first_use.setdefault(id(parameter), self._clock.moment())

    def open_all(self, reason: str) -> None:
        """See :class:`~lightning_bytescheduler.gradients.gate.Gate`: what is used from here on is not seen."""
        self.end_forward()

    def _accumulated(self, parameter: torch.Tensor) -> None:
        # The last time counts: with reentrant checkpointing a gradient can come in parts.
        self.gradient[id(parameter)] = self._clock.moment()
