"""Where workers and parameter servers find each other: a part of the rendezvous store that Lightning knows nothing of.

Each server signs on once, and gets a number. Before each fit rank 0 of the workers says what that is going to be: how
many workers and servers, and which version of this package. Then all of them connect in one gloo group, workers first.

While it serves, a server leaves word of what it does, each second: so workers that waited for too long can tell one
that stands still from one that waits for a worker. What it refuses it says there, too.

*A server's port* tells a living server from a dead one: it is open for as long as the server lives. Connections to it
close when its process ends, which is how workers tell a dead server from a dead worker. Whoever connects says the
server's *token*, which those know who may read the rendezvous store, and hears one byte. Who says something else, or
more, is hung up on; so is who says nothing, after a while, and at once where too many strangers say nothing: they take
no worker's place.
"""

from __future__ import annotations

import hmac
import os
import secrets
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
from lightning_bytescheduler.collectives.node_push_pull import NodeLayout
from lightning_bytescheduler.collectives.summing_server import abandon
from lightning_bytescheduler.exceptions import (
    RankFailedError,
    RanksDifferError,
    SchedulerTimeoutError,
    ServerFailedError,
)
from lightning_bytescheduler.failures.messages import StoreMessage
from lightning_bytescheduler.failures.store import StorePresence
from lightning_bytescheduler.scheduler.short_turns import short_turns

PREFIX = "bytescheduler-servers"
_LOOK_EVERY_S = 0.05
_SOON_GONE_S = 0.5  # connections of a process that ends are not closed at one moment
_CONNECTING_S = 60.0  # once all have come; takes milliseconds
_SILENT_S = 5.0  # a server leaves word each second
_WELCOME = b"\n"
_MOST_STRANGERS = 256
_PATIENCE_S = 10.0  # for who has connected and not said anything
_STOP_EVERY_S = 0.2


class Announcement(StoreMessage, frozen=True, kw_only=True):
    """Rank 0's, before a fit.

    Attributes:
        workers: Number of them.
        servers: Number of spare servers that they want.
        version: Of this package.
        rails: The workers of each group that pushes by itself; one of all workers when empty.
    """

    workers: int
    servers: int
    version: str
    rails: tuple[tuple[int, ...], ...] = ()


class SignedOn(StoreMessage, frozen=True, kw_only=True):
    """A server's, once.

    Attributes:
        host: Address of its port.
        port: That stays open while it lives.
        pid: Of its process.
        version: Of this package.
        token: That is said on its port.
    """

    host: str
    port: int
    pid: int
    version: str
    token: str = ""

    def named(self, number: int) -> str:
        """For messages."""
        return f"parameter server {number} (process {self.pid} at {self.host})"


class Doing(StoreMessage, frozen=True, kw_only=True):
    """What a server does, about each second.

    Attributes:
        beat: Counts.
        lacks: Workers whose push is missing from the oldest sum that is under way.
        since: For how long that has been under way, in seconds.
    """

    beat: int
    lacks: tuple[int, ...] = ()
    since: float = 0.0


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


