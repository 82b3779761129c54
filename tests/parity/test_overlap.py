"""The overlap is real: what a layer does not need yet may still be on its way while the layer runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from lightning.pytorch import LightningModule
from torch.optim import Adam

from lightning_bytescheduler.ddp.fit import Fit
from lightning_bytescheduler.scheduler.task import SubCommTask
from tests.parity.checks import DDP, assert_overlapped, assert_same, train_on
from tests.support.compare import bit_differences
from tests.support.fit import SIZES as SMALL
from tests.support.fit import Recipe, Run
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

STEPS = 12
# Every parameter is a bucket of its own, and the window is wide enough for all that is withheld.
SIZES = {"bucket_cap_mb": 1e-6, "partition_size": 400, "credit": 100_000}


class ReportsTheMiddle(Tower):
    """Says when its forward pass gets to the middle."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.layers[2].register_forward_pre_hook(lambda *_: self.in_the_middle())

    def in_the_middle(self) -> None:
        """Replaced by what withholds gradients."""


@contextmanager
def withheld_until_the_middle(
    module: LightningModule, *, steps: int = STEPS, patience: float = 30.0, barrier: bool = False
) -> Iterator[None]:
    """Gradients of the second half of the layers arrive when the next forward pass has passed the first half.

    A barrier at the start of the forward pass, or a gate that waits for more than its own bucket, would wait for ever;
    after ``patience`` seconds they arrive all the same, and that is noted. ``barrier`` puts up such a barrier.
    """
    assert isinstance(module, ReportsTheMiddle)
    notify_finish = SubCommTask.notify_finish
    second_half = 6  # position in the forward pass: first, layers 0 and 1 have two parameters each
    lock = threading.Lock()
    withheld: list[SubCommTask] = []
    timers: list[threading.Timer] = []
    passes = 0
    released_step = 1  # the first is synchronised

    def release(step: int) -> None:
        nonlocal released_step
        with lock:
            released_step = max(released_step, step)
            arrived = [sub for sub in withheld if sub.parent.key.step <= step]
            for sub in arrived:
                withheld.remove(sub)
        for sub in arrived:
            notify_finish(sub)

    def in_the_middle() -> None:
        nonlocal passes
        release(passes)  # this pass comes before the step of the same number
        passes += 1

    def give_up(step: int) -> None:
        with lock:
            in_time = released_step >= step
        if not in_time:
            module.notes.append(f"step {step} was waited for before the middle of the next forward pass")
            release(step)

    def notify_or_withhold(sub: SubCommTask) -> None:
        step = sub.parent.key.step
        with lock:
            hold = sub.priority >= second_half and step > released_step and step < steps
            if hold:
                withheld.append(sub)
        if not hold:
            notify_finish(sub)
        elif sub.index == 0:
            timers.append(threading.Timer(patience, give_up, [step]))
            timers[-1].daemon = True
            timers[-1].start()

    module.in_the_middle = in_the_middle  # type: ignore[method-assign]
    begin_forward = Fit.begin_forward

    def wait_for_all(fit: Fit, *batch: Any) -> None:
        fit.flush()
        begin_forward(fit, *batch)

    with (
        patch.object(SubCommTask, "notify_finish", notify_or_withhold),
        patch.object(Fit, "begin_forward", wait_for_all if barrier else begin_forward),
    ):
        yield
    for timer in timers:
        timer.cancel()
    assert passes == steps


def test_each_layer_waits_for_its_own_gradients_only(two_ranks: RankPool) -> None:
    recipe = Recipe(model=ReportsTheMiddle, steps=STEPS)
    run = Run(options=SIZES, network="plain", sabotage=withheld_until_the_middle)
    ddp, ours = train_on(two_ranks, recipe, DDP, run)
    assert_same(ddp, ours)
    assert_overlapped(ours)


def test_a_barrier_before_the_forward_pass_would_be_noticed(two_ranks: RankPool) -> None:
    barrier = partial(withheld_until_the_middle, steps=4, patience=0.3, barrier=True)
    recipe = Recipe(model=ReportsTheMiddle, steps=4)
    (ours,) = train_on(two_ranks, recipe, Run(options=SIZES, network="plain", sabotage=barrier))
    waited = [f"step {step} was waited for before the middle of the next forward pass" for step in (2, 3)]
    assert ours[0].notes == ours[1].notes == waited


@pytest.mark.parametrize("mode", ["overlapped", "ddp"])
def test_gradients_that_go_straight_are_ddps(two_ranks: RankPool, mode: str) -> None:
    """As over links with long round trips."""
    recipe = Recipe(model=partial(Tower, optimizer=partial(Adam, lr=0.005)), steps=24)
    ddp, ours = train_on(two_ranks, recipe, DDP, Run(options={**SMALL, "mode": mode}, far=True))
    assert_same(ddp, ours)
    if mode == "overlapped":
        assert_overlapped(ours)


def test_ranks_agree_on_gradients_that_go_straight(four_ranks: RankPool) -> None:
    recipe = Recipe(model=partial(Tower, optimizer=partial(Adam, lr=0.005)), steps=12)
    around, straight = train_on(four_ranks, recipe, Run(), Run(network="held", far=True))
    assert_overlapped(straight)
    for rank in range(1, 4):
        assert not bit_differences(straight[0].weights, straight[rank].weights, "weights")
    for name, value in around[0].weights.items():
        other = straight[0].weights[name]
        assert (value - other).norm() <= 1e-3 * value.norm(), "sums in another order, and nothing else"


@contextmanager
def synchronous_steps(module: LightningModule) -> Iterator[None]:
    """Claim to defer a step, and wait for it all the same."""
    step = Fit.take_step

    def step_and_wait(fit: Fit, *args: Any) -> Any:
        result = step(fit, *args)
        fit.flush()
        return result

    with patch.object(Fit, "take_step", step_and_wait):
        yield


def test_a_synchronous_step_would_be_noticed(two_ranks: RankPool) -> None:
    (ours,) = train_on(
        two_ranks, Recipe(model=Tower, steps=24), Run(network="held", patience=0.2, sabotage=synchronous_steps)
    )
    for outcome in ours:
        assert outcome.statistics is not None
        assert outcome.statistics.deferred_share > 0.95, "this is what it claims"
        assert outcome.forced > 0, "and this is what the other tests would fail on"
