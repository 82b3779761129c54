"""Ranks of a node add up a part before one of them pushes it: in their order, in turns, and no rank waits forever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.groups import abandon
from lightning_bytescheduler.collectives.operations import StartedOperation
from lightning_bytescheduler.collectives.push_pull import NodePushPull, PlacedParts
from lightning_bytescheduler.collectives.server_meeting import Announcement, connect, lay_out
from tests.support.waiting import WAIT

TIMEOUT = timedelta(seconds=2 * WAIT)
NODES, RANKS = 2, 3


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """Call each on a thread of its own; returns what they return or raise."""
    results: list[Any] = [None] * len(calls)

    def call(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()
    return results


@pytest.fixture
def ranks() -> Iterator[list[NodePushPull]]:
    """Two nodes of three ranks, each a server besides."""
    store = dist.HashStore()

    places = [(node, local, RANKS) for node in range(NODES) for local in range(RANKS)]

    def join(rank: int) -> NodePushPull:
        rails = tuple(zip(*lay_out(places), strict=True))
        fit = Announcement(fit=1, rails=rails, servers=())
        node, number = divmod(rank, RANKS)
        rail, local = connect(
            store,
            fit,
            [fit.rail(number, node), (f"node {node}", number, RANKS)],
            rank=rank,
            wait=WAIT,
            timeout=TIMEOUT,
            failure=lambda: None,
        )
        return NodePushPull(rail, local, rails[number], PlacedParts(workers=NODES, servers=0), TIMEOUT)

    made = at_once([partial(join, rank) for rank in range(NODES * RANKS)])
    yield made
    at_once([partial(one.close, idle=False) for one in made])
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("bytescheduler")]


def ended(started: StartedOperation) -> StartedOperation:
    following: StartedOperation | None = started
    while following is not None:
        for work in following.works:
            work.wait()
        following = None if following.finish is None else following.finish()
    return started


def test_sums_are_formed_in_the_order_of_ranks_whichever_rank_pushes(ranks: list[NodePushPull]) -> None:
    generator = torch.Generator().manual_seed(1)
    for number in range(1, 7):  # each rank of a node pushes two of them
        values = [torch.randn(1000, generator=generator) for _ in ranks]
        parts = [value.clone() for value in values]
        # Another rank is last in each round.
        started = at_once(
            [
                partial(lambda one, part, n: ended(one.reduce(one.group, part, n, 1 / 6)), one, part, number)
                for one, part in zip(ranks, parts, strict=True)
            ]
        )
        scaled = [value * (1.0 / 6) for value in values]
        expected = ((scaled[0] + scaled[1]) + scaled[2]) + ((scaled[3] + scaled[4]) + scaled[5])
        assert all(torch.equal(part, expected) for part in parts)
        pushers = [index % RANKS for index, one in enumerate(started) if not isinstance(one.lane, str)]
        assert pushers == [(number - 1) % RANKS] * NODES
    assert [sum(one.shares.bytes_per_server) for one in ranks] == [8000] * 6
    assert ranks[0].wire_share == pytest.approx(1 / RANKS)


def test_a_rank_that_has_gone_ends_all_that_waits_for_it(ranks: list[NodePushPull]) -> None:
    """It has sent nothing of the part: the other ranks of its node find out, then those of the other node."""
    gone = ranks[1]
    waiting = ranks[:1] + ranks[2:]

    def wait(one: NodePushPull) -> None:
        try:
            ended(one.reduce(one.group, torch.ones(10), 1, 1 / 6))
        finally:  # as a strategy does that has an error
            one.close(idle=False)

    def leave() -> None:
        abandon(gone.local)
        abandon(gone.group)

    results = at_once([*(partial(wait, one) for one in waiting), leave])
    assert all(isinstance(result, RuntimeError) for result in results[:-1]), results
