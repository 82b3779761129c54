"""The benchmark of slices runs and counts; what it measures is not judged here."""

from __future__ import annotations

from benchmarks.slices import fit_stall, stall, throughput


def test_throughput():
    found = throughput(rows=1000, columns=8, rounds=1)
    assert found["slices / mapped"] > 0
    assert found["data module / mapped"] > 0


def test_stall():
    found = stall(slices=4, slice_bytes=64 * 1024, seconds_per_slice=0.01, latency=0.001)
    assert found["hits"] + found["misses"] == 8
    assert found["spent on reading after it [%]"] >= found["waited after it [%]"] >= 0


def test_a_fit():
    found = fit_stall(slices=4, slice_bytes=1024 * 1024, seconds_per_slice=0.01, latency=0.001)
    assert found["hits"] + found["misses"] == 8
    assert found["waited for batches after it [%]"] >= found["of that, for bytes [%]"] >= 0
