"""Who is there, and who is in another training."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_bytescheduler.exceptions import (
    RankFailedError,
    RanksDifferError,
    RanksUnreachableError,
    SchedulerTimeoutError,
)
from lightning_bytescheduler.failures import board, rendezvous
from lightning_bytescheduler.failures.board import connected
from lightning_bytescheduler.failures.messages import names_of
from lightning_bytescheduler.failures.rendezvous import Introduction, Meeting, hold_roll_call, require_alike
from lightning_bytescheduler.failures.standstill import Sign
from tests.support.rank_pool import free_port
from tests.support.waiting import until


def introduction(rank: int, *, noted: dict[str, str] | None = None, **facts: str) -> Introduction:
    return Introduction(rank=rank, host=f"host{rank // 2}", facts=facts, noted=noted or {})


def test_everybody_learns_of_everybody() -> None:
    store = dist.HashStore()
    own = [introduction(rank, mode="'auto'", noted={"torch": "2"}) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(hold_roll_call, store, one, world_size=3, timeout=20.0) for one in own]
        assert [call.result() for call in calls] == [own] * 3
    require_alike(own)
    assert json.loads(store.get("1"))["facts"] == {"mode": "'auto'"}


def test_facts_may_be_texts_of_a_class_of_their_own() -> None:
    one = introduction(0, torch=torch.__version__)
    assert Introduction.decode(one.encode().encode()).facts == {"torch": str(torch.__version__)}


class Clock:
    """Only waits make it go on."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "time", Clock())


@pytest.mark.usefixtures("clock")
def test_a_missing_rank_is_named_and_then_given_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_WARN_S", 10.0)
    store = dist.HashStore()
    store.set("2", introduction(2).encode())
    with caplog.at_level(logging.WARNING), pytest.raises(SchedulerTimeoutError) as caught:
        hold_roll_call(store, introduction(0), timeout=100.0, world_size=4)
    assert "ranks 1, 3 of 4 did not join this training" in str(caught.value)
    assert "(here: ranks 0, 2 (host0, host1))" in str(caught.value)
    assert "strategy='ddp'" in str(caught.value)
    assert len(caplog.records) == 4  # after 10, 20, 40 and 80 s: ever more seldom
    caplog.clear()
    store.set("3", introduction(3).encode())
    with caplog.at_level(logging.WARNING), pytest.raises(SchedulerTimeoutError, match="After 50 s, rank 1 of 4"):
        hold_roll_call(store, introduction(2), timeout=50.0, world_size=4)
    assert not caplog.records  # the first two speak for all


@pytest.mark.parametrize("timeout", [0.0, 100.0])
def test_a_rank_that_comes_while_it_is_looked_for_is_not_missing(
    timeout: float, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_WARN_S", 0.0)
    store = dist.HashStore()
    looks = 0

    class Late:
        """The other rank comes right after the first look for all."""

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def check(self, keys: list[str]) -> bool:
            nonlocal looks
            looks += len(keys) > 1
            there: bool = store.check(keys)
            store.set("1", introduction(1).encode())
            return there

    here: Any = Late()
    with caplog.at_level(logging.WARNING):
        assert len(hold_roll_call(here, introduction(0), world_size=2, timeout=timeout)) == 2
    assert looks >= 1
    assert not caplog.records


def test_a_late_rank_is_waited_for() -> None:
    store = dist.HashStore()
    late = threading.Timer(0.5, lambda: store.set("1", introduction(1).encode()))
    late.start()
    assert len(hold_roll_call(store, introduction(0), world_size=2, timeout=20.0)) == 2


def test_a_failure_elsewhere_ends_the_wait() -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match="boom"):
        hold_roll_call(
            dist.HashStore(), introduction(0), world_size=2, timeout=600.0, failure=lambda: ValueError("boom")
        )
    assert time.monotonic() - start < 60.0


