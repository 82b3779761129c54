"""Residuals of error feedback in one fit: one flat fp32 tensor for each parameter, by the parameter's name.

With PowerSGD, the factors with which the next step's power iteration begins are kept, too. They are the same on all
ranks.

A residual has the layout of its gradient in the bucket. Residuals are not saved: a fit that goes on from a checkpoint
begins without any, as each fit does. So what the last step before the checkpoint left out is not sent.

Residuals of scaled gradients are kept with their loss scale, and are rescaled when it changes. A step that a loss
scaler leaves out, or whose gradient a hook drops, changes them as any other: what it left out is sent with the next
gradient. With manual optimization the next gradient may be that of another loss, so compression is refused there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bytescheduler.compression.powersgd import PowerSGD

__all__ = ["Residuals"]


class Residuals:
    """One rank's residuals. The training thread uses them while no gradient is in flight.

    While gradients are in flight, sending threads change them, each for its own parts.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._rights: dict[str, Tensor] = {}
        self._scale = 1.0
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

    def right_of(self, name: str, columns: int, codec: PowerSGD) -> Tensor:
        """Return the right factor of a parameter's last mean gradient, ``(columns, rank)``; changed in place."""
        known = self._rights.get(name)
        if known is None or known.shape != (columns, codec.rank):
            known = self._rights[name] = codec.first_right(name, columns).to(self._device)
        return known

    def scale_to(self, loss_scale: float) -> None:
        """Rescale to ``loss_scale``; nothing may be in flight."""
        if loss_scale != self._scale and loss_scale > 0:
            for tensor in self._tensors.values():
                tensor.mul_(loss_scale / self._scale)
            self._scale = loss_scale

    def clear(self) -> None:
        """Begin anew, as other weights were loaded; nothing may be in flight."""
        self._tensors.clear()
        self._rights.clear()
