"""The rendezvous store: ranks meet there before there is a process group, and compare what has to be the same.

*Before there is a process group* the ranks meet at the store (:class:`Meeting`): each looks for it, and says now and
then what it waits for. Only the training thread waits, in Python, so that a hint, a difference or a signal reaches it.
What follows, the connections of the process group, is torch's native code, where a rank may wait for half an hour for
one that cannot connect. A fault board watches over it, and :func:`explain_connection` says what is wrong.

*Before ranks wait for each other in a training*, each rank introduces itself with a few facts and reads those of all
others (:func:`hold_roll_call`). If a fact has to be equal and is not, every rank raises an error that names ranks,
hosts and values (:func:`require_alike`). A rank that does not come is named after half a minute. All requests go
through the training thread's own connection and do not block. Nothing is sent through process groups.

Asking a TCPStore whose host has died makes torch print a stack trace of C++ frames. The kernel knows earlier and
without noise: an idle TCP connection to the same port ends when the process at the other end does.

``torchrun``'s agent may keep one rendezvous store over all restarts of its workers. A new start then finds what an
earlier one wrote under the same keys: gloo connects to ports of processes that are gone, and waits for minutes. The
agent says how often it has restarted, but each agent counts for itself, and one that joins later begins at 0. So the
ranks agree on a name themselves, and use only the keys under that name.

*Why no rank ends up with an earlier start's name.* Rank 0 writes a fresh name. Each other rank reads a name, answers
under it with a fresh word of its own, and goes on once rank 0 has confirmed that word under that name. Words are never
used twice, so the confirmation was written after the word, by a rank 0 that is alive now. A rank that has read an older
name answers under that one, is not confirmed, and looks again: rank 0 has written its name by then, or will.

*Why all ranks take the same name.* A rank takes only a name under which its word was confirmed, and rank 0 confirms
under one name. It does so until all ranks have introduced themselves there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import msgspec
import torch.distributed as dist

from lightning_bytescheduler.exceptions import (
    RankFailedError,
    RanksDifferError,
    RanksUnreachableError,
    SchedulerTimeoutError,
)
from lightning_bytescheduler.failures.messages import RANKS_SHOWN, FaultNotice, StoreMessage, names_of

log = logging.getLogger(__name__)

_TIMEOUT = timedelta(seconds=15)
_REUNION_S = 8.0  # longer than a rank that did not notice a failure is left alive
_SHORTEST_S, _LONGEST_S = 0.002, 0.05  # between two looks
_PLACE = "bytescheduler-incarnation"
_WARN_S = 30.0  # until missing ranks are named
_ROLL_CALL_S = 0.25  # at most, between two looks
_CONNECT_S = 2.0
_FAREWELL_S = 2.0
_DIFFERENCES_SHOWN = 8
_NO_ADDRESS = "Unable to find address for"  # gloo's words
_NO_CONNECTION = "connectFullMesh failed"
_INTERFACE = (
    "Gloo connects through the address that a machine's name resolves to: on each machine, name the interface that "
    "leads to the others, such as GLOO_SOCKET_IFNAME=eth0, and let the machines connect to each other on all TCP ports."
)
_ABSENT = "nothing"
_WAY_OUT = "Start all of them with the same packages, the same code, the same options and variables."


def agent_keeps_store() -> bool:
    """Whether the store outlives the ranks, and may hold what earlier ones wrote."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_gone(noticed: str) -> RankFailedError:
    """The failure of the process that has kept the store: rank 0, or torchrun's agent.

    Args:
        noticed: How that was noticed, in words.
    """
    if agent_keeps_store():
        return RankFailedError(None, f"the rendezvous agent is gone; {noticed}")
    return RankFailedError(0, f"its process is gone, and the rendezvous store with it; {noticed}")


