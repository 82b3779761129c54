from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_bytescheduler.scheduler import (
    AnnouncedOrder,
    ByteCore,
    Decision,
    SubCommTask,
    TaskKey,
    TaskState,
)
from lightning_bytescheduler.scheduler.order import LaneChoice
from tests.scheduler.harness import ManualTransport, enqueue, running_core
from tests.support.waiting import until


class Network:
    """Sub-tasks that are under way until a test ends them."""

    def __init__(self, core: ByteCore) -> None:
        self._core = core
        self.choice = LaneChoice()

    def lanes(self, *priorities: int, size: int = 10) -> list[int]:
        """The lanes of sub-tasks that are launched next."""
        return [self.choice.choose(self.part(priority, size)) for priority in priorities]

    def part(self, priority: int, size: int = 10) -> SubCommTask:
        return enqueue(self._core, ManualTransport(), "t", size, priority=priority).sub_tasks[0]


@pytest.fixture
def network() -> Iterator[Network]:
    with running_core(credit=10_000, partition_size=1_000) as core:
        yield Network(core)


def test_what_is_no_more_urgent_follows_on_the_same_lane(network: Network) -> None:
    assert network.lanes(3, 3, 4, 9) == [0, 0, 0, 0]


def test_what_is_more_urgent_goes_to_the_emptier_lane_and_others_follow_it(network: Network) -> None:
    assert network.lanes(9, 9, 1, 2, 9) == [0, 0, 1, 1, 1]
    assert network.lanes(0) == [1], "the other lane is emptier by no more than this part"


def test_what_has_ended_or_failed_is_not_under_way(network: Network) -> None:
    early = [network.part(9) for _ in range(3)]
    assert [network.choice.choose(sub) for sub in early] == [0, 0, 0]
    assert network.lanes(1, 2) == [1, 1]
    for sub in early:
        until(lambda sub=sub: sub.state is TaskState.STARTED)  # type: ignore[misc]
    early[0].notify_finish()
    early[1].notify_finish()
    early[2].fail(RuntimeError("lost"))
    assert network.lanes(0) == [0]


def test_a_lane_that_is_emptier_by_less_than_the_part_is_not_worth_it(network: Network) -> None:
    assert network.lanes(9, 1, size=10) == [0, 0]
    network.choice = LaneChoice()
    assert network.lanes(9, size=11) + network.lanes(1, size=10) == [0, 1]


def test_what_has_ended_is_not_kept_where_nothing_overtakes(network: Network) -> None:
    for priority in range(200):
        sub = network.part(priority)
        network.choice.choose(sub)
        until(lambda sub=sub: sub.state is TaskState.STARTED)  # type: ignore[misc]
        sub.notify_finish()
    assert sum(map(len, network.choice._under_way)) <= 64


def test_what_is_urgent_takes_a_second_credit_and_no_more() -> None:
    transport = ManualTransport()
    with running_core(credit=20, overtaking=True) as core:
        enqueue(core, transport, "late", 40, priority=9)
        transport.wait_for(2)
        enqueue(core, transport, "as late", 10, priority=9)
        enqueue(core, transport, "urgent", 10, priority=5)
        transport.wait_for(3)
        enqueue(core, transport, "more urgent", 40, priority=1)
        transport.wait_for(4)
        core.launch_allowed()
        assert transport.names == ["late[0]", "late[1]", "urgent[0]", "more urgent[0]"]
        assert core.in_flight == 40
        transport.launched[3].notify_finish()  # nothing is more urgent than what comes next now
        assert transport.wait_for(5)[4].name == "more urgent[1]"
        core.launch_allowed()
        assert core.in_flight == 40


@pytest.mark.parametrize("options", [{}, {"overtaking": False}])
def test_without_it_what_is_urgent_waits_for_credit(options: dict[str, bool]) -> None:
    transport = ManualTransport()
    with running_core(credit=10, **options) as core:
        enqueue(core, transport, "late", 10, priority=9)
        transport.wait_for(1)
        enqueue(core, transport, "urgent", 10, priority=1)
        core.launch_allowed()
        assert transport.names == ["late[0]"]


def test_a_follower_launches_what_overtakes_on_the_lane_that_was_announced() -> None:
    order, transport = AnnouncedOrder(), ManualTransport()
    keys = [TaskKey(0, bucket=n) for n in range(2)]
    with running_core(order=order, credit=10, overtaking=True) as core:
        for key in keys:
            enqueue(core, transport, f"{key.bucket}", 20, key=key)
        decisions = [Decision(keys[0], 10, 0), Decision(keys[1], 10, 0, lane=1), Decision(keys[1], 10, 1, lane=1)]
        core.update_order(lambda: order.announce(decisions))
        transport.wait_for(2)
        core.launch_allowed()
        assert transport.names == ["0[0]", "1[0]"], "two credits, whatever priorities are here"
        assert [sub.lane for sub in transport.launched] == [0, 1]
        transport.launched[0].notify_finish()
        transport.wait_for(3)
        assert transport.names == ["0[0]", "1[0]", "1[1]"]
