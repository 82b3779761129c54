"""Orders are permutations that never change."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_bytescheduler.slices.catalogue import sample_order, slice_order


def test_orders_are_the_same_on_every_platform_and_in_every_release():
    assert slice_order(10, seed=1, epoch=2).tolist() == [4, 2, 0, 6, 1, 5, 9, 8, 7, 3]
    assert sample_order(10, seed=1, epoch=2, slice_index=0).tolist() == [3, 1, 5, 8, 9, 6, 0, 7, 2, 4]


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_an_order_is_a_permutation(count):
    assert sorted(slice_order(count, seed=5, epoch=0)) == list(range(count))
    assert sorted(sample_order(count, seed=5, epoch=0, slice_index=3)) == list(range(count))


def test_orders_of_seeds_epochs_and_slices_differ():
    orders = [slice_order(100, seed=seed, epoch=epoch).tolist() for seed in (0, 1, 2**64 - 1) for epoch in (0, 1)]
    orders += [sample_order(100, seed=0, epoch=0, slice_index=index).tolist() for index in (0, 1)]
    assert len({tuple(order) for order in orders}) == len(orders)


def test_every_place_is_as_likely():
    places = np.zeros((8, 8))
    for epoch in range(2000):
        places[np.arange(8), slice_order(8, seed=0, epoch=epoch)] += 1
    assert abs(places - 250).max() < 80  # five standard deviations
