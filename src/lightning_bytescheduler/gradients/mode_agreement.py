"""Ranks agree on the way in which they take steps from here on."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from lightning_bytescheduler.gradients.mode_trial import ModeChoice, ModeFound, ModeTrial

__all__ = ["agree_on_mode"]


def agree_on_mode(
    trial: ModeTrial, step: int, device: torch.device, on_news: Callable[[ModeFound], None] | None
) -> None:
    """Let rank 0 decide, from what all ranks have seen and its own clock; every rank comes here before the same step.

    Why the same step: a look is due at a number of steps that only `ModeTrial.settle` changes, from the step of the
    look, its own state and rank 0's choice. All ranks begin with the same state and go through the same looks with the
    same choices, so they come to the same number; by induction, for good. What a rank has timed itself enters nothing
    but `ModeTrial.choose`, whose result counts on rank 0 alone.

    Args:
        trial: This rank's; its steps have been noted.
        step: The one that begins.
        device: Where the default group wants its tensors.
        on_news: Told what was found if it is new.
    """
    exposed = torch.tensor(trial.exposed, dtype=torch.float64, device=device)
    dist.all_reduce(exposed, op=dist.ReduceOp.MIN)
    by_all: list[float] = exposed.tolist()
    wanted = trial.choose(step, by_all)
    message = torch.tensor([wanted.as_ddp, wanted.trying], dtype=torch.int64, device=device)
    dist.broadcast(message, src=0)
    as_ddp, trying = (bool(number) for number in message.tolist())
    found = trial.settle(step, ModeChoice(as_ddp=as_ddp, trying=trying), by_all)
    if found is not None and on_news is not None:
        on_news(found)
