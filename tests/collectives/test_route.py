"""The two lanes for long round trips: urgent parts arrive before parts that were sent earlier."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives import completion
from lightning_bytescheduler.collectives.operations import StartedOperation
from lightning_bytescheduler.collectives.route import Served, Sharded
from lightning_bytescheduler.scheduler.task import TaskKey
from tests.collectives.sub_tasks import Part
from tests.support.waiting import until

WAIT = 20.0


class Held:
    """Something under way that ends when it is let go of."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def wait(self) -> None:
        assert self.let_go.wait(WAIT)


def routes(ranks: int = 2) -> list[Sharded]:
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def make(rank: int) -> Sharded:
        store = dist.TCPStore("127.0.0.1", master.port, is_master=False, wait_for_workers=False)
        made: list[Any] = []
        for lane in range(2):
            own = dist.PrefixStore(f"{lane}", store)
            made.append(dist.ProcessGroupGloo(own, rank, ranks, timedelta(seconds=WAIT)))
        return Sharded(made[0], lambda error: error, made[1])

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(make, range(ranks)))


@pytest.mark.parametrize("lane", [1, pytest.param(0, id="the same lane")])
def test_what_is_urgent_arrives_while_another_lane_is_held_up(lane: int) -> None:
    made = routes()
    held = [Held() for _ in made]
    tensors = [torch.full((4,), float(rank)) for rank in range(2)]
    before: Any = Part(0)
    urgent: Any = [Part(lane) for _ in made]
    try:
        for rank, route in enumerate(made):
            holding = held[rank]
            route.send(torch.zeros(4), before, lambda *_, h=holding: StartedOperation([h], messages=True))
            route.send(tensors[rank], urgent[rank], partial(route.all_reduce, factor=0.5))
        if lane == 0:
            assert not urgent[0].ended.wait(0.3)
            for holding in held:
                holding.let_go.set()
        for sub in urgent:
            assert sub.ended.wait(WAIT)
            assert sub.error is None
        for tensor in tensors:
            assert tensor.tolist() == [0.5] * 4
    finally:
        for holding in held:
            holding.let_go.set()
        for route in made:
            assert route.stop(WAIT)


@pytest.mark.parametrize("own", [False, True], ids=["the data group", "a group of its own"])
def test_a_wait_for_a_message_is_ended_on_the_group_of_the_message(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    data, nodes, servers = (SimpleNamespace(name=name, size=lambda: 2) for name in ("data", "node", "servers"))
    message, broken = Held(), []

    def breaks(group: Any) -> None:
        broken.append(group.name)
        message.let_go.set()

    monkeypatch.setattr(completion, "break_connections", breaks)
    shares = SimpleNamespace(expect=lambda *_: None)
    push_pull: Any = SimpleNamespace(reduce=None, wire_share=1.0, group=servers, shares=shares)
    route = Served(data, lambda error: error, push_pull)  # type: ignore[arg-type]
    part: Any = Part(0)
    part.parent, part.index = SimpleNamespace(key=TaskKey(1)), 0
    started = StartedOperation([message], messages=True, group=nodes if own else None)  # type: ignore[arg-type]
    route.send(torch.zeros(4), part, lambda *_: started)
    until(lambda: next(iter(route._pulls.values()))._awaited is not None)
    assert route.stop(WAIT)
    assert set(broken) == {"node" if own else "data"}
