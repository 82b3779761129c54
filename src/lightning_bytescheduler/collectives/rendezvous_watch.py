"""Names the ranks that are missing while the others look for each other, before there is a process group.

torch waits there in silence. Here a thread, ``bytescheduler-rendezvous``, writes to the same store, on a connection of
its own, that this rank has come, and says now and then who has not. Nothing happens in the first two seconds, in which
most jobs meet. The thread ends within seconds of the wait that it watches.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist

from lightning_bytescheduler.collectives.roll_call import names_of

__all__ = ["RendezvousWatch"]

log = logging.getLogger(__name__)

_FIRST_S = 2.0
_WARN_S = 30.0
_LOOK_S = 1.0
_CONNECT_S = 2.0
_STOP_S = 5.0


class RendezvousWatch:
    """Around the wait for other ranks.

    Args:
        host: Where rank 0 opens the store.
        port: Where rank 0 opens the store.
        rank: This rank.
        world_size: Number of ranks.
        strategy: Its name, for the others.
        warn_after: Seconds until missing ranks are named, and again after twice as long, and so on; 30 if left out.
    """

    def __init__(
        self, host: str, port: int, *, rank: int, world_size: int, strategy: str, warn_after: float | None = None
    ) -> None:
        self._host, self._port = host, port
        self._rank, self._world_size, self._strategy = rank, world_size, strategy
        self._warn_after = _WARN_S if warn_after is None else warn_after
        self._met = threading.Event()
        self._prefix = f"bytescheduler-rendezvous/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._thread = threading.Thread(target=self._run, name="bytescheduler-rendezvous", daemon=True)

    def __enter__(self) -> RendezvousWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._met.set()
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        started, warn_at = time.monotonic(), self._warn_after
        store: dist.Store | None = None
        differ = False
        pause = min(_FIRST_S, self._warn_after)
        while not self._met.wait(pause):
            pause = max(min(_LOOK_S, self._warn_after), self._world_size / 16)  # all ranks ask about all
            try:
                store = store or self._connect()
                waited = time.monotonic() - started
                here = {} if store is None else self._here(store)
                new = not differ and any(text.split(" ")[0] != self._strategy for text in here.values())
                differ = differ or new  # that will not get better
                if waited >= warn_at or new:
                    warn_at *= 2 if waited >= warn_at else 1
                    self._say(store is not None, here, waited)
            except RuntimeError:  # the store has gone; whoever waits for it will say so
                store = None

    def _connect(self) -> dist.Store | None:
        """The store, once it is there, with this rank's name in it."""
        try:  # torch would knock at a closed door for long, and aloud
            socket.create_connection((self._host, self._port), timeout=_CONNECT_S).close()
        except OSError:
            return None
        tcp = dist.TCPStore(
            self._host, self._port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S)
        )
        store = dist.PrefixStore(self._prefix, tcp)
        store.set(str(self._rank), f"{self._strategy} on {socket.gethostname()}")
        return store

    def _here(self, store: dist.Store) -> dict[int, str]:
        """Who has come, with strategy and host."""
        ranks = [rank for rank in range(self._world_size) if store.check([str(rank)])]
        return {rank: store.get(str(rank)).decode() for rank in ranks}

    def _say(self, reached: bool, here: dict[int, str], waited: float) -> None:
        if not reached:
            log.warning(
                "bytescheduler: rank %d has been waiting for %.0f s for rank 0 to open %s:%d. Is rank 0 started, and "
                "can it be reached from %s?",
                self._rank, waited, self._host, self._port, socket.gethostname(),
            )  # fmt: skip
            return
        if min(here, default=self._rank) != self._rank:
            return  # the first one speaks for all
        missing = [rank for rank in range(self._world_size) if rank not in here]
        odd = [f"rank {rank} runs {text}" for rank, text in here.items() if text.split(" ")[0] != self._strategy]
        who = f"{names_of(missing)} did not come" if missing else "all came, but do not find each other"
        log.warning(
            "bytescheduler: the %d ranks have been looking for each other at %s:%d for %.0f s; %s. Here are %s.%s",
            self._world_size, self._host, self._port, waited, who,
            "; ".join(f"rank {rank} ({text})" for rank, text in list(here.items())[:16]),
            f" They do not run the same strategy: {'; '.join(odd[:16])}." if odd else "",
        )  # fmt: skip
