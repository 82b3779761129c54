"""The rendezvous store: which ranks have come, whether all are in the same training, and a connection of its own.

*Before there is a process group*, torch waits in silence while the ranks look for each other. :class:`RendezvousWatch`
has a thread, ``bytescheduler-rendezvous``. It writes to the same store, on a connection of its own, that this rank has
come, and says now and then which ranks have not. It does nothing in the first two seconds, in which most jobs meet. A
rank that fails there, such as one that cannot connect to another, writes that too. The others may then be in torch's
native code for half an hour, where no exception reaches them. So their processes end; no training is lost yet. The
thread ends within seconds of the wait that it watches.

*Before ranks wait for each other in a training*, each rank introduces itself with a few facts and reads those of all
others (:func:`hold_roll_call`). If a fact has to be equal and is not, every rank raises an error that names ranks,
hosts and values (:func:`require_alike`). A rank that does not come is named after half a minute. If it was connected
already, it runs something else, such as plain DDP: that is an error after two minutes. All requests go through the
training thread's own connection and do not block. Nothing is sent through process groups.

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

*Why all ranks take the same name.* Rank 0 goes on once all ranks have answered under its name, and a rank takes only a
name under which its word was confirmed.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import TracebackType

import msgspec
import torch.distributed as dist

from lightning_bytescheduler.exceptions import (
    RankFailedError,
    RanksDifferError,
    RanksUnreachableError,
    SchedulerTimeoutError,
)
from lightning_bytescheduler.failures.messages import FaultNotice, StoreMessage, names_of

log = logging.getLogger(__name__)

_TIMEOUT = timedelta(seconds=15)
_REUNION_S = 8.0  # longer than a rank that did not notice a failure is left alive
_SHORTEST_S, _LONGEST_S = 0.002, 0.05  # between two looks
_PLACE = "bytescheduler-incarnation"
_PATIENCE_S = 120.0  # until the third hint of the rendezvous
_PLAIN = "default_pg/0//cpu//0/{}"  # where torch's own process group keeps a gloo rank's address
_WARN_S = 30.0  # until missing ranks are named
_LAST_HINT = 4.0  # times _WARN_S, until the third hint
_ROLL_CALL_S = 0.25  # at most, between two looks
_FIRST_S, _LOOK_S = 2.0, 1.0  # before the rendezvous thread's first look, and between two looks
_CONNECT_S = 2.0
_STOP_S = 5.0
_LEAVE_S = 5.0  # for this rank to come out of the wait by itself, after another one has failed
_RANKS_SHOWN = 16
_DIFFERENCES_SHOWN = 8
_LONGEST_TEXT = 2000
_NO_ADDRESS = "Unable to find address for"
_NO_CONNECTION = "connectFullMesh failed"  # gloo's words for it
_watches = itertools.count()
_ABSENT = "nothing"
_WAY_OUT = "Start all of them with the same packages, the same code, the same options and variables."


def agent_keeps_store() -> bool:
    """Whether the store outlives the ranks, and may hold what earlier ones wrote."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


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


