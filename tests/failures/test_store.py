from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_bytescheduler.exceptions import RankFailedError
from lightning_bytescheduler.failures import store as store_module
from lightning_bytescheduler.failures.messages import FaultNotice
from lightning_bytescheduler.failures.store import StorePresence, connect_to_store, open_board


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))


def test_presence_ends_with_the_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as host:
        presence = StorePresence(*host.getsockname())
        served, _ = host.accept()
        assert not presence.gone()
        served.close()
        deadline = time.monotonic() + 2.0
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
        RankFailedError, match=r"^Rank 0 failed: the rendezvous store at 127.0.0.1:\d+ is gone \(refused\)"
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
    late = threading.Timer(0.5, lambda: open_board(store, presence, rank=1, world_size=2))
    late.start()
    start = time.monotonic()
    open_board(store, presence, rank=0, world_size=2)
    assert time.monotonic() - start > 0.4
    late.join()

    again = open_board(store, presence, rank=0, world_size=2)  # that one did not fail: nobody waits
    again.set("fault", FaultNotice(rank=0, cause="ValueError: boom", by=0).encode())
    monkeypatch.setattr(store_module, "_REUNION_S", 0.2)
    with pytest.raises(
        RankFailedError,
        match=r"^Rank 1 failed: it does not train again after this: Rank 0 failed: ValueError: boom$",
    ):
        open_board(store, presence, rank=0, world_size=2)
