"""Rank 0's decisions over real gloo groups, one thread per rank, each with a store connection of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives import launch_order
from lightning_bytescheduler.collectives.launch_order import DecidingOrder, FollowingOrder, order_of
from lightning_bytescheduler.collectives.routing_group import ForeignCollectives
from lightning_bytescheduler.exceptions import LaunchOrderError
from lightning_bytescheduler.scheduler.core import ByteCore
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask, TaskKey
from tests.support.waiting import WAIT, until


@pytest.fixture(params=[False, True], ids=["near", "far"])
def far(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether messages are expected ahead; for the ranks of each test."""
    found: bool = request.param
    monkeypatch.setattr(Rank, "far", found)
    return found


def make_groups(world_size: int, timeout: float = WAIT) -> list[dist.ProcessGroup]:
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def make(rank: int) -> dist.ProcessGroup:
        store = dist.TCPStore("127.0.0.1", master.port, is_master=False, wait_for_workers=False)
        group: Any = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=timeout))
        return group

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(make, range(world_size)))


class Rank:
    """A core whose sub-tasks finish as soon as they are launched."""

    far = False

    def __init__(self, rank: int, group: dist.ProcessGroup, *, credit: int = 10_000) -> None:
        self.launched: list[str] = []
        self.errors: list[BaseException] = []
        self.launch: Callable[[SubCommTask], None] = self._finish
        self.order = order_of(group, self.failed, direct=self.far, lanes=self.far)
        self.core = ByteCore(partition_size=100, credit=credit, order=self.order, name=f"rank {rank}")
        self.order.start(self.core.update_order)

    def failed(self, error: BaseException) -> BaseException:
        self.errors.append(error)
        self.core.abort(error)
        return error

    def task(self, index: int, size: int, *, priority: int = 0, step: int = 1) -> CommTask:
        task = CommTask(f"{step}.{index}", size, launch=self.launch, priority=priority, key=TaskKey(step, bucket=index))
        self.core.enqueue(task)
        return task

    def _finish(self, sub_task: SubCommTask) -> None:
        self.launched.append(sub_task.name)
        sub_task.notify_finish()


@contextmanager
def ranks(world_size: int, *, credit: int = 10_000) -> Iterator[list[Rank]]:
    made = [Rank(n, group, credit=credit) for n, group in enumerate(make_groups(world_size))]
    try:
        yield made
    finally:
        for rank in made:
            rank.core.shutdown(timeout=WAIT, drain=False)
        with ThreadPoolExecutor(world_size) as pool:
            assert all(pool.map(lambda rank: rank.order.end(WAIT), made))


@pytest.mark.usefixtures("far")
def test_followers_launch_what_rank_zero_launches_in_its_order() -> None:
    with ranks(3, credit=100) as made:
        tasks: list[list[CommTask]] = []
        for number, rank in enumerate(made):
            mine = [rank.task(index, 250, priority=-index) for index in range(20)]
            tasks.append(mine)
            # Each rank's data comes in another order.
            for position in range(20):
                mine[position * (7, 11, 13)[number] % 20].notify_ready()
        for mine in tasks:
            for task in mine:
                task.wait(WAIT)
        assert made[0].launched == made[1].launched == made[2].launched
        assert len(made[0].launched) == 60


@pytest.mark.usefixtures("far")
def test_more_decisions_than_one_message_holds() -> None:
    with ranks(2) as made:
        tasks = [rank.task(0, 9_900) for rank in made]
        for task in tasks:
            task.notify_ready()
        for task in tasks:
            task.wait(WAIT)
        assert made[1].launched == [f"1.0[{index}]" for index in range(99)]


@pytest.mark.usefixtures("far")
def test_a_follower_waits_for_its_own_data() -> None:
    with ranks(2) as made:
        leading, following = made[0].task(0, 100), made[1].task(0, 100)
        leading.notify_ready()
        leading.wait(WAIT)
        order = made[1].order
        assert isinstance(order, FollowingOrder)
        until(lambda: bool(order._decisions))
        made[1].core.launch_allowed()
        assert not made[1].launched
        following.notify_ready()
        following.wait(WAIT)


def test_the_leader_may_change_its_partition_size_at_any_time() -> None:
    with ranks(2) as made:
        for step, size in enumerate((100, 30, 70), start=1):
            made[0].core.partition_size = size
            tasks = [rank.task(0, 210, step=step) for rank in made]
            for task in tasks:
                task.notify_ready()
            for task in tasks:
                task.wait(WAIT)
        assert made[0].launched == made[1].launched
        assert [name.split("[")[0] for name in made[1].launched] == ["1.0"] * 3 + ["2.0"] * 7 + ["3.0"] * 3


def test_another_model_is_an_error_that_says_so() -> None:
    with ranks(2) as made:
        leading, following = made[0].task(0, 300), made[1].task(0, 290)  # the same number of parts
        leading.notify_ready()
        following.notify_ready()
        with pytest.raises(LaunchOrderError, match="Every rank must build the same model"):
            following.wait(WAIT)


