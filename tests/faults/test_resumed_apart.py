"""Ranks that go on from different checkpoints: an error before the first step, on each of them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.faults.ranks import Nursery
from tests.faults.test_apart import Case, check, run


@pytest.mark.parametrize("strategy", [pytest.param("bytescheduler", marks=pytest.mark.slow), "diloco"])
def test_different_files_are_an_error_before_the_first_step(strategy: str, nursery: Nursery, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    whole: Case = ({"strategy": strategy, "checkpoint": str(saved), "epochs": 2}, {})
    for rank in run(nursery, tmp_path, whole)[0]:
        assert rank.code == 0, rank.log
    older, newer = sorted(saved.glob("*.ckpt"), key=lambda file: int(file.stem.removeprefix("step=")))
    copied, moved = tmp_path / "copied.ckpt", tmp_path / "moved.ckpt"
    shutil.copy(older, copied)
    state = torch.load(older, weights_only=True)
    state["optimizer_states"][0]["state"][0]["momentum_buffer"][0, 0] += 1e-3
    torch.save(state, moved)

    step = re.escape(older.stem.removeprefix("step="))
    cases: dict[Path | None, str] = {
        None: r"none on rank 1 \(",
        newer: r"one with digest \w{{8}} of epoch 1, step \d+ on rank 1 \(",
        moved: r"one with digest \w{{8}} of epoch 0, step {step} on rank 1 \(",
        copied: "",
    }
    if strategy == "diloco":  # the files are compared by the same code
        cases = {moved: cases[moved]}
    (tmp_path / "resumed").mkdir()
    ended = run(
        nursery,
        tmp_path / "resumed",
        *(
            (
                {"strategy": strategy, "resume": str(older), "epochs": 3, "val_batches": 2, "sanity": 2},
                {1: {"resume": None if other is None else str(other)}},
            )
            for other in cases
        ),
    )
    for says, ranks in zip(cases.values(), ended, strict=True):
        if not says:
            assert [rank.code for rank in ranks] == [0, 0], ranks[0].log
            continue
        check(ranks, "RanksDifferError: The ranks are not in the same training: ", "copy it to every machine")
        mine = rf"checkpoint is one with digest \w{{8}} of epoch 0, step {step} on rank 0 \(.*\)"
        theirs = says.format(step=step)
        for rank in ranks:
            assert re.search(f"{mine}, but {theirs}", rank.log), rank.log
            assert "TRAINED" not in rank.log, rank.log