def looks(failure: Callable[[], BaseException | None], *, longest: float = _LONGEST_S) -> Iterator[float]:
    """Loop that looks for others at the store, ever less often, until the caller ends it or there is a failure.

    Args:
        failure: Called between two looks; returns the reason why the others will not come, or ``None``.
        longest: Longest time between two looks, in seconds.

    Yields:
        How long it has looked, in seconds.

    Raises:
        BaseException: What ``failure`` returned.
    """
    began, pause = time.monotonic(), _SHORTEST_S
    while True:
        yield time.monotonic() - began
        cause = failure()
        if cause is not None:
            raise cause
        time.sleep(pause)
        pause = min(2 * pause, longest)


_Missing = Callable[[float], tuple[str, bool]]


def _patient_looks(
    who_is_missing: _Missing, *, timeout: float, failure: Callable[[], BaseException | None]
) -> Iterator[float]:
    """Like :func:`looks`, but says who is missing: in a warning after half a minute, a minute, and so on.

    Args:
        who_is_missing: Called with the seconds waited; returns what to say, empty if all have come since the last look,
            and whether this rank warns of it.
        timeout: Seconds until that is an error.
        failure: See :func:`looks`.

    Raises:
        SchedulerTimeoutError: If the time is up.
    """
    warn_at = _WARN_S
    for waited in looks(failure, longest=_ROLL_CALL_S):
        yield waited
        if waited >= min(warn_at, timeout):
            text, speaks = who_is_missing(waited)
            if text and waited >= timeout:
                raise SchedulerTimeoutError(text)
            if text and speaks:
                log.warning("bytescheduler: %s", text)
            warn_at *= 2


class StorePresence:
    """Tells whether a store's host is still there, without asking the store.

    Args:
        host: The store's host; ``None`` for a store without connections, which is always there.
        port: The store's port.
        timeout: Longest wait for it, in seconds.

    Raises:
        OSError: If nothing listens there.
    """

    def __init__(self, host: str | None = None, port: int = 0, timeout: float = _TIMEOUT.total_seconds()) -> None:
        self._socket: socket.socket | None = None
        if host is not None:
            self._socket = socket.create_connection((host, port), timeout)
            self._socket.setblocking(False)

    @property
    def own_address(self) -> str:
        """This machine's address on the route to the store; empty for a store without connections."""
        return "" if self._socket is None else str(self._socket.getsockname()[0])

    def gone(self) -> bool:
        """Whether the host has ended. Never blocks."""
        if self._socket is None:
            return False
        try:
            return self._socket.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None


def find_store(host: str, port: int, *, who: str, timeout: float) -> StorePresence:
    """Wait until there is a store at this address; says now and then that it does.

    Args:
        host: Where it will be.
        port: Its port.
        who: Waits, in words.
        timeout: Longest wait, in seconds.

    Raises:
        SchedulerTimeoutError: If there is none in time.
    """

    def missing(waited: float) -> tuple[str, bool]:
        return (
            f"{who} has been waiting for {waited:.0f} s for rank 0 to open {host}:{port}. Is rank 0 started, and can "
            f"it be reached from {socket.gethostname()}? MASTER_ADDR and MASTER_PORT say where it is."
            f"{unknown_name(host)}"
        ), True

    for _ in _patient_looks(missing, timeout=timeout, failure=lambda: None):
        with contextlib.suppress(OSError):  # torch would try for long and print much
            presence = StorePresence(host, port, _CONNECT_S)
            break
    return presence


