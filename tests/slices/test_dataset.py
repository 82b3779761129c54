"""Slices in a loop without Lightning."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from torch.utils.data import DataLoader

from lightning_bytescheduler import OptionError, SliceDataset, SourceUnavailableError
from lightning_bytescheduler.slices.options import StoreOptions
from tests.slices.faults import FaultySource, lines


@pytest.fixture
def rows(tmp_path):
    for number, count in enumerate([5, 7, 3]):
        np.save(tmp_path / f"{number}.npy", np.arange(count) + 100 * number)
    return f"{tmp_path}/*.npy"


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_share_an_epoch_with_any_number_of_workers(rows, workers):
    datasets = [SliceDataset(rows, batch_size=(4, 2), rank=rank) for rank in range(2)]
    for epoch in range(2):
        seen: Counter = Counter()
        for dataset in datasets:
            dataset.set_epoch(epoch)
            loader = DataLoader(dataset, batch_size=None, num_workers=workers, collate_fn=list)
            batches = list(loader)
            assert len(batches) == len(dataset) == 3
            seen.update(int(number) for batch in batches for number in batch)
        assert seen == Counter([*range(5), *range(100, 107), *range(200, 203)])


def test_samples_are_transformed_and_shuffled(rows):
    options = {"batch_size": 15, "transform": int, "shuffle_samples": True}
    first, second = (next(iter(SliceDataset(rows, seed=seed, **options))) for seed in (0, 1))
    assert sorted(first) == sorted(second)
    assert first != second
    assert all(type(number) is int for number in first)


def test_a_corrupt_slice_is_named_and_others_repeated():
    source = FaultySource(3, count=6)
    source.fault = lambda slice_, start, answer: b"?" * len(answer) if slice_.key == "s1" else answer
    dataset = SliceDataset(source, batch_size=6, shuffle=False)
    with pytest.warns(UserWarning, match="'s1' is corrupt, others are repeated"):
        batches = list(dataset)
    assert batches[0] == lines(0, 6)
    assert set(batches[1]) <= set(lines(0, 6))
    assert batches[2] == lines(2, 6)


def test_nothing_readable_at_all_is_an_error():
    source = FaultySource(2, count=6)
    source.fault = lambda slice_, start, answer: b"?" * len(answer)
    with pytest.raises(RuntimeError, match="corrupt"):
        list(SliceDataset(source, batch_size=6))


def test_a_source_that_stays_away_ends_the_loop():
    def gone(slice_, start, answer):
        raise ConnectionError("gone")

    source = FaultySource(2, count=6)
    source.fault = gone
    with pytest.raises(SourceUnavailableError, match="gone"):
        list(SliceDataset(source, batch_size=6, options=StoreOptions(timeout=0.1)))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("batch_size", ()),
        ("batch_size", (0,)),
        ("batch_size", 0),
        ("rank", 1),
        ("num_replicas", 0),
        ("shortage", "x"),
        ("seed", -1),
    ],
)
def test_misuse(rows, option, value):
    with pytest.raises(OptionError, match=option):
        SliceDataset(rows, **{option: value})
    with pytest.raises(OptionError, match="epoch"):
        SliceDataset(rows).set_epoch(-1)
