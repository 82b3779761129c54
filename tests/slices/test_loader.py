"""DataLoader workers share their rank's samples: the same batches with any number of them, each sample made once."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from lightning_bytescheduler import SliceDataModule, UnsupportedError
from lightning_bytescheduler.exceptions import BadSampleError, SliceCorruptError
from lightning_bytescheduler.slices import formats
from lightning_bytescheduler.slices.make import make_slices
from lightning_bytescheduler.slices.slice import SliceStream
from tests.slices.fits import Remembers, SaveEveryStep, fit

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*multi-threaded.*fork:DeprecationWarning", "ignore:This DataLoader will create:UserWarning"
)

SAMPLES = 50


def counting(made: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose calls are counted in all processes that are forked."""

    def counted(*arguments: Any) -> Any:
        with made.get_lock():
            made.value += 1
        return function(*arguments)

    return counted


def batches_of(data: SliceDataModule) -> list[Any]:
    data.setup("fit")
    batches = list(data.train_dataloader())
    data.teardown("fit")
    return batches


def as_lists(batches: list[Any]) -> list[Any]:
    return [
        {key: as_lists([part])[0] for key, part in batch.items()}
        if isinstance(batch, dict)
        else batch.tolist()
        if isinstance(batch, torch.Tensor)
        else batch
        for batch in batches
    ]


def write(folder: Path, form: str) -> str:
    lines = [json.dumps({"x": number, "text": f"é{number}"}) for number in range(SAMPLES)]
    if form == "npy":
        np.save(folder / "a.npy", np.arange(SAMPLES * 3, dtype=np.float32).reshape(SAMPLES, 3))
        make_slices(f"{folder}/a.npy", f"{folder}/slices", slice_bytes=300)
        return f"{folder}/slices"
    if form == "numbers":
        np.save(folder / "a.npy", np.arange(SAMPLES, dtype=np.int16))
        return f"{folder}/a.npy"
    if form == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"x": list(range(SAMPLES))}), folder / "a.parquet")
        return f"{folder}/a.parquet"
    if form.endswith(".gz"):
        (folder / f"a.{form}").write_bytes(gzip.compress("\n".join(lines).encode()))
    else:
        (folder / f"a.{form}").write_text("\n".join(lines))
    if form in ("txt", "jsonl"):
        make_slices(f"{folder}/a.{form}", f"{folder}/slices", slice_bytes=400)
        return f"{folder}/slices"
    return f"{folder}/a.{form}"


@pytest.mark.parametrize(
    ("form", "shuffle"),
    [
        ("npy", True),
        ("npy", "samples"),
        ("numbers", "samples"),
        ("txt", True),
        ("jsonl", "samples"),
        ("jsonl.gz", True),
        ("parquet", "samples"),
    ],
)
def test_the_same_batches_with_any_number_of_workers(tmp_path: Path, form: str, shuffle: Any) -> None:
    url = write(tmp_path, form)
    options: dict[str, Any] = {"batch_size": 4, "shuffle": shuffle, "seed": 3}
    alone, *others = (
        batches_of(SliceDataModule(url, num_workers=workers, **options))
        for workers in ((0, 1, 4) if form == "npy" else (0, 3))
    )
    assert sum(len(batch if isinstance(batch, (list, torch.Tensor)) else batch["x"]) for batch in alone) == SAMPLES
    for batches in others:
        assert as_lists(batches) == as_lists(alone)
        for batch, expected in zip(batches, alone, strict=True):
            assert type(batch) is type(expected)
            if isinstance(batch, torch.Tensor):
                assert batch.dtype == expected.dtype


@pytest.mark.parametrize("shuffle", [True, "samples"])
def test_each_sample_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle: Any) -> None:
    url = write(tmp_path, "jsonl")
    made = multiprocessing.Value("i", 0)
    data = SliceDataModule(url, batch_size=4, num_workers=3, shuffle=shuffle)
    monkeypatch.setattr(formats, "json", SimpleNamespace(loads=counting(made, json.loads)))
    assert sum(len(batch["x"]) for batch in batches_of(data)) == SAMPLES
    assert made.value == SAMPLES


