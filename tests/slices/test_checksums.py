"""Chunks are yielded as long as they are right."""

from __future__ import annotations

from lightning_bytescheduler.slices.slice import Slice, digests_of

CONTENT = bytes(range(250)) * 10
SLICE = Slice(key="a", url="a", size=2500, samples=1, chunk_bytes=1000, digests=digests_of(CONTENT, 1000))


def test_chunks_together_end_before_one_that_is_damaged() -> None:
    damaged = memoryview(CONTENT[:2100] + b"?" + CONTENT[2101:])
    assert [len(chunk) for chunk in SLICE.right_chunks(damaged)] == [1000, 1000]
    assert [len(chunk) for chunk in SLICE.right_chunks(damaged, 1, together=True)] == [1000]
    assert [len(chunk) for chunk in SLICE.right_chunks(memoryview(CONTENT), together=True)] == [2500]
