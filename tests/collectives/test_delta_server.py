"""Deltas are added as they come, and nobody gets further ahead than the staleness allows."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

from lightning_bytescheduler.collectives.delta_server import DeltaExchange, DeltaServer
from lightning_bytescheduler.collectives.push_pull import abandon
from lightning_bytescheduler.exceptions import RankFailedError, UnsupportedError
from tests.collectives.test_summing_server import world

PATIENCE = timedelta(seconds=30)


def at_once(*calls: Callable[[], object]) -> None:
    """Each on a thread of its own."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40.0)
        assert not thread.is_alive()


def begin(workers: int, staleness: int) -> tuple[DeltaServer, list[DeltaExchange]]:
    """Worker r begins with weights of r."""
    groups = world(workers)
    server = DeltaServer(groups[workers], workers=workers, staleness=staleness)
    sides: list[DeltaExchange] = [None] * workers  # type: ignore[list-item]

    def join(rank: int) -> None:
        weights = [torch.full((7,), float(rank)), torch.full((3,), float(rank), dtype=torch.float64)]
        sides[rank] = DeltaExchange(groups[rank], workers=workers, servers=1, weights=weights, timeout=PATIENCE)

    at_once(*(lambda rank=rank: join(rank) for rank in range(workers)))  # type: ignore[misc]
    return server, sides


def end(server: DeltaServer, sides: list[DeltaExchange]) -> None:
    for side in sides:
        side.close(idle=True)
    server.wait(lambda: False)


def stepped(side: DeltaExchange, by: float) -> list[torch.Tensor]:
    """What a step makes of what was pulled last: not only a sum, so that it matters what that was."""
    return [weight * 0.75 + by for weight in side.weights]


def test_a_schedule_gives_the_weights_that_it_gives_by_hand() -> None:
    server, sides = begin(2, staleness=3)
    kept = torch.zeros(7)  # the first rank's
    held = [kept.clone(), kept.clone()]
    for rank, by in ((0, 0.1), (0, 0.3), (1, 0.7), (0, -0.2), (1, 0.9), (1, 0.4)):
        now = stepped(sides[rank], by)
        sides[rank].push_pull(now)
        kept = kept + ((held[rank] * 0.75 + by) - held[rank])
        held[rank] = kept.clone()
        assert torch.equal(now[0], kept)
        assert torch.equal(sides[rank].weights[0], kept)
    at_once(sides[0].meet, sides[1].meet)
    for side in sides:
        assert torch.equal(side.weights[0], kept)
        assert side.weights[1].dtype == torch.float64
    end(server, sides)


@pytest.mark.parametrize("staleness", [0, 2])
def test_nobody_gets_further_ahead_than_that_and_the_faster_does_get_ahead(staleness: int) -> None:
    server, sides = begin(3, staleness)
    steps, ended, furthest = 12, [0, 0, 0], [0]

    def train(rank: int) -> None:
        pause = random.Random(rank)
        for step in range(1, steps + 1):
            time.sleep(pause.uniform(0, 0.004) if rank else 0.01)
            begun[rank] = step
            sides[rank].push_pull(stepped(sides[rank], 1.0))
            # Others have pushed as many before this answer was given.
            assert min(begun) >= step - staleness
            ended[rank] = step
            furthest[0] = max(furthest[0], step - min(ended))

    for _ in range(2):  # clocks begin anew where all have met
        begun = [0, 0, 0]
        ended[:] = [0, 0, 0]
        at_once(*(lambda rank=rank: train(rank) for rank in range(3)))  # type: ignore[misc]
        assert ended == [steps] * 3
        at_once(*(side.meet for side in sides))
    assert furthest[0] >= staleness
    assert all(torch.equal(side.weights[0], sides[0].weights[0]) for side in sides)
    end(server, sides)


def test_who_waits_to_meet_holds_nobody_up_and_the_slow_one_is_known() -> None:
    server, sides = begin(2, staleness=1)

    def slow() -> None:
        for _ in range(4):
            sides[1].push_pull(stepped(sides[1], 1.0))
        deadline = time.monotonic() + 20.0
        while not server.waits_for[0] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.waits_for[0] == (1,)
        sides[1].meet()

    at_once(sides[0].meet, slow)
    assert torch.equal(sides[0].weights[0], sides[1].weights[0])
    end(server, sides)


def test_a_worker_that_dies_ends_the_wait_of_the_others() -> None:
    server, sides = begin(2, staleness=0)
    broken: list[BaseException] = []

    def wait() -> None:
        try:
            sides[0].push_pull(stepped(sides[0], 1.0))
        except RuntimeError as error:
            broken.append(error)

    waits = threading.Thread(target=wait)
    waits.start()
    sides[1].close(idle=False)
    with pytest.raises(RankFailedError, match="Rank"):
        server.wait(lambda: False)
    waits.join(20.0)
    assert broken
    sides[0].close(idle=False)


def test_what_does_not_fit_is_refused_and_nothing_of_it_applied() -> None:
    server, sides = begin(2, staleness=5)
    sides[0].push_pull(stepped(sides[0], 1.0))
    before = [weight.clone() for weight in server._weights]
    sides[1]._clock = 7  # says that it has taken steps which never came
    with pytest.raises(RuntimeError):
        sides[1].push_pull(stepped(sides[1], 1.0))
    with pytest.raises(UnsupportedError, match="Rank 1 pushes step 8 after step 0"):
        server.wait(lambda: False)
    assert all(torch.equal(*pair) for pair in zip(before, server._weights, strict=True))
    for side in sides:
        abandon(side._group)
