from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import rank_pool
from tests.support.rank_pool import RankPool, RanksFailed, show_stacks
from tests.support.waiting import until


def environment(rank: int, name: str) -> tuple[int, str | None, int]:
    return rank, os.environ.get(name), os.getpid()


def listed(rank: int, value: object) -> tuple[int, list[object]]:
    return os.getpid(), [value, random.random()]


def raise_on(rank: int, bad: int) -> int:
    if rank == bad:
        raise ValueError(f"rank {rank} is bad")
    return rank


def hang_on(rank: int, bad: int) -> int:
    if rank == bad:
        time.sleep(600)
    return rank


def die_on(rank: int, bad: int) -> int:
    if rank == bad:
        os._exit(7)
    return rank


def segfault_on(rank: int, bad: int) -> int:
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # as Lightning does after each fit
    show_stacks()
    if rank == bad:
        signal.raise_signal(signal.SIGSEGV)
    return rank


def not_imported(rank: int, modules: tuple[str, ...]) -> list[str]:
    return [module for module in modules if module not in sys.modules]


def return_a_lambda(rank: int) -> Any:
    return lambda: rank


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as started:
        yield started


def test_runs_on_all_ranks_in_processes_that_stay(pool: RankPool) -> None:
    first = pool.run(environment, name="LOCAL_RANK")
    second = pool.run(environment, name="WORLD_SIZE")
    assert [result[:2] for result in first] == [(0, "0"), (1, "1")]
    assert [result[1] for result in second] == ["2", "2"]
    assert [result[2] for result in first] == [result[2] for result in second]


def test_ranks_are_forked_with_everything_imported(pool: RankPool) -> None:
    assert pool.run(not_imported, modules=rank_pool._PRELOADED) == [[], []]


def test_what_was_run_before_is_answered_from_memory(pool: RankPool) -> None:
    first = pool.run_once(listed, value={"size": 1})
    expected = [list(numbers) for _, numbers in first]
    first[0][1].clear()  # what a test does to its own copy
    pool.stop()
    again, other = pool.run_once(listed, value={"size": 1}), pool.run_once(listed, value={"size": 2})
    assert [numbers for _, numbers in again] == expected
    assert [process for process, _ in again] == [process for process, _ in first]
    assert not {process for process, _ in other} & {process for process, _ in first}


def test_a_raising_rank_is_reported_with_its_traceback(pool: RankPool) -> None:
    with pytest.raises(RanksFailed, match=r"Rank 1 of 2 failed:\n(.|\n)*ValueError: rank 1 is bad"):
        pool.run(raise_on, bad=1)
    assert pool.run(raise_on, bad=2) == [0, 1]


@pytest.mark.slow
def test_a_hanging_rank_is_named_with_its_stack_and_ended(pool: RankPool) -> None:
    assert pool.run(hang_on, bad=2) == [0, 1]
    with pytest.raises(RanksFailed, match=r"No answer within 5 s from rank 0 of 2(.|\n)*in hang_on"):
        pool.run(hang_on, bad=0, timeout=5.0)
    assert pool.run(hang_on, bad=2) == [0, 1]


def test_a_dead_rank_is_reported_with_its_exit_code(pool: RankPool) -> None:
    with pytest.raises(RanksFailed, match=r"Rank 0 of 2 failed:\nThe process ended with exit code 7"):
        pool.run(die_on, bad=0)
    assert pool.run(die_on, bad=2) == [0, 1]


def test_a_rank_that_dies_of_a_signal_is_reported_with_its_stacks(pool: RankPool) -> None:
    with pytest.raises(RanksFailed, match=r"exit code -11(.|\n)*in segfault_on"):
        pool.run(segfault_on, bad=1)
    assert pool.run(segfault_on, bad=2) == [0, 1]


def test_a_result_that_cannot_be_sent_is_a_failure(pool: RankPool) -> None:
    with pytest.raises(RanksFailed, match="The result cannot be pickled"):
        pool.run(return_a_lambda)


def _process(rank: int) -> int:
    return os.getpid()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_idle_ranks_take_no_processor_time_and_go_on(pool: RankPool) -> None:
    processes = pool.run(_process)
    until(lambda: {Path(f"/proc/{process}/stat").read_text().split()[2] for process in processes} == {"T"})
    assert pool.run(_process) == processes
