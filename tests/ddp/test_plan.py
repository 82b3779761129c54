"""What the plan says to people, in one line and in a few."""

from __future__ import annotations

from lightning.pytorch.core.optimizer import _MockOptimizer

from lightning_bytescheduler import OverlapPlan
from lightning_bytescheduler.ddp.decided_fit import optimizer_reasons
from lightning_bytescheduler.ddp.fit_report import ONE_RANK


def test_a_synchronised_plan_says_why() -> None:
    plan = OverlapPlan(steps="synchronised", reasons=("there are 2 optimizers (use one)", "it is manual (do not)"))
    assert not plan.overlapped
    assert plan.summary() == (
        "steps are synchronised, because there are 2 optimizers (use one); because it is manual (do not)."
    )
    assert repr(plan) == (
        "OverlapPlan(\n  steps are synchronised, because there are 2 optimizers (use one)\n"
        "  because it is manual (do not)\n)"
    )


def test_an_overlapped_plan_says_how() -> None:
    plan = OverlapPlan(
        steps="overlapped",
        gradients="reduce-scatter",
        norm_needed_by=("gradient norm clipping", "fp16 loss scaling"),
        gated_at_start=("a", "b", "c", "d", "e"),
        waits={"on_train_batch_end looks at weights or gradients between steps": 7},
        opened_for={"torch.jit.trace": 2},
    )
    assert plan.overlapped
    assert "reduce-scatter, norm, all-gather for gradient norm clipping and fp16 loss scaling" in plan.summary()
    assert "'a', 'b', 'c' and 2 more updated early" in plan.summary()
    assert repr(plan).splitlines()[1:6] == [
        "  steps overlap: gradients travel under the backward and the next forward pass",
        "  reduce-scatter, norm, all-gather for gradient norm clipping and fp16 loss scaling",
        "  'a', 'b', 'c' and 2 more updated early, as reads of them cannot be seen",
        "  7 steps waited for all gradients, because on_train_batch_end looks at weights or gradients between steps",
        "  all updated at once for torch.jit.trace, 2 times",
    ]


def test_the_plain_case_is_short() -> None:
    plan = OverlapPlan(steps="overlapped", pace="mode='overlapped'")
    assert plan.summary() == (
        "steps overlap, because mode='overlapped': gradients travel under the backward and the next forward pass."
    )


def test_on_one_rank_there_is_nothing_to_schedule() -> None:
    plan = OverlapPlan(steps="synchronised", as_ddp=True, reasons=(ONE_RANK,))
    assert plan.summary() == "1 rank: nothing to schedule."
    assert repr(plan) == "OverlapPlan(\n  1 rank: nothing to schedule\n)"


def test_steps_that_cannot_overlap_are_ddps_for_good() -> None:
    plan = OverlapPlan(steps="synchronised", as_ddp=True, reasons=("it is manual (do not)",))
    assert repr(plan) == (
        "OverlapPlan(\n  steps are synchronised, and taken as DDP takes them, because it is manual (do not)\n)"
    )


def test_lightnings_stand_in_is_no_optimizer() -> None:
    assert optimizer_reasons([_MockOptimizer()]) == [
        "there is no optimizer (configure_optimizers that returns one keeps the overlap)"
    ]


def test_steps_taken_as_ddps() -> None:
    plan = OverlapPlan(steps="overlapped", as_ddp=True)
    assert plan.summary() == "steps are taken as DDP takes them."
    assert repr(plan) == "OverlapPlan(\n  steps are taken as DDP takes them\n)"


def test_what_has_come_to_pass_is_told() -> None:
    plan = OverlapPlan(
        steps="overlapped",
        held_elsewhere=("weight",),
        deferred_share=0.75,
        waits={"SGD has step hooks": 3},
    )
    assert "'weight' updated in the step, as other code can read the memory" in plan.summary()
    assert "p.data = p.data.clone()" in plan.summary()
    assert "so far 75% of the updates crossed the step boundary" in repr(plan)
    assert "3 steps waited for all gradients, because SGD has step hooks" in repr(plan)


def test_a_plan_says_what_was_measured() -> None:
    plan = OverlapPlan(
        steps="overlapped",
        as_ddp=True,
        pace="synchronised steps are fastest so far (34.9 against 37.2 ms)",
        deferred_share=0.0,
    )
    assert plan.summary() == (
        "steps are taken as DDP takes them, because synchronised steps are fastest so far (34.9 against 37.2 ms)."
    )
    assert repr(plan) == (
        "OverlapPlan(\n  steps are taken as DDP takes them, because synchronised steps are fastest so far "
        "(34.9 against 37.2 ms)\n)"
    ), "and nothing of how gradients would travel"
    plan = OverlapPlan(steps="synchronised", as_ddp=True, reasons=("it is manual (do not)",))
    assert plan.summary() == "steps are synchronised, and taken as DDP takes them, because it is manual (do not)."
