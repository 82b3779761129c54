"""The cache stays within its bound, keeps what is in use, and survives whatever happens to those who write it."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import time
from pathlib import Path

import pytest

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices import cache as cache_module
from lightning_bytescheduler.slices.cache import CacheFull, DiskFailed, SliceCache
from lightning_bytescheduler.slices.slice import Slice, digests_of

# Forking is intended: forked processes share open files.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def plan(name: str, size: int = 2500) -> Slice:
    digests = digests_of(name[:1].encode() * size, 1000)
    return Slice(key=name, url=name, size=size, samples=1, chunk_bytes=1000, digests=digests)


PLAN = plan("none")
SIZE = PLAN.size


def chunks(letter: str) -> list[bytes]:
    return [letter.encode() * (stop - start) for start, stop in map(PLAN.bounds, range(PLAN.count))]


def put(cache: SliceCache, name: str):
    writer = cache.begin(plan(name))
    for chunk in chunks(name):
        writer.write(chunk)
    return writer.commit()


def held(cache: SliceCache, name: str) -> list[bytes] | None:
    cached = cache.find(plan(name))
    if cached is None:
        return None
    content = [bytes(chunk) for chunk in cached.chunks(0)]
    cached.close()
    return content


def names(cache: SliceCache) -> set[str]:
    by_name = {plan(letter).name: letter for letter in "abcdpq"}
    return {by_name[path.stem] for path in cache.folder.glob("*.slice")}


def file_of(folder: Path, name: str) -> Path:
    return folder / f"{plan(name).name}.slice"


def test_what_is_put_is_found(tmp_path):
    cache = SliceCache(tmp_path, 10 * SIZE)
    put(cache, "a").close()
    assert held(cache, "a") == chunks("a")
    assert held(SliceCache(tmp_path, 10 * SIZE), "a") == chunks("a")
    assert held(cache, "b") is None
    assert cache.begin(plan("a")) is None


def test_the_longest_unused_goes_first(tmp_path):
    cache = SliceCache(tmp_path, 3 * SIZE)
    for age, name in enumerate("abc"):
        put(cache, name).close()
        os.utime(file_of(tmp_path, name), (1000 + age, 1000 + age))
    assert held(cache, "a") == chunks("a")
    put(cache, "d").close()
    assert names(cache) == {"a", "c", "d"}
    assert sum(path.stat().st_size for path in tmp_path.glob("*.slice")) <= cache.capacity_bytes


def test_what_is_in_use_stays(tmp_path):
    cache = SliceCache(tmp_path, 2 * SIZE)
    used = put(cache, "a")
    other = put(SliceCache(tmp_path, 2 * SIZE), "b")
    with pytest.raises(CacheFull, match="no room"):
        cache.begin(plan("c"))
    other.close()
    put(cache, "c").close()
    assert names(cache) == {"a", "c"}
    used.close()


def test_nothing_is_deleted_where_that_would_not_be_enough(tmp_path):
    cache = SliceCache(tmp_path, 3 * SIZE)
    used = [put(cache, "a"), put(cache, "b")]
    put(cache, "c").close()
    with pytest.raises(CacheFull):
        cache.begin(plan("d", 5000))
    assert held(cache, "c") == chunks("c")
    for cached in used:
        cached.close()


def test_what_is_being_written_counts_with_its_full_size(tmp_path):
    cache = SliceCache(tmp_path, 2 * SIZE)
    first, second = cache.begin(plan("a")), cache.begin(plan("b"))
    assert cache.begin(plan("a")) is None
    with pytest.raises(CacheFull):
        cache.begin(plan("c"))
    first.abandon()
    cache.begin(plan("c")).abandon()
    second.abandon()
    assert list(tmp_path.glob("*.partial")) == []


def test_another_follows_what_is_being_written(tmp_path):
    cache = SliceCache(tmp_path, 2 * SIZE)
    writer = cache.begin(plan("a"))
    growing = SliceCache(tmp_path, 2 * SIZE).follow(plan("a"))
    assert growing.chunk(0) is None
    writer.write(chunks("a")[0])
    assert growing.chunk(0) == chunks("a")[0]
    assert growing.chunk(1) is None
    for chunk in chunks("a")[1:]:
        writer.write(chunk)
    writer.commit().close()
    assert growing.chunk(2) == chunks("a")[2]
    growing.close()
    assert cache.follow(plan("a")) is None


def test_chunks_are_read_into_the_memory_of_their_slice(tmp_path):
    cache, content = SliceCache(tmp_path, SIZE), bytearray(SIZE)
    put(cache, "a").close()
    with cache.find(plan("a")) as cached:
        read = list(cached.chunks(1, memoryview(content)))
    assert content == bytes(1000) + b"".join(chunks("a")[1:])
    assert read == chunks("a")[1:]
    content[1500:] = bytes(SIZE - 1500)
    assert read[0] == b"a" * 500 + bytes(500), "not a copy"


@pytest.mark.parametrize("at", [0, 1500, 2499])
def test_a_flipped_bit_on_the_disk_ends_the_chunks_before_it(tmp_path, at):
    cache = SliceCache(tmp_path, SIZE)
    put(cache, "a").close()
    content = bytearray(file_of(tmp_path, "a").read_bytes())
    content[at] ^= 1
    file_of(tmp_path, "a").write_bytes(content)
    cached = cache.find(plan("a"))
    assert len(list(cached.chunks(0))) == at // 1000
    cached.close()
    cache.discard(plan("a"))
    assert names(cache) == set()


def test_a_file_that_is_cut_short_is_deleted(tmp_path):
    cache = SliceCache(tmp_path, SIZE)
    put(cache, "a").close()
    file_of(tmp_path, "a").write_bytes(file_of(tmp_path, "a").read_bytes()[:-1])
    assert cache.find(plan("a")) is None
    assert names(cache) == set()


def test_a_disk_that_is_full_before_the_limit_makes_room_and_then_gives_up(tmp_path, monkeypatch):
    cache = SliceCache(tmp_path, 10 * SIZE)
    put(cache, "a").close()
    used = put(cache, "b")
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(cache_module.shutil, "disk_usage", lambda _: usage(0, 0, (2 - len(names(cache))) * SIZE))
    put(cache, "c").close()
    assert names(cache) == {"b", "c"}
    used_too = cache.find(plan("c"))
    with pytest.raises(DiskFailed, match="has no room"):
        cache.begin(plan("d"))
    used.close()
    used_too.close()
    assert not list(tmp_path.glob("*.partial"))


def test_what_others_write_counts_on_a_disk_that_is_nearly_full(tmp_path, monkeypatch):
    cache = SliceCache(tmp_path, 10 * SIZE)
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(cache_module.shutil, "disk_usage", lambda _: usage(0, 0, SIZE + 1))
    writer = cache.begin(plan("a"))
    with pytest.raises(DiskFailed, match="has no room"):
        cache.begin(plan("b"))
    writer.abandon()


def test_a_quota_that_is_used_up_makes_room_and_then_gives_up(tmp_path, monkeypatch):
    """The disk has room, of which this user gets no more."""
    pwrite = os.pwrite

    def limited(descriptor, content, at):
        if len(names(cache)) > 1:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return pwrite(descriptor, content, at)

    cache = SliceCache(tmp_path, 10 * SIZE)
    put(cache, "a").close()
    used = put(cache, "b")
    monkeypatch.setattr(cache_module.os, "pwrite", limited)
    put(cache, "c").close()
    assert names(cache) == {"b", "c"}
    writer, used_too = cache.begin(plan("d")), cache.find(plan("c"))
    with pytest.raises(DiskFailed, match="quota exceeded"):
        writer.write(chunks("d")[0])
    writer.abandon()
    used.close()
    used_too.close()
    assert not list(tmp_path.glob("*.partial"))


def test_a_disk_that_fails_in_mid_write_is_told(tmp_path, monkeypatch):
    def full(descriptor, content, at):
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = SliceCache(tmp_path, 10 * SIZE)
    monkeypatch.setattr(cache_module.os, "pwrite", full)
    writer = cache.begin(plan("a"))
    with pytest.raises(DiskFailed, match="No space left"):
        writer.write(chunks("a")[0])
    writer.abandon()
    assert not list(tmp_path.glob("*.partial"))


def _other(folder: Path, what: str, ready) -> None:
    cache = SliceCache(folder, 10**6)
    if what == "write":
        writer = cache.begin(plan("a"))
        writer.write(b"x" * 1000)
        ready.set()
        time.sleep(600)  # until it is killed
    elif what == "lock":
        with cache.locked():
            ready.set()
            time.sleep(600)  # until it is killed
    else:
        pinned = cache.find(plan("p"))
        ready.set()
        time.sleep(600)  # until it is killed
        pinned.close()


def other_process(folder: Path, what: str):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=_other, args=(folder, what, ready))
    process.start()
    assert ready.wait(60)
    return process


def kill(process) -> None:
    process.kill()
    process.join()


def test_kill_9_in_mid_write_leaves_nothing_behind(tmp_path):
    writer = other_process(tmp_path, "write")
    try:
        (partial,) = tmp_path.glob("*.partial")
        cache = SliceCache(tmp_path, 10**6)  # the writer lives: its file stays
        assert partial.exists()
        assert cache.begin(plan("a")) is None
        assert held(cache, "a") is None
    finally:
        kill(writer)
    assert partial.exists()
    put(cache, "a").close()  # not even a new start is needed
    assert held(cache, "a") == chunks("a")
    partial.write_bytes(b"x" * 1000)
    SliceCache(tmp_path, 10**6)
    assert not partial.exists()


def test_locks_of_dead_processes_do_not_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "_LOCK_SECONDS", 3600.0)
    cache = SliceCache(tmp_path, SIZE)
    put(cache, "p").close()
    owner = other_process(tmp_path, "lock")
    kill(owner)
    pinning = other_process(tmp_path, "pin")
    try:
        with pytest.raises(CacheFull):
            SliceCache(tmp_path, SIZE).begin(plan("q"))
    finally:
        kill(pinning)
    put(cache, "q").close()
    assert names(cache) == {"q"}


def test_misuse(tmp_path):
    with pytest.raises(OptionError, match="cache"):
        SliceCache(tmp_path, 0)
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=r"cache=.*can be made and written, but it is a file"):
        SliceCache(tmp_path / "file", 10)


def test_a_slice_that_is_deleted_as_it_is_opened_is_not_found(tmp_path, monkeypatch):
    """Another process may delete it between the opening and the lock; its memory would not be kept from others."""
    cache = SliceCache(tmp_path, 10 * SIZE)
    put(cache, "a").close()
    lock = cache_module.lock_file

    def late(descriptor: int, *, exclusive: bool) -> bool:
        file_of(tmp_path, "a").unlink(missing_ok=True)
        return lock(descriptor, exclusive=exclusive)

    monkeypatch.setattr(cache_module, "lock_file", late)
    assert cache.find(plan("a")) is None
