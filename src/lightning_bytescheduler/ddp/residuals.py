"""Residuals of error feedback in one fit: one flat fp32 tensor for each parameter, by the parameter's name.

With PowerSGD, the factors with which the next step's power iteration begins are kept, too. They are the same on all
ranks.

A residual has the layout of its gradient in the bucket. Residuals are not saved: a fit that goes on from a checkpoint
begins without any, as each fit does. So what the last step before the checkpoint left out is not sent.

Residuals of scaled gradients are kept with their loss scale, and are rescaled when it changes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bytescheduler.compression.powersgd import PowerSGD

__all__ = ["Residuals"]

_FIRST = 1024  # elements of a gradient that are checked first; a nonzero value there decides


class Residuals:
    """One rank's residuals. The training thread uses them while no gradient is in flight.

    While gradients are in flight, sending threads use :meth:`to_change`, each for its own parts; one creates residuals.

    Args:
        parameters: The compressed parameters by name.
        may_drop: Whether mean gradients may be dropped without an optimizer step, as with two losses and optimizers.
            The residuals are then restored.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter] | None = None, *, may_drop: bool = False) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._rights: dict[str, Tensor] = {}
        self._scale = 1.0
        self._before: dict[str, Tensor] = {}  # residuals before a step that may be skipped
        self._changed: set[str] = set()  # in that step
        self._pending: set[str] = set()  # changed earlier, by gradients that are neither applied nor dropped
        self._may_be_left_out = False
        self._parameters = {} if parameters is None else parameters
        self._may_drop = may_drop
        self._stepped: set[int] = set()  # ids of parameters stepped since the last reduced backward pass
        self._versions: dict[str, int] = {}  # of parameters, when that pass began
        self._dropped: set[str] = set()  # gradients dropped since then
        self._device = torch.device("cpu")

    def live_on(self, device: torch.device) -> None:
        """Keep residuals on ``device``, where gradients are encoded, from the first step on."""
        self._device = device

    def of(self, name: str, size: int) -> Tensor:
        """Return the residual of a parameter, zeros at first; the caller changes it in place."""
        known = self._tensors.get(name)
        if known is None or known.numel() != size:
            known = self._tensors[name] = torch.zeros(size, dtype=torch.float32, device=self._device)
        return known

    def to_change(self, name: str, size: int) -> Tensor:
        """Return a parameter's residual; the first call in a step keeps its old value, if that may be restored.

        While an earlier step's gradient is pending, the older value is kept.
        """
        residual = self.of(name, size)
        if self._may_be_left_out and name not in self._pending and name not in self._changed:
            before = self._before.get(name)
            if before is None or before.numel() != size:
                self._before[name] = residual.clone()
            else:
                before.copy_(residual)
            self._changed.add(name)
        return residual

    def stepped(self, optimizer: Optimizer) -> None:
        """Record that an optimizer has stepped with the present mean gradients."""
        if self._may_drop:
            with torch._C.DisableTorchFunctionSubclass():
                parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
                self._stepped.update(id(parameter) for parameter in parameters if parameter.grad is not None)

    def not_applied(self) -> set[str]:
        """Return the parameters whose last mean gradient may still be dropped unused.

        A step that bypasses the strategy, such as that of a separate optimizer, shows as a write to the parameter.
        """
        if not self._may_drop:
            return set()
        with torch._C.DisableTorchFunctionSubclass():
            return {
                name
                for name in self.changed & self._parameters.keys()
                if id(self._parameters[name]) not in self._stepped
                and self._parameters[name]._version == self._versions.get(name)
            }

    def before_backward(self) -> None:
        """Record which mean gradients were dropped."""
        with torch._C.DisableTorchFunctionSubclass():
            self._dropped.update(name for name in self.not_applied() if _is_dropped(self._parameters[name].grad))

    def begin_step(self, loss_scale: float | None) -> None:
        """Begin a step with ``loss_scale``; ``None`` if steps are never skipped.

        A smaller scale than before means that the last step overflowed and was skipped. Then the earlier residuals are
        restored, as are those of mean gradients that were dropped without a step. A mean gradient that was neither
        applied nor dropped is still there, and this step's is added to it.
        """
        if loss_scale is not None and loss_scale < self._scale:
            self.take_back(self.changed)
        self.take_back(self._dropped)
        self._pending = self.not_applied()
        self._changed.clear()
        self._stepped.clear()
        self._dropped.clear()
        self._may_be_left_out = loss_scale is not None or self._may_drop
        self.scale_to(1.0 if loss_scale is None else loss_scale)
        if self._may_drop:
            with torch._C.DisableTorchFunctionSubclass():
                self._versions = {name: parameter._version for name, parameter in self._parameters.items()}

    @property
    def changed(self) -> set[str]:
        """Names of the parameters whose residuals changed in the last step, if that may be undone.

        Includes pending ones of earlier steps.
        """
        return self._changed | self._pending

    def take_back(self, names: Collection[str]) -> None:
        """Restore residuals whose mean gradients were dropped; nothing may be in flight."""
        for name in self.changed.intersection(names):
            self._tensors[name].copy_(self._before[name])
        self._changed.difference_update(names)
        self._pending.difference_update(names)

    def clear(self) -> None:
        """Begin anew, as other weights were loaded; nothing may be in flight."""
        for kept in (self._tensors, self._rights, self._changed, self._pending):
            kept.clear()

    def right_of(self, name: str, columns: int, codec: PowerSGD) -> Tensor:
        """Return the right factor of a parameter's last mean gradient, ``(columns, rank)``; changed in place."""
        known = self._rights.get(name)
        if known is None or known.shape != (columns, codec.rank):
            known = self._rights[name] = codec.first_right(name, columns).to(self._device)
        return known

    def scale_to(self, loss_scale: float) -> None:
        """Rescale to ``loss_scale``."""
        if loss_scale != self._scale and loss_scale > 0:
            for tensor in (*self._tensors.values(), *(self._before[name] for name in self.changed)):
                tensor.mul_(loss_scale / self._scale)
            self._scale = loss_scale


def _is_dropped(gradient: Tensor | None) -> bool:
    """Whether ``zero_grad`` was called, with or without ``set_to_none``."""
    if gradient is None:
        return True
    flat = gradient.detach().reshape(-1)
    return not flat[:_FIRST].any() and not flat.any()
