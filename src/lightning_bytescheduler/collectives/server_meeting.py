"""Where workers and parameter servers meet, and ``lightning-bytescheduler server``, which runs a server.

They meet in a separate part of the rendezvous store.

Each server signs on once and gets a number. Like a rank, it gives a sign of life four times a second
(:class:`~lightning_bytescheduler.failures.standstill.VitalSigns`), and a last one when it ends, with the reason. Rank 0
of the workers looks for as many living servers as a fit asks for, and announces the fit: its workers, the numbers of
its servers, and the version of this package. Then all connect in one gloo group for each *rail*, see
:class:`NodePushPull`; if each worker pushes for itself, one rail has all workers. Workers have the first ranks in a
group, then come the servers. A server that a fit does not name waits for the next one.

A server that ends because a worker has died leaves without a reason: it is not to blame, and workers look for the dead
one.
"""

from __future__ import annotations

import argparse
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from typing import cast

import msgspec
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
from lightning_bytescheduler.failures.messages import StoreMessage, brief
from lightning_bytescheduler.failures.rendezvous import (
    Introduction,
    StorePresence,
    connect_to_store,
    find_store,
    hold_roll_call,
    looks,
)
from lightning_bytescheduler.failures.standstill import PERIOD_S, Standing, VitalSigns
from lightning_bytescheduler.registration import __version__
from lightning_bytescheduler.scheduler.threads import short_turns, start_thread
from lightning_bytescheduler.serving import parse_bind

PREFIX = "bytescheduler-servers"
_LOOK_EVERY_S = 0.05
_SEEN_S = 4.0  # seconds until all servers are seen to live, or one is not
_CONNECTING_S = 60.0  # seconds, once all have come; takes milliseconds
_ALL_CONNECT_S = 120.0  # seconds to connect, after all have found each other
_LEAVE_S = 2.0
_INTERRUPTED = 130  # a shell's exit code after Ctrl+C
_WAY_OUT = "Leave group out: then each rank pushes for itself."


class Announcement(StoreMessage, frozen=True, kw_only=True):
    """Rank 0's announcement of the latest fit that has found its servers."""

    fit: int
    rails: tuple[tuple[int, ...], ...]
    servers: tuple[int, ...]
    version: str = __version__

    @property
    def workers(self) -> int:
        """Number of workers."""
        return sum(map(len, self.rails))

    def rail(self, number: int, rank: int) -> tuple[str, int, int]:
        """Return a rail's group as (name, rank, size); see :func:`connect`."""
        return f"rail {number}", rank, len(self.rails[number]) + len(self.servers)


