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

*Why no rank ends up with an earlier start's name.* Each rank but the first writes a fresh word, and waits for a name
under that word. Words are never used twice, so the name was written after the word, by a rank 0 that is alive now.

*Why all ranks take the same name.* Rank 0 has one fresh name, and answers all words with it until all ranks have
introduced themselves there.
"""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import msgspec
import torch.distributed as dist

from lightning_bytescheduler.exceptions import (
    RankFailedError,
    RanksDifferError,
    RanksUnreachableError,
    SchedulerTimeoutError,
)
from lightning_bytescheduler.failures.messages import RANKS_SHOWN, StoreMessage, brief, names_of

log = logging.getLogger(__name__)

_TIMEOUT = timedelta(seconds=15)
_SHORTEST_S, _LONGEST_S = 0.002, 0.25  # between two looks
_WARN_S = 30.0  # until missing ranks are named
_CONNECT_S = 2.0
_FAREWELL_S = 2.0
_CANNOT_CONNECT = re.compile("connectFullMesh failed|Unable to find address for")  # gloo's words
INTERFACE = (
    "Gloo connects through the address that a machine's name resolves to: on each machine, name the interface that "
    "leads to the others, such as GLOO_SOCKET_IFNAME=eth0, and let the machines connect to each other on all TCP ports."
)
"""What to do if ranks cannot connect."""
_START = (
    " The number of ranks is Trainer's num_nodes times devices. Start the script on each machine, with torchrun or "
    "srun, and call fit, or validate, on every rank."
)
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


Failure = Callable[[], BaseException | None]
"""Returns the reason why the other ranks will not come, or ``None``."""


def looks(
    failure: Failure = lambda: None,
    *,
    missing: Callable[[], str] = lambda: "",
    timeout: float = math.inf,
    warns: bool = True,
) -> Iterator[float]:
    """Loop that looks for others at the store, ever less often, until the caller ends it or there is a failure.

    Args:
        failure: Called between two looks.
        missing: Called after half a minute, a minute, and so on; returns who is missing, and what to look at. Empty if
            all have come since the last look.
        timeout: Seconds until that is an error.
        warns: Whether this rank says so for all.

    Yields:
        How long it has looked, in seconds.

    Raises:
        SchedulerTimeoutError: If the time is up.
        BaseException: What ``failure`` returned.
    """
    began, pause, warn_at = time.monotonic(), _SHORTEST_S, _WARN_S
    while True:
        waited = time.monotonic() - began
        yield waited
        if waited >= min(warn_at, timeout):
            text = missing()
            if text and waited >= timeout:
                raise SchedulerTimeoutError(f"After {waited:.0f} s, {text}")
            if text and warns:
                log.warning("bytescheduler: after %.0f s, %s", waited, text)
            warn_at *= 2
        cause = failure()
        if cause is not None:
            raise cause
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_S)


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

    def gone(self) -> bool:
        """Whether the host has ended, or :meth:`close` was called. Never blocks."""
        try:
            return self._socket is not None and self._socket.recv(1) == b""
        except OSError as error:
            return not isinstance(error, BlockingIOError)

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()


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
    refused: OSError | None = None

    def missing() -> str:
        return (
            f"{who} still waits for rank 0 to open {host}:{port} ({refused}). Is rank 0 started, and can it be reached "
            f"from {socket.gethostname()}? MASTER_ADDR and MASTER_PORT say where it is."
        )

    for _ in looks(missing=missing, timeout=timeout):
        try:  # torch would try for long and print much
            presence = StorePresence(host, port, _CONNECT_S)
            break
        except OSError as error:
            refused = error
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
    try:
        if isinstance(base, dist.TCPStore):  # before torch tries, as it would go on for minutes where nothing listens
            presence = StorePresence(base.host, base.port)
        name = store.compare_set("bytescheduler", "", uuid.uuid4().hex).decode()
        if isinstance(base, dist.TCPStore):
            base = dist.TCPStore(base.host, base.port, is_master=False, wait_for_workers=False, timeout=_TIMEOUT)
    except (OSError, RuntimeError) as error:
        lost = isinstance(error, OSError) or presence.gone()
        presence.close()
        if lost:
            raise store_gone(f"this broke here: {error}") from error
        raise
    return dist.PrefixStore(f"bytescheduler/{name}", base), presence


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
    store: dist.Store, own: Introduction, *, world_size: int, timeout: float, failure: Failure = lambda: None
) -> list[Introduction]:
    """Introduce this rank, and wait until all others have done so.

    Args:
        store: A view of the rendezvous store, which every rank uses for this roll call only.
        own: This rank's introduction.
        world_size: Number of ranks.
        timeout: Longest wait for the others, in seconds.
        failure: Called while others are waited for.

    Returns:
        All introductions, by rank.

    Raises:
        SchedulerTimeoutError: If ranks are still missing; names them.
        BaseException: What ``failure`` returned.
    """
    keys = [str(rank) for rank in range(world_size)]
    store.set(keys[own.rank], own.encode())

    def missing() -> str:
        here = [Introduction.decode(store.get(key)) for key in keys if store.check([key])]
        absent = sorted(set(range(world_size)).difference(one.rank for one in here))
        text = (
            f"{names_of(absent)} of {world_size} did not join this training (here: {_who(here)}). Is it started there, "
            f"and with the same strategy? A process with strategy='ddp' waits for others without joining.{_START}"
        )
        return text if absent else ""

    for _ in looks(failure, missing=missing, timeout=timeout, warns=own.rank < 2):
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
            by_value.setdefault(facts.get(name, "nothing"), []).append(one)
        if len(by_value) > 1:
            parts = [f"{value} on {_who(ones)}" for value, ones in by_value.items()]
            differences.append(f"{name} is {', but '.join(parts)}")
    return differences


def _who(introductions: Sequence[Introduction]) -> str:
    hosts = sorted({one.host for one in introductions})[:RANKS_SHOWN]
    return f"{names_of([one.rank for one in introductions])} ({', '.join(hosts)})"


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
        opens, limit = self.rank == 0 and not agent_keeps_store(), timedelta(seconds=self.timeout)
        try:
            if not opens:
                find_store(host, port, who=f"rank {self.rank}", timeout=self.timeout).close()
            # A rank of plain DDP that has the store waits until as many have connected.
            store = dist.TCPStore(
                host, port, self.world_size, opens, limit, wait_for_workers=not opens, multi_tenant=True
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
        place, own = dist.PrefixStore("bytescheduler-starts", store), uuid.uuid4().hex

        def answer_words() -> None:
            for word in [f"word/{other}" for other in range(1, self.world_size)]:
                if place.check([word]):
                    place.set(place.get(word).decode(), own)

        first = self.rank == 0
        met = dist.PrefixStore(own if first else self._name_for(own, place), store)
        ranks = hold_roll_call(
            dist.PrefixStore("meeting", met),
            Introduction(rank=self.rank, facts={"strategy": self.strategy}),
            world_size=self.world_size,
            timeout=self.timeout,
            failure=answer_words if first else lambda: None,
        )
        try:
            require_alike(ranks, way_out="Give all of them the same one.")
        except RanksDifferError:
            time.sleep(_FAREWELL_S)  # the store may end with rank 0, and the others read it four times a second
            raise
        return met

    def _name_for(self, word: str, place: dist.Store) -> str:
        """The name that rank 0 answers to this rank's word."""
        missing = (
            f"rank {self.rank} of {self.world_size} still waits for rank 0 at the rendezvous store. Did its process "
            f"start, and call fit with the same strategy?{_START}"
        )
        place.set(f"word/{self.rank}", word)
        for _ in looks(missing=lambda: missing, timeout=self.timeout, warns=self.rank == 1):
            if place.check([word]):
                break
        return place.get(word).decode()


def explain_connection(error: Exception, rank: int, host: str, port: int) -> Exception:
    """Say why this rank cannot connect to the others, if gloo's error is known; else return ``error``.

    Args:
        error: What making the process group raised.
        rank: This rank.
        host: Where the ranks have met.
        port: Its port.
    """
    if not _CANNOT_CONNECT.search(str(error)):
        return error
    return RanksUnreachableError(
        f"Rank {rank} on {socket.gethostname()} found the others at {host}:{port}, but cannot connect to them: "
        f"{brief(error)}. {INTERFACE} This one has {', '.join(name for _, name in socket.if_nameindex())}."
    )
