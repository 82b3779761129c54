from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from lightning_bytescheduler.checking.comparison import compare, first_difference, tensor_distances
from lightning_bytescheduler.checking.recorder import digest
from lightning_bytescheduler.checking.report import hide_secrets
from lightning_bytescheduler.checking.runs import RankRecord, RunSpec
from tests.checking.runs import made

DDP = RunSpec(strategy="ddp", steps=3)
RECORD = RankRecord(
    rank=0,
    world_size=2,
    strategy="ddp",
    steps=3,
    losses=("0x1p+0", "0x1p-1", "0x1p-2"),
    loss_steps=(0, 1, 2),
    weights={"a": "1", "b": "2"},
    trace={1: {"a": "1", "b": "2"}, 2: {"a": "1", "b": "2"}},
)


def test_every_rank_counts() -> None:
    other = replace(RECORD, rank=1, weights={"a": "1", "b": "3"})
    found = compare(made(DDP, RECORD, replace(RECORD, rank=1)), made(DDP, RECORD, other))
    assert found.weights == ("b",)
    assert not found.trained_alike


def test_what_only_one_has_differs() -> None:
    fewer = replace(RECORD, steps=2, losses=RECORD.losses[:2], weights={"a": "1"})
    found = compare(made(DDP, RECORD), made(DDP, fewer))
    assert found.weights == ("b",)
    assert found.losses == 1
    assert found.other == ("rank 0 took 2 steps instead of 3",)


def test_a_loss_shows_in_the_step_it_belongs_to() -> None:
    other = replace(RECORD, losses=("0x1p+0", "0x1p-1", "0x1p-3"))
    found = first_difference(made(DDP, RECORD), made(DDP, other))
    assert found is not None
    assert found.step == 3
    assert found.losses == (0.25, 0.125)


def test_an_update_that_differs_shows_before_the_loss_does() -> None:
    trace = {1: {"a": "1", "b": "2"}, 2: {"a": "1", "b": "9"}}
    other = replace(RECORD, trace=trace, losses=("0x1p+0", "0x1p-1", "0x1p-3"))
    found = first_difference(made(DDP, RECORD), made(DDP, other))
    assert found is not None
    assert found.step == 2
    assert found.losses is None
    assert found.tensors == ("b",)


def test_micro_batches_of_one_step_belong_to_it() -> None:
    accumulated = replace(RECORD, loss_steps=(0, 0, 1))
    other = replace(accumulated, losses=("0x1p+0", "0x1p-7", "0x1p-2"))
    found = first_difference(made(DDP, accumulated), made(DDP, other))
    assert found is not None
    assert found.step == 1


def test_distances_are_relative(tmp_path: Path) -> None:
    for name, value in (("one", 2.0), ("two", 2.5)):
        torch.save({"weights": {"w": torch.full((3,), value), "count": torch.tensor(3)}}, tmp_path / name)
    assert tensor_distances(tmp_path / "one", tmp_path / "two") == {"w": 0.25}


def test_a_digest_is_of_bits() -> None:
    nan = torch.tensor([float("nan")])
    assert digest(nan) == digest(nan.clone())
    assert digest(torch.tensor(0.0)) != digest(torch.tensor(-0.0))
    assert digest(torch.zeros(2, 3)) != digest(torch.zeros(3, 2))
    assert digest(torch.zeros(0)) == digest(torch.zeros(0))
    assert digest(torch.eye(3).to_sparse()) == digest(torch.eye(3))
    assert digest(torch.ones(4, 4, dtype=torch.bfloat16).t()) == digest(torch.ones(4, 4, dtype=torch.bfloat16))


def test_secrets_stay_out_of_the_report() -> None:
    command = ["python", "train.py", "--api-key", "abc", "--token=def", "--lr", "1", "--hub_token", "--x"]
    assert hide_secrets(command) == "python train.py --api-key ... --token=... --lr 1 --hub_token --x"


def test_records_survive_the_file(tmp_path: Path) -> None:
    record = replace(RECORD, trained=("a",), seconds=(0.1,))
    record.save(tmp_path)
    assert RankRecord.load(tmp_path / "rank0.json") == record
    spec = replace(DDP, early=("a", "b"))
    spec.save(tmp_path / "spec.json", tmp_path)
    assert RunSpec.load(tmp_path / "spec.json") == (spec, tmp_path)