def connect_to_store(store: dist.Store) -> tuple[dist.Store, StorePresence]:
    """Connect to the store that ``store`` is a view of. A store without connections is shared instead.

    The returned store has a name space of its own: the store of ``torchrun``'s agent outlives the workers, and keeps
    what an earlier attempt wrote.

    Args:
        store: The default group's store.

    Raises:
        RankFailedError: If the store is gone, as after a failed fit in the same process.
    """
    base = store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    presence = StorePresence()
    if isinstance(base, dist.TCPStore):
        try:  # before torch tries, as it would go on for minutes where nothing listens
            presence = StorePresence(base.host, base.port)
        except OSError as error:
            raise store_gone(f"{base.host}:{base.port} cannot be connected to ({error})") from error
    try:
        name = store.compare_set("bytescheduler", "", uuid.uuid4().hex).decode()
        if isinstance(base, dist.TCPStore):
            base = dist.TCPStore(base.host, base.port, is_master=False, wait_for_workers=False, timeout=_TIMEOUT)
    except RuntimeError as error:
        lost = presence.gone()
        presence.close()
        if lost:
            raise store_gone(f"this broke here: {error}") from error
        raise
    return dist.PrefixStore(f"bytescheduler/{name}", base), presence


def open_board(store: dist.Store, presence: StorePresence, *, rank: int, world_size: int) -> dist.Store:
    """Make a part of the store for one more run. Every rank makes these parts in the same order.

    After a failed run the ranks wait for one another here, not in a collective. A rank that has not noticed the failure
    is still inside a collective of the failed run, and gloo ends the process when two different collectives meet.

    Args:
        store: The store from :func:`connect_to_store`.
        presence: The presence from :func:`connect_to_store`.
        rank: This rank.
        world_size: Number of ranks.

    Raises:
        RankFailedError: If the run before failed, and a rank does not come to train again.
    """
    instance = store.add(f"boards/{rank}", 1)
    before = f"{instance - 1}/fault"
    if instance > 1 and store.check([before]):
        cause = FaultNotice.decode(store.get(before)).as_error()
        missing = [r for r in range(world_size) if r != rank]
        for waited in looks(lambda: None):
            if missing and (presence.gone() or waited > _REUNION_S):
                lost = 0 if presence.gone() and not agent_keeps_store() else missing[0]
                raise RankFailedError(lost, f"it does not train again after this: {cause}")
            missing = [r for r in missing if store.add(f"boards/{r}", 0) < instance]
            if not missing:
                break
    return dist.PrefixStore(str(instance), store)


# ── Who has come ────────────────────────────────────────────────────────────


class Introduction(StoreMessage, frozen=True, kw_only=True):
    """What a rank tells about itself.

    Attributes:
        rank: Its rank.
        host: Where it runs, in words.
        facts: What has to be the same on all ranks, by name.
        noted: What may differ but is worth a message, by name.
    """

    rank: int
    facts: Mapping[str, str]
    noted: Mapping[str, str] = msgspec.field(default_factory=dict)
    host: str = msgspec.field(default_factory=socket.gethostname)


def hold_roll_call(
    store: dist.Store,
    own: Introduction,
    *,
    world_size: int,
    timeout: float,
    failure: Callable[[], BaseException | None] = lambda: None,
) -> list[Introduction]:
    """Introduce this rank, and wait until all others have done so.

    Args:
        store: A view of the rendezvous store, which every rank uses for this roll call only.
        own: This rank's introduction.
        world_size: Number of ranks.
        timeout: Longest wait for the others, in seconds.
        failure: Called while others are waited for; returns the reason why they will not come, or ``None``.

    Returns:
        All introductions, by rank.

    Raises:
        SchedulerTimeoutError: If ranks are still missing; names them.
        BaseException: What ``failure`` returned.
    """
    store.set(str(own.rank), own.encode())
    keys = [str(rank) for rank in range(world_size)]

    def who_is_missing(waited: float) -> tuple[str, bool]:
        came = [rank for rank in range(world_size) if store.check([str(rank)])]
        if len(came) == world_size:
            return "", False
        here = [Introduction.decode(store.get(str(rank))) for rank in came]
        differences = _differences(here, [one.facts for one in here])
        text = (
            f"{names_of(sorted(set(range(world_size)).difference(came)))} of {world_size} did not join this training "
            f"within {waited:.0f} s (here: {_who(here)}). Is it started there, and with the same strategy? A process "
            f"with strategy='ddp' waits for others without joining.{_start()}"
        )
        return f"{text} {'; '.join(differences)}." if differences else text, here[0].rank == own.rank

    for _ in _patient_looks(who_is_missing, timeout=timeout, failure=failure):
        if store.check(keys):
            break
    return [Introduction.decode(text) for text in store.multi_get(keys)]


