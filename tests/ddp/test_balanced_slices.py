"""Batches shared out of slices: as of a DataLoader, but each rank reads slices of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ddp.balanced_fits import Balanced, Numbered, Seen, fit_balanced
from tests.slices.fits import make_rows
from tests.support.rank_pool import RankPool

COUNTS = [40, 25, 60, 33, 50, 42, 7]
SAMPLES = sum(COUNTS)


def rows(folder: Path) -> dict[str, Any]:
    return {"train": make_rows(folder / "rows", COUNTS), "batch_size": 8}


def unions(found: Sequence[Seen], epoch: int = 0) -> list[list[int]]:
    """Samples of each step; what a rank without one has borrowed is another's."""
    steps = zip(*(seen.batches[epoch] for seen in found), strict=True)
    return [list(dict.fromkeys(n for batch in batches for n in batch)) for batches in steps]


def used(found: Sequence[Seen], epoch: int = 0) -> Counter[int]:
    return Counter(n for union in unions(found, epoch) for n in union)


def alone(found: Sequence[Seen], accumulate: int = 1) -> dict[str, torch.Tensor]:
    """Weights of one process on the union of the ranks' batches of a step, a sample of which is there once."""
    torch.manual_seed(7)
    module = Balanced(0, Seen(), None, 0.0).double()
    optimizer = module.configure_optimizers()
    for epoch in range(len(found[0].batches)):
        batches = unions(found, epoch)
        for first in range(0, len(batches), accumulate):
            samples = [Numbered(0)[n] for union in batches[first : first + accumulate] for n in union]
            inputs = torch.stack([sample[0] for sample in samples]).double()
            targets = torch.stack([sample[1] for sample in samples]).double()
            optimizer.zero_grad()
            nn.functional.mse_loss(module.predict(inputs), targets).backward()
            optimizer.step()
    return {name: value.detach() for name, value in module.state_dict().items()}


@pytest.mark.slow
def test_slices_follow_pace_and_the_training_is_one_processs(two_ranks: RankPool, tmp_path: Path) -> None:
    found = two_ranks.run(
        fit_balanced,
        size=0,
        seconds=[3.0, 1.0],
        epochs=2,
        slices=rows(tmp_path),
        trainer={"precision": "64-true"},
    )
    assert not [seen.error for seen in found if seen.error]
    for seen in found:
        assert "batches of 16 samples, by rank (4, 12)" in seen.plan
        assert seen.metrics["bytescheduler/share_of_rank_0"] == 4
        assert seen.changes == 1
    for epoch in range(2):
        assert used(found, epoch) == Counter(range(SAMPLES))
        assert [len(union) for union in unions(found, epoch)] == [16] * 16 + [1], "one is borrowed in the last step"
    assert [len(batch) for batch in found[1].batches[1]][:16] == [12] * 16, "the pace is known from epoch to epoch"
    for name, weight in alone(found).items():
        assert (found[0].weights[name] - weight).norm() <= 1e-6 * weight.norm(), name


def test_a_rank_slows_while_processes_read_ahead_and_the_epoch_goes_on_elsewhere(
    two_ranks: RankPool, three_ranks: RankPool, tmp_path: Path
) -> None:
    """From a checkpoint in the middle of a step, of which it lacks the gradients."""
    middle = str(tmp_path / "middle.ckpt")
    counts = [*COUNTS, 48, 80]
    data, size = {**rows(tmp_path), "train": make_rows(tmp_path / "more", counts)}, sum(counts)
    before = two_ranks.run(
        fit_balanced,
        size=0,
        seconds=[1.0, 1.0],
        change=(3, [3.0, 1.0]),
        slices={**data, "num_workers": 1},
        trainer={"accumulate_grad_batches": 2},
        save=(middle, 10),
    )
    assert not [seen.error for seen in before if seen.error]
    assert used(before) == Counter(range(size))
    assert [[len(batch) for batch in seen.batches[0]][18] for seen in before] == [4, 12], "soon after it slowed"
    assert [[len(batch) for batch in seen.batches[0]][9] for seen in before] == [8, 8]
    first = Counter(n for union in unions(before)[:20] for n in union)  # of 21, the last of which counts for nothing

    after = three_ranks.run(
        fit_balanced,
        size=0,
        seconds=[1.0] * 3,
        slices={**data, "batch_size": 20, "num_workers": 0},
        options={"batch_size": "global"},
        resume=middle,
    )
    assert not [seen.error for seen in after if seen.error]
    assert {len(seen.batches[0][0]) for seen in after} == {6, 7}
    assert first + used(after) == Counter(range(size))
    assert "batches of 20 samples, by rank (7, 7, 6)" in after[0].plan

    plain = two_ranks.run(
        fit_balanced,
        size=0,
        seconds=[1.0] * 2,
        slices={**data, "batch_size": [3, 5]},
        options={"batch_size": None, "weighting": "ranks"},
        resume=middle,
    )
    assert not [seen.error for seen in plain if seen.error]
    assert first + used(plain) == Counter(range(size))


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_one_process_has_all_of_each_batch(tmp_path: Path) -> None:
    """Batches that a step accumulates count by their samples: the last one has 12."""
    with RankPool(1) as process:
        (seen,) = process.run(
            fit_balanced,
            size=0,
            seconds=[1.0],
            slices={**rows(tmp_path), "batch_size": 35},
            options={"batch_size": "global"},
            trainer={"accumulate_grad_batches": 4, "precision": "64-true"},
        )
    assert not seen.error
    assert [len(batch) for batch in seen.batches[0]] == [35] * 7 + [12]
    for name, weight in alone([seen], accumulate=4).items():
        assert (seen.weights[name] - weight).norm() <= 1e-6 * weight.norm(), name


@pytest.mark.parametrize(
    ("options", "slices", "words"),
    [
        ({"batch_size": "global"}, {"batch_size": 1}, r"SliceDataModule(batch_size)=1 is not allowed"),
        (
            {"batch_size": "balanced"},
            {"batch_size": [8, 4]},
            "batch_size=[8, 4] is not allowed: batch_size must be one",
        ),
        (
            {"batch_size": {"balanced": 7}},
            {},
            "batch_size={'balanced': 7} is not allowed: batch_size must be 16 or more",
        ),
        ({}, {"seed": [1, 2]}, "the order of the slices is shuffled from seed 1 on rank 0"),
        ({}, {"batch_size": [[4], [5]]}, "the SliceDataModule's batch_size is 8 for all ranks on rank 0"),
    ],
)
def test_what_cannot_be_shared_out(
    two_ranks: RankPool, tmp_path: Path, options: dict[str, Any], slices: dict[str, Any], words: str
) -> None:
    given = {**rows(tmp_path), **slices}
    for seen in two_ranks.run(fit_differently, options=options, slices=given):
        assert words in seen.error


def fit_differently(rank: int, options: dict[str, Any], slices: dict[str, Any]) -> Seen:
    seed, size = slices.get("seed", 0), slices["batch_size"]
    if isinstance(seed, list):
        slices["seed"] = seed[rank]
    if isinstance(size, list) and isinstance(size[0], list):
        slices["batch_size"] = size[rank][0]
    return fit_balanced(rank, size=0, seconds=[1.0, 1.0], options=options, slices=slices)
