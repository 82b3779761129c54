"""What the plan says: for people, in one line and in a few."""

from __future__ import annotations

from lightning_bytescheduler import OverlapPlan


def test_a_synchronised_plan_says_why() -> None:
    plan = OverlapPlan(steps="synchronised", reasons=("there are 2 optimizers (use one)", "it is manual (do not)"))
    assert not plan.overlapped
    assert plan.summary() == (
        "steps are synchronised, because there are 2 optimizers (use one); it is manual (do not)."
    )
    assert repr(plan) == (
        "OverlapPlan(\n  steps: synchronised\n  because there are 2 optimizers (use one)\n"
        "  because it is manual (do not)\n)"
    )


def test_an_overlapped_plan_says_how() -> None:
    plan = OverlapPlan(
        steps="overlapped",
        gradients="reduce-scatter",
        norm_needed_by=("gradient norm clipping", "fp16 loss scaling"),
        gated_at_start=("a", "b", "c", "d", "e"),
        early_readers={"EMA.on_train_batch_end": 7},
        opened_for={"torch.jit.trace": 2},
    )
    assert plan.overlapped
    assert "reduce-scatter, norm, all-gather for gradient norm clipping and fp16 loss scaling" in plan.summary()
    assert "'a', 'b', 'c' and 2 more updated early" in plan.summary()
    assert repr(plan).splitlines()[1:6] == [
        "  steps: overlapped, except the first",
        "  gradients: reduce-scatter, norm, all-gather (for gradient norm clipping and fp16 loss scaling)",
        "  updated early: 'a', 'b', 'c' and 2 more",
        "  waited for by EMA.on_train_batch_end in 7 steps",
        "  all updated at once for torch.jit.trace, 2 times",
    ]


def test_the_plain_case_is_short() -> None:
    assert OverlapPlan(steps="overlapped").summary() == "updates cross the step boundary."


def test_steps_taken_as_ddps() -> None:
    plan = OverlapPlan(steps="overlapped", as_ddp=True)
    assert plan.summary() == "steps are taken as DDP takes them."
    assert "steps: as DDP takes them, at present" in repr(plan)
