"""Ranks agree on the way in which they take steps from here on."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from lightning_bytescheduler.gradients.mode_trial import ModeTrial

__all__ = ["agree_on_mode"]


def agree_on_mode(trial: ModeTrial, device: torch.device, on_news: Callable[[bool, float, float], None] | None) -> None:
    """Settle a trial as rank 0's clock says; every rank comes here at the start of the same forward pass.

    Args:
        trial: This rank's; its steps have been noted.
        device: Where the default group wants its tensors.
        on_news: Told what was found if it is new, with both medians in seconds.
    """
    choice = torch.tensor(int(trial.prefers_ddp()), device=device)
    dist.broadcast(choice, src=0)
    overlapped_s, as_ddp_s = trial.medians()
    if trial.settle(bool(choice.item())) and on_news is not None:
        on_news(bool(choice.item()), overlapped_s, as_ddp_s)