def join_group(
    store: dist.Store, fit: int, *, rank: int, size: int, timeout: timedelta, name: str = "group"
) -> dist.ProcessGroup:
    """Connect workers and servers; all of them call this.

    Args:
        store: From :func:`meeting_store`.
        fit: Number of the fit.
        rank: Servers follow the workers.
        size: Workers and servers.
        timeout: Of connecting, and of messages that are waited for without another one.
        name: Of the group, where a fit has several.

    Raises:
        RuntimeError: If one of them has died since it said that it was here, and could not be connected to.
    """
    met = dist.PrefixStore(f"fit/{fit}/{name}", store)
    made = dist.ProcessGroupGloo(met, rank, size, min(timeout, timedelta(seconds=_CONNECTING_S)))
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
        self._host = _presence_of(store)
        self._servers = servers

    def find_gone(self, *, within: float = _SOON_GONE_S) -> ServerFailedError | None:
        """The server that has died or has refused to go on, if one has; waits ``within`` seconds for that to show."""
        deadline = time.monotonic() + within
        while True:
            for number, (server, presence) in self._servers.items():
                refused = self._read(f"fit/{self.fit}/refused/{number}")
                if refused:
                    return ServerFailedError(f"{server.named(number)} has refused what it was sent: {refused}")
                if presence.gone():
                    why = self._read(f"fit/{self.fit}/over/{number}")
                    return ServerFailedError(f"{server.named(number)} has ended{': ' if why else ''}{why}")
            if time.monotonic() >= deadline:
                return None
            time.sleep(_LOOK_EVERY_S)

    def find_silent(self, *, within: float = _SILENT_S) -> ServerFailedError | None:
        """The server that stands still, if one does: it lives, and has left no word for ``within`` seconds."""
        begin = {number: self._read(f"server/{number}/doing") for number in self._servers}
        silent, deadline = set(begin), time.monotonic() + within
        while silent and time.monotonic() < deadline and not self._host.gone():
            time.sleep(_LOOK_EVERY_S)
            silent = {number for number in silent if self._read(f"server/{number}/doing") == begin[number]}
        if not silent or self._host.gone():
            return None
        number = min(silent)
        return ServerFailedError(
            f"{self._servers[number][0].named(number)} is silent: it is connected, but has sent nothing in time, nor "
            f"a sign of life for {within:g} s. Was its process stopped? A longer timeout waits for it"
        )

    def whereabouts(self) -> str:
        """What each server waits for, in words; empty if for nothing."""
        said = []
        for number, (server, _) in self._servers.items():
            text = self._read(f"server/{number}/doing")
            doing = Doing.decode(text.encode()) if text else None
            if doing is not None and doing.lacks:
                ranks = ", ".join(map(str, doing.lacks))
                said.append(f"{server.named(number)} has waited for {doing.since:.0f} s for what rank {ranks} pushes")
        return "; ".join(said)

    def _read(self, key: str) -> str:
        """What a server has left there: a rank may have died while this one had nothing to send for a while."""
        with suppress(RuntimeError):  # the store is gone as well
            if not self._host.gone() and self._store.check([key]):  # torch prints a trace when it asks in vain
                return self._store.get(key).decode()
        return ""

    def close(self) -> None:
        """Close the connections."""
        self._host.close()
        for _, presence in self._servers.values():
            presence.close()


def _presence_of(store: dist.Store) -> StorePresence:
    """Tells whether the store is still there."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    with suppress(OSError):
        if isinstance(store, dist.TCPStore):
            return StorePresence(store.host, store.port)
    return StorePresence()


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
    rails: tuple[tuple[int, ...], ...] = (),
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
        rails: See :class:`Announcement`.

    Raises:
        SchedulerTimeoutError: If too few have signed on in time.
        RanksDifferError: If a server has another version of this package.
    """
    if rank == 0:
        announced = Announcement(workers=workers, servers=servers, version=__version__, rails=rails)
        store.set(f"fit/{fit}", announced.encode())
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
        return server, call_on(server.host, server.port, server.token)
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
        if not isinstance(error, RankFailedError):
            store.set(f"fit/{fit}/refused/{number}", str(error))


def leave_sign(store: dist.Store, number: int, doing: Doing) -> None:
    """Have workers know what server ``number`` does."""
    with suppress(RuntimeError):  # the training is over
        store.set(f"server/{number}/doing", doing.encode())


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
    layout: NodeLayout | None = None,
) -> tuple[ServersFound, dist.ProcessGroup, dist.ProcessGroup | None]:
    """Connect workers with servers; every worker calls this at the same point, once in a fit.

    Args:
        groups: Among workers, whose default group has the store.
        servers: Number of spare servers.
        timeout: Of the wait for servers, and of each message.
        failure: Asked while waiting: why others will not come, if they will not.
        say: Told once that servers are missing, on rank 0.
        layout: Which workers are on one machine, where these have a group of their own.

    Returns:
        The servers, the group of workers (of one rail, where there is a layout) and servers, and that of the node's.

    Raises:
        SchedulerTimeoutError: If too few servers have come in time.
        RanksDifferError: If a server has another version of this package.
        ServerFailedError: If one has died.
    """
    store = meeting_store(dist.distributed_c10d._get_default_store())
    # Rank 0's number: a rank that failed before it came here has counted fewer fits.
    number = torch.tensor([next_fit(store) if groups.rank == 0 else 0], device="cpu")
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
        rails=() if layout is None else layout.rails,
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
            if layout is None:
                return found, join_group(store, found.fit, rank=groups.rank, size=size, timeout=timeout), None
            return found, *_join_on_node(store, found.fit, layout, servers, timeout)
    except RuntimeError as error:
        cause = found.find_gone() or failure()
        found.close()
        if cause is None:
            raise
        raise cause from error
    except BaseException:
        found.close()
        raise


