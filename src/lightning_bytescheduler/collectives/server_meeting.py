"""Where workers and parameter servers meet, and ``lightning-bytescheduler server``, which runs a server.

They meet in a separate part of the rendezvous store.

Each server signs on once and gets a number. Once all servers of a fit have signed on, rank 0 of the workers announces
the fit: its workers, its number of servers, and the version of this package. Then all connect in one gloo group for
each *rail*, see :class:`NodePushPull`; if each worker pushes for itself, one rail has all workers. Workers have the
first ranks in a group, then come the servers.

*A server's port* shows whether the server lives: it is open while the server lives, and its connections close when the
process ends. A client sends the server's *token*, which readers of the rendezvous store know, and receives what the
server does. So a stalled server can be told from a server that waits for a worker. A server that fails reports the
reason on all connections. A client that sends anything else is disconnected. A silent client is disconnected after a
while, or at once if there are too many, so that strangers do not take the places of workers.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import cast

import torch
import torch.distributed as dist

from lightning_bytescheduler.checks import require_seconds, require_whole
from lightning_bytescheduler.collectives.groups import SchedulerGroups, abandon, choose_interface
from lightning_bytescheduler.collectives.operations import PATIENCE
from lightning_bytescheduler.collectives.push_pull import NodePushPull, Nodes, PlacedParts, PushPull
from lightning_bytescheduler.collectives.summing_server import SummingServer, await_goodbyes
from lightning_bytescheduler.exceptions import (
    OptionError,
    RankFailedError,
    RanksDifferError,
    SchedulerTimeoutError,
    ServerFailedError,
    UnsupportedError,
)
from lightning_bytescheduler.failures.messages import StoreMessage, brief, is_communication_error, is_timeout
from lightning_bytescheduler.failures.rendezvous import StorePresence, looks
from lightning_bytescheduler.registration import __version__
from lightning_bytescheduler.scheduler.threads import short_turns
from lightning_bytescheduler.serving import end_others, parse_bind

PREFIX = "bytescheduler-servers"
_LOOK_EVERY_S = 0.05
_SOON_GONE_S = 0.5  # seconds; a dying process does not close all connections at once
_CONNECTING_S = 60.0  # seconds, once all have come; takes milliseconds
_REACHED_S = 15.0
_ANSWERS_S = 5.0  # seconds; a working server answers at once
_MOST_STRANGERS = 256
_PATIENCE_S = 10.0  # seconds for a client to send its token
_ALL_CONNECT_S = 120.0  # seconds to connect, after all have found each other
_LINGER_S = 6.0  # seconds; longer than workers need to find a dead one
_LOOK_FOR_FIT_S = 0.1
_INTERRUPTED = 130  # a shell's exit code after Ctrl+C
_WAITED = "Of the servers,"
_WAY_OUT = "Leave group out: then each rank pushes for itself."


class Announcement(StoreMessage, frozen=True, kw_only=True):
    """Rank 0's announcement of the latest fit that has found its servers."""

    fit: int
    rails: tuple[tuple[int, ...], ...]
    servers: int
    version: str = __version__

    @property
    def workers(self) -> int:
        """Number of workers."""
        return sum(map(len, self.rails))

    def rail(self, number: int, rank: int) -> tuple[str, int, int]:
        """Return a rail's group as (name, rank, size); see :func:`connect`."""
        return f"rail {number}", rank, len(self.rails[number]) + self.servers


class SignedOn(StoreMessage, frozen=True, kw_only=True):
    """A server's registration."""

    host: str
    port: int
    pid: int
    version: str
    token: str


class Doing(StoreMessage, frozen=True, kw_only=True):
    """What a server does.

    Attributes:
        lacks: Workers whose push is missing from the oldest sum in progress.
        since: Age of that sum, in seconds.
        ends: Why it ends, in words; empty if it does not.
        refuses: Whether it ends because of what workers have sent, not because of a worker that has ended.
    """

    lacks: tuple[int, ...] = ()
    since: float = 0.0
    ends: str = ""
    refuses: bool = False


