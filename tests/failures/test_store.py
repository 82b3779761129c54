from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist

from lightning_bytescheduler.exceptions import RankFailedError, SchedulerTimeoutError
from lightning_bytescheduler.failures import rendezvous as store_module
from lightning_bytescheduler.failures.rendezvous import Meeting, StorePresence, connect_to_store


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))


def test_presence_ends_with_the_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as host:
        presence = StorePresence(*host.getsockname())
        served, _ = host.accept()
        assert not presence.gone()
        served.close()
        deadline = time.monotonic() + 60.0
        while not presence.gone() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert presence.gone()
        presence.close()
        presence.close()
        assert presence.gone()


def test_a_store_without_connections_is_always_there() -> None:
    connection, presence = connect_to_store(dist.PrefixStore("default", dist.HashStore()))
    connection.set("a", "b")
    assert not presence.gone()


def test_ranks_share_a_name_space_that_no_other_group_has(store: dist.TCPStore) -> None:
    first = connect_to_store(dist.PrefixStore("attempt 0", store))
    second = connect_to_store(dist.PrefixStore("attempt 0", store))
    other = connect_to_store(dist.PrefixStore("attempt 1", store))
    first[0].set("key", "value")
    assert second[0].check(["key"])
    assert not other[0].check(["key"])
    for _, presence in (first, second, other):
        assert not presence.gone()
        presence.close()


def test_a_store_that_is_gone_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch, store: dist.TCPStore) -> None:
    def refuse(*_: object) -> StorePresence:
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(store_module, "StorePresence", lambda *place: refuse() if place else StorePresence())
    with pytest.raises(
        RankFailedError,
        match=r"^Rank 0 failed: its process is gone, and the rendezvous store with it; this broke here: refused",
    ):
        connect_to_store(store)


def meet(store: dist.Store, rank: int, *, world_size: int, timeout: float) -> dist.Store:
    meeting = Meeting(rank=rank, world_size=world_size, strategy="bytescheduler", timeout=timeout)
    return meeting.on(store)


@pytest.mark.parametrize("late", [0, 1])
def test_each_start_has_a_part_of_the_store_of_its_own(late: int) -> None:
    """Whichever comes last: ranks that come before the first one find the name of the start before."""
    store = dist.HashStore()
    for start, size in enumerate((3, 2, 4, 1, 3)):

        def join(rank: int, size: int = size) -> dist.Store:
            time.sleep(0.1 if rank == late else 0.0)
            return meet(store, rank, world_size=size, timeout=60.0)

        with ThreadPoolExecutor(size) as pool:
            parts = list(pool.map(join, range(size)))
        assert not any(part.check(["start"]) for part in parts)
        parts[0].set("start", str(start))
        assert [part.get("start") for part in parts] == [str(start).encode()] * size


def test_ranks_do_not_go_on_with_the_name_of_a_start_that_is_gone(store: dist.TCPStore) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(partial(meet, store, world_size=2, timeout=60.0), range(2)))
    with pytest.raises(SchedulerTimeoutError, match=r"After 0 s, rank 1 of 2 still waits for rank 0"):
        meet(store, 1, world_size=2, timeout=0.1)
    with pytest.raises(SchedulerTimeoutError, match="ranks 1, 2, 3 of 4 did not join"):
        meet(store, 0, world_size=4, timeout=0.1)
