"""One bucket's gradients on their way, and the optimizer step that is due when they arrive.

States, all moved by the training thread (or whoever touches a parameter) under the engine's lock::

    REDUCING  after backward: only ``parameter.grad`` makes the toucher wait; the weights are still valid
    REDUCED   the gradient was read before optimizer.step: it is final, parameters are plain, the step comes at once
    DUE       after optimizer.step: any touch waits and applies the update
    STEPPED   its update was applied while a thread waited for another bucket; the gate is closed still, as it tells
              when and in which order parameters are used
    OPENING   one thread applies it, or transforms the gradient; only that thread's own code can meet this state, as
              whoever else touches a parameter waits for the lock
    DONE      parameters are plain again

A gate opens *after* what it guards is done. Whoever touches a parameter meanwhile, on another thread, meets a closed
gate and waits; if it opened before the step, that thread would read last step's weights, or save for its backward pass
what the step then changes in place.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import torch
from torch import nn

from lightning_bytescheduler.gradients.gate import arm, can_be_gated, disarm, gate_of
from lightning_bytescheduler.gradients.partial_step import HyperparameterSnapshot, ParameterGradient
from lightning_bytescheduler.scheduler.task import CommTask

if TYPE_CHECKING:
    from lightning_bytescheduler.gradients.engine import GradientEngine

__all__ = ["BucketUpdate", "UpdateState"]


class UpdateState(enum.Enum):
    """Where a bucket's update stands."""

    REDUCING = "reducing"
    REDUCED = "reduced"
    DUE = "due"
    STEPPED = "stepped"
    OPENING = "opening"
    DONE = "done"


class BucketUpdate:
    """A gate on the parameters of one bucket.

    Args:
        engine: Applies the update.
        index: The bucket's index, the same on all ranks.
        parameters: The bucket's parameters.
        buffer: The flat gradient, reduced in place.
        task: The communication.
    """

    __slots__ = (
        "buffer",
        "chosen",
        "engine",
        "hyperparameters",
        "index",
        "norm_when_read",
        "parameters",
        "state",
        "task",
        "touched_by",
        "transformed",
    )

    def __init__(
        self,
        engine: GradientEngine,
        index: int,
        parameters: list[nn.Parameter],
        buffer: torch.Tensor,
        task: CommTask,
    ) -> None:
        self.engine = engine
        self.index = index
        self.parameters = parameters
        self.buffer = buffer
        self.task = task
        self.state = UpdateState.REDUCING
        self.chosen: list[ParameterGradient] = []
        self.hyperparameters: HyperparameterSnapshot = []
        self.transformed = 0  # how many of the step's transforms have been applied
        self.norm_when_read: torch.Tensor | None = None  # of the buffer, when last handed to a reader
        self.touched_by: nn.Parameter | None = None

    @property
    def has_arrived(self) -> bool:
        """Whether the gradient is here, reduced."""
        return self.task.done() and self.task.error is None

    @property
    def is_closed(self) -> bool:
        """Whether a touch may find something left to do."""
        return self.state in (UpdateState.REDUCING, UpdateState.DUE, UpdateState.STEPPED)

    def holds(self, gradient: torch.Tensor) -> bool:
        """Whether ``gradient`` is a view of this bucket, not a tensor somebody put in its place."""
        if not gradient.numel():  # has no address to go by
            return True
        first = self.buffer.data_ptr()
        return first <= gradient.data_ptr() < first + self.buffer.numel() * self.buffer.element_size()

    def gateable(self) -> bool:
        """Whether every parameter's touches can be seen."""
        return all(can_be_gated(p) for p in self.parameters)

    def close_gate(self) -> None:
        """Gate the parameters."""
        arm(self.parameters, self)

    def open_gate(self) -> None:
        """Make the parameters plain again."""
        disarm(p for p in self.parameters if gate_of(p) is self)

    def touched(self, parameter: nn.Parameter, gradient_only: bool) -> None:
        """See :class:`~lightning_bytescheduler.gradients.gate.Gate`."""
        self.touched_by = parameter
        self.engine.touched(self, gradient_only)
        gate = gate_of(parameter)
        if gate is not None and gate is not self:
            gate.touched(parameter, gradient_only)  # put there while this thread waited

    def open_all(self, reason: str) -> None:
        """See :class:`~lightning_bytescheduler.gradients.gate.Gate`."""
        self.engine.open_all(reason)
