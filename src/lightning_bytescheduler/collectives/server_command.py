"""``lightning-bytescheduler server``: a parameter server for trainings with ``servers``."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from lightning_bytescheduler.__about__ import __version__
from lightning_bytescheduler.checks import require_seconds, require_whole
from lightning_bytescheduler.collectives.groups import choose_interface
from lightning_bytescheduler.collectives.server_meeting import (
    Announcement,
    Doing,
    ServerPort,
    SignedOn,
    await_all,
    fit_after,
    join_group,
    last_begun,
    leave_sign,
    leave_word,
    meeting_store,
    rail_name,
    sign_on,
)
from lightning_bytescheduler.collectives.summing_server import RailServers, SummingServer, SumsOfEncoded
from lightning_bytescheduler.exceptions import OptionError, RankFailedError, RanksDifferError, SchedulerTimeoutError
from lightning_bytescheduler.failures.messages import brief
from lightning_bytescheduler.failures.store import StorePresence

__all__ = ["add_arguments", "run", "serve"]

_CONNECTING_S = 120.0  # all have found each other before
_FOREVER = timedelta(days=30)  # a validation may take long; whether workers live is seen by their connections
_LINGER_S = 6.0  # longer than workers need to find the one that has died
_LOOK_EVERY_S = 0.1
_SIGN_EVERY_S = 1.0
_INTERRUPTED = 130  # as a shell says of what Ctrl+C ended


_Serving = SummingServer | RailServers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("--master-addr", metavar="HOST", help="of the training (default: MASTER_ADDR)")
    parser.add_argument("--master-port", metavar="PORT", type=int, help="of the training (default: MASTER_PORT)")
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=1800.0, help="wait so long for the training (default: 1800)"
    )


def run(options: argparse.Namespace, *, sums: Callable[[int], SumsOfEncoded] | None = None) -> int:
    """Serve until the training is over; returns the exit code.

    Args:
        options: The command's.
        sums: See :func:`serve`.
    """
    host = options.master_addr or os.environ.get("MASTER_ADDR")
    port = options.master_port or os.environ.get("MASTER_PORT")
    if not host or not port:
        missing = "MASTER_PORT" if host else "MASTER_ADDR"
        raise OptionError(missing, host and port, "that of the training", "Set it, or use the command's option.")
    torch.set_num_threads(1)  # sums of different parts run beside each other
    code = 0
    try:
        serve(str(host), require_whole("MASTER_PORT", int(port), 1), timeout=options.timeout, say=_say, sums=sums)
    except RankFailedError as error:
        _say(f"The training has ended: {error}")
        code = 1
    except KeyboardInterrupt:
        _say("Interrupted.")
        code = _INTERRUPTED
    sys.stdout.flush()
    if code:  # gloo would wait for what it can never receive
        sys.stderr.flush()
        os._exit(code)
    return code


def _say(text: str) -> None:
    print(text, flush=True)


def serve(
    host: str,
    port: int,
    *,
    timeout: float = 1800.0,
    say: Callable[[str], object],
    sums: Callable[[int], SumsOfEncoded] | None = None,
) -> None:
    """Serve one fit after the other, until the training's rendezvous store is gone.

    Args:
        host: ``MASTER_ADDR`` of the training.
        port: ``MASTER_PORT`` of the training.
        timeout: Longest wait for the training to begin, in seconds.
        say: Called with what is worth knowing.
        sums: Makes, for each fit, what adds up encoded pushes, of this process's number among all that encode the same.

    Raises:
        SchedulerTimeoutError: If there is no training there in time.
        RanksDifferError: If the training has another version, or has all the servers that it asked for.
        RankFailedError: If a worker has died.
    """
    require_seconds("timeout", timeout)
    own = _address_towards(host, port, timeout)
    choose_interface(host)
    presence = StorePresence(host, port)
    store = meeting_store(
        dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=15))
    )
    fit = last_begun(store)
    door = ServerPort(own)
    try:
        signed = SignedOn(host=own, port=door.port, pid=os.getpid(), version=__version__, token=door.token)
        number = sign_on(store, signed)
        say(f"Parameter server {number} at {own} is ready for the training at {host}:{port}.")
        while True:
            begun = _next_fit(store, presence, fit)
            if begun is None:
                say("The training is over.")
                return
            fit, announced = begun
            _check(number, announced)
            rank, size = announced.workers + number, announced.workers + announced.servers
            try:
                await_all(store, fit, rank=rank, size=size, timeout=_CONNECTING_S, failure=partial(_gone, presence))
                rails = [
                    join_group(
                        store,
                        fit,
                        rank=len(rail) + number,
                        size=len(rail) + announced.servers,
                        timeout=_FOREVER,
                        name=rail_name(one),
                    )
                    for one, rail in enumerate(announced.rails)
                ]
                group = None if rails else join_group(store, fit, rank=rank, size=size, timeout=_FOREVER)
            except SchedulerTimeoutError as error:
                say(f"{error} The next fit is waited for.")
                continue
            except RuntimeError as error:  # one has died since
                say(f"The workers of fit {fit} could not be connected to: {brief(error)}. The next fit is waited for.")
                continue
            say(f"Fit {fit}: serving {announced.workers} workers, with {announced.servers} servers in all.")
            try:
                serving: _Serving
                if group is None:
                    serving = RailServers(rails, announced.rails)
                else:
                    encoded = None if sums is None else sums(rank)
                    serving = SummingServer(group, workers=announced.workers, encoded=encoded)
                serving.wait(_Signs(store, number, serving, presence).gone)
            except Exception as error:
                if not presence.gone():
                    leave_word(store, fit, number, error)
                time.sleep(_LINGER_S)
                raise
    finally:
        door.close()
        presence.close()


class _Signs:
    """Leaves word of what a server does, each second, while it is asked whether the training is gone."""

    def __init__(
        self,
        store: dist.Store,
        number: int,
        serving: _Serving,
        presence: StorePresence,
    ) -> None:
        self._store = store
        self._number = number
        self._serving = serving
        self._presence = presence
        self._beats = 0
        self._next = 0.0

    def gone(self) -> bool:
        """Whether the rendezvous store is gone."""
        if self._presence.gone():
            return True
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _SIGN_EVERY_S
            self._beats += 1
            lacks, since = self._serving.waits_for
            leave_sign(self._store, self._number, Doing(beat=self._beats, lacks=lacks, since=since))
        return False


def _next_fit(store: dist.Store, presence: StorePresence, last: int) -> tuple[int, Announcement] | None:
    """Wait for the next fit; ``None`` if there will be none."""
    while not presence.gone():
        try:
            begun = fit_after(store, last)
            if begun is not None:
                return begun
        except RuntimeError:  # the store has gone in this moment
            continue
        time.sleep(_LOOK_EVERY_S)
    return None


def _gone(presence: StorePresence) -> RankFailedError | None:
    return RankFailedError(0, "the rendezvous store of the training is gone") if presence.gone() else None


def _check(number: int, announced: Announcement) -> None:
    if announced.version != __version__:
        raise RanksDifferError(
            f"The training has lightning-bytescheduler {announced.version}, and parameter server {number} has "
            f"{__version__}. Install the same version on all machines."
        )
    if number >= announced.servers:
        raise RanksDifferError(
            f"The training has servers={announced.servers}, and that many have joined before: this one, number "
            f"{number}, is one too many. Was a server started twice?"
        )


def _address_towards(host: str, port: int, timeout: float) -> str:
    """This machine's address on the way to the training, once that listens."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            with socket.create_connection((host, port), timeout=5.0) as connection:
                address: str = connection.getsockname()[0]
                return address
        except OSError as error:
            if time.monotonic() > deadline:
                raise SchedulerTimeoutError(
                    f"There is no training at {host}:{port} within {timeout:g} s ({error}). Check MASTER_ADDR and "
                    "MASTER_PORT; they are those of rank 0."
                ) from error
        time.sleep(0.2)
