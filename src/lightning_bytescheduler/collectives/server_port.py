"""The port that tells a living server from a dead one.

A server keeps it open for as long as it lives. Connections to it close when its process ends, which is how workers tell
a dead server from a dead worker. Whoever connects says the server's *token*, which those know who may read the
rendezvous store, and hears one byte. Who says something else, or more, is hung up on; so is who says nothing, after a
while, and at once where too many strangers say nothing: they take no worker's place.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import threading
import time
from contextlib import suppress
from typing import cast

from lightning_bytescheduler.failures.store import StorePresence

__all__ = ["ServerPort", "call_on"]

_WELCOME = b"\n"
_MOST_STRANGERS = 256
_PATIENCE_S = 10.0  # for who has connected and not said anything
_LOOK_EVERY_S = 0.2


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
            for key, _ in self._selector.select(_LOOK_EVERY_S):
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
            self._stopping.wait(_LOOK_EVERY_S)
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
