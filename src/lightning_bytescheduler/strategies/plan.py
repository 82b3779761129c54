"""What is overlapped in a fit, what is not, and why: ``strategy.plan``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["OverlapPlan"]

_NAMES_SHOWN = 3
_HELD = (
    "updated in the step, as somebody else can read the memory: an alias, NumPy, another process, a mapped file "
    "(p.data = p.data.clone() before the fit, and keeping no alias, keeps the overlap)"
)


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
        as_ddp: Whether steps are taken as DDP takes them at present: because of ``mode="ddp"``, because they cannot
            overlap, or because little could be hidden or a trial found that faster.
        pace: Why they are taken as DDP's, or overlap, as far as that was measured; in a few words.
        early_readers: Who looked at weights or gradients between two steps so far on this rank, for example
            ``MyCallback.on_train_batch_end``, and in how many steps. They saw what DDP would show; these steps waited.
        read_unseen: Names of parameters that code which no gate sees began to read after the first step, as found on
            this rank, and the step in which it was found. In that step they had, or may have had, the weights of the
            step before; from the next one on they are waited for.
        opened_for: What needed all updates at once so far on this rank, as it reads weights unseen or must not meet
            gates, for example ``torch.jit.trace`` or ``compiled MyModule.attend``, and how often.
        whole_steps: Why steps that were to overlap were not deferred, and how many, so far on this rank: what was not
            there when the fit began, such as another optimizer, or somebody who keeps its state.
        held_elsewhere: Names of parameters whose memory somebody else can read, now or at the last step: an alias that
            is kept, a NumPy array, another process. They are updated in the step itself. Memory of their own
            (``p.data = p.data.clone()`` before the fit) keeps the overlap.
        deferred_share: Of the updates so far on this rank, how many crossed the step boundary (0 to 1); ``None``
            before the first.
    """

    steps: Literal["overlapped", "synchronised"]
    reasons: tuple[str, ...] = ()
    gradients: Literal["all-reduce", "reduce-scatter"] = "all-reduce"
    norm_needed_by: tuple[str, ...] = ()
    gated_at_start: tuple[str, ...] = ()
    as_ddp: bool = False
    pace: str = ""
    early_readers: Mapping[str, int] = field(default_factory=dict)
    read_unseen: Mapping[str, int] = field(default_factory=dict)
    opened_for: Mapping[str, int] = field(default_factory=dict)
    whole_steps: Mapping[str, int] = field(default_factory=dict)
    held_elsewhere: tuple[str, ...] = ()
    deferred_share: float | None = None

    @property
    def overlapped(self) -> bool:
        """Whether updates cross the step boundary."""
        return self.steps == "overlapped"

    def summary(self) -> str:
        """One line for the log."""
        if not self.overlapped:
            how = ", and taken as DDP takes them" if self.as_ddp else ""
            return f"steps are synchronised{how}, because {'; '.join(self.reasons)}."
        if self.as_ddp:
            return f"steps as ddp's: {self.pace}." if self.pace else "steps are taken as DDP takes them."
        line = "updates cross the step boundary"
        if self.norm_needed_by:
            line += f"; reduce-scatter, norm, all-gather for {' and '.join(self.norm_needed_by)}"
        if self.gated_at_start:
            line += f"; {_some_of(self.gated_at_start)} updated early, as reads of them cannot be seen"
        if self.held_elsewhere:
            line += f"; {_some_of(self.held_elsewhere)} {_HELD}"
        return f"{line}."

    def __repr__(self) -> str:
        how = ", except the first" if self.overlapped else ""
        lines = [f"steps: {self.steps}{how}" if not self.as_ddp else "steps: as DDP takes them, at present"]
        lines += [f"because {reason}" for reason in self.reasons]
        if self.pace:
            lines.append(f"because {self.pace}")
        if self.overlapped:
            lines.append(
                "gradients: all-reduce"
                if self.gradients == "all-reduce"
                else f"gradients: reduce-scatter, norm, all-gather (for {' and '.join(self.norm_needed_by)})"
            )
        if self.gated_at_start:
            lines.append(f"updated early: {_some_of(self.gated_at_start)}")
        if self.held_elsewhere:
            lines.append(f"{_some_of(self.held_elsewhere)} {_HELD}")
        if self.overlapped and self.deferred_share is not None:
            lines.append(f"so far {self.deferred_share:.0%} of the updates crossed the step boundary")
        lines += [f"{steps} steps were taken whole, because {why}" for why, steps in self.whole_steps.items()]
        lines += [f"waited for by {reader} in {steps} steps" for reader, steps in self.early_readers.items()]
        lines += [f"read unseen, and late, in step {step}: {name!r}" for name, step in self.read_unseen.items()]
        lines += [f"all updated at once for {what}, {times} times" for what, times in self.opened_for.items()]
        body = "\n".join(f"  {line}" for line in lines)
        return f"OverlapPlan(\n{body}\n)"


def _some_of(names: tuple[str, ...]) -> str:
    shown = ", ".join(map(repr, names[:_NAMES_SHOWN]))
    more = len(names) - _NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
