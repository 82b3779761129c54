"""Everything around the training data of one process: formats, workers, evaluation, caches, damage and misuse."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

from lightning_bytescheduler import OptionError, SliceDataModule
from lightning_bytescheduler.slices.make import make_slices
from lightning_bytescheduler.slices.slice import SliceStream
from tests.slices.fits import Evaluates, Remembers, SaveEveryStep, fit, make_rows, trainer_for

# Workers of a DataLoader are forked, also where threads fetch.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def batches_of(data: SliceDataModule) -> list[Any]:
    data.setup("fit")
    batches = list(data.train_dataloader())
    data.teardown("fit")
    return batches


def test_lines_of_text_and_json(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\n")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"x": number}) + "\n" for number in range(3)))
    assert batches_of(SliceDataModule(f"{tmp_path}/a.txt", batch_size=2)) == [["one", "two"], ["three"]]
    numbers = batches_of(SliceDataModule([f"{tmp_path}/b.jsonl"], batch_size=3))
    assert numbers[0]["x"].tolist() == [0, 1, 2]


def read_pairs(stream: SliceStream) -> Iterator[bytes]:
    while pair := stream.read(2):
        yield pair


def as_number(pair: bytes) -> int:
    return int(pair)


def test_a_reader_a_transform_and_a_collation_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "a.pairs").write_bytes(b"102030405060")
    data = SliceDataModule(
        f"{tmp_path}/a.pairs", batch_size=4, reader=read_pairs, transform=as_number, collate=sum, num_workers=1
    )
    assert batches_of(data) == [100, 110]


def test_evaluation_sees_each_sample_once_in_order(tmp_path: Path) -> None:
    rows = make_rows(tmp_path, [5, 4])
    data = SliceDataModule(val=rows, test=rows, predict=rows, batch_size=2, eval_batch_size=4)
    model, trainer = Evaluates(), trainer_for()
    trainer.validate(model, data, verbose=False)
    trainer.test(model, data, verbose=False)
    assert model.seen == [*range(9), *range(9)]
    predicted: Any = trainer.predict(model, data)
    assert predicted == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_limits_cut_an_epoch_and_the_next_one_has_another_order(tmp_path: Path) -> None:
    rows = make_rows(tmp_path, [1] * 12)
    model = fit(SliceDataModule(rows, batch_size=2), max_epochs=3, limit_train_batches=2)
    whole = fit(SliceDataModule(rows, batch_size=2), max_epochs=3)
    assert model.batches == [*whole.batches[:2], *whole.batches[6:8], *whole.batches[12:14]]


def test_to_overfit_is_to_train_on_the_same_batches_again(tmp_path: Path) -> None:
    rows = make_rows(tmp_path, [6, 6, 6])
    batches = fit(SliceDataModule(rows, batch_size=4, shuffle="samples"), max_epochs=3, overfit_batches=2).batches
    assert batches == 3 * batches[:2]


def test_samples_are_shuffled_within_slices_too(tmp_path: Path) -> None:
    rows = make_rows(tmp_path, [50, 50])
    data = SliceDataModule(rows, batch_size=100, shuffle="samples")
    first, second = fit(data, max_epochs=2).batches
    assert sorted(first) == sorted(second) == list(range(100))
    assert sorted(first[:50]) != first[:50] != second[:50]
    assert SliceDataModule(rows, batch_size=100).batch_size == 100


def remote(name: str, counts: list[int], folder: Path) -> str:
    make_slices(make_rows(folder / "rows", counts), f"memory://{name}", overwrite=True)
    return f"memory://{name}"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cache_smaller_than_the_data(tmp_path: Path, workers: int) -> None:
    url = remote("small-cache", [40] * 8, tmp_path)
    cache = tmp_path / "cache"
    data = SliceDataModule(url, batch_size=16, num_workers=workers, cache={"dir": str(cache), "bytes": 4000})
    model = fit(data, max_epochs=2)
    assert Counter(number for batch in model.batches for number in batch) == Counter(dict.fromkeys(range(320), 2))
    assert sum(file.stat().st_size for file in cache.glob("*.slice")) <= 4000
    assert data.statistics.bytes_fetched > 0


def test_resumed_with_a_wiped_cache_or_another_one(tmp_path: Path) -> None:
    url = remote("wiped", [10] * 6, tmp_path)

    def data(cache: str) -> SliceDataModule:
        return SliceDataModule(url, batch_size=4, cache=str(tmp_path / cache))

    save = SaveEveryStep(str(tmp_path))
    whole = fit(data("one"), callbacks=[save])
    for file in (tmp_path / "one").glob("*.slice"):
        file.unlink()
    for cache in ("one", "two"):
        assert fit(data(cache), resume=save.saved[6]).batches == whole.batches[7:]


def test_the_cache_is_the_users_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    fit(SliceDataModule(remote("default-cache", [4], tmp_path), batch_size=4))
    assert len(list((tmp_path / "home" / "lightning-bytescheduler" / "slices").glob("*.slice"))) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_corrupt_slice_is_replaced_for_its_epoch_and_then_left_out(tmp_path: Path, workers: int) -> None:
    url = remote("corrupt", [8, 8, 8], tmp_path)
    memory = fsspec.filesystem("memory")
    path = sorted(file for file in memory.ls("/corrupt", detail=False) if file.endswith(".npy"))[1]
    memory.pipe(path, memory.cat(path)[:-1] + b"?")
    data = SliceDataModule(url, batch_size=4, shuffle=False, num_workers=workers, cache=str(tmp_path / "cache"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = fit(data, max_epochs=2)
    messages = [str(warning.message) for warning in seen if "corrupt" in str(warning.message)]
    assert len(messages) == 1
    assert "'slice-000001.npy' is corrupt, also when fetched again, and is quarantined" in messages[0]
    left = [*range(8), *range(16, 24)]
    numbers = [[int(number) for number in batch] for batch in model.batches]
    assert [len(batch) for batch in numbers] == [4] * (6 + 4)
    assert "others are repeated until the end of the epoch, at most 8 samples" in messages[0]
    assert Counter(number for batch in numbers[:6] for number in batch) == Counter([*left, *range(16, 24)])
    assert Counter(number for batch in numbers[6:] for number in batch) == Counter(left)


def test_the_search_for_a_batch_size_may_set_it(tmp_path: Path) -> None:
    data = SliceDataModule(make_rows(tmp_path, [12]), batch_size=2)
    assert len(fit(data).batches) == 6
    data.batch_size = 6
    assert len(fit(data).batches) == 2


def test_shuffle_is_no_number(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"shuffle must be True, False or 'samples'"):
        SliceDataModule(str(tmp_path), batch_size=2, shuffle=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("train", ""),
        ("val", [3]),
        ("batch_size", 0),
        ("batch_size", [2, 0]),
        ("eval_batch_size", "4"),
        ("num_workers", -1),
        ("shuffle", "no"),
        ("shuffle", "slices"),
        ("seed", -1),
        ("seed", 2**64),
        ("transform", 3),
        ("collate", "stack"),
        ("cache", 5),
        ("cache", {"bytes": 0}),
        ("cache", {"folder": "a"}),
        ("on_bad_sample", "ignore"),
        ("timeout", -1.0),
    ],
)
def test_each_option_is_checked_at_once(option: str, value: Any) -> None:
    with pytest.raises(OptionError, match=option):
        SliceDataModule(**{"train": "memory://never-opened", option: value})


def test_misuse(tmp_path: Path) -> None:
    rows = make_rows(tmp_path, [4])
    with pytest.raises(OptionError, match="given, or val, test or predict"):
        SliceDataModule()
    data = SliceDataModule(rows, batch_size=[1, 2])
    with pytest.raises(OptionError, match="a list of 1, one for each rank of this run"):
        fit(data)
    for asks in (SliceDataModule.train_dataloader, SliceDataModule.training.fget):
        with pytest.raises(OptionError, match=r"trainer\.fit\(model, datamodule=data\), or call setup\('fit'\)"):
            asks(SliceDataModule(rows))
    with pytest.raises(OptionError, match=r"call setup\('test'\) first"):
        SliceDataModule(test=rows).test_dataloader()
    with pytest.raises(OptionError, match=r"reader\(stream\), or None; this one cannot be called so"):
        SliceDataModule(rows, reader=lambda stream, first: iter(()))  # type: ignore[arg-type,misc]
    with pytest.raises(OptionError, match="a glob that some file fits"):
        fit(SliceDataModule(f"{tmp_path}/*.nothing"))
    with pytest.raises(OptionError, match="cache="):
        fit(SliceDataModule(remote("too-large", [500], tmp_path), cache={"dir": str(tmp_path / "c"), "bytes": 100}))


def test_rows_can_be_written_to(tmp_path: Path) -> None:
    class Changes(Remembers):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            batch += 1
            return loss

    fit(SliceDataModule(make_rows(tmp_path, [4]), batch_size=2), model=Changes(), max_epochs=2)
    assert np.load(tmp_path / "rows-000.npy").flatten().tolist() == [0, 1, 2, 3]