def test_each_difference_names_ranks_hosts_and_values() -> None:
    ranks = [
        introduction(0, version="'1'", mode="'auto'", noted={"BYTESCHEDULER_CREDIT": "9"}),
        introduction(1, version="'1'", mode="'ddp'"),
        introduction(2, version="'2'", mode="'auto'"),
    ]
    with pytest.raises(RanksDifferError) as caught:
        require_alike(ranks)
    assert str(caught.value).startswith(
        "The ranks are not in the same training: version is '1' on ranks 0, 1 (host0), but '2' on rank 2 (host1); "
        "mode is 'auto' on ranks 0, 2 (host0, host1), but 'ddp' on rank 1 (host0) "
        "(BYTESCHEDULER_CREDIT is 9 on rank 0 (host0), but nothing on ranks 1, 2 (host0, host1)). Start all"
    )


def test_a_fact_that_one_rank_does_not_know_is_a_difference() -> None:
    with pytest.raises(RanksDifferError, match=r"news is nothing on rank 0 .*, but 1 on rank 1"):
        require_alike([introduction(0), introduction(1, news="1")])


def test_what_may_differ_is_said() -> None:
    said: list[str] = []
    require_alike([introduction(0, noted={"torch": "2.6"}), introduction(2, noted={"torch": "2.7"})], warn=said.append)
    assert said == [
        "bytescheduler: not the same on all ranks: torch is 2.6 on rank 0 (host0), but 2.7 on rank 2 (host1)."
    ]
    require_alike([introduction(0, noted={"torch": "2.6"})] * 2, warn=said.append)
    assert len(said) == 1


def test_many_ranks_are_counted() -> None:
    assert names_of([4]) == "rank 4"
    assert names_of(range(20)).endswith("15 and 4 more")


CONNECTS = """
import sys, time
from lightning_bytescheduler.failures.board import connected
from lightning_bytescheduler.failures.standstill import Watchdog
import torch.distributed as dist
rank, port, patience, how = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
Watchdog.__init__.__defaults__ = (patience, Watchdog.__init__.__defaults__[1])
store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
with connected(store, "127.0.0.1", port, rank=rank, world_size=2) as board:
    if rank == 0:
        store.get("the other has started")
        while how == "stands" or board.fault is None:
            time.sleep(0.05)  # as in native code, where no exception arrives
        raise RuntimeError("Connection closed by peer")
    store.set("the other has started", "")
    raise RuntimeError("Gloo connectFullMesh failed with refused, remote=[127.0.1.1]:80")
"""


@pytest.mark.parametrize(
    ("patience", "how"),
    [
        pytest.param(0.2, "stands", id="stands", marks=pytest.mark.slow),
        pytest.param(60.0, "comes back", id="comes back"),
    ],
)
def test_a_rank_that_cannot_connect_ends_the_others(patience: float, how: str) -> None:
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", CONNECTS, str(rank), str(port), str(patience), how],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    waiting, failing = (rank.communicate(timeout=120)[1] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "RanksUnreachableError: Rank 1 on " in failing
    assert "cannot connect to them: Gloo connectFullMesh failed with refused, remote=[127.0.1.1]:80" in failing
    assert "GLOO_SOCKET_IFNAME=eth0" in failing
    assert "Rank 1 failed: RanksUnreachableError: Rank 1 on " in waiting
    if how == "stands":
        assert "The training thread did not come back within 0.2 s, so its process is ended." in waiting
    else:
        assert "RankFailedError: Rank 1 failed: RanksUnreachableError" in waiting


def meet_on(
    port: int, *, rank: int, strategy: str = "bytescheduler", timeout: float = 60.0, host: str = "127.0.0.1"
) -> dist.Store:
    meeting = Meeting(rank=rank, world_size=2, strategy=strategy, timeout=timeout)
    return meeting.at(host, port)


def test_ranks_meet_whichever_comes_first() -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(meet_on, port, rank=1)
        first, second = meet_on(port, rank=0), late.result()
    first.set("key", "value")
    assert second.get("key") == b"value"


DIFFERENCE = r"strategy is diloco on rank 0 \(.+\), but bytescheduler on rank 1 \(.+\)\. Give all of them the same one"