def require_alike(
    introductions: Sequence[Introduction], *, warn: Callable[[str], object] | None = None, way_out: str = _WAY_OUT
) -> None:
    """Make sure that all ranks are in the same training.

    Args:
        introductions: Those of all ranks, by rank.
        warn: Called with what differs and may.
        way_out: What the user can do about a difference.

    Raises:
        RanksDifferError: Names each fact that differs, and the ranks' values.
    """
    differences = _differences(introductions, [one.facts for one in introductions])
    noted = _differences(introductions, [one.noted for one in introductions])
    if len(differences) > _DIFFERENCES_SHOWN:
        more = len(differences) - _DIFFERENCES_SHOWN
        differences = [*differences[:_DIFFERENCES_SHOWN], f"and {more} more differ"]
    if differences:
        also = f" ({'; '.join(noted)})" if noted else ""
        raise RanksDifferError(f"The ranks are not in the same training: {'; '.join(differences)}{also}. {way_out}")
    if noted and warn is not None:
        warn(f"bytescheduler: not the same on all ranks: {'; '.join(noted)}.")


def _differences(introductions: Sequence[Introduction], said: Sequence[Mapping[str, str]]) -> list[str]:
    names = dict.fromkeys(name for facts in said for name in facts)
    differences = []
    for name in names:
        by_value: dict[str, list[Introduction]] = {}
        for one, facts in zip(introductions, said, strict=True):
            by_value.setdefault(facts.get(name, _ABSENT), []).append(one)
        if len(by_value) > 1:
            parts = [f"{value} on {_who(ones)}" for value, ones in by_value.items()]
            differences.append(f"{name} is {', but '.join(parts)}")
    return differences


def _who(introductions: Sequence[Introduction]) -> str:
    hosts = sorted({one.host for one in introductions})[:RANKS_SHOWN]
    return f"{names_of([one.rank for one in introductions])} ({', '.join(hosts)})"


def _start() -> str:
    """What starts the ranks, according to this rank's environment."""
    said = [f"{name}={os.environ[name]}" for name in ("RANK", "WORLD_SIZE", "SLURM_NTASKS") if os.environ.get(name)]
    of = f" ({', '.join(said)} in the environment)" if said else ""
    return (
        f" The number of ranks is Trainer's num_nodes times devices{of}. Start the script on each machine, with "
        "torchrun or srun, and call fit, or validate, on every rank."
    )


