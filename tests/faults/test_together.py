"""Ranks that are not in the same training, and ranks that are not there."""

from __future__ import annotations

from pathlib import Path

from tests.faults.ranks import Nursery
from tests.faults.test_apart import Case, check, run

SOON = {"warn_after": 0.3, "timeout": 5.0}


def test_other_options_and_variables_are_an_error_on_every_rank(nursery: Nursery, tmp_path: Path) -> None:
    options: Case = ({}, {1: {"mode": "ddp", "environment": {"BYTESCHEDULER_CREDIT": "9"}}})
    harmless: Case = ({}, {0: {"environment": {"BYTESCHEDULER_DEBUG": "0"}}})
    rounds: Case = ({"strategy": "diloco"}, {1: {"inner_steps": 4}})
    differing, noted, outer = run(nursery, tmp_path, options, harmless, rounds)
    check(
        differing,
        "RanksDifferError: The ranks are not in the same training: ",
        "mode is 'overlapped' on rank 0 (",
        ", but 'ddp' on rank 1 (",
        "credit is None on rank 0 (",
        "BYTESCHEDULER_CREDIT is nothing on rank 0 (",
    )
    assert [rank.code for rank in noted] == [0, 0], noted[0].log
    assert "not the same on all ranks: BYTESCHEDULER_DEBUG is 0 on rank 0 (" in noted[0].log
    check(outer, "RanksDifferError: ", "inner_steps is 2 on rank 0 (", ", but 4 on rank 1 (")


def test_a_rank_that_is_not_there_is_named_while_ranks_look_for_each_other(nursery: Nursery, tmp_path: Path) -> None:
    absent: Case = (SOON, {1: {"strategy": "absent"}})
    first: Case = (SOON, {0: {"strategy": "absent"}})
    another: Case = ({"warn_after": 0.3}, {1: {"strategy": "diloco"}})
    without_one, without_first, differing = run(nursery, tmp_path, absent, first, another)
    assert "bytescheduler: after " in without_one[0].log
    assert " s, rank 1 of 2 did not join this training (here: rank 0 (" in without_one[0].log
    assert " s, rank 1 still waits for rank 0 to open 127.0.0.1:" in without_first[1].log
    assert "strategy is bytescheduler on rank 0 (" in differing[0].log
    assert "but diloco on rank 1 (" in differing[0].log
