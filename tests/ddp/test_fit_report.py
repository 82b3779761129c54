"""Lines for people: with the figures that a decision was made from, each once, and none where nothing happens."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_bytescheduler import OverlapPlan
from lightning_bytescheduler.ddp.decided_fit import DecidedFit, first_pace
from lightning_bytescheduler.ddp.fit_report import SchedulerStatistics, summary_of
from lightning_bytescheduler.ddp.wire import AgreedSizes
from lightning_bytescheduler.scheduler.options import policy_of
from lightning_bytescheduler.tuning.sizes import LinkEstimate, SchedulerSizes
from tests.ddp.fits import said, say_what_is_found, train_alone
from tests.support.rank_pool import RankPool

NAN = math.nan
AGREED = AgreedSizes(
    sizes=SchedulerSizes(partition_size=1000, credit=4000, bucket_bytes=4000),
    link=LinkEstimate(alpha=2e-4, beta=1e-8),
)


def say_start(
    plan: OverlapPlan, agreed: AgreedSizes, *, world_size: int, nbytes: int, tuned: bool, policy: str = "bytescheduler"
) -> None:
    """Say how the steps of a fit begin that has these sizes and nothing else."""
    fit: Any = SimpleNamespace(
        wire=SimpleNamespace(agreed=agreed, groups=SimpleNamespace(world_size=world_size)),
        _options=SimpleNamespace(
            scheduler=SimpleNamespace(policy=policy_of(policy)), tuning=SimpleNamespace(tunes_now=tuned)
        ),
    )
    DecidedFit.say_start(fit, plan, nbytes)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, "lightning.pytorch.utilities.rank_zero")
    with said() as heard:
        yield heard


def test_how_steps_begin_is_one_line(lines: list[str]) -> None:
    pace = first_pace("auto", slow=False, as_ddp=True)
    say_start(
        OverlapPlan(steps="overlapped", as_ddp=True, pace=pace), AGREED, world_size=2, nbytes=6_320_000, tuned=False
    )
    assert lines == [
        "bytescheduler: 2 ranks, all-reduce at 100 MB/s after 0.20 ms: 63.4 ms for all gradients (6.32 MB). Steps are "
        "taken as DDP takes them, because nothing has been measured yet; overlap is tried if training is seen to wait "
        "for gradients."
    ]
    pace = first_pace("auto", slow=True, as_ddp=False)
    say_start(OverlapPlan(steps="overlapped", pace=pace), AGREED, world_size=2, nbytes=6_320_000, tuned=True)
    assert lines[1].partition(". ")[2] == (
        "Steps overlap, because the link is slow for this model: gradients travel under the backward and the next "
        "forward pass. They are cut into partitions of 1,000 parameters, and 4,000 parameters (the credit) travel at "
        "once. How much travels at once is tuned while training."
    )
    unmeasured = AgreedSizes(sizes=AGREED.sizes, link=None)
    pace = first_pace("ddp", slow=False, as_ddp=True)
    say_start(OverlapPlan(steps="overlapped", as_ddp=True, pace=pace), unmeasured, world_size=4, nbytes=1, tuned=False)
    assert lines[2] == "bytescheduler: 4 ranks. Steps are taken as DDP takes them, because mode='ddp'."
    plan = OverlapPlan(steps="synchronised", reasons=("there is no optimizer (make one)",))
    say_start(plan, AGREED, world_size=4, nbytes=1, tuned=False)
    assert lines[3:] == ["bytescheduler: steps are synchronised, because there is no optimizer (make one)."]


def test_the_end_of_a_fit_is_a_line_where_something_was_scheduled() -> None:
    counted = SchedulerStatistics(steps=500, overlapped_steps=480, exposed_s=4.0)
    line = "500 steps, 480 of them overlapped; training waited 8.0 ms a step for gradients"
    assert summary_of(counted, "") == f"{line}."
    assert summary_of(counted, "overlapped steps are fastest") == f"{line}; overlapped steps are fastest."
    assert summary_of(SchedulerStatistics(steps=500), "synchronised steps are fastest") is None
    assert summary_of(SchedulerStatistics(steps=500, overlapped_steps=10), "a trial") is None, "that was said already"


def test_compressed_steps_are_not_called_those_of_ddp() -> None:
    plan = OverlapPlan(steps="overlapped", as_ddp=True, compressed={"weight": "int8"})
    for line in (plan.summary(), repr(plan)):
        assert "synchronised" in line
        assert "DDP" not in line


@pytest.mark.parametrize(
    ("pace", "found"),
    [
        (
            {"ddp_ms": 40.0, "overlapped_ms": 30.0, "hideable_ms": 1.0},
            "stay synchronised: 1.0 ms of a step's 40.0 ms could be hidden: too little",
        ),
        (
            {"ddp_ms": 40.0, "overlapped_ms": 30.0, "hideable_ms": 4.0},
            "stay synchronised: 4.0 ms of a step's 40.0 ms could be hidden: overlap is tried soon",
        ),
        (
            {"ddp_ms": 40.0, "overlapped_ms": 30.0, "hideable_ms": math.inf},
            "are from here on overlapped: overlapped steps with credit 800, partition 400 are fastest (30.0 ms against "
            "40.0 ms synchronised), after 2 trials",
        ),
        (
            {"ddp_ms": 40.0, "overlapped_ms": 50.0, "hideable_ms": 20.0},
            "are from here on synchronised: synchronised steps are fastest (40.0 ms against 50.0 ms overlapped), after "
            "2 trials",
        ),
        (
            {"ddp_ms": 40.0, "overlapped_ms": 39.9, "hideable_ms": 20.0},
            "are from here on synchronised: overlapped steps are hardly faster (39.9 ms against 40.0 ms synchronised), "
            "after 2 trials",
        ),
    ],
)
def test_a_decision_is_told_once_with_its_figures(two_ranks: RankPool, pace: dict[str, float], found: str) -> None:
    (lines, last), (others, _) = two_ranks.run(say_what_is_found, steps=30, **pace)
    assert others == []
    assert "2 ranks" in lines[0]
    assert lines[1] == f"bytescheduler: steps {found}."
    assert last == found.partition(": ")[2], "the plan has the same words"
    (end,) = lines[2:] or [""]
    assert end == "" or end.endswith(f"; {last}.")


def test_one_rank_is_told_that_there_is_nothing_to_schedule() -> None:
    with RankPool(1) as alone:
        ((lines, plan),) = alone.run(train_alone)
    assert lines == ["bytescheduler: 1 rank: nothing to schedule."]
    assert plan == "OverlapPlan(\n  1 rank: nothing to schedule\n)"


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("bytescheduler", "cut into partitions of 1,000 parameters, and 4,000 parameters (the credit) travel at once"),
        ("fifo", "Buckets travel whole, as they come (policy='fifo')"),
        ("p3", "Slices of 1,000 parameters travel one at a time (policy='p3')"),
    ],
)
def test_a_policy_is_said_in_words(lines: list[str], policy: str, words: str) -> None:
    overlapped = OverlapPlan(steps="overlapped", gradients="all-reduce")
    say_start(overlapped, AGREED, world_size=2, nbytes=1, tuned=False, policy=policy)
    assert words in lines[-1]