def test_ranks_that_run_other_strategies_do_not_wait_for_each_other() -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        met = [
            pool.submit(meet_on, port, rank=rank, strategy=name)
            for rank, name in enumerate(("diloco", "bytescheduler"))
        ]
        for one in met:
            with pytest.raises(RanksDifferError, match=DIFFERENCE):
                one.result()


def test_a_first_rank_that_does_not_come_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_WARN_S", 0.1)
    port = free_port()
    with caplog.at_level(logging.WARNING), pytest.raises(SchedulerTimeoutError, match=f"to open 127.0.0.1:{port}"):
        meet_on(port, rank=1, timeout=0.3)
    assert "rank 1 still waits for rank 0" in caplog.text


def test_a_master_address_that_is_no_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(SchedulerTimeoutError, match=r"to open node-zero:1 \(no such name\)"):
        meet_on(1, rank=1, timeout=0.0, host="node-zero")


@pytest.mark.parametrize("hangs", [True, False])
def test_what_to_look_at_is_said_where_connecting_takes_long(
    hangs: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(board, "_LATER_S", 0.0 if hangs else 600.0)

    def hints() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "bytescheduler-late-word"]

    with caplog.at_level(logging.WARNING), connected(dist.HashStore(), "10.0.0.1", 29500, rank=0, world_size=1):
        started = hints()
        deadline = time.monotonic() + 60.0
        while hangs and not caplog.messages and time.monotonic() < deadline:
            time.sleep(0.01)
    assert hangs or started
    for thread in started:
        thread.join(60.0)
    assert not hints()
    assert [message.partition(", and")[0] for message in caplog.messages] == (
        ["bytescheduler: all 1 ranks have met at 10.0.0.1:29500"] if hangs else []
    )


def dies(watching: board.FaultBoard) -> bool:
    """Another rank has given one sign of life, and gives no other."""
    watching._store.set("signs/1", Sign(beat=1).encode())
    return watching.fault is not None


def test_a_rank_that_dies_while_ranks_connect_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "NATIVE_S", 0.5)
    monkeypatch.setattr(board, "_VANISHED", 1e6)  # this is for a training, where a rank may compute for long
    with (
        pytest.raises(RankFailedError, match="Rank 1 failed: it shows no sign of life") as found,
        connected(dist.HashStore(), "10.0.0.1", 29500, rank=0, world_size=2) as watching,
    ):
        until(lambda: dies(watching))
    assert found.value.rank == 1


@pytest.mark.parametrize(
    "broken",
    [
        dist.DistStoreError("wait timeout after 1800000ms, keys: /0/1"),
        pytest.param(
            RuntimeError("Gloo connectFullMesh failed with refused, remote=[127.0.1.1]:80"), marks=pytest.mark.slow
        ),
    ],
)
def test_a_connection_that_a_dead_rank_breaks_names_it(broken: Exception) -> None:
    with (
        pytest.raises(RankFailedError, match="Rank 1 failed: it shows no sign of life; this broke here: "),
        connected(dist.HashStore(), "10.0.0.1", 29500, rank=0, world_size=2),
    ):
        raise broken


def test_what_to_look_at_is_said_where_a_connection_times_out() -> None:
    refused = "timed out connecting: SO_ERROR: Connection refused, remote=[127.0.1.1]:80"
    with (
        pytest.raises(RanksUnreachableError, match=r"timed out connecting.*GLOO_SOCKET_IFNAME=eth0"),
        connected(dist.HashStore(), "10.0.0.1", 29500, rank=0, world_size=1),
    ):
        raise RuntimeError(f"Gloo connectFullMesh failed with {refused}")


def test_a_store_that_ends_while_a_rank_connects_to_it_is_rank_0s_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    host = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    client = dist.TCPStore("127.0.0.1", host[0].port, is_master=False, wait_for_workers=False)

    class Presence(rendezvous.StorePresence):
        def __init__(self, *place: Any) -> None:
            super().__init__(*place)
            if place:
                host.clear()

    monkeypatch.setattr(rendezvous, "StorePresence", Presence)
    with pytest.raises(RankFailedError, match="Rank 0 failed: its process is gone"):
        rendezvous.connect_to_store(client)