def test_collectives_of_others_have_the_same_place_on_all_ranks() -> None:
    with ranks(3, credit=100) as made:
        reports: list[int] = []
        foreign = [ForeignCollectives(rank.core, reports.append) for rank in made]
        tasks: list[CommTask] = []
        for rank, others in zip(made, foreign, strict=True):
            mine = [rank.task(index, 250, priority=-index) for index in range(8)]
            tasks += mine
            for position in range(8):
                mine[position * (3, 5, 7)[len(tasks) // 8 - 1] % 8].notify_ready()
                if position in (3, 7):  # before the gradients after it, or not: these have been handed over
                    tasks.append(others.submit("broadcast", partial(rank.launched.append, "foreign")))
        assert sorted(reports) == [1, 1, 1, 2, 2, 2]
        leading = made[0].order
        assert isinstance(leading, DecidingOrder)
        made[0].core.update_order(lambda: leading.submitted_everywhere(2))
        for task in tasks:
            task.wait(WAIT)
        assert made[0].launched == made[1].launched == made[2].launched
        assert made[0].launched.count("foreign") == 2


def test_different_collectives_are_an_error_that_says_so() -> None:
    with ranks(2) as made:
        kinds = ("broadcast", "allreduce")
        tasks = [
            ForeignCollectives(rank.core, lambda count: None).submit(kind, lambda: None)
            for rank, kind in zip(made, kinds, strict=True)
        ]
        leading = made[0].order
        assert isinstance(leading, DecidingOrder)
        made[0].core.update_order(lambda: leading.submitted_everywhere(1))
        with pytest.raises(LaunchOrderError, match="As collective 1 of DDP's process group, rank 0 launches another"):
            tasks[1].wait(WAIT)


def test_followers_send_on_the_lane_that_rank_zero_chose(far: bool) -> None:
    with ranks(2) as made:
        leader, follower = made
        held: list[SubCommTask] = []
        leader.launch = held.append
        mine = [leader.task(0, 200, priority=9), leader.task(1, 300, priority=1)]
        theirs = [follower.task(0, 200), follower.task(1, 300)]
        for task in theirs:
            task.notify_ready()
        for count, task in zip((2, 5), mine, strict=True):
            task.notify_ready()
            until(lambda count=count: len(held) == count)  # type: ignore[misc]
        for task in theirs:
            task.wait(WAIT)
        chosen = [sub.lane for task in mine for sub in task.sub_tasks]
        assert [sub.lane for task in theirs for sub in task.sub_tasks] == chosen == [0, 0, *([int(far)] * 3)]
        for sub in held:
            sub.notify_finish()


def test_messages_are_not_kept_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_order, "_UNTOLD", 5)
    monkeypatch.setattr(Rank, "far", True)
    with ranks(3, credit=100) as made:
        tasks = [[rank.task(index, 100) for index in range(60)] for rank in made]
        for mine in tasks:
            for task in mine:
                task.notify_ready()
        for mine in tasks:
            for task in mine:
                task.wait(WAIT)
        order = made[0].order
        assert isinstance(order, DecidingOrder)
        assert len(order._sent) <= 3 * 5


def test_a_message_is_sent_though_the_one_before_has_not_been_waited_for() -> None:
    """On links with long round trips: a receive that was posted in advance needs no word of the follower."""
    leader, follower = make_groups(2)
    deciding = DecidingOrder(leader, direct=True)
    expected = FollowingOrder(follower, pytest.fail, direct=True)
    assert expected._direct
    rooms = [torch.zeros(100, dtype=torch.int64) for _ in range(launch_order._EXPECTED)]
    works = [follower.recv([room], 0, launch_order._NUMBER) for room in rooms]
    assert deciding.end(WAIT)
    for work in works:
        work.wait()
    assert all(int(room[0]) == launch_order._CLOSE for room in rooms)


def test_messages_are_as_long_as_what_they_say(far: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[int] = []
    frombuffer = torch.frombuffer

    def noted(numbers: Any, **kind: Any) -> torch.Tensor:
        said.append(len(numbers) * numbers.itemsize)
        return frombuffer(numbers, **kind)

    monkeypatch.setattr(torch, "frombuffer", noted)
    with ranks(2, credit=100) as made:
        tasks = [rank.task(0, 500) for rank in made]
        for task in tasks:
            task.notify_ready()
        for task in tasks:
            task.wait(WAIT)
        assert said == [64 if far else 232] * 5, "one part at a time, in bytes"


def test_a_follower_can_leave_before_rank_zero_does(far: bool) -> None:
    leader, follower = make_groups(2, timeout=10 * WAIT)
    order = FollowingOrder(follower, pytest.fail, direct=far)
    order.start(lambda update: update())
    assert not order.end(0.0)
    assert order._thread is not None
    assert not order._thread.is_alive()
    del leader


def test_a_follower_that_was_never_started_stops() -> None:
    leader, follower = make_groups(2)
    assert not FollowingOrder(follower, pytest.fail).end(WAIT)
    del leader


@pytest.mark.usefixtures("far")
def test_the_followers_learn_that_rank_zero_is_gone() -> None:
    groups = make_groups(2)
    follower = Rank(1, groups[1])
    groups.clear()  # closes rank 0's connections, as the end of its process does
    until(lambda: bool(follower.errors))
    assert "Connection closed" in str(follower.errors[0]) or "reset by peer" in str(follower.errors[0])
    follower.core.shutdown(timeout=WAIT, drain=False)