# ── Before there is a process group ─────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """One rank's part in the meeting of all before there is a process group. Every rank has one for each start.

    Attributes:
        rank: This rank.
        world_size: Number of ranks.
        strategy: Name of this rank's strategy.
        timeout: Longest wait for the others, in seconds.
    """

    rank: int
    world_size: int
    strategy: str
    timeout: float

    def at(self, host: str, port: int) -> dist.Store:
        """Meet at the store that rank 0, or torchrun's agent, has at this address; see :meth:`on`.

        Raises:
            RankFailedError: If the store ends before.
        """
        opens = self.rank == 0 and not agent_keeps_store()
        try:
            if not opens:
                find_store(host, port, who=f"rank {self.rank}", timeout=self.timeout).close()
            # A rank of plain DDP that has the store waits until as many have connected.
            store = dist.TCPStore(
                host,
                port,
                self.world_size,
                is_master=opens,
                timeout=timedelta(seconds=self.timeout),
                wait_for_workers=not opens,
                multi_tenant=True,
            )
            return self.on(store)
        except dist.DistNetworkError as error:
            if opens:
                raise
            raise store_gone(f"the ranks looked for each other at {host}:{port} ({error})") from error

    def on(self, store: dist.Store) -> dist.Store:
        """Meet at a store.

        Args:
            store: The job's.

        Returns:
            A part of the store that no earlier start has written to.

        Raises:
            SchedulerTimeoutError: If ranks do not come in time; names them.
            RanksDifferError: If ranks run other strategies of this package.
        """
        place = dist.PrefixStore(_PLACE, store)
        own = uuid.uuid4().hex
        unconfirmed = set(range(1, self.world_size)) if self.rank == 0 else set()

        def confirm() -> None:
            for other in [r for r in unconfirmed if place.check([f"{own}/{r}"])]:
                place.set(f"{own}/confirmed/{place.get(f'{own}/{other}').decode()}", "")
                unconfirmed.remove(other)

        if self.rank == 0:
            place.set("name", own)
        met = dist.PrefixStore(own if self.rank == 0 else self._confirmed_name(place, own), store)
        introduced = Introduction(rank=self.rank, facts={"strategy": self.strategy})
        call = partial(hold_roll_call, own=introduced, world_size=self.world_size)
        ranks = call(dist.PrefixStore("meeting", met), timeout=self.timeout, failure=confirm)
        try:
            require_alike(ranks, way_out="Give all of them the same one.")
        except RanksDifferError:
            with contextlib.suppress(SchedulerTimeoutError, dist.DistError):  # the store may end with rank 0
                call(dist.PrefixStore("read", met), timeout=_FAREWELL_S)
            raise
        return met

    def _confirmed_name(self, place: dist.Store, own: str) -> str:
        """The name that rank 0 has confirmed to this rank, whose word is ``own``."""

        def who_is_missing(waited: float) -> tuple[str, bool]:
            return (
                f"rank {self.rank} of {self.world_size} has been waiting for {waited:.0f} s at the rendezvous store "
                f"for rank 0. Did its process start, and call fit with the same strategy?{_start()}"
            ), self.rank == 1

        name = ""
        for _ in _patient_looks(who_is_missing, timeout=self.timeout, failure=lambda: None):
            if place.check(["name"]):
                read = place.get("name").decode()
                if read != name:
                    name = read
                    place.set(f"{name}/{self.rank}", own)
                if place.check([f"{name}/confirmed/{own}"]):
                    break
        return name


def unknown_name(host: str) -> str:
    """A sentence, after a space, if this machine cannot look up the address of ``host``; else nothing."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return f" {socket.gethostname()} does not know the name {host!r} ({error})."
    return ""


def connection_hint(world_size: int, host: str, port: int) -> str:
    """What to look at if connecting takes long, as torch waits without a word.

    Args:
        world_size: How many ranks there are.
        host: Where they have met.
        port: Its port.
    """
    met = f"bytescheduler: all {world_size} ranks have met at {host}:{port}, and are still connecting to each other."
    return f"{met} {_INTERFACE}"


def explain_connection(error: Exception, rank: int, host: str, port: int) -> Exception:
    """Say why this rank cannot connect to the others, if gloo's error is known; else return ``error``.

    Args:
        error: What making the process group raised.
        rank: This rank.
        host: Where the ranks have met.
        port: Its port.
    """
    if _NO_ADDRESS in str(error):
        name = os.environ.get("GLOO_SOCKET_IFNAME", "")
        return RanksUnreachableError(
            f"GLOO_SOCKET_IFNAME={name!r} is not allowed: {socket.gethostname()} has no address on an interface of "
            f"that name. It has {', '.join(name for _, name in socket.if_nameindex())}."
        )
    if _NO_CONNECTION not in str(error):
        return error
    where = re.search(r"remote=\[(.*?)\]", str(error))
    return RanksUnreachableError(
        f"Rank {rank} on {socket.gethostname()} found the others at {host}:{port}, but cannot connect to "
        f"{'one of them' if where is None else f'the one at {where[1]}'}. {_INTERFACE}"
    )