def meeting_store(store: dist.Store) -> dist.Store:
    """Return the servers' part of a rendezvous store, for any view of the store."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return dist.PrefixStore(PREFIX, store)


def connect(
    store: dist.Store,
    fit: Announcement,
    places: Iterable[tuple[str, int, int]],
    *,
    rank: int,
    wait: float,
    timeout: timedelta,
    failure: Callable[[], BaseException | None],
) -> list[dist.ProcessGroup]:
    """Connect workers and servers; all call this. They wait for each other first, as gloo does not say who is missing.

    Args:
        store: From :func:`meeting_store`.
        fit: The fit.
        places: Groups to make: name, this process's rank, and size of each.
        rank: Number of this process among all workers and servers, workers first.
        wait: Longest wait for all to come, in seconds.
        timeout: Timeout of connecting, and the default for messages.
        failure: Called while waiting; returns the reason if they will not come.

    Raises:
        SchedulerTimeoutError: If some have not come in time.
        RuntimeError: If a process has died after it came.
        BaseException: The result of ``failure``.
    """
    size = fit.workers + fit.servers
    store.set(f"fit/{fit.fit}/here/{rank}", "")
    keys = [f"fit/{fit.fit}/here/{one}" for one in range(size)]
    for waited in looks(failure):
        if store.check(keys):
            break
        if waited > wait:
            missing = ", ".join(str(one) for one, key in enumerate(keys) if not store.check([key]))
            raise SchedulerTimeoutError(
                f"Of {size} workers and parameter servers of fit {fit.fit}, numbered from 0 with the workers first, "
                f"{missing} did not come to connect within {wait:g} s."
            )
    made: list[dist.ProcessGroup] = []
    try:
        with short_turns():  # for gloo's threads
            for name, place, members in places:
                met = dist.PrefixStore(f"fit/{fit.fit}/{name}", store)
                group = dist.ProcessGroupGloo(met, place, members, min(timeout, timedelta(seconds=_CONNECTING_S)))
                made.append(cast(dist.ProcessGroup, group))  # the stubs lack its base class
    except BaseException:
        for one in made:
            abandon(one)
        raise
    return made


def require_same_version(version: str, whose: str, own: str) -> None:
    """Raise :class:`RanksDifferError` unless ``version`` is this process's; ``whose`` and ``own`` name both sides."""
    if version != __version__:
        raise RanksDifferError(
            f"{whose} has lightning-bytescheduler {version}, and {own} has {__version__}. Install the same version on "
            "all machines."
        )


def begun_after(store: dist.Store, last: int) -> Announcement | None:
    """Return a fit later than ``last`` that has found its servers; ``None`` if there is none.

    Args:
        store: From :func:`meeting_store`.
        last: Number of a fit; the first fit has number 1.
    """
    if not store.check(["begun"]):
        return None
    announced = Announcement.decode(store.get("begun"))
    return announced if announced.fit > last else None


def sign_on(store: dist.Store, own: SignedOn) -> int:
    """Take the lowest number that no living server has, and return it."""
    number = 0
    while True:
        before = store.get(f"server/{number}").decode() if store.check([f"server/{number}"]) else ""
        living = _call(store, number) if before else None
        if living is not None:
            living.close()
            number += 1
        elif store.compare_set(f"server/{number}", before, own.encode()).decode() == own.encode():
            return number


class ServerLine:
    """A connection to a server's port. For any thread.

    Args:
        timeout: Longest wait for its answer, in seconds.

    Raises:
        OSError: If no server with that token lives there.
        TimeoutError: If it does not answer.
    """

    def __init__(self, number: int, server: SignedOn, timeout: float = _REACHED_S) -> None:
        self.server = server
        self.name = f"parameter server {number} (process {server.pid} at {server.host})"
        self._lock = threading.Lock()
        self._socket = socket.create_connection((server.host, server.port), timeout)
        self._said = b""
        try:
            self._socket.sendall(server.token.encode())
            while b"\n" not in self._said:
                piece = self._socket.recv(4096)
                if not piece:
                    raise ConnectionError("The other side has hung up.")
                self._said += piece
        except BaseException:
            self._socket.close()
            raise
        self._socket.setblocking(False)

    @property
    def doing(self) -> Doing:
        """The server's latest report."""
        return Doing.decode(self._said.split(b"\n")[-2] or b"{}")  # the last piece is an incomplete line

    def find_gone(self) -> ServerFailedError | None:
        """Return an error if the server has died or has refused to go on; does not wait."""
        with self._lock:
            try:
                while piece := self._socket.recv(4096):
                    self._said += piece
                ended = True
            except BlockingIOError:
                ended = False
            except OSError:
                ended = self._socket.fileno() >= 0  # otherwise this side has closed it
            doing = self.doing
        if doing.refuses:
            return ServerFailedError(f"{self.name} has refused what it was sent: {doing.ends}")
        return ServerFailedError(f"{self.name} has ended{': ' * bool(doing.ends)}{doing.ends}") if ended else None

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def _call(store: dist.Store, number: int) -> ServerLine | None:
    """Connect to the server that has this number now, if it lives."""
    if not store.check([f"server/{number}"]):
        return None
    try:
        return ServerLine(number, SignedOn.decode(store.get(f"server/{number}")))
    except OSError:
        return None