def name_incarnation(
    store: dist.Store,
    *,
    rank: int,
    world_size: int,
    timeout: float,
    failure: Callable[[], BaseException | None] = lambda: None,
    patience: float = _PATIENCE_S,
) -> str:
    """Agree on a name for this start. Every rank calls this once.

    Args:
        store: The job's store.
        rank: This rank.
        world_size: Number of ranks of this start.
        timeout: Longest wait for the others, in seconds.
        failure: Called while others are waited for; returns the reason why they will not come, or ``None``.
        patience: Longest wait for a rank that has made a process group without asking for the name, in seconds.

    Raises:
        SchedulerTimeoutError: If ranks do not come in time; names them.
        RanksDifferError: If ranks run something else, such as plain DDP.
        BaseException: What ``failure`` returned.
    """
    place = dist.PrefixStore(_PLACE, store)
    own, answered = uuid.uuid4().hex, ""
    missing = set(range(1, world_size)) if rank == 0 else {0}
    if rank == 0:
        place.set("name", own)
    for waited in looks(failure):
        if rank == 0:
            for other in [r for r in missing if place.check([f"{own}/{r}"])]:
                place.set(f"{own}/confirmed/{place.get(f'{own}/{other}').decode()}", "")
                missing.remove(other)
        elif place.check(["name"]):
            name = place.get("name").decode()
            if name != answered:
                place.set(f"{name}/{rank}", own)
                answered = name
            if place.check([f"{name}/confirmed/{own}"]):
                return name
        if not missing:
            break
        plain = [other for other in missing if waited >= patience and store.check([_PLAIN.format(other)])]
        if plain:
            raise RanksDifferError(
                f"Rank {plain[0]} has waited for {waited:.0f} s in a process group of its own, as with strategy='ddp', "
                f"and rank {rank} runs another strategy. Give all ranks the same one."
            )
        if waited >= timeout:
            who = ", ".join(map(str, sorted(missing)))
            raise SchedulerTimeoutError(
                f"Rank {rank} of {world_size} has waited {timeout:.0f} s at torchrun's store for rank {who}. Did its "
                "process start, and call fit?"
            )
    return own


class StorePresence:
    """Tells whether a store's host is still there, without asking the store.

    Args:
        host: The store's host; ``None`` for a store without connections, which is always there.
        port: The store's port.

    Raises:
        OSError: If nothing listens there.
    """

    def __init__(self, host: str | None = None, port: int = 0) -> None:
        self._socket: socket.socket | None = None
        if host is not None:
            self._socket = socket.create_connection((host, port), timeout=_TIMEOUT.total_seconds())
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
        presence = _find(base)  # before torch tries, as it would go on for minutes where nothing listens
    own_name = uuid.uuid4().hex
    name = store.compare_set("bytescheduler", "", own_name).decode()
    if isinstance(base, dist.TCPStore):
        base = dist.TCPStore(base.host, base.port, is_master=False, wait_for_workers=False, timeout=_TIMEOUT)
    return dist.PrefixStore(f"bytescheduler/{name}", base), presence


def _find(store: dist.TCPStore) -> StorePresence:
    try:
        return StorePresence(store.host, store.port)
    except OSError as error:
        rank = 0 if not agent_keeps_store() else None
        raise RankFailedError(rank, f"the rendezvous store at {store.host}:{store.port} is gone ({error})") from error


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
    warn_after: float | None = None,
    connected: bool = False,
) -> list[Introduction]:
    """Introduce this rank, and wait until all others have done so.

    Args:
        store: A view of the rendezvous store, which every rank uses for this roll call only.
        own: This rank's introduction.
        world_size: Number of ranks.
        timeout: Longest wait for the others, in seconds.
        failure: Called while others are waited for; returns the reason why they will not come, or ``None``.
        warn_after: Seconds until missing ranks are named, and again after twice as long, and so on; 30 if left out.
        connected: Whether all ranks have just connected to each other. Then nothing keeps them from coming here, and
            ranks that do not come run something else. That is an error at the time of the third hint.

    Returns:
        All introductions, by rank.

    Raises:
        SchedulerTimeoutError: If ranks are still missing; names them.
        RanksDifferError: If ranks are connected but missing.
        BaseException: What ``failure`` returned.
    """
    store.set(str(own.rank), own.encode())
    warn_at = _WARN_S if warn_after is None else warn_after
    patience = _LAST_HINT * warn_at if connected else math.inf
    keys = [str(rank) for rank in range(world_size)]
    for waited in looks(failure, longest=_ROLL_CALL_S):
        if store.check(keys):
            break
        if waited >= min(warn_at, timeout):
            here, missing = _who_is_here(store, world_size)
            text = f"{names_of(missing)} of {world_size} did not join this training within {waited:.0f} s "
            text += f"(here: {_who(here)})."
            if missing and waited >= patience:
                raise RanksDifferError(
                    f"{text} A rank that is connected and does not join runs another strategy than "
                    f"{own.facts.get('strategy', 'these')}, such as 'ddp'. Give all ranks the same one."
                )
            text += (
                " Is it started there, and with the same strategy? A process with strategy='ddp' waits for others "
                "without joining."
            )
            if waited >= timeout:
                raise SchedulerTimeoutError(text)
            if missing and here[0].rank == own.rank:
                log.warning("bytescheduler: %s", text)
            warn_at *= 2
    return [Introduction.decode(text) for text in _values(store, keys)]


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


