"""A connection to the rendezvous store that nothing else uses, and a way to tell that the store is gone.

Asking a TCPStore whose host has died makes torch print a stack trace of C++ frames. The kernel knows it earlier and
says it quietly: an idle TCP connection to the same port ends when the process at the other end does.
"""

from __future__ import annotations

import contextlib
import socket
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from lightning_bytescheduler.exceptions import RankFailedError
from lightning_bytescheduler.failures.incarnation import agent_keeps_store
from lightning_bytescheduler.failures.messages import FaultNotice

__all__ = ["StorePresence", "connect_to_store", "open_board", "store_lives_with_rank_zero"]

_TIMEOUT = timedelta(seconds=15)
_REUNION_S = 8.0  # longer than a rank that noticed nothing of a failure is left alive


def store_lives_with_rank_zero() -> bool:
    """Whether the store ends when rank 0 ends; under ``torchrun`` the agent holds it."""
    return not agent_keeps_store()


class StorePresence:
    """Tells whether a store's host is still there, without asking the store.

    Args:
        host: Where the store is; ``None`` for a store without connections, which is always there.
        port: Where the store is.

    Raises:
        OSError: If nobody listens there.
    """

    def __init__(self, host: str | None = None, port: int = 0) -> None:
        self._socket: socket.socket | None = None
        if host is not None:
            self._socket = socket.create_connection((host, port), timeout=_TIMEOUT.total_seconds())
            self._socket.setblocking(False)

    def introduce(self, word: bytes, answer: int) -> None:
        """Say ``word``, and wait for ``answer`` bytes.

        Raises:
            OSError: If they do not come.
        """
        if self._socket is None:
            return
        self._socket.settimeout(_TIMEOUT.total_seconds())
        self._socket.sendall(word)
        if len(self._socket.recv(answer)) != answer:
            raise ConnectionError("The other side has hung up.")
        self._socket.setblocking(False)

    def gone(self) -> bool:
        """Whether the host has ended; at once, never blocks."""
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
    """Connect to the store that ``store`` is a view of; a store without connections is shared.

    What is returned has a name space of its own: a store of ``torchrun``'s agent outlives the workers, and whatever an
    earlier attempt wrote to it.

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
        presence = _find(base)  # first: torch would knock at a closed door for minutes
    own_name = uuid.uuid4().hex
    name = store.compare_set("bytescheduler", "", own_name).decode()
    if isinstance(base, dist.TCPStore):
        base = dist.TCPStore(base.host, base.port, is_master=False, wait_for_workers=False, timeout=_TIMEOUT)
    return dist.PrefixStore(f"bytescheduler/{name}", base), presence


def _find(store: dist.TCPStore) -> StorePresence:
    try:
        return StorePresence(store.host, store.port)
    except OSError as error:
        rank = 0 if store_lives_with_rank_zero() else None
        raise RankFailedError(rank, f"the rendezvous store at {store.host}:{store.port} is gone ({error})") from error


def open_board(store: dist.Store, presence: StorePresence, *, rank: int, world_size: int) -> dist.Store:
    """A part of the store for one more run; every rank opens them in the same order.

    After a failed run the ranks wait for one another here, not in a collective: those that have not noticed yet are
    still inside one of the failed run, and gloo ends the process when two different collectives meet.

    Args:
        store: From :func:`connect_to_store`.
        presence: From :func:`connect_to_store`.
        rank: This rank.
        world_size: Number of ranks.

    Raises:
        RankFailedError: If the run before failed, and a rank does not come to train again.
    """
    instance = store.add(f"boards/{rank}", 1)
    before = f"{instance - 1}/fault"
    if instance > 1 and store.check([before]):
        cause = FaultNotice.decode(store.get(before)).as_error()
        deadline = time.monotonic() + _REUNION_S
        missing = [r for r in range(world_size) if r != rank]
        while missing:
            if presence.gone() or time.monotonic() > deadline:
                lost = 0 if presence.gone() and store_lives_with_rank_zero() else missing[0]
                raise RankFailedError(lost, f"it does not train again after this: {cause}")
            missing = [r for r in missing if store.add(f"boards/{r}", 0) < instance]
            time.sleep(0.05)
    return dist.PrefixStore(str(instance), store)