def find_servers(
    store: dist.Store,
    fit: Announcement,
    *,
    rank: int,
    timeout: float,
    failure: Callable[[], BaseException | None],
    say: Callable[[str], object],
) -> list[ServerLine]:
    """Wait until all servers of a fit have signed on; every worker calls this once in a fit.

    Args:
        store: From :func:`meeting_store`.
        fit: The fit.
        rank: This worker's rank.
        timeout: Longest wait, in seconds.
        failure: Called while waiting; returns the reason if they will not come.
        say: Called once on rank 0 if servers are missing.

    Returns:
        A connection to each, by number.

    Raises:
        SchedulerTimeoutError: If too few have signed on in time.
        RanksDifferError: If a server has another version of this package.
    """
    servers, said = fit.servers, rank != 0
    lines: dict[int, ServerLine] = {}
    try:
        for waited in looks(failure):
            for number in range(servers):
                if number in lines and lines[number].find_gone() is not None:  # it has ended while others were awaited
                    lines.pop(number).close()
                if number not in lines and (line := _call(store, number)) is not None:
                    lines[number] = line
            missing = servers - len(lines)
            if not missing:
                break
            if waited > timeout:
                raise SchedulerTimeoutError(
                    f"{len(lines)} of {servers} parameter servers have joined within {timeout:g} s. Start {missing} "
                    "more with 'lightning-bytescheduler server', with the MASTER_ADDR and MASTER_PORT of this "
                    "training, or ask for fewer: servers=..."
                )
            if waited > 2 and not said:
                said = True
                say(
                    f"bytescheduler: waiting for {missing} of {servers} parameter servers. Each is started by: "
                    f"MASTER_ADDR={os.environ.get('MASTER_ADDR', '...')} "
                    f"MASTER_PORT={os.environ.get('MASTER_PORT', '...')} lightning-bytescheduler server"
                )
        if rank == 0:
            store.set("begun", fit.encode())
        found = [lines[number] for number in range(servers)]
        for line in found:
            require_same_version(line.server.version, line.name, f"rank {rank}")
        return found
    except BaseException:
        for line in lines.values():
            line.close()
        raise


class JoinedServers:
    """A worker's connections to the servers of one fit."""

    push_pull: PushPull

    def __init__(self, lines: Sequence[ServerLine]) -> None:
        self._lines = lines

    def find_gone(self, *, within: float = _SOON_GONE_S) -> ServerFailedError | None:
        """Return an error if a server has died or refused to go on; waits up to ``within`` seconds for that to show."""
        deadline = time.monotonic() + within
        while True:
            for line in self._lines:
                if (gone := line.find_gone()) is not None:
                    return gone
            if time.monotonic() >= deadline:
                return None
            time.sleep(_LOOK_EVERY_S)

    def explain_timeout(self, error: BaseException) -> BaseException:
        """Explain a timeout: which server stands still, or what servers wait for."""
        timed_out = isinstance(error, SchedulerTimeoutError) or (is_communication_error(error) and is_timeout(error))
        if not timed_out or _WAITED in str(error):
            return error
        waits: list[str] = []
        for number, line in enumerate(self._lines):
            try:
                asked = ServerLine(number, line.server, _ANSWERS_S)
            except TimeoutError:
                silent = ServerFailedError(
                    f"{line.name} is silent: it is connected, but has sent nothing in time, nor a sign of life for "
                    f"{_ANSWERS_S:g} s. Was its process stopped? A longer timeout waits for it"
                )
                silent.__cause__ = error
                return silent
            except OSError:  # it has ended: see find_gone()
                continue
            asked.close()
            doing = asked.doing
            if doing.lacks:
                ranks = ", ".join(map(str, doing.lacks))
                waits.append(f"{line.name} has waited for {doing.since:.0f} s for what rank {ranks} pushes")
        if not waits:
            return error
        explained = SchedulerTimeoutError(f"{brief(error)} {_WAITED} {'; '.join(waits)}.")
        explained.__cause__ = error
        return explained

    def leave(self, *, idle: bool) -> None:
        """Leave the servers; see :meth:`PushPull.close`."""
        try:
            self.push_pull.close(idle=idle)
        finally:
            self.close()

    def close(self) -> None:
        """Close the connections to ports."""
        for line in self._lines:
            line.close()