def _who_is_here(store: dist.Store, world_size: int) -> tuple[list[Introduction], list[int]]:
    """The introductions of the ranks that have come, and the ranks that have not."""
    came = [rank for rank in range(world_size) if store.check([str(rank)])]
    here = [Introduction.decode(store.get(str(rank))) for rank in came]
    return here, sorted(set(range(world_size)).difference(came))


def _values(store: dist.Store, keys: Sequence[str]) -> list[bytes]:
    if getattr(store, "has_extended_api", lambda: False)():
        return list(store.multi_get(list(keys)))  # one request, however many ranks there are
    return [store.get(key) for key in keys]


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
    hosts = sorted({one.host for one in introductions})[:_RANKS_SHOWN]
    return f"{names_of([one.rank for one in introductions])} ({', '.join(hosts)})"


def _start() -> str:
    """What starts the ranks, according to this rank's environment."""
    said = [f"{name}={os.environ[name]}" for name in ("RANK", "WORLD_SIZE", "SLURM_NTASKS") if os.environ.get(name)]
    of = f" ({', '.join(said)} in the environment)" if said else ""
    return (
        f" The number of ranks is Trainer's num_nodes times devices{of}. Start the script on each machine, with "
        "torchrun or srun, and call fit on every rank."
    )


class RendezvousWatch:
    """Context around torch's wait for the other ranks.

    Args:
        host: Host on which rank 0 opens the store.
        port: Port on which rank 0 opens the store.
        rank: This rank.
        world_size: Number of ranks.
        strategy: Name of this rank's strategy, for the others.
        warn_after: Seconds until missing ranks are named, and again after twice as long, and so on; 30 if left out.

    Attributes:
        difference: Why the ranks will not meet, once another rank is seen to run another strategy.
    """

    def __init__(
        self, host: str, port: int, *, rank: int, world_size: int, strategy: str, warn_after: float | None = None
    ) -> None:
        self._host, self._port = host, port
        self._rank, self._world_size = rank, world_size
        self._own = Introduction(rank=rank, facts={"strategy": strategy})
        self._warn_after = _WARN_S if warn_after is None else warn_after
        self._met = threading.Event()
        # A rank may try again while torchrun's store is still there, so each attempt has a key of its own.
        self._failed = "" if agent_keeps_store() else f"failed/{next(_watches)}"
        self._error: BaseException | None = None  # this rank's error
        self._elsewhere = ""  # another rank's error
        self.difference: RanksDifferError | None = None
        self._prefix = f"bytescheduler-introductions/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._thread = threading.Thread(target=self._run, name="bytescheduler-rendezvous", daemon=True)

    def meet_as(self, incarnation: str) -> None:
        """Use the name of this start, shared with no earlier rank, to tell whether a rank has failed."""
        self._failed = f"failed/{incarnation}"

    def __enter__(self) -> RendezvousWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self._error = error
        self._met.set()
        self._thread.join(_STOP_S)
        if self._error is None or isinstance(error, RanksDifferError):
            return
        if self.difference is not None:
            raise self.difference from error
        if self._elsewhere:
            raise RanksUnreachableError(self._elsewhere) from error
        if _NO_ADDRESS in str(error):
            name = os.environ.get("GLOO_SOCKET_IFNAME", "")
            raise RanksUnreachableError(
                f"GLOO_SOCKET_IFNAME={name!r} is not allowed: {socket.gethostname()} has no address on an interface of "
                f"that name. It has {', '.join(name for _, name in socket.if_nameindex())}."
            ) from error
        if _NO_CONNECTION in str(error):
            raise RanksUnreachableError(self._unreachable(str(error))) from error

    def _run(self) -> None:
        started, warn_at = time.monotonic(), self._warn_after
        store: dist.Store | None = None
        pause = min(_FIRST_S, self._warn_after)
        while not self._met.wait(pause):
            pause = max(min(_LOOK_S, self._warn_after), self._world_size / 16)  # as all ranks ask about all
            try:
                waited = time.monotonic() - started
                store = store or self._connect()
                is_news = self.difference is None and store is not None and self._differs(store)
                if waited >= warn_at or is_news:
                    warn_at *= 2 if waited >= warn_at else 1
                    self._say(store, waited)
                if store is not None and self._failed and store.check([self._failed]):
                    self._leave(store.get(self._failed).decode())
                    return
            except RuntimeError:  # the store is gone; the thread that waits for it will say so
                store = None
        if self._error is not None:
            self._tell(store)

    def _tell(self, store: dist.Store | None) -> None:
        """Tell the others that this rank has failed."""
        text = f"rank {self._rank} on {socket.gethostname()} failed while the ranks connected: {self._error}"
        try:
            store = store or self._connect()
            if store is not None and self._failed:
                store.set(self._failed, text[:_LONGEST_TEXT])
        except RuntimeError:
            log.debug("The others could not be told.", exc_info=True)

    def _leave(self, text: str) -> None:
        """End the process: another rank has failed, so this one waits in vain."""
        self._elsewhere = text
        if self._met.wait(_LEAVE_S):
            return
        log.error("bytescheduler: %s. Rank %d ends, as it would wait for it.", text, self._rank)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def _unreachable(self, error: str) -> str:
        where = re.search(r"remote=\[(.*?)\]", error)
        return (
            f"Rank {self._rank} on {socket.gethostname()} found the others at {self._host}:{self._port}, but cannot "
            f"connect to {'one of them' if where is None else f'the one at {where[1]}'}. Gloo connects through the "
            "address that a machine's name resolves to: on each machine, name the interface that leads to the others, "
            "such as GLOO_SOCKET_IFNAME=eth0, and let the machines connect to each other on all TCP ports."
        )

    def _connect(self) -> dist.Store | None:
        """Connect to the store once it is there, and write this rank's name in it."""
        try:  # torch would try for long and print much
            socket.create_connection((self._host, self._port), timeout=_CONNECT_S).close()
        except OSError:
            return None
        tcp = dist.TCPStore(
            self._host, self._port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S)
        )
        store = dist.PrefixStore(self._prefix, tcp)
        store.set(str(self._rank), self._own.encode())
        return store

    def _differs(self, store: dist.Store) -> bool:
        """Whether a rank runs another strategy, which no wait will change."""
        try:
            require_alike(_who_is_here(store, self._world_size)[0], way_out="Give all of them the same one.")
        except RanksDifferError as error:
            self.difference = error
        return self.difference is not None

    def _say(self, store: dist.Store | None, waited: float) -> None:
        if store is None:
            log.warning(
                "bytescheduler: rank %d has been waiting for %.0f s for rank 0 to open %s:%d. Is rank 0 started, and "
                "can it be reached from %s? MASTER_ADDR and MASTER_PORT say where it is.",
                self._rank, waited, self._host, self._port, socket.gethostname(),
            )  # fmt: skip
            return
        here, missing = _who_is_here(store, self._world_size)
        if here[0].rank != self._rank:
            return  # the first rank speaks for all
        who = f"{names_of(missing)} did not come" if missing else "all came, but do not find each other"
        log.warning(
            "bytescheduler: the %d ranks have been looking for each other at %s:%d for %.0f s; %s. Here are %s.%s%s",
            self._world_size, self._host, self._port, waited, who,
            _who(here),
            f" {self.difference}" if self.difference is not None else "",
            _start() if missing else "",
        )  # fmt: skip
