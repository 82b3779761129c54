"""A fetch hands on verified bytes, in order, whatever the source answers; or it ends with an error that names it."""

from __future__ import annotations

import pickle
from functools import partial

import pytest

from lightning_bytescheduler.exceptions import SliceCorruptError, SourceUnavailableError
from lightning_bytescheduler.slices import fetch as fetch_module
from lightning_bytescheduler.slices.fetch import SliceCounters, fetch_chunks
from tests.slices.faults import CHUNK, FaultySource, VirtualTime


@pytest.fixture
def source():
    return FaultySource(1)


@pytest.fixture
def time():
    return VirtualTime()


def fetch(source, time, first=0, counters=None, timeout=60.0):
    (slice_,) = source.slices
    chunks = fetch_chunks(
        slice_,
        partial(source.read, slice_),
        first=first,
        timeout=timeout,
        waiting=time.waiting(),
        counters=counters,
    )
    return b"".join(bytes(chunk) for chunk in chunks)


def once(fault):
    """Apply a fault to the second answer only."""
    answers = []

    def apply(slice_, start, answer):
        answers.append(answer)
        return fault(answer) if len(answers) == 2 else answer

    return apply


def flip(answer: bytes) -> bytes:
    return bytes([answer[0] ^ 1]) + answer[1:]


def test_requests_grow_from_one_chunk_to_their_bound(source, time, monkeypatch):
    monkeypatch.setattr(fetch_module, "_REQUEST_BYTES", 4 * CHUNK)
    assert fetch(source, time) == source.contents["s0"]
    assert [stop - start for _, start, stop in source.asked][:3] == [CHUNK, 2 * CHUNK, 4 * CHUNK]
    assert max(stop - start for _, start, stop in source.asked) == 4 * CHUNK
    assert time.sleeps == []


def test_it_begins_with_any_chunk(source, time):
    assert fetch(source, time, first=3) == source.contents["s0"][3 * CHUNK :]
    assert source.asked[0][1] == 3 * CHUNK


@pytest.mark.parametrize(
    "fault",
    [
        flip,
        lambda answer: answer[:-1],
        lambda answer: answer[: CHUNK + 10],
        lambda answer: b"",
        lambda answer: answer + b"more",
    ],
    ids=["flipped bit", "short", "truncated download", "empty", "too long"],
)
def test_a_wrong_answer_is_fetched_again(source, time, fault):
    source.fault = once(fault)
    counters = SliceCounters()
    assert fetch(source, time, counters=counters) == source.contents["s0"]
    assert len(time.sleeps) == 1
    assert counters.snapshot().corrupt_chunks == 1


@pytest.mark.parametrize(("fault", "reason"), [(flip, "another checksum"), (lambda answer: b"", "only 0 are there")])
def test_one_that_stays_wrong_is_named(source, time, fault, reason):
    source.fault = lambda slice_, start, answer: fault(answer) if start >= 2 * CHUNK else answer
    with pytest.raises(SliceCorruptError, match=f"'s0' at test://s0.txt is corrupt.*{reason}.*3 times") as caught:
        fetch(source, time)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert source.asked[-1][1] == 3 * CHUNK or source.asked[-1][1] == 2 * CHUNK


def test_without_an_index_lengths_are_checked(time):
    source = FaultySource(1, indexed=False)
    source.fault = lambda slice_, start, answer: answer[:-1]
    with pytest.raises(SliceCorruptError, match="are there"):
        fetch(source, time)


def test_a_source_that_is_gone_for_five_seconds_loses_nothing(source, time):
    def away(slice_, start, answer):
        if 0.0 < time.now < 5.0 or (start and not time.now):
            time.now += 0.01
            raise ConnectionError("gone")
        return answer

    source.fault = away
    assert fetch(source, time) == source.contents["s0"]
    assert 5.0 <= time.now < 12.6, "five seconds and the longest pause, of 7.5"
    assert all(0.5 <= pause / usual < 1.5 for pause, usual in zip(time.sleeps, [0.1, 0.2, 0.4, 0.8], strict=False))


def test_one_that_stays_away_is_an_error_with_url_and_time(source, time):
    def away(*_):
        raise ConnectionError("gone")

    source.fault = away
    with pytest.raises(SourceUnavailableError, match=r"test://s0.txt .*30.0 s.*ConnectionError: gone") as caught:
        fetch(source, time, timeout=30.0)
    assert time.now == pytest.approx(30.0)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("seconds", [0.0, 20.0])
def test_a_source_that_does_not_answer_is_told_once_and_early(source, time, caplog, seconds):
    """Also if each request takes long to fail, so that there are few."""

    def away(*_):
        time.now += seconds
        raise ConnectionError("gone")

    source.fault = away
    with pytest.raises(SourceUnavailableError):
        fetch(source, time)
    (message,) = caplog.messages
    assert message == "test://s0.txt does not answer: ConnectionError: gone. It is asked again, for 60 s in all."


def test_a_file_that_stays_missing_is_waited_for(source, time):
    def missing(*_):
        raise FileNotFoundError("s0.txt")

    source.fault = missing
    with pytest.raises(SourceUnavailableError, match=r"60\.0 s.*FileNotFoundError: s0\.txt"):
        fetch(source, time)


def test_a_missing_library_is_not_waited_for(source, time):
    def no_library(*_):
        raise ImportError("Install s3fs")

    source.fault = no_library
    with pytest.raises(ImportError, match="s3fs"):
        fetch(source, time)
    assert time.sleeps == []


def test_hours_of_asking(source, time):
    def away(*_):
        raise ConnectionError("gone")

    source.fault = away
    with pytest.raises(SourceUnavailableError, match=r"10800\.0 s"):
        fetch(source, time, timeout=3 * 3600.0)
    assert 5.0 < max(time.sleeps) < 7.5
    assert len(source.asked) == len(time.sleeps) + 1 > 1800


def test_stopping_a_pause_ends_the_fetch(source, time, monkeypatch):
    class Stopped(Exception):
        pass

    def away(*_):
        raise ConnectionError("gone")

    def stop(seconds):
        raise Stopped

    source.fault = away
    monkeypatch.setattr(time, "sleep", stop)
    with pytest.raises(Stopped):
        fetch(source, time)
    assert len(source.asked) == 1
