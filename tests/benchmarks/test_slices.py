"""The benchmark of slices runs and counts; what it measures is not judged here."""

from __future__ import annotations

import pytest

from benchmarks.slices import compare_loaders, fit_stall


@pytest.mark.slow
def test_loaders_read_every_sample() -> None:
    records = compare_loaders(samples=200, workers=(0,), rounds=1)
    assert records[-1].what == "slices, 0 workers"
    assert all(one.medians["seen"] == 200 for one in records)


def test_a_fit() -> None:
    found = fit_stall(slices=4, slice_bytes=1024 * 1024, seconds_per_slice=0.01, latency=0.001)
    assert found["hits"] + found["misses"] == 8
    assert found["waited for batches after it [%]"] >= found["of that, for bytes [%]"] >= 0