def lay_out(places: Sequence[tuple[int, int, int]]) -> Nodes:
    """Return the ranks of each node, in the order of their numbers there; nodes are ordered by their first ranks.

    Args:
        places: By rank: its node, its number there, and the number of ranks started there.

    Raises:
        UnsupportedError: On all ranks alike, if the places contradict each other, or nodes have different numbers of
            ranks.
    """
    there = [(node, local, one) for one, (node, local, _) in enumerate(places)]
    nodes = {node: sorted(one[1:] for one in there if one[0] == node) for node, _, _ in sorted(there)}
    if len({len(ranks) for ranks in nodes.values()}) > 1:
        counts = ", ".join(f"node {node} has {len(ranks)}" for node, ranks in nodes.items())
        raise UnsupportedError(f"The group 'node' needs as many ranks on each node, but {counts}. {_WAY_OUT}")
    for one, (node, local, size) in enumerate(places):
        numbers = [number for number, _ in nodes[node]]
        if numbers != [*range(size)]:
            raise UnsupportedError(
                f"The group 'node' needs to know which ranks are on which node, but rank {one} says that it is number "
                f"{local} of {size} on node {node}, where the ranks say that they are numbers "
                f"{', '.join(map(str, numbers))}. The launcher tells them by LOCAL_RANK, and NODE_RANK or GROUP_RANK. "
                "Check these on each machine, and that devices=... and num_nodes=... of the Trainer are what the "
                f"launcher has started. {_WAY_OUT}"
            )
    return tuple(sorted(tuple(one for _, one in ranks) for ranks in nodes.values()))


def agree_on_nodes(groups: SchedulerGroups, place: Sequence[int]) -> Nodes:
    """Exchange the places of all ranks, see :func:`lay_out`; every rank calls this at the same point.

    Raises:
        UnsupportedError: See :func:`lay_out`.
        RuntimeError: If a rank has died.
    """
    own = torch.tensor(place, device="cpu")
    places = [torch.zeros_like(own) for _ in range(groups.world_size)]
    dist.all_gather(places, own, group=groups.control)
    return lay_out([(node, local, size) for node, local, size in (one.tolist() for one in places)])


def join_servers(
    groups: SchedulerGroups,
    spare: int,
    nodes: Nodes = (),
    *,
    placement: str,
    timeout: timedelta,
    failure: Callable[[], BaseException | None] = lambda: None,
    say: Callable[[str], object],
) -> JoinedServers:
    """Connect workers with servers; every worker calls this at the same point, once in a fit.

    Args:
        groups: The workers' groups; their default group has the store.
        spare: Number of servers on separate machines; more than one per node are ignored.
        nodes: The ranks of each node, if they push as one; empty if each rank pushes for itself.
        placement: One of ``push_pull.PLACEMENTS``.
        timeout: Longest wait for servers, and for each message.
        failure: Called while waiting; returns the reason if others will not come.
        say: Called on rank 0 with messages for the user.

    Raises:
        SchedulerTimeoutError: If too few servers have come in time.
        RanksDifferError: If a server has another version of this package.
        ServerFailedError: If a server has died.
    """
    nodes = nodes or tuple((rank,) for rank in range(groups.world_size))
    node, here = next((node, ranks) for node, ranks in enumerate(nodes) if groups.rank in ranks)
    number, rails = here.index(groups.rank), tuple(zip(*nodes, strict=True))  # a rank's number is its rail
    pushers, grouped = len(nodes), len(here) > 1
    servers, each = min(spare, pushers), "node" if grouped else "worker"
    if servers < spare and groups.rank == 0:
        say(f"bytescheduler: servers={spare} counts as {servers}, as more than one per {each} are of no use.")
    store = meeting_store(dist.distributed_c10d._get_default_store())
    # Rank 0's number counts: a rank that failed early may have counted fewer fits.
    count = torch.tensor([store.add("fits", 1) if groups.rank == 0 else 0], device="cpu")
    dist.broadcast(count, src=0, group=groups.control)
    fit, seconds = Announcement(fit=int(count), rails=rails, servers=servers), timeout.total_seconds()
    lines = find_servers(store, fit, rank=groups.rank, timeout=seconds, failure=failure, say=say)
    joined = JoinedServers(lines)
    places = [fit.rail(number, node)]
    if grouped:  # servers do not join a node's own group
        places.append((f"node {node}", number, len(here)))

    def gone() -> BaseException | None:
        return joined.find_gone(within=0.0) or failure()

    try:
        made = connect(store, fit, places, rank=groups.rank, wait=seconds, timeout=timeout, failure=gone)
    except BaseException as error:
        cause = (joined.find_gone() or failure()) if isinstance(error, RuntimeError) else None
        joined.close()
        if cause is None:
            raise
        raise cause from error
    placed = PlacedParts(placement, workers=pushers, servers=servers, nodes=nodes if grouped else ())
    if grouped:
        joined.push_pull = NodePushPull(made[0], made[1], rails[number], placed, timeout)
    else:
        joined.push_pull = PushPull(made[0], rails[number], placed, timeout)
    return joined


