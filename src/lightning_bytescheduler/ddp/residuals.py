"""Residuals of error feedback in one fit: one flat fp32 tensor for each parameter, by the parameter's name.

With PowerSGD, the factors with which the next step's power iteration begins are kept, too. They are the same on all
ranks.

A residual has the layout of its gradient in the bucket. Residuals are not saved: a fit that goes on from a checkpoint
begins without any, as each fit does. So what the last step before the checkpoint left out is not sent.

Residuals of scaled gradients are kept with their loss scale, and are rescaled when it changes. A step that a loss
scaler leaves out changes them as any other: what it left out is of a gradient like the others.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bytescheduler.compression.powersgd import PowerSGD

__all__ = ["Residuals"]

_FIRST = 1024  # elements of a gradient that are checked first; a nonzero value there decides


class Residuals:
    """One rank's residuals. The training thread uses them while no gradient is in flight.

    While gradients are in flight, sending threads change them, each for its own parts.

    Args:
        parameters: The compressed parameters by name, if user code may drop mean gradients without an optimizer step,
            as with two losses and optimizers. A residual is then dropped with its gradient.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter] | None = None) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._rights: dict[str, Tensor] = {}
        self._scale = 1.0
        self._may_be_dropped = {} if parameters is None else parameters
        self._changed: set[str] = set()  # in the last step
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
        """Return a parameter's residual, which this step changes."""
        self._changed.add(name)
        return self.of(name, size)

    def stepped(self, optimizer: Optimizer) -> None:
        """Record that an optimizer has stepped with the present mean gradients."""
        if self._may_be_dropped:
            with torch._C.DisableTorchFunctionSubclass():
                parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
                self._stepped.update(id(parameter) for parameter in parameters if parameter.grad is not None)

    def before_backward(self) -> None:
        """Record which mean gradients were dropped without a step.

        A step that bypasses the strategy, such as that of a separate optimizer, shows as a write to the parameter.
        """
        with torch._C.DisableTorchFunctionSubclass():
            sent = ((name, self._may_be_dropped[name]) for name in self._changed & self._may_be_dropped.keys())
            as_sent = ((n, p) for n, p in sent if id(p) not in self._stepped and p._version == self._versions.get(n))
            self._dropped.update(name for name, parameter in as_sent if _is_dropped(parameter.grad))

    def begin_step(self, loss_scale: float | None) -> None:
        """Begin a step with ``loss_scale``; ``None`` without one. Nothing may be in flight."""
        for name in self._dropped:
            self._tensors[name].zero_()
        for noted in (self._changed, self._stepped, self._dropped):
            noted.clear()
        self.scale_to(1.0 if loss_scale is None else loss_scale)
        with torch._C.DisableTorchFunctionSubclass():
            self._versions = {name: parameter._version for name, parameter in self._may_be_dropped.items()}

    def clear(self) -> None:
        """Begin anew, as other weights were loaded; nothing may be in flight."""
        for kept in (self._tensors, self._rights, self._changed, self._dropped):
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
            for tensor in self._tensors.values():
                tensor.mul_(loss_scale / self._scale)
            self._scale = loss_scale


def _is_dropped(gradient: Tensor | None) -> bool:
    """Whether ``zero_grad`` was called, with or without ``set_to_none``."""
    if gradient is None:
        return True
    flat = gradient.detach().reshape(-1)
    return not flat[:_FIRST].any() and not flat.any()
