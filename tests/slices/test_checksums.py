"""Chunks are yielded as long as they are right."""

from __future__ import annotations

from lightning_bytescheduler.slices.slice import ChunkPlan, digests_of, right_chunks

CONTENT = bytes(range(250)) * 10
PLAN = ChunkPlan(size=2500, chunk_bytes=1000, digests=digests_of(CONTENT, 1000))


def test_chunks_together_end_before_one_that_is_damaged() -> None:
    damaged = memoryview(CONTENT[:2100] + b"?" + CONTENT[2101:])
    assert [len(chunk) for chunk in right_chunks(damaged, PLAN)] == [1000, 1000]
    assert [len(chunk) for chunk in right_chunks(damaged, PLAN, 1, together=True)] == [1000]
    assert [len(chunk) for chunk in right_chunks(memoryview(CONTENT), PLAN, together=True)] == [2500]
