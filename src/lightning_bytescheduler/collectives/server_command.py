"""``lightning-bytescheduler server``: a parameter server for trainings with ``servers``."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from lightning_bytescheduler.checks import require_seconds, require_whole
from lightning_bytescheduler.collectives.groups import choose_interface
from lightning_bytescheduler.collectives.sending_turns import PATIENCE
from lightning_bytescheduler.collectives.server_meeting import (
    Announcement,
    Doing,
    ServerPort,
    begun_after,
    connect,
    meeting_store,
    require_same_version,
    sign_on,
)
from lightning_bytescheduler.collectives.summing_server import SummingServer, await_goodbyes
from lightning_bytescheduler.exceptions import OptionError, RankFailedError, RanksDifferError, SchedulerTimeoutError
from lightning_bytescheduler.failures.messages import brief
from lightning_bytescheduler.failures.rendezvous import StorePresence
from lightning_bytescheduler.serving import parse_bind

__all__ = ["add_arguments", "run", "serve"]

_CONNECTING_S = 120.0  # seconds to connect, after all have found each other
_LINGER_S = 6.0  # seconds; longer than workers need to find a dead one
_LOOK_EVERY_S = 0.1
_INTERRUPTED = 130  # a shell's exit code after Ctrl+C


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("--master-addr", metavar="HOST", help="of the training (default: MASTER_ADDR)")
    parser.add_argument("--master-port", metavar="PORT", type=int, help="of the training (default: MASTER_PORT)")
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=1800.0, help="wait so long for the training (default: 1800)"
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
    presence = _reach(host, port, timeout)
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
            except (SchedulerTimeoutError, RuntimeError) as error:  # one does not come, or has died since
                say(f"Fit {last} could not be connected to: {brief(error).rstrip('.')}. The next fit is waited for.")
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


def _reach(host: str, port: int, timeout: float) -> StorePresence:
    deadline = time.monotonic() + timeout
    while True:
        try:
            return StorePresence(host, port)
        except OSError as error:
            if time.monotonic() > deadline:
                raise SchedulerTimeoutError(
                    f"There is no training at {host}:{port} within {timeout:g} s ({error}). Check MASTER_ADDR and "
                    "MASTER_PORT; they are those of rank 0."
                ) from error
        time.sleep(0.2)


def _next_fit(store: dist.Store, presence: StorePresence, last: int) -> Announcement | None:
    while not presence.gone():
        with suppress(RuntimeError):  # the store may just have gone
            if (fit := begun_after(store, last)) is not None:
                return fit
        time.sleep(_LOOK_EVERY_S)
    return None


def _check(number: int, fit: Announcement) -> None:
    require_same_version(fit.version, "The training", f"parameter server {number}")
    if number >= fit.servers:
        raise RanksDifferError(
            f"The training has servers={fit.servers}, and that many have joined before: this one, number "
            f"{number}, is one too many. Was a server started twice?"
        )


def _connect(store: dist.Store, presence: StorePresence, number: int, fit: Announcement) -> list[dist.ProcessGroup]:
    def gone() -> RankFailedError | None:
        return RankFailedError(0, "the rendezvous store of the training is gone") if presence.gone() else None

    places = [fit.rail(one, len(rail) + number) for one, rail in enumerate(fit.rails)]
    return connect(store, fit, places, rank=fit.workers + number, wait=_CONNECTING_S, timeout=PATIENCE, failure=gone)


def _doing(servers: Sequence[SummingServer]) -> Doing:
    lacks, since = max((server.waits_for for server in servers), key=lambda waits: waits[1])
    return Doing(lacks=lacks, since=since)
