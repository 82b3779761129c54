"""A loop of Fabric ends: by itself, with a step that nothing has waited for, or because a rank has failed."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.faults.fabric_script import make_model
from tests.faults.ranks import Ended, Nursery

SCRIPT = Path(__file__).with_name("fabric_script.py")


def run(nursery: Nursery, folder: Path, *how: str) -> list[list[Ended]]:
    def one(number: int, asked: str) -> list[Ended]:
        place = folder / str(number)
        place.mkdir()
        return nursery.run(SCRIPT, {"how": asked}, world_size=2, folder=place, timeout=120.0)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(len(how)), how))


def test_the_last_step_lands_before_the_process_ends(nursery: Nursery, tmp_path: Path) -> None:
    """Weights that are read at exit are those of five steps, on both ranks; the last four were deferred."""
    (ranks,) = run(nursery, tmp_path, "ends")
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].log
    ends = [re.findall(r"ends with (\S+), deferred (\d)", rank.log) for rank in ranks]
    assert ends[0] == ends[1]
    ((weights, deferred),) = ends[0]
    assert deferred == "4"
    torch.manual_seed(0)  # as each rank, so that their mean is what each has
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(weights) == pytest.approx(sum(float(p.detach().double().sum()) for p in model.parameters()), rel=1e-6)


def test_an_exception_on_one_rank_ends_the_other_with_its_name(nursery: Nursery, tmp_path: Path) -> None:
    """In the midst of the loop, or when the script of the other has come to its end, and waits for its last step."""
    for survivor, failed in run(nursery, tmp_path, "fails in step 1", "fails in step 3"):
        assert failed.code == 1, failed.log
        assert survivor.code == 1, survivor.log
        assert "RankFailedError: Rank 1 failed: ValueError: sample 17 is broken" in survivor.log


def test_a_rank_with_fewer_steps_is_named_on_both(nursery: Nursery, tmp_path: Path) -> None:
    (ranks,) = run(nursery, tmp_path, "is short")
    for rank in ranks:
        assert rank.code == 1, rank.log
        assert "RanksDivergedError: The ranks wait for each other in different places" in rank.log, rank.log
        assert "rank 0 has ended the fit after 4 batches" in rank.log
        assert "waits for the gradients of step 5" in rank.log


def test_a_rank_with_fewer_steps_that_waits_for_the_others_is_named_on_both(nursery: Nursery, tmp_path: Path) -> None:
    (ranks,) = run(nursery, tmp_path, "is short, and waits")
    for rank in ranks:
        assert rank.code == 1, rank.log
        assert "RanksDivergedError: The ranks wait for each other in different places" in rank.log, rank.log
        assert re.search(r"rank 0 is after the backward pass, step 4, waits in barrier, collective \d+ ", rank.log)
        assert "waits for the gradients of step 5" in rank.log
