"""A catalogue finds slices by index and key, and tells other data apart."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.slice import Slice
from tests.slices.tracker_workers import slices

SLICES = st.lists(
    st.builds(
        Slice,
        key=st.text(min_size=1, max_size=8),
        url=st.sampled_from(["memory://a", "memory://ä", "s3://b/c"]),
        size=st.integers(0, 2**62),
        samples=st.integers(1, 2**40),
    ),
    min_size=1,
    max_size=20,
    unique_by=lambda item: item.key,
)


@given(items=SLICES)
def test_slices_come_back_as_they_were_also_in_another_process(items):
    for catalogue in (SliceCatalogue(items), pickle.loads(pickle.dumps(SliceCatalogue(items)))):
        assert list(catalogue) == items
        assert catalogue[-1] == items[-1]
        assert [catalogue.find(item.key) for item in items] == list(range(len(items)))
        assert catalogue.total_samples == sum(item.samples for item in items)


def test_a_key_that_is_not_there_is_not_found():
    assert SliceCatalogue(slices([1, 2])).find("slice2") is None


def test_an_index_out_of_range_is_an_error():
    catalogue = SliceCatalogue(slices([1, 2]))
    for index in (2, -3):
        with pytest.raises(IndexError):
            catalogue[index]


@pytest.mark.parametrize("change", [{"key": "other"}, {"samples": 7}, {"url": "s3://moved"}, {"digests": bytes(8)}])
def test_other_keys_and_counts_are_other_data_and_other_places_are_not(change):
    first, second = slices([5, 9])
    here, there = SliceCatalogue([first, second]), SliceCatalogue([replace(first, **change), second])
    assert (here.digest == there.digest) == (not {"key", "samples"} & set(change))
    assert here.digest != SliceCatalogue([second, first]).digest
