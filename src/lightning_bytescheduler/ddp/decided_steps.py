"""Which way a fit's steps are taken: agreed on before the first of them, and again by what is seen.

The same for a Trainer's fit and for a module of Fabric; what is tuned besides is the Trainer's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from lightning_bytescheduler.ddp.compression_rules import AUTO
from lightning_bytescheduler.ddp.ddp_mode import ModeFound, ModeTrial, StepMode, TriedMode
from lightning_bytescheduler.ddp.fit_report import first_pace, reason_for, say_found
from lightning_bytescheduler.ddp.plan import OverlapPlan
from lightning_bytescheduler.scheduler.options import MODES, SchedulerOptions
from lightning_bytescheduler.tuning.default_sizes import LinkEstimate, is_slow


class DecidedSteps:
    """Has the plan of a fit, and decides with the other ranks which of its steps are as DDP's."""

    def __init__(self) -> None:
        self._plan: OverlapPlan | None = None
        self._finding = ""  # what was seen to be fastest

    def _tunes_at_once(self, *, slow: bool) -> bool:
        """Whether this rank would have sizes tuned from the first step on, on a link that is slow for the model."""
        return False

    def _begin_tuning(self) -> StepMode | None:
        """Have sizes tuned from here on; every rank comes here before the same step. ``None`` where nothing is."""
        return None

    def _decide_mode(
        self,
        plan: OverlapPlan,
        options: SchedulerOptions,
        agree: Callable[[bool], bool],
        *,
        link: LinkEstimate | None,
        device: torch.device,
        nbytes: int,
    ) -> StepMode:
        """Agree on how steps are taken, as far as that is known before the first; notes the plan.

        Args:
            plan: Which all ranks have agreed on.
            options: This rank's; what counts is what rank 0 says.
            agree: Says whether all ranks say so.
            link: As measured.
            device: Where the default group wants its tensors.
            nbytes: Of all gradients.
        """
        self._plan, mode = plan, options.mode
        if not plan.overlapped:
            # Parts by priority bring nothing to a step that waits for all of them; who asks for that step gets them.
            found = StepMode(agree(mode == "ddp" or (mode == "auto" and options.cross_barrier)))
            self._plan = replace(plan, as_ddp=found.ddp_mode)
            return found
        slow = link is not None and is_slow(link, nbytes=nbytes, busy_processor=device.type == "cpu")
        finds_layers = set(plan.compressed.values()) == {AUTO}
        numbers = [MODES.index(mode), slow, self._tunes_at_once(slow=slow), finds_layers]
        message = torch.tensor(numbers, dtype=torch.int64, device=device)
        dist.broadcast(message, src=0)
        mode, (slow, at_once, finds_layers) = MODES[int(message[0])], map(bool, message[1:].tolist())
        tuned = self._begin_tuning() if at_once else None
        self._plan = replace(self._plan, pace=first_pace(mode, slow=slow, tuned=tuned is not None))
        if tuned is not None:
            return tuned
        self._plan = replace(self._plan, as_ddp=mode == "ddp" or (mode == "auto" and not slow))
        if mode == "auto":
            return TriedMode(ModeTrial(overlapped=slow, finds_layers=finds_layers), device, self._mode_found)
        return StepMode(mode == "ddp")

    def _mode_found(self, found: ModeFound) -> StepMode | None:
        """Every rank comes here before the same step."""
        reason, plan = reason_for(found), self._plan
        news = found.changed or (found.compared and not self._finding)
        self._finding = reason if found.compared else ""
        if plan is not None:
            self._plan = replace(plan, as_ddp=found.ddp_mode, pace=reason)
        tuned = self._begin_tuning() if found.changed and not found.ddp_mode else None
        if news:
            stays = plan is not None and plan.as_ddp == found.ddp_mode
            compressed = plan is not None and bool(plan.compressed)
            say_found(found, stays=stays, tuned=tuned is not None, compressed=compressed)
        return tuned


def agreed_plan(plan: OverlapPlan, agree: Callable[[bool], bool]) -> OverlapPlan:
    """``plan``, or one without overlap where another rank cannot: it decides what is sent, so all have to do the same.

    Args:
        plan: This rank's.
        agree: Says whether all ranks say so.
    """
    if agree(plan.overlapped) or not plan.overlapped:
        return plan
    return OverlapPlan(steps="synchronised", reasons=("another rank cannot let its steps overlap",))