class SignedOn(StoreMessage, frozen=True, kw_only=True):
    """A server's registration."""

    host: str = msgspec.field(default_factory=socket.gethostname)
    pid: int = msgspec.field(default_factory=os.getpid)
    version: str = __version__


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
    hold_roll_call(
        dist.PrefixStore(f"fit/{fit.fit}/here", store),
        Introduction(rank=rank, facts={}),
        world_size=fit.workers + len(fit.servers),
        timeout=wait,
        failure=failure,
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


class LivingServer:
    """This process as a server: its number, and the thread ``bytescheduler-server-signs`` with its signs of life.

    Args:
        store: From :func:`meeting_store`; a connection that nothing else uses.
        own: What workers are told of it.
        presence: Tells whether the store is still there.
    """

    def __init__(self, store: dist.Store, own: SignedOn, presence: StorePresence | None = None) -> None:
        self.number = store.add("servers", 1) - 1
        store.set(f"server/{self.number}", own.encode())
        self._signs = VitalSigns(store, self.number)
        self._presence = presence or StorePresence()
        self._why = ""
        self._ends = threading.Event()
        self._thread = start_thread("server-signs", self._run)

    def leave(self, why: str = "") -> None:
        """End in order, or because of ``why``; bounded."""
        self._why = why
        self._ends.set()
        self._thread.join(_LEAVE_S)

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store has just gone
            while not self._presence.gone():
                left = self._ends.is_set()
                self._signs.give(Standing(place=self._why), left=left)
                if left:
                    return
                self._ends.wait(PERIOD_S)


def find_servers(
    store: dist.Store,
    wanted: int,
    *,
    timeout: float,
    failure: Callable[[], BaseException | None],
    say: Callable[[str], object],
) -> tuple[int, ...]:
    """Wait for living servers; rank 0 calls this once in a fit.

    Args:
        store: From :func:`meeting_store`.
        wanted: How many.
        timeout: Longest wait, in seconds.
        failure: Called while waiting; returns the reason if they will not come.
        say: Called once if servers are missing.

    Returns:
        Their numbers.

    Raises:
        SchedulerTimeoutError: If too few have signed on in time.
        RanksDifferError: If a server has another version of this package.
    """
    signs, said, since = VitalSigns(store, -1), False, 0.0
    for waited in looks(failure):
        signs.look(range(store.add("servers", 0)))
        since = since or signs.looked_at  # signs that were there then may be those of the dead
        gone = {*signs.left, *signs.silent()}
        found = tuple(number for number in signs.live(since) if number not in gone)[:wanted]
        missing = wanted - len(found)
        if not missing:
            break
        if waited > timeout:
            raise SchedulerTimeoutError(
                f"{len(found)} of {wanted} parameter servers have joined within {timeout:g} s. Start {missing} "
                "more with 'lightning-bytescheduler server', with the MASTER_ADDR and MASTER_PORT of this "
                "training, or ask for fewer: servers=..."
            )
        if waited > 2 and not said:
            said = True
            say(
                f"bytescheduler: waiting for {missing} of {wanted} parameter servers. Each is started by: "
                f"MASTER_ADDR={os.environ.get('MASTER_ADDR', '...')} "
                f"MASTER_PORT={os.environ.get('MASTER_PORT', '...')} lightning-bytescheduler server"
            )
    for number in found:
        require_same_version(_signed_on(store, number).version, _name(store, number), "rank 0")
    return found


def _signed_on(store: dist.Store, number: int) -> SignedOn:
    return SignedOn.decode(store.get(f"server/{number}"))


def _name(store: dist.Store, number: int) -> str:
    own = _signed_on(store, number)
    return f"parameter server {number} (process {own.pid} at {own.host})"


class JoinedServers:
    """A worker's view of the servers of one fit.

    Args:
        store: From :func:`meeting_store`; a connection that nothing else uses.
        numbers: The servers.
        presence: Tells whether the store is still there.
    """

    push_pull: PushPull

    def __init__(self, store: dist.Store, numbers: Sequence[int], presence: StorePresence | None = None) -> None:
        self._names = {number: _name(store, number) for number in numbers}
        self._signs = VitalSigns(store, -1, numbers)
        self._presence = presence or StorePresence()
        self._lock = threading.Lock()  # held while one thread looks

    def find_gone(self, *, within: float = _SEEN_S) -> ServerFailedError | None:
        """Return an error if a server has died, stands still or has refused to go on.

        Args:
            within: Longest wait until all are seen to live, in seconds; that takes a quarter of a second.
        """
        with self._lock:
            deadline, since = time.monotonic() + within, 0.0
            while self._names and not self._presence.gone():
                try:
                    self._signs.look()
                except RuntimeError:  # the store has just gone
                    break
                since = since or self._signs.looked_at
                for number, why in self._signs.left.items():
                    if why:
                        return ServerFailedError(f"{self._names[number]} has ended: {why}")
                for number in self._signs.silent():
                    return ServerFailedError(
                        f"{self._names[number]} shows no sign of life. Was its process killed or stopped?"
                    )
                if len(self._signs.live(since)) == len(self._names) or time.monotonic() >= deadline:
                    break
                time.sleep(_LOOK_EVERY_S)
        return None

    def leave(self, *, idle: bool) -> None:
        """Leave the servers; see :meth:`PushPull.close`."""
        try:
            self.push_pull.close(idle=idle)
        finally:
            self._presence.close()


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
    each = {size for _, _, size in places}
    if len(each) > 1 or any([number for number, _ in ranks] != [*range(*each)] for ranks in nodes.values()):
        said = ", ".join(
            f"rank {one}: number {local} of {size} on node {node}" for one, (node, local, size) in enumerate(places)
        )
        raise UnsupportedError(
            "The group 'node' needs as many ranks on each node, and to know which are where, but the ranks say: "
            f"{said}. The launcher tells them by LOCAL_RANK, and NODE_RANK or GROUP_RANK. Check these on each machine, "
            f"and that devices=... and num_nodes=... of the Trainer are what the launcher has started. {_WAY_OUT}"
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
    connection, presence = connect_to_store(dist.distributed_c10d._get_default_store())
    store, seconds = meeting_store(connection), timeout.total_seconds()
    with ExitStack() as opened:
        opened.callback(presence.close)
        # Rank 0's number counts: a rank that failed early may have counted fewer fits.
        count = torch.tensor([store.add("fits", 1) if groups.rank == 0 else 0], device="cpu")
        dist.broadcast(count, src=0, group=groups.control)
        if groups.rank == 0:
            found = find_servers(store, servers, timeout=seconds, failure=failure, say=say) if servers else ()
            store.set("begun", Announcement(fit=int(count), rails=rails, servers=found).encode())
        for waited in looks(failure):
            if begun_after(store, int(count) - 1) is not None:
                break
            if waited > seconds + _ALL_CONNECT_S:
                raise SchedulerTimeoutError(f"Rank 0 has not found {servers} parameter servers within {waited:.0f} s.")
        fit = Announcement.decode(store.get("begun"))
        joined = JoinedServers(store, fit.servers, presence)
        places = [fit.rail(number, node)]
        if grouped:  # servers do not join a node's own group
            places.append((f"node {node}", number, len(here)))

        def gone() -> BaseException | None:
            return joined.find_gone(within=0.0) or failure()

        try:
            made = connect(store, fit, places, rank=groups.rank, wait=seconds, timeout=timeout, failure=gone)
        except RuntimeError as error:
            cause = joined.find_gone() or failure()
            if cause is None:
                raise
            raise cause from error
        opened.pop_all()
    placed = PlacedParts(placement, workers=pushers, servers=servers, nodes=nodes if grouped else ())
    if grouped:
        joined.push_pull = NodePushPull(made[0], made[1], rails[number], placed, timeout)
    else:
        joined.push_pull = PushPull(made[0], rails[number], placed, timeout)
    return joined


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
        RanksDifferError: If the training has another version.
        UnsupportedError: If a worker's push does not fit another worker's.
        RankFailedError: If a worker has died.
    """
    require_seconds("timeout", timeout)
    say(f"Looking for the training at {host}:{port}.")
    presence = find_store(host, port, who="this parameter server", timeout=timeout)
    choose_interface(host)
    connect_anew = partial(
        dist.TCPStore, host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=15)
    )
    # On one connection signs of life would wait while gloo waits for another process's address.
    store, signs = meeting_store(connect_anew()), meeting_store(connect_anew())
    begun = begun_after(store, 0)
    last = 0 if begun is None else begun.fit  # a fit in progress already has its servers
    server, why = LivingServer(signs, SignedOn(), presence), ""
    try:
        say(f"Parameter server {server.number} at {socket.gethostname()} is ready for the training at {host}:{port}.")
        while (fit := _next_fit(store, presence, last)) is not None:
            last = fit.fit
            require_same_version(fit.version, "The training", f"parameter server {server.number}")
            if server.number not in fit.servers:
                say(f"Fit {last} has its {len(fit.servers)} servers. Waiting for the next fit.")
                continue
            try:
                groups = _connect(store, presence, fit, fit.servers.index(server.number))
            except (SchedulerTimeoutError, RuntimeError) as error:  # a process does not come, or has died
                say(f"Fit {last} could not be connected: {brief(error).rstrip('.')}. Waiting for the next fit.")
                continue
            say(f"Fit {last}: serving {fit.workers} workers, with {len(fit.servers)} servers in all.")
            sums = [SummingServer(group, rail) for group, rail in zip(groups, fit.rails, strict=True)]
            await_goodbyes(sums, presence.gone)
        say("The training is over.")
    except BaseException as error:
        why = "" if isinstance(error, RankFailedError) else str(error) or type(error).__name__
        raise
    finally:
        server.leave(why)
        presence.close()


def _next_fit(store: dist.Store, presence: StorePresence, last: int) -> Announcement | None:
    while not presence.gone():
        with suppress(RuntimeError):  # the store may just have gone
            if (fit := begun_after(store, last)) is not None:
                return fit
        time.sleep(_LOOK_EVERY_S)
    return None


def _connect(store: dist.Store, presence: StorePresence, fit: Announcement, place: int) -> list[dist.ProcessGroup]:
    def gone() -> RankFailedError | None:
        return RankFailedError(0, "the rendezvous store of the training is gone") if presence.gone() else None

    places = [fit.rail(one, len(rail) + place) for one, rail in enumerate(fit.rails)]
    return connect(store, fit, places, rank=fit.workers + place, wait=_ALL_CONNECT_S, timeout=PATIENCE, failure=gone)
