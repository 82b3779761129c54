"""What is overlapped in a fit, what is not, and why: ``strategy.plan``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["OverlapPlan"]

_NAMES_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapPlan:
    """Made at the start of a fit from the model, its optimizers, precision and clipping; the same on every rank.

    The first step of a fit is synchronised in any case: DDP has not settled its buckets yet.

    Attributes:
        steps: ``"overlapped"`` when updates cross the step boundary, ``"synchronised"`` when each step waits for all
            gradients.
        reasons: Why steps are synchronised, each with how to avoid it; empty when they overlap.
        gradients: ``"all-reduce"``, or ``"reduce-scatter"`` when every update needs to know all gradients' norm: each
            rank reduces a shard, norms are exchanged, and gradients are gathered under the next forward pass.
        norm_needed_by: What needs it, in words.
        gated_at_start: Names of parameters whose updates are applied before ``training_step`` begins or in the step
            itself, as it cannot be seen when they are read.
        as_ddp: Whether steps are taken as DDP takes them at present, because of ``mode="ddp"`` or, where they could
            overlap, because a trial found that faster.
        early_readers: Who looked at weights or gradients between two steps so far on this rank, for example
            ``MyCallback.on_train_batch_end``, and in how many steps. They saw what DDP would show; these steps waited.
        read_unseen: Names of parameters that code which no gate sees began to read after the first step, as found on
            this rank, and the step in which it was found. In that step they had, or may have had, the weights of the
            step before; from the next one on they are waited for.
        opened_for: What needed all updates at once so far on this rank, as it reads weights unseen or must not meet
            gates, for example ``torch.jit.trace`` or ``compiled MyModule.attend``, and how often.
    """

    steps: Literal["overlapped", "synchronised"]
    reasons: tuple[str, ...] = ()
    gradients: Literal["all-reduce", "reduce-scatter"] = "all-reduce"
    norm_needed_by: tuple[str, ...] = ()
    gated_at_start: tuple[str, ...] = ()
    as_ddp: bool = False
    early_readers: Mapping[str, int] = field(default_factory=dict)
    read_unseen: Mapping[str, int] = field(default_factory=dict)
    opened_for: Mapping[str, int] = field(default_factory=dict)

    @property
    def overlapped(self) -> bool:
        """Whether updates cross the step boundary."""
        return self.steps == "overlapped"

    def summary(self) -> str:
        """One line for the log."""
        if not self.overlapped and not self.as_ddp:
            return f"steps are synchronised, because {'; '.join(self.reasons)}."
        if self.as_ddp:
            return "steps are taken as DDP takes them."
        line = "updates cross the step boundary"
        if self.norm_needed_by:
            line += f"; reduce-scatter, norm, all-gather for {' and '.join(self.norm_needed_by)}"
        if self.gated_at_start:
            line += f"; {self._gated()} updated early, as reads of them cannot be seen (scripted or aliased)"
        return f"{line}."

    def _gated(self) -> str:
        shown = ", ".join(map(repr, self.gated_at_start[:_NAMES_SHOWN]))
        more = len(self.gated_at_start) - _NAMES_SHOWN
        return f"{shown} and {more} more" if more > 0 else shown

    def __repr__(self) -> str:
        how = ", except the first" if self.overlapped else ""
        lines = [f"steps: {self.steps}{how}" if not self.as_ddp else "steps: as DDP takes them, at present"]
        lines += [f"because {reason}" for reason in self.reasons]
        if self.overlapped:
            lines.append(
                "gradients: all-reduce"
                if self.gradients == "all-reduce"
                else f"gradients: reduce-scatter, norm, all-gather (for {' and '.join(self.norm_needed_by)})"
            )
        if self.gated_at_start:
            lines.append(f"updated early: {self._gated()}")
        lines += [f"waited for by {reader} in {steps} steps" for reader, steps in self.early_readers.items()]
        lines += [f"read unseen, and late, in step {step}: {name!r}" for name, step in self.read_unseen.items()]
        lines += [f"all updated at once for {what}, {times} times" for what, times in self.opened_for.items()]
        body = "\n".join(f"  {line}" for line in lines)
        return f"OverlapPlan(\n{body}\n)"
