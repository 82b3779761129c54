"""Where workers and parameter servers find each other: a part of the rendezvous store that Lightning knows nothing of.

Each server signs on once, and gets a number. Before each fit rank 0 of the workers says what that is going to be: how
many workers and servers, and which version of this package. Then all of them connect in one gloo group, workers first.

A server keeps a port open for as long as it lives, on which it never says anything: connections to it close when its
process ends, which is how workers tell a dead server from a dead worker. Whoever sends something there is hung up on.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from lightning_bytescheduler.__about__ import __version__
from lightning_bytescheduler.collectives.groups import SchedulerGroups
from lightning_bytescheduler.exceptions import RanksDifferError, SchedulerTimeoutError, ServerFailedError
from lightning_bytescheduler.failures.messages import StoreMessage
from lightning_bytescheduler.failures.store import StorePresence
from lightning_bytescheduler.scheduler.short_turns import short_turns

__all__ = [
    "Announcement",
    "ServerPort",
    "ServersFound",
    "SignedOn",
    "await_all",
    "find_servers",
    "fit_after",
    "join_group",
    "last_begun",
    "leave_word",
    "meet_servers",
    "meeting_store",
    "next_fit",
    "sign_on",
]

PREFIX = "bytescheduler-servers"
_LOOK_EVERY_S = 0.05
_SOON_GONE_S = 0.5  # connections of a process that ends are not closed at one moment
_MOST_CONNECTIONS = 1024


class Announcement(StoreMessage, frozen=True, kw_only=True):
    """Rank 0's, before a fit.

    Attributes:
        workers: Number of them.
        servers: Number of spare servers that they want.
        version: Of this package.
    """

    workers: int
    servers: int
    version: str


class SignedOn(StoreMessage, frozen=True, kw_only=True):
    """A server's, once.

    Attributes:
        host: Address of its port.
        port: That stays open while it lives.
        pid: Of its process.
        version: Of this package.
    """

    host: str
    port: int
    pid: int
    version: str

    def named(self, number: int) -> str:
        """For messages."""
        return f"parameter server {number} (process {self.pid} at {self.host})"


def meeting_store(store: dist.Store) -> dist.Store:
    """The part of a rendezvous store where servers are met, whatever view of it ``store`` is."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return dist.PrefixStore(PREFIX, store)


def await_all(
    store: dist.Store,
    fit: int,
    *,
    rank: int,
    size: int,
    timeout: float,
    failure: Callable[[], BaseException | None],
) -> None:
    """Wait until all workers and servers of a fit are about to connect, which nothing could be learnt in.

    Args:
        store: From :func:`meeting_store`.
        fit: Number of the fit.
        rank: Servers follow the workers.
        size: Workers and servers.
        timeout: Longest wait, in seconds.
        failure: Asked while waiting: why they will not come, if they will not.

    Raises:
        SchedulerTimeoutError: If some have not come in time.
        BaseException: What ``failure`` says.
    """
    store.set(f"fit/{fit}/here/{rank}", "")
    keys, deadline = [f"fit/{fit}/here/{one}" for one in range(size)], time.monotonic() + timeout
    while not store.check(keys):
        cause = failure()
        if cause is not None:
            raise cause
        if time.monotonic() > deadline:
            missing = ", ".join(str(one) for one, key in enumerate(keys) if not store.check([key]))
            raise SchedulerTimeoutError(
                f"Of {size} workers and parameter servers of fit {fit}, numbered from 0 with the workers first, "
                f"{missing} did not come to connect within {timeout:g} s."
            )
        time.sleep(_LOOK_EVERY_S)