def _join_on_node(
    store: dist.Store, fit: int, layout: NodeLayout, servers: int, timeout: timedelta
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The group of this rank's rail and that of its node, which servers know nothing of."""
    size = len(layout.nodes) + servers
    rail = join_group(store, fit, rank=layout.node, size=size, timeout=timeout, name=rail_name(layout.local_rank))
    name = f"node {layout.node}"
    try:
        return rail, join_group(store, fit, rank=layout.local_rank, size=layout.local_size, timeout=timeout, name=name)
    except BaseException:
        abandon(rail)
        raise


def rail_name(number: int) -> str:
    """Of a rail's group."""
    return f"rail {number}"


def fit_after(store: dist.Store, last: int) -> tuple[int, Announcement] | None:
    """A fit later than ``last`` that has found its servers, so that its workers come at once; ``None`` if none has."""
    current = int(store.get("current")) if store.check(["current"]) else 0
    if current <= last or not store.check([f"begun/{current}"]):
        return None
    return current, Announcement.decode(store.get(f"fit/{current}"))


def call_on(host: str, port: int, token: str) -> StorePresence:
    """Connect to a server's port, and say the token.

    Args:
        host: The server's.
        port: The server's.
        token: The server's.

    Raises:
        OSError: If no server with that token lives there.
    """
    presence = StorePresence(host, port)
    try:
        presence.introduce(token.encode(), len(_WELCOME))
    except BaseException:
        presence.close()
        raise
    return presence


class ServerPort:
    """A port that is open while this process lives; its thread, ``bytescheduler-server-port``, ends with :meth:`close`.

    Args:
        host: Address that workers reach this machine by.

    Attributes:
        port: Its number.
        token: What those say who may be connected.
    """

    def __init__(self, host: str) -> None:
        self._listener = socket.create_server((host, 0))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.token = secrets.token_hex(16)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._known: set[socket.socket] = set()
        self._strangers: dict[socket.socket, float] = {}  # and since when, the oldest first
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bytescheduler-server-port", daemon=True)
        self._thread.start()

    @property
    def connections(self) -> int:
        """How many there are."""
        return len(self._known) + len(self._strangers)

    def close(self, timeout: float = 2.0) -> None:
        """Hang up on all, and end the thread, within ``timeout`` seconds."""
        self._stopping.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stopping.is_set():
            for key, _ in self._selector.select(_STOP_EVERY_S):
                one = cast(socket.socket, key.fileobj)
                if one is self._listener:
                    self._accept()
                elif one in self._known or one in self._strangers:
                    self._hear(one)
            while self._strangers:
                oldest, since = next(iter(self._strangers.items()))
                if len(self._strangers) <= _MOST_STRANGERS and time.monotonic() < since + _PATIENCE_S:
                    break
                self._hang_up(oldest)
        for one in [*self._known, *self._strangers]:
            self._hang_up(one)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            one, _ = self._listener.accept()
        except OSError:  # out of descriptors, perhaps: not again at once
            self._stopping.wait(_STOP_EVERY_S)
            return
        one.setblocking(False)
        self._strangers[one] = time.monotonic()
        self._selector.register(one, selectors.EVENT_READ)

    def _hear(self, one: socket.socket) -> None:
        """A worker says its token, at once and in one piece, and nothing else until it closes."""
        token = self.token.encode()
        try:
            said = one.recv(len(token) + 1)
            if one in self._strangers and hmac.compare_digest(said, token):
                one.sendall(_WELCOME)
                del self._strangers[one]
                self._known.add(one)
                return
        except OSError:
            pass
        self._hang_up(one)

    def _hang_up(self, one: socket.socket) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(one)
        self._known.discard(one)
        self._strangers.pop(one, None)
        one.close()
