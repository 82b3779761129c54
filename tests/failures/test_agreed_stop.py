from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist

from lightning_bytescheduler.exceptions import RankFailedError, SchedulerTimeoutError
from lightning_bytescheduler.failures.board import AgreedStop


def nothing() -> None:
    return None


def alike(world_size: int) -> list[AgreedStop]:
    store = dist.HashStore()
    return [AgreedStop(store, rank=rank, world_size=world_size) for rank in range(world_size)]


@pytest.mark.parametrize("seed", range(40))
def test_all_stop_before_the_same_batch(seed: int) -> None:
    """In any order in which watchers look and training threads begin batches, up to two batches apart."""
    chance = random.Random(seed)
    world_size = chance.randint(2, 4)
    ranks = alike(world_size)
    begun = [0] * world_size
    stopped: set[int] = set()
    asked_at = chance.randint(0, 60)
    for moment in range(2000):
        rank = chance.randrange(world_size)
        if moment == asked_at:
            ranks[rank].ask()
        if chance.random() < 0.5:
            ranks[rank].look()
        elif rank not in stopped and begun[rank] < min(begun) + 2 and not waits(ranks[rank]):
            if ranks[rank].begin_batch(nothing, 0.0):
                stopped.add(rank)
            else:
                begun[rank] += 1
    assert len(stopped) == world_size
    assert len(set(begun)) == 1


def waits(rank: AgreedStop) -> bool:
    """Whether its training thread would wait for the others in ``begin_batch``."""
    return rank._stopping and rank._last is None


def test_no_rank_is_stopped_unasked() -> None:
    ranks = alike(2)
    for _ in range(5):
        for rank in ranks:
            rank.look()
            assert not rank.urgent
            assert not rank.begin_batch(nothing, 0.0)


def test_a_rank_waits_for_the_others_and_goes_on_as_far_as_they_were() -> None:
    behind, ahead = alike(2)
    assert not behind.begin_batch(nothing, 0.0)
    assert not ahead.begin_batch(nothing, 0.0)
    assert not ahead.begin_batch(nothing, 0.0)
    behind.ask()
    behind.look()
    said: list[bool] = []
    training = threading.Thread(target=lambda: said.extend(behind.begin_batch(nothing, 30.0) for _ in range(2)))
    training.start()
    ahead.look()
    behind.look()
    training.join(30.0)
    assert said == [False, True]
    assert ahead.begin_batch(nothing, 0.0)


@pytest.mark.parametrize(
    ("failure", "error"),
    [(nothing, SchedulerTimeoutError), (lambda: RankFailedError(1, "it is gone"), RankFailedError)],
)
def test_a_wait_ends_when_no_rank_answers(
    failure: Callable[[], BaseException | None], error: type[BaseException]
) -> None:
    one, _ = alike(2)
    one.ask()
    one.look()
    with pytest.raises(error):
        one.begin_batch(failure, 0.0)


def test_ranks_with_unequal_validations_train_on_as_many_batches() -> None:
    short, long = alike(2)
    for rank, validated in ((short, 2), (long, 4)):
        assert not rank.begin_batch(nothing, 0.0)
        for _ in range(validated):
            assert not rank.begin_batch(nothing, 0.0, trains=False)
    short.ask()
    for rank in (short, long, short):
        rank.look()
    assert not short.begin_batch(nothing, 0.0, trains=False)  # it may still go as far as the other one
    for rank in (short, long):
        assert rank.begin_batch(nothing, 0.0)


def test_an_agreement_is_not_lost_to_a_failure_that_follows_it() -> None:
    first, second = alike(2)
    first.ask()
    first.look()
    second.look()

    def failure() -> BaseException:
        first.look()  # as the watcher learns of both at once
        return RankFailedError(1, "it has ended")

    assert first.begin_batch(failure, 30.0)
