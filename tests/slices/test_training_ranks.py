"""Ranks that step together: all train the same number of steps, and together on every sample once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightning_bytescheduler import OptionError, SliceDataModule
from lightning_bytescheduler.slices.make import make_slices
from tests.slices.fits import SaveEveryStep, fit, fit_rank, make_rows
from tests.support.rank_pool import RankPool

COUNTS = [5, 7, 3, 9, 2]
SAMPLES = sum(COUNTS)

Batches = list[list[int]]


@pytest.fixture
def rows(tmp_path: Path) -> str:
    return make_rows(tmp_path / "rows", COUNTS)


def fitted(ranks: RankPool, **arguments: Any) -> list[tuple[Batches, list[int], int]]:
    return ranks.run(fit_rank, **arguments)


def trained(*ranks: Batches) -> Counter[int]:
    return Counter(number for batches in ranks for batch in batches for number in batch)


@pytest.mark.parametrize("strategy", ["ddp", "bytescheduler"])
def test_two_ranks_train_what_one_does(two_ranks: RankPool, rows: str, strategy: str) -> None:
    options = {"train": rows, "val": rows, "batch_size": [4, 2], "num_workers": 0}
    trainer = {"strategy": strategy, "max_epochs": 2, "num_sanity_val_steps": 0}
    (first, seen, steps), (second, seen_too, steps_too) = fitted(two_ranks, options=options, trainer=trainer)
    assert steps == steps_too == -(-SAMPLES // 6)
    assert len(first) == len(second) == 2 * steps
    assert trained(first, second) == Counter(dict.fromkeys(range(SAMPLES), 2))
    assert {len(batch) for batch in first[: steps - 1]} == {4}
    assert {len(batch) for batch in second[: steps - 1]} == {2}
    assert Counter(seen + seen_too) == Counter(dict.fromkeys(range(SAMPLES), 2))


def test_an_uneven_rest_is_repeated(two_ranks: RankPool, tmp_path: Path) -> None:
    options = {"train": make_rows(tmp_path / "odd", [11, 14]), "batch_size": 1}
    (first, _, expected), (second, _, _) = fitted(two_ranks, options=options, trainer={"strategy": "ddp"})
    counts = trained(first, second)
    assert len(first) == len(second) == expected == 13
    assert max(counts.values()) == 2
    assert sum(counts.values()) == 26


def test_fewer_samples_than_ranks(two_ranks: RankPool, tmp_path: Path) -> None:
    one = make_rows(tmp_path / "one", [1])
    (first, seen, _), (second, seen_too, _) = fitted(
        two_ranks, options={"train": one, "val": one, "batch_size": 4}, trainer={"strategy": "ddp"}
    )
    assert first == second == [[0]]
    assert seen[-1:] == seen_too[-1:] == [0]


def test_resume_with_the_same_ranks_more_and_fewer(two_ranks: RankPool, rows: str, tmp_path: Path) -> None:
    options = {"train": rows, "batch_size": 2}
    whole = fitted(two_ranks, options=options, trainer={"strategy": "ddp", "max_epochs": 2})
    stopped = str(tmp_path / "stopped.ckpt")
    trainer = {"strategy": "ddp", "max_epochs": -1, "max_steps": 3}
    before = fitted(two_ranks, options=options, trainer=trainer, save_to=stopped)
    assert [batches for batches, _, _ in before] == [batches[:3] for batches, _, _ in whole]

    trainer = {"strategy": "bytescheduler", "max_epochs": -1, "max_steps": 14}
    resumed = fitted(two_ranks, options=options, trainer=trainer, resume=stopped)
    assert [batches for batches, _, _ in resumed] == [batches[3:] for batches, _, _ in whole]

    alone = fit(SliceDataModule(rows, batch_size=5, num_workers=2), max_epochs=2, resume=stopped)
    assert trained(alone.batches, *(batches for batches, _, _ in before)) == Counter(range(SAMPLES))

    save = SaveEveryStep(str(tmp_path))
    start = fit(SliceDataModule(rows, batch_size=2), max_epochs=-1, max_steps=2, callbacks=[save])
    rest = fitted(
        two_ranks,
        options={**options, "batch_size": [3, 1]},
        trainer={"strategy": "ddp"},
        resume=save.saved[-1],
    )
    counts = trained(start.batches, *(batches for batches, _, _ in rest))
    assert set(counts) == set(range(SAMPLES))
    assert sum(counts.values()) - SAMPLES in (0, 1)  # padding


def test_every_rank_refuses_other_slices(two_ranks: RankPool, tmp_path: Path) -> None:
    folders = [make_rows(tmp_path / str(rank), [4 + rank]) for rank in range(2)]
    errors = two_ranks.run(_refused, urls=folders)
    assert all("the same on every rank" in error for error in errors)
    assert all(folder in errors[1] for folder in folders), "which one has what"


def _refused(rank: int, urls: list[str]) -> str:
    with pytest.raises(OptionError) as caught:
        fit_rank(rank, options={"train": urls[rank]}, trainer={"strategy": "ddp"})
    return str(caught.value)


def test_all_ranks_leave_out_what_one_finds_corrupt(two_ranks: RankPool, tmp_path: Path) -> None:
    make_slices(make_rows(tmp_path / "rows", [8, 8, 8, 8]), str(tmp_path / "slices"))
    damaged = sorted((tmp_path / "slices").glob("*.npy"))[1]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    options = {"train": str(tmp_path / "slices"), "batch_size": 4, "shuffle": False}
    trainer = {"strategy": "ddp", "max_epochs": 2}
    (first, _, _), (second, _, _) = fitted(two_ranks, options=options, trainer=trainer)
    left = [*range(8), *range(16, 32)]
    assert len(first) == len(second) == 4 + 3
    assert set(trained(first[:4], second[:4])) == set(left)
    assert trained(first[4:], second[4:]) == Counter(left)
