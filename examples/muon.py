"""Muon for the matrices of layers and AdamW for everything else, as the one optimizer that Lightning steps by itself.

    def configure_optimizers(self):
        matrices = [weight for weight in self.blocks.parameters() if weight.ndim == 2]
        return MuonAndAdamW(self.parameters(), matrices=matrices, lr=3e-3)

Embeddings and the output layer are matrices too, but are for AdamW. Schedules, clipping and checkpoints see one
optimizer with two parameter groups. ``torch.optim.Muon`` needs torch 2.9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer


class MuonAndAdamW(Optimizer):
    """Steps ``matrices`` by Muon, with updates of the size of AdamW's, and the other ``parameters`` by AdamW."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, matrices: Iterable[nn.Parameter], lr: float, **adamw: Any
    ) -> None:
        first = list(matrices)
        others = [parameter for parameter in parameters if all(parameter is not one for one in first)]
        decay = adamw.setdefault("weight_decay", 0.01)
        self._parts = Muon(first, lr, decay, adjust_lr_fn="match_rms_adamw"), AdamW(others, lr, **adamw)
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()
