"""What a policy wants of each bucket, made from what is observed while training."""

from __future__ import annotations

import torch

from lightning_bytescheduler.ddp.arranged_buckets import BucketArranger
from lightning_bytescheduler.ddp.reduction import GradientBucket
from lightning_bytescheduler.scheduler.policies import LinkCost, policy_of

MILLION = 1_000_000
LINK = LinkCost(start_up=0.0, per_parameter=1.5e-6)


class Steps:
    """Steps of four buckets, a second apart, of which the last is used first; a second of forward pass for each.

    Args:
        plans: See :class:`BucketArranger`.
        policy: Its name.
        touched: Indices of the buckets in the order in which the forward pass uses them.
    """

    def __init__(self, policy: str, *, plans: bool = True, touched: tuple[int, ...] = (3, 2, 1, 0)) -> None:
        self.now = 0.0
        self.touched = touched
        self.arranger = BucketArranger(policy_of(policy), LINK, plans=plans, clock=lambda: self.now)

    def take(self, kind: str = "overlapped", sizes: tuple[int, ...] = (MILLION,) * 4) -> list[GradientBucket]:
        arranger, buckets = self.arranger, []
        arranger.begin_step(kind)
        for index, size in enumerate(sizes):
            bucket = GradientBucket(index, [], torch.empty(size, device="meta"), 3 - index)
            arranger.arrange(bucket, last=index == len(sizes) - 1)
            buckets.append(bucket)
            self.now += 1
        for index in self.touched:
            arranger.waiting()
            self.now += 0.7
            arranger.waiting_ends()
            arranger.needed(index)
            self.now += 1
        return buckets


def test_unequal_blocks_come_from_the_second_step_on() -> None:
    steps = Steps("us-byte")
    assert [bucket.cut for bucket in steps.take()] == [None] * 4
    second = steps.take()
    assert [bucket.cut for bucket in second] == [(667_648, 332_352), *[(666_624, 333_376)] * 2, (MILLION,)]
    assert [bucket.priority for bucket in second] == [3, 2, 1, 0]


def test_the_order_of_use_is_observed_without_what_was_waited() -> None:
    steps = Steps("tictac", touched=(3, 1, 2, 0))
    assert [bucket.priority for bucket in steps.take()] == [3, 2, 1, 0]
    assert [bucket.priority for bucket in steps.take()] == [3, 1, 2, 0]


def test_other_steps_and_other_buckets_are_observed_anew() -> None:
    steps = Steps("us-byte")
    steps.take()
    assert steps.take()[0].cut is not None
    assert steps.take("synchronised")[0].cut is None
    assert steps.take()[0].cut is None
    assert steps.take()[0].cut is not None
    assert steps.take(sizes=(2 * MILLION, *(MILLION,) * 3))[0].cut is None  # frozen layers let another bucket grow


def test_a_rank_that_follows_observes_nothing() -> None:
    steps = Steps("us-byte", plans=False)
    for _ in range(3):
        assert [bucket.cut for bucket in steps.take()] == [None] * 4


def test_policies_that_do_not_observe_are_asked_bucket_by_bucket() -> None:
    assert [bucket.priority for bucket in Steps("fifo").take()] == [0, 1, 2, 3]


def test_complex_gradients_keep_equal_parts() -> None:
    steps = Steps("us-byte")
    steps.take()
    steps.arranger.begin_step("overlapped")
    bucket = GradientBucket(0, [], torch.empty(MILLION, dtype=torch.complex64, device="meta"), 3)
    steps.arranger.arrange(bucket, last=False)
    assert bucket.cut is None
