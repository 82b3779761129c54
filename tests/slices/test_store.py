"""Samples come from verified chunks, before the whole slice is local, whatever happens on the way; none is lost."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import errno
import itertools
import multiprocessing
import os
import pickle
import threading
import time
import warnings

import fsspec
import numpy as np
import pytest
from fsspec.asyn import AsyncFileSystem

from lightning_bytescheduler.exceptions import (
    ByteSchedulerError,
    OptionError,
    SliceCorruptError,
    SourceUnavailableError,
)
from lightning_bytescheduler.slices import cache, fetch, urls
from lightning_bytescheduler.slices.formats import format_of
from lightning_bytescheduler.slices.options import StoreOptions
from lightning_bytescheduler.slices.slice import Slice, digests_of
from lightning_bytescheduler.slices.source import SliceSource, open_source
from tests.slices.faults import CHUNK, FaultySource, Store, VirtualTime, lines

# Forking is intended: forked processes share open files.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

SLICE_BYTES = 20_000
LONG = 60.0


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "_REQUEST_BYTES", 4 * CHUNK)
    return StoreOptions(str(tmp_path / "cache"), 10 * SLICE_BYTES, LONG)


def until(condition) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def cached_names(options: StoreOptions) -> list[str]:
    return [name for name in os.listdir(options.cache_dir) if name.endswith(".slice")]


def test_all_samples_and_the_second_time_from_the_cache(options):
    source = FaultySource(3)
    with Store(source, options) as store:
        for _ in range(2):
            for number, slice_ in enumerate(source.slices):
                assert list(store.samples(slice_)) == lines(number)
            until(lambda: len(cached_names(options)) == 3)  # a slice can be read before it is durable
        statistics = store.statistics
    assert (statistics.cache_misses, statistics.cache_hits) == (3, 3)
    assert statistics.bytes_fetched == sum(map(len, source.contents.values()))


@pytest.mark.parametrize("first", [0, 1, 99, 499, 500])
@pytest.mark.parametrize("cached", [True, False])
def test_it_begins_with_any_sample(options, first, cached):
    source = FaultySource(1)
    with Store(source, options if cached else None) as store:
        for _ in range(2):
            assert list(store.samples(source.slices[0], first)) == lines(0)[first:]


@pytest.mark.parametrize("cached", [True, False])
def test_samples_come_before_the_slice_is_local(options, cached):
    source = FaultySource(1)
    held = threading.Event()

    def slow(slice_, start, answer):
        if start >= 3 * CHUNK:
            assert held.wait(LONG)
        return answer

    source.fault = slow
    with Store(source, options if cached else None) as store:
        samples = store.samples(source.slices[0])
        assert [next(samples) for _ in range(50)] == lines(0)[:50]
        held.set()
        assert list(samples) == lines(0)[50:]


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(
    "fault",
    [lambda answer: answer[:-1], lambda answer: answer[:700], lambda answer: bytes([answer[0] ^ 1]) + answer[1:]],
    ids=["truncated", "cut short", "flipped bit"],
)
def test_wrong_answers_are_fetched_again_and_nothing_wrong_is_yielded(options, cached, fault):
    source = FaultySource(2)
    source.fault = lambda slice_, start, answer: fault(answer) if len(source.asked) % 2 else answer
    clock = VirtualTime()
    with Store(source, options if cached else None, waiting=clock.waiting()) as store:
        for number, slice_ in enumerate(source.slices):
            assert list(store.samples(slice_)) == lines(number)
        assert store.statistics.corrupt_chunks > 0


@pytest.mark.parametrize("cached", [True, False])
def test_a_slice_that_stays_corrupt_is_named_and_the_next_one_is_read(options, cached):
    source = FaultySource(2)
    source.fault = lambda slice_, start, answer: b"x" * len(answer) if slice_.key == "s0" and start else answer
    with Store(source, options if cached else None, waiting=VirtualTime().waiting()) as store:
        read: list[str] = []
        with pytest.raises(SliceCorruptError, match=r"'s0' at test://s0\.txt"):
            read.extend(store.samples(source.slices[0]))
        assert read == lines(0)[: len(read)]
        assert list(store.samples(source.slices[1])) == lines(1)


def test_a_file_that_becomes_shorter_while_it_is_read_is_an_error_that_names_it(options, tmp_path):
    text = "".join(f"{line}\n" for line in lines(0, 2000))
    path = tmp_path / "rewritten.txt"
    path.write_text(text)
    content = text.encode()
    digests = digests_of(content, CHUNK)
    slice_ = Slice(key="a", url=str(path), size=len(content), samples=2000, digests=digests, chunk_bytes=CHUNK)
    source = SliceSource([slice_], {slice_.url: format_of(slice_.url)}, {})
    with Store(source, options, waiting=VirtualTime().waiting()) as store:
        read = store.samples(slice_)
        assert next(read) == lines(0)[0]
        path.write_bytes(b"")
        with pytest.raises(SliceCorruptError, match=r"rewritten\.txt"):
            list(read)


def test_a_file_that_is_cut_short_while_its_samples_are_picked_does_no_harm(tmp_path):
    """A process ends at once where a file that it has mapped becomes shorter: all of a slice is read before."""
    path = tmp_path / "a.npy"
    np.save(path, np.arange(100_000))
    source = open_source(str(path))
    with Store(source) as store, contextlib.closing(store.open(source.slices[0], whole=True)) as opened:
        numbers = np.arange(100_000)[::-1]
        (first,) = opened.pick(numbers[:10])
        path.write_bytes(b"")
        (rest,) = opened.pick(numbers[10:])
    assert [*first, *rest] == numbers.tolist()


@pytest.mark.parametrize("cached", [True, False])
def test_a_cache_that_damages_what_it_is_given_is_read_past(cached, options, monkeypatch):
    source = FaultySource(1)
    monkeypatch.setattr(cache.SliceFile, "chunk", lambda self, number, memory=None: None)
    with Store(source, options if cached else None) as store:
        assert list(store.samples(source.slices[0])) == lines(0)


@pytest.mark.parametrize("cached", [True, False])
def test_a_source_gone_for_five_seconds(options, cached):
    source, clock = FaultySource(1), VirtualTime()

    def away(slice_, start, answer):
        if start and clock.now < 5.0:
            raise OSError("gone")
        return answer

    source.fault = away
    with Store(source, options if cached else None, waiting=clock.waiting()) as store:
        assert list(store.samples(source.slices[0])) == lines(0)
    assert clock.now >= 5.0


@pytest.mark.parametrize("cached", [True, False])
def test_a_source_that_stays_away_is_an_error(options, cached):
    source = FaultySource(1)

    def away(*_):
        raise OSError("gone")

    source.fault = away
    store = Store(source, options if cached else None, waiting=VirtualTime().waiting())
    with store, pytest.raises(SourceUnavailableError, match=r"test://s0\.txt.*60\.0 s.*OSError: gone"):
        list(store.samples(source.slices[0]))


def test_a_request_that_never_returns_is_an_error_and_no_hang(tmp_path):
    source, held = FaultySource(1), threading.Event()
    source.fault = lambda slice_, start, answer: answer if held.wait(LONG) else b""
    store = Store(source, StoreOptions(str(tmp_path), 10**6, 0.1))
    try:
        with pytest.raises(SourceUnavailableError, match="a request that has not returned"):
            list(store.samples(source.slices[0]))
    finally:
        held.set()
        store.close()


class Hanging(AsyncFileSystem):  # type: ignore[misc]
    """Answers after the wait has ended."""

    protocol = "hanging"

    async def _cat_file(self, path, start=None, end=None, **_):
        await asyncio.sleep(5.0)
        return b""


def test_past_the_cache_too_a_request_that_never_returns_is_an_error(monkeypatch):
    fsspec.register_implementation("hanging", Hanging, clobber=True)
    monkeypatch.setattr(urls, "_REQUEST_SECONDS", 0.2)
    slice_ = Slice(key="a", url="hanging://a.txt", size=10, samples=1)
    source = SliceSource([slice_], {slice_.url: format_of(slice_.url)}, {})
    store = Store(source, StoreOptions(timeout=0.1))
    with store, pytest.raises(SourceUnavailableError, match="FSTimeoutError"):
        list(store.samples(slice_))


def test_a_flipped_bit_in_the_cache_is_fetched_again(options):
    source = FaultySource(1)
    with Store(source, options) as store:
        assert list(store.samples(source.slices[0])) == lines(0)
        until(lambda: cached_names(options))
        (name,) = cached_names(options)
        path = f"{options.cache_dir}/{name}"
        with open(path, "r+b") as file:
            file.seek(5 * CHUNK)
            file.write(b"\0")
        assert list(store.samples(source.slices[0])) == lines(0)
        assert store.statistics.corrupt_chunks == 1
        until(lambda: cached_names(options))
        assert list(store.samples(source.slices[0])) == lines(0)
        assert store.statistics.cache_hits == 2


@pytest.mark.parametrize("at", [0, 5 * CHUNK, -1])
def test_a_whole_slice_is_made_of_what_is_right_in_the_cache_and_of_what_is_fetched(options, at):
    source = FaultySource(1)
    with Store(source, options) as store:
        assert list(store.samples(source.slices[0])) == lines(0)
        until(lambda: cached_names(options))
        path = f"{options.cache_dir}/{cached_names(options)[0]}"
        with open(path, "r+b") as file:
            file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
            file.write(b"?")
        with contextlib.closing(store.open(source.slices[0], whole=True)) as opened:
            assert list(itertools.chain.from_iterable(opened.pick(np.arange(500)))) == lines(0)
        assert store.statistics.corrupt_chunks == 1


@pytest.mark.parametrize("after_chunks", [0, 5])
def test_a_full_disk_streams_past_the_cache_with_one_warning(options, monkeypatch, after_chunks):
    def full(descriptor, content, at, pwrite=os.pwrite):
        if at >= after_chunks * CHUNK:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, content, at)

    monkeypatch.setattr(cache.os, "pwrite", full)
    source = FaultySource(2)
    with Store(source, options) as store, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store.prefetch(source.slices)
        for number, slice_ in enumerate(source.slices):
            assert list(store.samples(slice_)) == lines(number)
        assert store.statistics.uncached == 2
    (warning,) = caught
    assert "No space left" in str(warning.message)
    assert "loses nothing" in str(warning.message)
    assert os.listdir(options.cache_dir) in (["cache.lock"], [])


def test_a_cache_without_room_beside_what_is_in_use(options, tmp_path):
    source = FaultySource(2)
    small = StoreOptions(str(tmp_path / "small"), SLICE_BYTES)
    with Store(source, small) as store:
        outer = store.samples(source.slices[0])
        assert next(outer) == lines(0)[0]
        assert list(store.samples(source.slices[1])) == lines(1)
        assert list(outer) == lines(0)[1:]


def test_planned_slices_are_local_before_they_are_wanted(options):
    source = FaultySource(6)
    with Store(source, options) as store:
        store.prefetch(source.slices[1:])
        until(lambda: store.statistics.prefetched >= 2)
        for number, slice_ in enumerate(source.slices[1:], start=1):
            until(lambda slice_=slice_: store.prefetcher.cache.has(slice_))  # they come in any order
            assert list(store.samples(slice_)) == lines(number)
        assert store.statistics.cache_hits == 5
        assert store.depth >= 1


def test_what_is_planned_stays_in_a_cache_that_others_fill(options, tmp_path):
    source = FaultySource(5)
    small = StoreOptions(str(tmp_path / "small"), 3 * SLICE_BYTES)
    with Store(source, small) as store:
        store.prefetch(source.slices[:1])
        until(lambda: store.statistics.prefetched == 1)
        with Store(source, small) as other:
            for number in range(1, 5):
                assert list(other.samples(source.slices[number])) == lines(number)
        assert list(store.samples(source.slices[0])) == lines(0)
        assert store.statistics.cache_hits == 1


def test_a_slice_stays_cached_though_its_reader_stops_at_its_last_chunk(options, monkeypatch):
    source, stopped, slice_bytes = FaultySource(1), threading.Event(), len(FaultySource(1).contents["s0"])
    write = cache.SliceWriter.write
    written = 0

    def write_and_be_read(self, chunk):
        nonlocal written
        write(self, chunk)
        written += len(chunk)
        if written == slice_bytes:
            stopped.wait(LONG)

    monkeypatch.setattr(cache.SliceWriter, "write", write_and_be_read)
    with Store(source, options) as store:
        assert list(store.samples(source.slices[0])) == lines(0)
        store.prefetcher._stopped.set()  # as its end does, before it waits for the threads
        stopped.set()
    with Store(source, options) as store:
        assert store.prefetcher.cache.has(source.slices[0])


def test_a_wanted_slice_does_not_stand_behind_plans(options):
    source, held = FaultySource(4), threading.Event()
    source.fault = lambda slice_, start, answer: answer if slice_.key == "s3" or held.wait(LONG) else b""
    with Store(source, options) as store:
        store.prefetch(source.slices[:3])
        until(lambda: source.asked)
        assert list(store.samples(source.slices[3])) == lines(3)
        held.set()


def _read_in_another_process(options, gate, results):
    source = FaultySource(2)

    def slow(slice_, start, answer):
        time.sleep(0.01)
        return answer

    source.fault = slow
    gate.wait(LONG)
    with Store(source, options) as store:
        right = [list(store.samples(slice_)) == lines(number) for number, slice_ in enumerate(source.slices)]
        results.put((right, store.statistics.bytes_fetched))


def test_two_processes_fetch_a_slice_once(options):
    context = multiprocessing.get_context("fork")
    gate, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_read_in_another_process, args=(options, gate, results)) for _ in range(2)]
    for process in processes:
        process.start()
    found = [results.get(timeout=LONG) for _ in processes]
    for process in processes:
        process.join(LONG)
    assert [right for right, _ in found] == [[True, True]] * 2
    assert sum(fetched for _, fetched in found) == sum(map(len, FaultySource(2).contents.values()))


def _read_after_fork(store, results):
    results.put([list(store.samples(slice_)) == lines(n) for n, slice_ in enumerate(store.source.slices)])
    store.close()


def test_a_copy_begins_anew_in_a_forked_process(options):
    source = FaultySource(3)
    with Store(source, options) as store:
        store.prefetch(source.slices[:2])
        assert list(store.samples(source.slices[2])) == lines(2)
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        process = context.Process(target=lambda: _read_after_fork(copy.copy(store), results))
        process.start()
        assert results.get(timeout=LONG) == [True] * 3
        process.join(LONG)
        assert list(store.samples(source.slices[0])) == lines(0)


def test_a_store_can_be_sent_to_another_process(options):
    with Store(FaultySource(1), options) as store, pickle.loads(pickle.dumps(store)) as other:
        assert list(other.samples(other.source.slices[0])) == lines(0)


def test_a_reader_asks_anew_where_a_planned_fetch_has_failed(options):
    source, away = FaultySource(1), True

    def fault(slice_, start, answer):
        if away:
            raise OSError("gone")
        return answer

    source.fault = fault
    with Store(source, options, waiting=VirtualTime().waiting()) as store:
        store.prefetch(source.slices)
        until(lambda: any(fetch.error for fetch in store.prefetcher._fetches.values()))
        away = False
        assert list(store.samples(source.slices[0])) == lines(0)


def test_nothing_is_planned_while_a_store_is_closed(options):
    source = FaultySource(2)
    with Store(source, options) as store:
        prefetcher = store.prefetcher
    prefetcher.plan(source.slices)
    assert not prefetcher._fetches
    assert not source.asked


def test_its_threads_end_with_it(options):
    source = FaultySource(4)
    store = Store(source, options)
    store.prefetch(source.slices)
    samples = store.samples(source.slices[0])
    next(samples)
    samples.close()
    store.close()
    assert not [thread for thread in threading.enumerate() if "slice-fetch" in thread.name]
    with pytest.raises(ByteSchedulerError, match="closed"):
        list(store.samples(source.slices[0]))


def test_a_cache_smaller_than_a_slice_is_an_error_at_start(tmp_path):
    with pytest.raises(OptionError, match=r"cache=.*1000.* is not allowed.*largest slice, 's0'"):
        Store(FaultySource(1), StoreOptions(str(tmp_path), 1000))