def test_workers_share_the_samples_of_a_users_reader(tmp_path: Path) -> None:
    def read(stream: SliceStream) -> Iterator[int]:
        while record := stream.read(4):
            yield int(record)

    (tmp_path / "a.numbers").write_bytes(b"".join(b"%04d" % number for number in range(SAMPLES)))
    data = SliceDataModule(f"{tmp_path}/a.numbers", batch_size=4, num_workers=3, reader=read)
    assert torch.cat(batches_of(data)).tolist() == list(range(SAMPLES))


def test_resumed_with_another_number_of_workers(tmp_path: Path) -> None:
    url = write(tmp_path, "numbers")
    options: dict[str, Any] = {"batch_size": 4, "shuffle": "samples", "transform": float}
    save = SaveEveryStep(str(tmp_path))
    whole = fit(SliceDataModule(url, num_workers=2, collate=as_column, **options), callbacks=[save]).batches
    for workers in (0, 3):
        data = SliceDataModule(url, num_workers=workers, collate=as_column, **options)
        assert fit(data, resume=save.saved[4]).batches == whole[5:]


def as_column(samples: list[float]) -> torch.Tensor:
    assert type(samples) is list
    return torch.tensor(samples).reshape(-1, 1)


def with_bad_lines(tmp_path: Path, bad: set[int], samples: int = SAMPLES) -> str:
    lines = ("?\n" if number in bad else f"{number}\n" for number in range(samples))
    (tmp_path / "a.jsonl").write_text("".join(lines))
    return f"{tmp_path}/a.jsonl"


def not_13(sample: int) -> int:
    if sample == 13:
        raise KeyError("thirteen")
    return sample


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, "samples"])
@pytest.mark.parametrize("transform", [None, not_13])
def test_a_sample_that_cannot_be_made_is_named(tmp_path: Path, workers: int, shuffle: Any, transform: Any) -> None:
    url = with_bad_lines(tmp_path, set() if transform else {13})
    data = SliceDataModule(url, batch_size=4, num_workers=workers, shuffle=shuffle, transform=transform)
    place = r"rank 0, DataLoader worker [01]" if workers else "rank 0"
    cause = "KeyError: 'thirteen'" if transform else "JSONDecodeError"
    with pytest.raises(BadSampleError, match=rf"Sample 13 of slice .*a\.jsonl.* cannot be made \({place}\): {cause}"):
        batches_of(data)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, "samples"])
def test_samples_that_cannot_be_made_are_skipped_where_that_is_wanted(
    tmp_path: Path, workers: int, shuffle: Any
) -> None:
    """Also where one that cannot be decoded is before another one whose transform raises."""
    url = with_bad_lines(tmp_path, {12, 17})
    options: dict[str, Any] = {"batch_size": 4, "num_workers": workers, "shuffle": shuffle, "transform": not_13}
    data = SliceDataModule(url, on_bad_sample="skip", **options)
    with pytest.warns(UserWarning, match=r"Samples of slice .* are left out, of which this is the first\. Sample 1"):
        batches = batches_of(data)
    assert [len(batch) for batch in batches] == [4] * 12 + [2]
    assert {int(sample) for batch in batches for sample in batch} == set(range(SAMPLES)) - {12, 13, 17}
    if not shuffle:
        assert batches[3].tolist() == [14, 15, 14, 15]
    assert (data.statistics.skipped, data.statistics.samples) == (3, SAMPLES)


def test_a_batch_of_bad_samples_repeats_others(tmp_path: Path) -> None:
    url = with_bad_lines(tmp_path, set(range(1, 8)))
    data = SliceDataModule(url, batch_size=4, shuffle=False, on_bad_sample="skip")
    with pytest.warns(UserWarning, match="are left out"):
        batches = batches_of(data)
    assert [batch.tolist() for batch in batches[:3]] == [[0] * 4, [0] * 4, [8, 9, 10, 11]]


def test_the_first_batch_may_have_nothing_but_bad_samples(tmp_path: Path) -> None:
    def from_2_on(sample: Any) -> Any:
        return sample if int(sample) > 1 else 1 // 0

    url = with_bad_lines(tmp_path, set())
    data = SliceDataModule(url, batch_size=1, shuffle=False, transform=from_2_on, on_bad_sample="skip")
    with pytest.warns(UserWarning, match="are left out"):
        batches = batches_of(data)
    assert [int(batch[0]) for batch in batches[:4]] == [2, 2, 2, 3]


