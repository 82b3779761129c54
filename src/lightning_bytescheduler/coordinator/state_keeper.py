"""One coordinator's hold on a run's state: its lease, what it loads with it, and what it saves while it has it."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from lightning_bytescheduler.coordinator.lease import Lease
from lightning_bytescheduler.coordinator.state_folder import StateFolder
from lightning_bytescheduler.coordinator.state_store import RunState, SaveCounts, StateStore

__all__ = ["StateKeeper"]

log = logging.getLogger(__name__)


class StateKeeper:
    """Keeps a run's state in a folder. For any thread.

    Args:
        url: Of the folder, as fsspec opens it.
        standby: Whether to wait for as long as another coordinator acts.
        lease: Seconds after which a standby takes over from one that shows no life.
        storage_options: For fsspec's file system.

    Raises:
        OptionError: If the folder cannot be made, or ``lease`` is not allowed.
        UnsupportedError: If a standby is not safe on that file system; names the way out.
    """

    def __init__(
        self,
        url: str,
        *,
        standby: bool = False,
        lease: float = 15.0,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.url = url
        folder = StateFolder(url, storage_options=storage_options)
        holder = f"{socket.gethostname()} (process {os.getpid()})"
        self._lease = Lease(folder, holder=holder, seconds=lease, standby=standby)
        self._store = StateStore(folder, may_save=lambda: self.held)
        self._released = False

    @property
    def held(self) -> bool:
        """Whether this coordinator may act, at this moment."""
        return self._lease.held

    @property
    def counts(self) -> SaveCounts:
        """How saving went."""
        return self._store.counts

    def take(
        self, stop: threading.Event, *, said: Callable[[str], None], lost: Callable[[], None]
    ) -> tuple[int, RunState | None] | None:
        """Wait until this coordinator may act.

        Args:
            stop: Ends the wait.
            said: Told once who is waited for.
            lost: Called from another thread once this coordinator may act no more.

        Returns:
            Its term, and the state that it carries on from; ``None`` if ``stop`` was set before.

        Raises:
            OptionError: If another one acts and this is no standby, or there are states and none can be loaded.
            OSError: If the state cannot be read.
        """
        if not self._lease.wait(stop, said=said):
            return None
        self._lease.keep(lost)
        state = self._store.load()
        self._store.adopt(self._lease.term)
        return self._lease.term, state

    def save(self, state: RunState) -> None:
        """Have a state saved; returns at once."""
        self._store.save(state)

    def close(self, seconds: float = 60.0) -> None:
        """Save what was handed over, and let the next one act. May be repeated."""
        if self._released:
            return
        self._released = True
        self._store.close(seconds)
        self._lease.release()