class ServerPort:
    """A port that is open while this process lives; its thread is ``bytescheduler-server-port``.

    Attributes:
        doing: Called on the thread; returns what the server does. May be set at any time.
    """

    def __init__(self, host: str) -> None:
        self.doing: Callable[[], Doing] = Doing
        self._known: set[asyncio.StreamWriter] = set()
        self._strangers: dict[asyncio.StreamWriter, None] = {}  # the oldest first
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._hear, host, 0))
        port = self._server.sockets[0].getsockname()[1]
        self.own = SignedOn(host=host, port=port, pid=os.getpid(), version=__version__, token=secrets.token_hex(16))
        self._thread = threading.Thread(target=self._run, name="bytescheduler-server-port", daemon=True)
        self._thread.start()

    def leave_word(self, error: BaseException) -> None:
        """Report to connected workers why this server ends."""
        doing = Doing(ends=str(error), refuses=not isinstance(error, RankFailedError))
        self._loop.call_soon_threadsafe(self._say, doing)

    def close(self, timeout: float = 2.0) -> None:
        """Disconnect all clients and end the thread, within ``timeout`` seconds; idempotent."""
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._hang_up())
        self._loop.close()

    async def _hang_up(self) -> None:
        self._server.close()
        await end_others()

    def _say(self, doing: Doing) -> None:
        self.doing = lambda: doing
        for one in self._known:
            one.write(f"{doing.encode()}\n".encode())

    async def _hear(self, reader: asyncio.StreamReader, one: asyncio.StreamWriter) -> None:
        """Serve a client, which sends its token and then nothing until it closes."""
        self._strangers[one] = None
        if len(self._strangers) > _MOST_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        token = self.own.token.encode()
        try:
            said = await asyncio.wait_for(reader.readexactly(len(token)), _PATIENCE_S)
            if hmac.compare_digest(said, token):
                self._strangers.pop(one, None)
                self._known.add(one)
                one.write(f"{self.doing().encode()}\n".encode())
                await reader.read(1)
        except (OSError, EOFError, asyncio.TimeoutError, asyncio.CancelledError):
            pass  # asyncio's streams log a cancelled task as an error, in Python 3.11
        finally:
            self._known.discard(one)
            self._strangers.pop(one, None)
            one.transport.abort()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("--master-addr", metavar="HOST", help="address of rank 0 (default: MASTER_ADDR)")
    parser.add_argument("--master-port", metavar="PORT", type=int, help="port on rank 0 (default: MASTER_PORT)")
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=1800.0, help="longest wait for the training (default: 1800)"
    )


def run(options: argparse.Namespace) -> int:
    """Serve until the training is over; returns the exit code."""
    place = {"MASTER_ADDR": options.master_addr, "MASTER_PORT": options.master_port}
    for name, given in place.items():
        place[name] = str(given or os.environ.get(name, ""))
        if not place[name]:
            option = f"--{name.lower().replace('_', '-')}"
            says = f"Where is the training? Give {option}, or set {name}: that of the training's rank 0."
            raise OptionError(option, None, "given", says=says)
    host, port = parse_bind("MASTER_ADDR:MASTER_PORT", ":".join(place.values()))
    torch.set_num_threads(1)  # sums of different parts run concurrently
    code = 0
    try:
        serve(host, require_whole("MASTER_PORT", port, 1), timeout=options.timeout, say=_say)
    except RankFailedError as error:
        _say(f"The training has ended: {error}")
        code = 1
    except KeyboardInterrupt:
        _say("Interrupted.")
        code = _INTERRUPTED
    if code:  # gloo would wait for messages that cannot come
        os._exit(code)
    return code