def test_slices_of_bad_samples_alone_are_an_error_that_says_so(tmp_path: Path) -> None:
    url = with_bad_lines(tmp_path, set())
    data = SliceDataModule(url, batch_size=1, shuffle=False, transform=lambda sample: 1 // 0, on_bad_sample="skip")
    with pytest.raises(BadSampleError, match="No sample can be made of the first 100 of each slice"):
        batches_of(data)


def test_slices_that_are_all_corrupt_are_not_said_to_have_bad_samples(tmp_path: Path) -> None:
    url = with_bad_lines(tmp_path, set())
    data = SliceDataModule(url, batch_size=1, shuffle=False, on_bad_sample="skip")
    data.setup("fit")
    (tmp_path / "a.jsonl").write_bytes(b"1\n" * SAMPLES)
    with pytest.raises(SliceCorruptError, match="and so is every other slice"):
        list(data.train_dataloader())
    data.teardown("fit")


def test_a_text_whose_first_line_cannot_be_decoded_has_a_bad_sample(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\u00e9\n".encode("latin-1") + b"fine\n" * (SAMPLES - 1))
    with pytest.raises(BadSampleError, match=r"Sample 0 of slice .*a\.txt.* cannot be made \(rank 0\): Unicode"):
        batches_of(SliceDataModule(f"{tmp_path}/a.txt", batch_size=4, shuffle=False))
    make_slices(f"{tmp_path}/a.txt", f"{tmp_path}/slices")
    for place in ("a.txt", "slices"):
        data = SliceDataModule(f"{tmp_path}/{place}", batch_size=5, shuffle=False, on_bad_sample="skip")
        with pytest.warns(UserWarning, match="are left out"):
            assert batches_of(data) == [["fine"] * 5] * 10


def test_bad_samples_are_judged_alike_in_each_epoch(tmp_path: Path) -> None:
    url = with_bad_lines(tmp_path, {70 * number + 5 for number in range(6)}, samples=500)
    data = SliceDataModule(url, batch_size=4, on_bad_sample="skip")
    data.setup("fit")
    with pytest.warns(UserWarning, match="are left out"):
        passes = [len(list(data.train_dataloader())) for _ in range(4)]
    assert passes == [125] * 4
    assert (data.statistics.skipped, data.statistics.samples) == (24, 2000)
    data.teardown("fit")


def test_more_than_a_few_bad_samples_are_an_error(tmp_path: Path) -> None:
    url = with_bad_lines(tmp_path, {20 * number + 1 for number in range(1, 50)}, samples=1000)
    data = SliceDataModule(url, batch_size=4, shuffle=False, on_bad_sample="skip")
    with (
        pytest.warns(UserWarning, match="are left out"),
        pytest.raises(BadSampleError, match=r"11 of the 224 samples .* more than one in 100\. The last one: Sample "),
    ):
        batches_of(data)


def die(sample: Any) -> Any:
    if sample.item() == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


def test_a_worker_that_dies_is_an_error(tmp_path: Path) -> None:
    data = SliceDataModule(write(tmp_path, "numbers"), batch_size=4, num_workers=2, shuffle=False, transform=die)
    with pytest.raises(RuntimeError, match=r"exited unexpectedly|killed by signal"):
        batches_of(data)


def test_batches_of_any_structure_and_size(tmp_path: Path) -> None:
    def collate(samples: list[Any]) -> Any:
        size = 2_000_000 if samples[0] == 0 else 3  # 8 MB go by way of a file
        nested = [torch.zeros(0, 2), {"a": torch.full((size,), float(samples[0])), "b": "text"}]
        return {"nested": nested, "pair": (torch.ones(2, requires_grad=True), torch.tensor(samples)[::2]), 3: None}

    data = SliceDataModule(
        write(tmp_path, "numbers"), batch_size=5, num_workers=2, shuffle=False, transform=int, collate=collate
    )
    for number, batch in enumerate(batches_of(data)):
        first = 5 * number
        assert batch["nested"][0].shape == (0, 2)
        assert batch["nested"][1]["b"] == "text"
        assert batch["nested"][1]["a"].shape == (3 if number else 2_000_000,)
        assert (batch["nested"][1]["a"] == first).all()
        learned, strided = batch["pair"]
        assert learned.requires_grad
        assert strided.tolist() == list(range(first, first + 5, 2))
        assert batch[3] is None


def test_many_batches_that_are_kept(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3000, dtype=np.int64))
    data = SliceDataModule(f"{tmp_path}/a.npy", batch_size=5, num_workers=2, shuffle=False)
    assert torch.cat(batches_of(data)).tolist() == list(range(3000))


def with_process(samples: list[Any]) -> tuple[torch.Tensor, int]:
    return torch.stack([torch.as_tensor(sample) for sample in samples]), os.getpid()


class Processes(Remembers):
    """Keeps the processes that have read, by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[set[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 0:
            self.read.append(set())
        self.read[-1].add(batch[1])
        return super().training_step(batch[0].reshape(-1, 1), batch_idx)


def test_workers_stay_from_epoch_to_epoch_and_end_with_the_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_SEED_WORKERS", "1")  # Lightning gives each loader a function of its own then
    data = SliceDataModule(write(tmp_path, "numbers"), batch_size=4, num_workers=2, collate=with_process)
    model = Processes()
    fit(data, model=model, max_epochs=3)
    first, *later = model.read
    assert len(first) == 2
    assert later == [first, first]
    assert not first & {process.pid for process in multiprocessing.active_children()}
    alone = fit(SliceDataModule(write(tmp_path, "numbers"), batch_size=4, collate=as_column), max_epochs=3)
    assert model.batches == alone.batches


def test_workers_end_with_a_fit_that_fails(tmp_path: Path) -> None:
    data = SliceDataModule(write(tmp_path, "numbers"), batch_size=4, num_workers=2, collate=with_process)
    model = Processes()

    def fail(step: int) -> None:
        if step == 14:  # at the begin of the second epoch
            raise ArithmeticError

    model.on_step = fail
    with pytest.raises(ArithmeticError):
        fit(data, model=model, max_epochs=3)
    assert model.read[1] <= model.read[0]
    assert not model.read[0] & {process.pid for process in multiprocessing.active_children()}


def test_passes_that_are_ended_by_another_one_or_given_up(tmp_path: Path) -> None:
    data = SliceDataModule(write(tmp_path, "numbers"), batch_size=4, num_workers=2, shuffle=False, collate=with_process)
    data.setup("fit")
    loader = data.train_dataloader()
    whole = [batch.tolist() for batch, _ in loader]
    torch.manual_seed(1)
    assert [batch.tolist() for batch, _ in loader] == whole
    drawn = torch.rand(1)
    ended, given_up = iter(loader), iter(loader)
    kept = {next(ended)[1] for _ in range(2)}
    others = {next(given_up)[1] for _ in range(2)}
    assert not kept & {process.pid for process in multiprocessing.active_children()}
    with pytest.raises(UnsupportedError, match="Another pass"):
        next(ended)
    given_up.close()  # type: ignore[attr-defined]
    assert not others & {process.pid for process in multiprocessing.active_children()}
    again = list(loader)
    assert [batch.tolist() for batch, _ in again] == whole, "nothing is left of what was given up"
    data.teardown("fit")
    assert not {process for _, process in again} & {process.pid for process in multiprocessing.active_children()}

    torch.manual_seed(1)
    alone = SliceDataModule(write(tmp_path, "numbers"), batch_size=4, shuffle=False)
    batches_of(alone)
    assert torch.equal(torch.rand(1), drawn)


def breaks_at_13(stream: SliceStream) -> Iterator[int]:
    """Not where samples are counted, at the start."""
    while record := stream.read(4):
        if int(record) == 13 and get_worker_info() is not None:
            raise ValueError("on purpose")
        yield int(record)


def test_a_corrupt_slice_is_told_in_each_epoch_by_workers_that_stay(tmp_path: Path) -> None:
    (tmp_path / "a.numbers").write_bytes(b"".join(b"%04d" % number for number in range(SAMPLES)))
    (tmp_path / "b.numbers").write_bytes(b"".join(b"%04d" % (100 + number) for number in range(SAMPLES)))
    data = SliceDataModule(f"{tmp_path}/*.numbers", batch_size=4, num_workers=2, shuffle=False, reader=breaks_at_13)
    data.setup("fit")
    loader = data.train_dataloader()
    told: list[Any] = []
    loader._on_report = lambda report, _: told.extend(report.corrupt)
    epochs = []
    for number in range(1, 3):
        epochs.append(as_lists(list(loader)))
        assert len(told) == 2 * number  # by both workers, which read it to its end
    assert epochs[0] == epochs[1]
    data.teardown("fit")
