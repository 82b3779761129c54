"""A server adds up in the order of ranks, and refuses what does not fit; and says what it waits for."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives import server_meeting
from lightning_bytescheduler.collectives.groups import abandon
from lightning_bytescheduler.collectives.push_pull import PlacedParts, PushPull, server_weights
from lightning_bytescheduler.collectives.server_meeting import (
    Announcement,
    JoinedServers,
    LivingServer,
    SignedOn,
    begun_after,
    connect,
    find_servers,
)
from lightning_bytescheduler.collectives.summing_server import SummingServer, await_goodbyes
from lightning_bytescheduler.ddp.compression_rules import CompressionRules
from lightning_bytescheduler.ddp.wire import ServerOptions
from lightning_bytescheduler.exceptions import (
    ByteSchedulerError,
    OptionError,
    RankFailedError,
    RanksDifferError,
    SchedulerTimeoutError,
    ServerFailedError,
    UnsupportedError,
)
from lightning_bytescheduler.failures.rendezvous import Introduction
from tests.support.waiting import WAIT

PATIENT: dict[str, Any] = {"wait": WAIT, "timeout": timedelta(seconds=WAIT), "failure": lambda: None}


def test_shares_follow_the_seeds_formula() -> None:
    assert sum(server_weights(4, 2)[:2]) == pytest.approx(0.6)
    assert server_weights(4, 4) == (0.25,) * 4 + (0.0,) * 4
    assert server_weights(4, 9) == server_weights(4, 4)
    assert server_weights(4, 0) == (0.25,) * 4


@pytest.mark.parametrize("servers", [0, 1, 2, 3, 4])
def test_bytes_come_to_the_shares(servers: int) -> None:
    weights, shares = server_weights(4, servers), PlacedParts(workers=4, servers=servers)
    for index in range(600):
        shares.next(1000 + 37 * (index % 11))
    total = sum(shares.bytes_per_server)
    for held, weight in zip(shares.bytes_per_server, weights, strict=True):
        assert held <= 1.05 * weight * total
        assert abs(held / total - weight) < 0.02


def world(workers: int, servers: int = 1) -> list[Any]:
    """Groups of all workers and of servers, in one process."""
    store, fit = dist.HashStore(), announced(workers=workers, servers=servers)
    made: list[Any] = [None] * (workers + servers)

    def join(rank: int) -> None:
        (made[rank],) = connect(store, fit, [fit.rail(0, rank)], rank=rank, **PATIENT)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(workers + servers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


def announced(*, fit: int = 1, workers: int = 1, servers: int) -> Announcement:
    return Announcement(fit=fit, rails=(tuple(range(workers)),), servers=tuple(range(servers)))


def with_servers(groups: list[Any], servers: int = 1) -> list[PushPull]:
    """Workers whose parts all go to spare servers, if there are any. Groups: the workers' first, then the servers'."""
    workers = range(len(groups) - servers)
    shares = PlacedParts(workers=1, servers=1) if servers else PlacedParts(workers=len(workers), servers=0)
    return [PushPull(group, workers, shares) for group in groups[: len(workers)]]


def leave(sides: list[PushPull]) -> None:
    """All at once, as workers that are servers besides wait for each other."""
    threads = [threading.Thread(target=side.close, kwargs={"idle": True}) for side in sides]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_sums_are_in_the_order_of_ranks_whichever_comes_first() -> None:
    groups = world(3)
    server, sides = SummingServer(groups[3], range(3)), with_servers(groups)
    parts = [torch.randn(1000) for _ in range(3)]
    expected = parts[0] * (1 / 3) + parts[1] * (1 / 3) + parts[2] * (1 / 3)
    started = {rank: sides[rank].reduce(groups[rank], parts[rank], 1, 1 / 3) for rank in (2, 0, 1)}
    for one in started.values():
        for work in one.works:
            work.wait()
    assert all(torch.equal(part, expected) for part in parts)
    assert not server._sums
    leave(sides)
    await_goodbyes([server], lambda: False)


def test_a_colocated_server_adds_up_what_its_own_worker_has_not_launched_before() -> None:
    """A worker that waits for the sum of an older part must not keep others from pushing younger ones to it."""
    groups = world(3, servers=0)
    sides = with_servers(groups, servers=0)
    parts = {(rank, number): torch.randn(100) for rank in range(3) for number in range(1, 7)}
    expected = {
        number: sum((parts[rank, number] * (1 / 3) for rank in range(1, 3)), parts[0, number] * (1 / 3))
        for number in range(1, 7)
    }
    ends = []
    for rank in (2, 1, 0):  # rank 0 comes last: what the others push to it is taken, and theirs goes on in that time
        ends += [sides[rank].reduce(groups[rank], parts[rank, number], number, 1 / 3) for number in range(1, 7)]
    for end in ends:
        for work in end.works:
            work.wait()
    assert all(torch.equal(part, expected[number]) for (_, number), part in parts.items())
    leave(sides)
    assert not [thread for thread in threading.enumerate() if thread.name == "bytescheduler-pushes"]


@pytest.mark.parametrize("wrong", [torch.zeros(5), torch.zeros(4, dtype=torch.float64)])
def test_a_push_unlike_the_other_ranks_is_refused(wrong: torch.Tensor) -> None:
    groups = world(2)
    server = SummingServer(groups[2], range(2))
    # Each is a server besides, to which nothing goes.
    sides = [PushPull(group, range(2), PlacedParts(workers=2, servers=1)) for group in groups[:2]]
    under_way = []  # a message that is not kept may never be sent
    for side, part in zip(sides, (torch.zeros(4), wrong), strict=True):
        under_way.append(side.push(part, 1, 2))
    with pytest.raises(UnsupportedError, match=r"Rank \d pushes .* as operation 1, but rank \d pushes") as refused:
        await_goodbyes([server], lambda: False)
    store = dist.HashStore()
    living = LivingServer(store, SignedOn(host="127.0.0.1", pid=1))
    found = find(store, servers=1)
    living.leave(str(refused.value))
    told = found.find_gone(within=WAIT)
    assert isinstance(told, ServerFailedError)
    assert str(told).startswith("The parameter server 0 (process 1 at 127.0.0.1) has ended: Rank ")
    for side in sides:
        side.close(idle=False)
        assert side._colocated is not None
        assert not any(thread.is_alive() for thread in side._colocated._threads)


class Dies(LivingServer):
    """A server that is killed, or stopped, when it is told to leave."""

    def leave(self, why: str = "") -> None:
        self._signs.give = lambda *_, **__: None  # type: ignore[method-assign]
        super().leave()


@pytest.mark.parametrize(
    "given",
    [
        {"servers": -1},
        {"servers": "ps"},
        {"servers": {"spares": 1}},
        {"servers": {"spare": -1}},
        {"servers": 1, "rules": CompressionRules.resolve("int8")},
        {"servers": {"spare": 1, "placement": "murmur"}},
        {"servers": {"placement": "djb2"}},
        {"servers": {"group": "machine"}},
    ],
)
def test_options_that_do_not_fit(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as error:
        ServerOptions.resolve(**given)
    assert isinstance(error.value, ByteSchedulerError)


def test_compressed_gradients_are_for_ranks_that_add_up() -> None:
    with pytest.raises(OptionError, match=r"compression .*left out with servers.* Leave servers out"):
        ServerOptions.resolve(0, CompressionRules.resolve("int8"))


def test_options_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not ServerOptions.resolve(None).used
    assert ServerOptions.resolve(0) == ServerOptions.resolve({}) == ServerOptions(spare=0)
    given = ServerOptions.resolve({"spare": 2, "placement": "mixed", "group": "node"})
    assert given == ServerOptions(spare=2, placement="mixed", group="node")
    monkeypatch.setenv("BYTEPS_ENABLE_MIXED_MODE", "1")
    assert ServerOptions.resolve(2).placement == "mixed"


def find(store: dist.Store, *, servers: int, say: Any = print, timeout: float = WAIT) -> JoinedServers:
    return JoinedServers(store, find_servers(store, servers, timeout=timeout, failure=lambda: None, say=say))


def test_servers_that_have_ended_are_followed_by_others() -> None:
    store = dist.HashStore()
    ended = [Dies(store, SignedOn(host="127.0.0.1", pid=10)), LivingServer(store, SignedOn(host="127.0.0.1", pid=11))]
    for one in ended:
        one.leave()
    living: list[LivingServer] = []

    def missing(_: str) -> None:
        living.append(LivingServer(store, SignedOn(host="127.0.0.1", pid=12)))
        living.append(Dies(store, SignedOn(host="127.0.0.1", pid=13)))

    found = find(store, servers=2, say=missing)
    assert [one.number for one in living] == list(found._names) == [2, 3]
    assert found.find_gone(within=WAIT) is None
    living[1].leave()  # as one that is killed
    gone = found.find_gone(within=WAIT)
    assert isinstance(gone, ServerFailedError)
    assert str(gone) == (
        "The parameter server 3 (process 13 at 127.0.0.1) shows no sign of life. Was its process killed or stopped?"
    )
    living[0].leave()
    assert not [thread for thread in threading.enumerate() if thread.name == "bytescheduler-server-signs"]


def test_a_server_that_ends_because_a_worker_has_died_is_not_to_blame() -> None:
    store = dist.HashStore()
    server = LivingServer(store, SignedOn(host="127.0.0.1"))
    found = find(store, servers=1)
    server.leave()
    assert found.find_gone(within=WAIT) is None


def test_servers_that_are_not_to_be_had() -> None:
    store = dist.HashStore()
    server = LivingServer(store, SignedOn(host="127.0.0.1", version="0"))
    with pytest.raises(RanksDifferError, match="parameter server 0"):
        find(store, servers=1)
    with pytest.raises(SchedulerTimeoutError, match=r"\d of 2 parameter servers"):
        find(store, servers=2, timeout=0.0)
    server.leave()


def test_a_server_takes_up_a_fit_that_has_its_servers() -> None:
    store = dist.HashStore()
    assert begun_after(store, 0) is None
    store.set("begun", announced(fit=2, servers=1).encode())
    assert begun_after(store, 0) == begun_after(store, 1) == announced(fit=2, servers=1)
    assert begun_after(store, 2) is None


def test_a_process_that_does_not_connect_is_named() -> None:
    store, fit = dist.HashStore(), announced(workers=2, servers=1)
    with pytest.raises(SchedulerTimeoutError, match="ranks 1, 2 of 3 did not join"):
        connect(store, fit, [], rank=0, **{**PATIENT, "wait": 0.0})
    with pytest.raises(RankFailedError, match="it is gone"):
        connect(store, fit, [], rank=1, **{**PATIENT, "failure": lambda: RankFailedError(2, "it is gone")})
    assert connect(store, fit, [], rank=2, **{**PATIENT, "wait": 0.0}) == []


def test_a_goodbye_to_a_server_that_has_gone_does_not_fail() -> None:
    groups = world(1)
    abandon(groups[1])
    (side,) = with_servers(groups)
    for _ in range(2):  # the second time the connection is known to be broken
        side.close(idle=True)


def test_a_training_whose_first_rank_has_left_may_still_say_goodbye() -> None:
    groups = world(2)
    server = SummingServer(groups[2], range(2))
    asked = threading.Event()

    def gone() -> bool:
        asked.set()
        return True

    waits = threading.Thread(target=await_goodbyes, args=([server], gone))
    waits.start()
    assert asked.wait(WAIT)
    leave(with_servers(groups))
    waits.join(WAIT)
    assert server._failure is None


def test_a_worker_that_dies_while_all_connect_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """And connecting has a shorter timeout than messages."""
    monkeypatch.setattr(server_meeting, "_CONNECTING_S", 1.0)
    store, fit = dist.HashStore(), announced(workers=2, servers=0)
    store.set("fit/1/here/0", Introduction(rank=0, facts={}).encode())
    with pytest.raises(RuntimeError, match="imeout"):
        connect(store, fit, [fit.rail(0, 1)], rank=1, **{**PATIENT, "timeout": timedelta(days=30)})
    groups = world(1)
    server = SummingServer(groups[1], range(1))
    (side,) = with_servers(groups)
    time.sleep(1.1)  # nothing is sent
    part = torch.ones(4)
    side.reduce(groups[0], part, 1, 1.0).works[0].wait()
    side.close(idle=True)
    await_goodbyes([server], lambda: False)
    assert server._failure is None


class _Dies(SummingServer):
    """Its other worker dies; that thread comes late to say so."""

    def _lost(self, rank: int | None, what: str, error: BaseException) -> None:
        # If the summing thread could end in order now, it would believe that this worker's wait is over.
        self._over.wait(0.2)
        super()._lost(rank, what, error)


class _Gone:
    """A group of two whose other rank sends nothing more."""

    def __init__(self) -> None:
        self.dies = threading.Event()

    def rank(self) -> int:
        return 0

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return self

    def wait(self, timeout: Any = None) -> bool:
        assert self.dies.wait(WAIT)
        raise RuntimeError("Connection closed by peer")


def test_a_worker_whose_other_one_dies_does_not_wait_for_its_own_server_forever() -> None:
    group: Any = _Gone()
    server = _Dies(group, (0, 1), own=0)
    own = server.push_own(1, torch.ones(4))
    group.dies.set()
    assert own.known.wait(WAIT)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        own.wait()
    server.stop(WAIT)