_say = partial(print, flush=True)


def serve(host: str, port: int, *, timeout: float = 1800.0, say: Callable[[str], object]) -> None:
    """Serve one fit after the other, until the training's rendezvous store is gone.

    Args:
        host: ``MASTER_ADDR`` of the training.
        port: ``MASTER_PORT`` of the training.
        timeout: Longest wait for the training to begin, in seconds.
        say: Called with messages for the user.

    Raises:
        SchedulerTimeoutError: If there is no training in time.
        RanksDifferError: If the training has another version, or already has all its servers.
        RankFailedError: If a worker has died.
    """
    require_seconds("timeout", timeout)
    presence = _reach(host, port, timeout, say)
    own = presence.own_address
    choose_interface(host)
    store = meeting_store(
        dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=15))
    )
    begun = begun_after(store, 0)
    last = 0 if begun is None else begun.fit  # a fit in progress already has its servers
    door = ServerPort(own)
    try:
        number = sign_on(store, door.own)
        say(f"Parameter server {number} at {own} is ready for the training at {host}:{port}.")
        while (fit := _next_fit(store, presence, last)) is not None:
            last = fit.fit
            _check(number, fit)
            try:
                groups = _connect(store, presence, number, fit)
            except (SchedulerTimeoutError, RuntimeError) as error:  # a process does not come, or has died
                say(f"Fit {last} could not be connected: {brief(error).rstrip('.')}. Waiting for the next fit.")
                continue
            say(f"Fit {last}: serving {fit.workers} workers, with {fit.servers} servers in all.")
            servers = [SummingServer(group, rail) for group, rail in zip(groups, fit.rails, strict=True)]
            door.doing = partial(_doing, servers)
            try:
                await_goodbyes(servers, presence.gone)
            except Exception as error:
                door.leave_word(error)
                time.sleep(_LINGER_S)
                raise
            finally:
                door.doing = Doing
        say("The training is over.")
    finally:
        door.close()
        presence.close()


def _reach(host: str, port: int, timeout: float, say: Callable[[str], object]) -> StorePresence:
    deadline, said = time.monotonic() + timeout, False
    while True:
        try:
            return StorePresence(host, port)
        except OSError as error:
            if time.monotonic() > deadline:
                raise SchedulerTimeoutError(
                    f"There is no training at {host}:{port} within {timeout:g} s ({error}). Check MASTER_ADDR and "
                    "MASTER_PORT; they are those of rank 0."
                ) from error
            if not said:
                say(f"Waiting for the training at {host}:{port} ({error}).")
                said = True
        time.sleep(0.2)


def _next_fit(store: dist.Store, presence: StorePresence, last: int) -> Announcement | None:
    while not presence.gone():
        with suppress(RuntimeError):  # the store may just have gone
            if (fit := begun_after(store, last)) is not None:
                return fit
        time.sleep(_LOOK_FOR_FIT_S)
    return None


def _check(number: int, fit: Announcement) -> None:
    require_same_version(fit.version, "The training", f"parameter server {number}")
    if number >= fit.servers:
        raise RanksDifferError(
            f"The training has servers={fit.servers}, and that many have joined before this server, number "
            f"{number}. Was a server started twice?"
        )


def _connect(store: dist.Store, presence: StorePresence, number: int, fit: Announcement) -> list[dist.ProcessGroup]:
    def gone() -> RankFailedError | None:
        return RankFailedError(0, "the rendezvous store of the training is gone") if presence.gone() else None

    places = [fit.rail(one, len(rail) + number) for one, rail in enumerate(fit.rails)]
    return connect(store, fit, places, rank=fit.workers + number, wait=_ALL_CONNECT_S, timeout=PATIENCE, failure=gone)


def _doing(servers: Sequence[SummingServer]) -> Doing:
    lacks, since = max((server.waits_for for server in servers), key=lambda waits: waits[1])
    return Doing(lacks=lacks, since=since)