def join_group(store: dist.Store, fit: int, *, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Connect workers and servers; all of them call this.

    Args:
        store: From :func:`meeting_store`.
        fit: Number of the fit.
        rank: Servers follow the workers.
        size: Workers and servers.
        timeout: Of each message, and of connecting.
    """
    made = dist.ProcessGroupGloo(dist.PrefixStore(f"fit/{fit}/group", store), rank, size, timeout)
    return cast(dist.ProcessGroup, made)  # its base class, which the stubs do not know


class ServersFound:
    """What a worker knows of the servers of a fit.

    Args:
        store: From :func:`meeting_store`.
        fit: Its number.
        servers: By number, with a connection to each.
    """

    def __init__(self, store: dist.Store, fit: int, servers: Mapping[int, tuple[SignedOn, StorePresence]]) -> None:
        self.fit = fit
        self._store = store
        self._servers = servers

    def find_gone(self, *, within: float = _SOON_GONE_S) -> ServerFailedError | None:
        """The server that has died, if one has; waits ``within`` seconds for that to show."""
        deadline = time.monotonic() + within
        while True:
            for number, (server, presence) in self._servers.items():
                if presence.gone():
                    return ServerFailedError(f"{server.named(number)} has ended{self._why(number)}")
            if time.monotonic() >= deadline:
                return None
            time.sleep(_LOOK_EVERY_S)

    def _why(self, number: int) -> str:
        """What it has left behind: a rank may have died while this one had nothing to send for a while."""
        key = f"fit/{self.fit}/over/{number}"
        with suppress(RuntimeError):  # the store is gone as well
            if self._store.check([key]):
                return f": {self._store.get(key).decode()}"
        return ""

    def close(self) -> None:
        """Close the connections."""
        for _, presence in self._servers.values():
            presence.close()


def next_fit(store: dist.Store) -> int:
    """The number of the next fit; for rank 0, whose word counts, as others may have missed one that failed."""
    return int(store.add("fits", 1))


def find_servers(
    store: dist.Store,
    *,
    fit: int,
    rank: int,
    workers: int,
    servers: int,
    timeout: float,
    failure: Callable[[], BaseException | None],
    say: Callable[[str], object],
) -> ServersFound:
    """Wait until all servers of a fit have signed on; every worker calls this, once in a fit.

    Args:
        store: From :func:`meeting_store`.
        fit: From :func:`next_fit` on rank 0.
        rank: This worker's.
        workers: Number of them.
        servers: Number of spare servers.
        timeout: Longest wait, in seconds.
        failure: Asked while waiting: why they will not come, if they will not.
        say: Told once that servers are missing, on rank 0.

    Raises:
        SchedulerTimeoutError: If too few have signed on in time.
        RanksDifferError: If a server has another version of this package.
    """
    if rank == 0:
        store.set(f"fit/{fit}", Announcement(workers=workers, servers=servers, version=__version__).encode())
        store.set("current", str(fit))
    found: dict[int, tuple[SignedOn, StorePresence]] = {}
    try:
        _await_servers(store, found, rank=rank, servers=servers, timeout=timeout, failure=failure, say=say)
        if rank == 0:
            store.set(f"begun/{fit}", "")
        for number, (server, _) in sorted(found.items()):
            if server.version != __version__:
                raise RanksDifferError(
                    f"{server.named(number)} has lightning-bytescheduler {server.version}, and rank {rank} has "
                    f"{__version__}. Install the same version on all machines."
                )
    except BaseException:
        ServersFound(store, fit, found).close()
        raise
    return ServersFound(store, fit, found)


def _await_servers(
    store: dist.Store,
    found: dict[int, tuple[SignedOn, StorePresence]],
    *,
    rank: int,
    servers: int,
    timeout: float,
    failure: Callable[[], BaseException | None],
    say: Callable[[str], object],
) -> None:
    begin, said = time.monotonic(), False
    while True:
        missing = []
        for number in range(servers):
            if number in found and found[number][1].gone():  # while others were waited for
                found.pop(number)[1].close()
            if number not in found and (one := _living(store, number)) is not None:
                found[number] = one
            if number not in found:
                missing.append(number)
        if not missing:
            break
        cause = failure()
        if cause is not None:
            raise cause
        waited = time.monotonic() - begin
        if waited > timeout:
            raise SchedulerTimeoutError(
                f"{servers - len(missing)} of {servers} parameter servers have joined within {timeout:g} s. Start "
                f"{len(missing)} more with 'lightning-bytescheduler server', with the MASTER_ADDR and MASTER_PORT of "
                "this training, or ask for fewer: servers=..."
            )
        if waited > 2 and not said and rank == 0:
            said = True
            say(
                f"bytescheduler: waiting for {len(missing)} of {servers} parameter servers. Each is started by: "
                f"MASTER_ADDR={os.environ.get('MASTER_ADDR', '...')} "
                f"MASTER_PORT={os.environ.get('MASTER_PORT', '...')} lightning-bytescheduler server"
            )
        time.sleep(_LOOK_EVERY_S)


def _living(store: dist.Store, number: int) -> tuple[SignedOn, StorePresence] | None:
    """The server that has a number, if it lives: one that has died may be followed by another."""
    if not store.check([f"server/{number}"]):
        return None
    server = SignedOn.decode(store.get(f"server/{number}"))
    try:
        return server, StorePresence(server.host, server.port)
    except OSError:
        return None


def sign_on(store: dist.Store, own: SignedOn) -> int:
    """Take the lowest number that no living server has, and return it.

    Args:
        store: From :func:`meeting_store`.
        own: What workers need to know of this server, whose port is open.
    """
    number = 0
    while True:
        before = store.get(f"server/{number}").decode() if store.check([f"server/{number}"]) else ""
        living = _living(store, number) if before else None
        if living is not None:
            living[1].close()
        elif store.compare_set(f"server/{number}", before, own.encode()).decode() == own.encode():
            return number
        else:
            continue  # another one was faster
        number += 1


def leave_word(store: dist.Store, fit: int, number: int, error: BaseException) -> None:
    """Have workers that notice later than others that server ``number`` has ended know why."""
    with suppress(RuntimeError):  # the training is over
        store.set(f"fit/{fit}/over/{number}", str(error))


def last_begun(store: dist.Store) -> int:
    """The last fit that has found its servers, from 1; 0 if none has. Asked before signing on."""
    current = int(store.get("current")) if store.check(["current"]) else 0
    return current if not current or store.check([f"begun/{current}"]) else current - 1


def meet_servers(
    groups: SchedulerGroups,
    servers: int,
    *,
    timeout: timedelta,
    failure: Callable[[], BaseException | None],
    say: Callable[[str], object],
) -> tuple[ServersFound, dist.ProcessGroup]:
    """Connect workers with servers; every worker calls this at the same point, once in a fit.

    Args:
        groups: Among workers, whose default group has the store.
        servers: Number of spare servers.
        timeout: Of the wait for servers, and of each message.
        failure: Asked while waiting: why others will not come, if they will not.
        say: Told once that servers are missing, on rank 0.

    Returns:
        The servers, and the group of workers and servers.

    Raises:
        SchedulerTimeoutError: If too few servers have come in time.
        RanksDifferError: If a server has another version of this package.
        ServerFailedError: If one has died.
    """
    store = meeting_store(dist.distributed_c10d._get_default_store())
    # Rank 0's number: a rank that failed before it came here has counted fewer fits.
    number = torch.tensor([next_fit(store) if groups.rank == 0 else 0])
    dist.broadcast(number, src=0, group=groups.control)
    found = find_servers(
        store,
        fit=int(number),
        rank=groups.rank,
        workers=groups.world_size,
        servers=servers,
        timeout=timeout.total_seconds(),
        failure=failure,
        say=say,
    )
    size = groups.world_size + servers
    try:
        await_all(
            store,
            found.fit,
            rank=groups.rank,
            size=size,
            timeout=timeout.total_seconds(),
            failure=lambda: found.find_gone(within=0.0) or failure(),
        )
        with short_turns():  # for gloo's own threads
            return found, join_group(store, found.fit, rank=groups.rank, size=size, timeout=timeout)
    except BaseException:
        found.close()
        raise


def fit_after(store: dist.Store, last: int) -> tuple[int, Announcement] | None:
    """A fit later than ``last`` that has found its servers, so that its workers come at once; ``None`` if none has."""
    current = int(store.get("current")) if store.check(["current"]) else 0
    if current <= last or not store.check([f"begun/{current}"]):
        return None
    return current, Announcement.decode(store.get(f"fit/{current}"))


class ServerPort:
    """A port that is open while this process lives; its thread, ``bytescheduler-server-port``, ends with :meth:`close`.

    Args:
        host: Address that workers reach this machine by.
    """

    def __init__(self, host: str) -> None:
        self._listener = socket.create_server((host, 0))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._open: set[socket.socket] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bytescheduler-server-port", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 2.0) -> None:
        """Hang up on all, and end the thread, within ``timeout`` seconds."""
        self._stopping.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stopping.is_set():
            for key, _ in self._selector.select(0.2):
                one = cast(socket.socket, key.fileobj)
                if one is self._listener:
                    self._accept()
                else:  # workers say nothing: it has closed, or is none
                    self._hang_up(one)
        for one in list(self._open):
            self._hang_up(one)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            one, _ = self._listener.accept()
            if len(self._open) >= _MOST_CONNECTIONS:
                one.close()
                return
            one.setblocking(False)
            self._open.add(one)
            self._selector.register(one, selectors.EVENT_READ)

    def _hang_up(self, one: socket.socket) -> None:
        self._selector.unregister(one)
        self._open.discard(one)
        one.close()
