"""What one process has verified, another one need not."""

from __future__ import annotations

import multiprocessing

from lightning_bytescheduler.slices.checksums import ChunkPlan, VerifiedChunks, digests_of, right_chunks

CONTENT = bytes(range(250)) * 10
PLAN = ChunkPlan(size=2500, chunk_bytes=1000, digests=digests_of(CONTENT, 1000))


def test_marks_are_of_one_file_and_chunk() -> None:
    verified = VerifiedChunks(3)
    verified.of("slice", 1).set(1)
    assert [verified.of("slice", 1).is_set(chunk) for chunk in range(3)] == [False, True, False]
    assert not verified.of("slice", 2).is_set(1)
    assert not verified.of("other", 1).is_set(1)


def test_a_process_that_was_forked_shares_them() -> None:
    verified = VerifiedChunks(100)
    process = multiprocessing.get_context("fork").Process(target=verified.of("slice").set, args=(7,))
    process.start()
    process.join(60)
    assert verified.of("slice").is_set(7)


def test_more_chunks_than_marks_are_verified_again() -> None:
    seals = VerifiedChunks(1).of("slice")
    for chunk in range(1000):
        seals.set(chunk)
    assert seals.is_set(999)
    assert not seals.is_set(0)


def test_chunks_together_end_before_one_that_is_damaged() -> None:
    damaged = memoryview(CONTENT[:2100] + b"?" + CONTENT[2101:])
    assert [len(chunk) for chunk in right_chunks(damaged, PLAN)] == [1000, 1000]
    assert [len(chunk) for chunk in right_chunks(damaged, PLAN, 1, together=True)] == [1000]
    assert [len(chunk) for chunk in right_chunks(memoryview(CONTENT), PLAN, together=True)] == [2500]
    seals = VerifiedChunks(3).of("slice")
    seals.set(2)
    assert sum(len(chunk) for chunk in right_chunks(damaged, PLAN, seals=seals)) == 2500
