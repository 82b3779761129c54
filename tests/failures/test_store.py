from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist

from lightning_bytescheduler.exceptions import RankFailedError, SchedulerTimeoutError
from lightning_bytescheduler.failures import rendezvous as store_module
from lightning_bytescheduler.failures.messages import FaultNotice
from lightning_bytescheduler.failures.rendezvous import Meeting, StorePresence, connect_to_store, open_board


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

    monkeypatch.setattr(store_module, "StorePresence", lambda *arguments: refuse() if arguments else None)
    with pytest.raises(
        RankFailedError,
        match=r"^Rank 0 failed: its process is gone, and the rendezvous store with it; 127.0.0.1:\d+ .*refused",
    ):
        connect_to_store(store)


def test_boards_follow_one_another(store: dist.TCPStore) -> None:
    presence = StorePresence()
    boards = [[open_board(store, presence, rank=rank, world_size=2) for rank in range(2)] for _ in range(2)]
    boards[0][0].set("fault", "x")
    assert boards[0][1].check(["fault"])
    assert not boards[1][1].check(["fault"])


def test_after_a_failure_ranks_wait_for_one_another(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    presence = StorePresence()
    failed, _ = (open_board(store, presence, rank=rank, world_size=2) for rank in range(2))
    failed.set("fault", FaultNotice(rank=1, cause="ValueError: boom", by=1).encode())
    monkeypatch.setattr(store_module, "_REUNION_S", 120.0)
    waiting = threading.Thread(target=open_board, args=(store, presence), kwargs={"rank": 0, "world_size": 2})
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    open_board(store, presence, rank=1, world_size=2)
    waiting.join(60.0)
    assert not waiting.is_alive()

    again = open_board(store, presence, rank=0, world_size=2)  # that one did not fail: there is no wait
    again.set("fault", FaultNotice(rank=0, cause="ValueError: boom", by=0).encode())
    monkeypatch.setattr(store_module, "_REUNION_S", 0.2)
    with pytest.raises(
        RankFailedError,
        match=r"^Rank 1 failed: it does not train again after this: Rank 0 failed: ValueError: boom$",
    ):
        open_board(store, presence, rank=0, world_size=2)


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
    with pytest.raises(SchedulerTimeoutError, match=r"rank 1 of 2 has been waiting for 0 s .* for rank 0"):
        meet(store, 1, world_size=2, timeout=0.1)
    with pytest.raises(SchedulerTimeoutError, match="ranks 1, 2, 3 of 4 did not join"):
        meet(store, 0, world_size=4, timeout=0.1)
