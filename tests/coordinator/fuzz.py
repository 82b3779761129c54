"""A coordinator under fire: malformed, oversized, replayed, half-sent and slow messages on every route.

``python -m tests.coordinator.fuzz --messages 100000`` runs a coordinator with a state, slices of data and an
honest worker, sends it that many wrong messages, and then lets the worker finish its round.
It fails if the coordinator fails or answers with an error of its own, if anything of the run's state has changed, if
memory has grown, or if a saved state does not load. Senders have no token, a wrong one, no session, another worker's,
or their own: with a token, too, a sender may say only what the protocol allows.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import hashlib
import logging
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import aiohttp
import torch

from lightning_bytescheduler import __version__
from lightning_bytescheduler.coordinator.run import CoordinatorOptions
from lightning_bytescheduler.coordinator.service import CoordinatorServer
from lightning_bytescheduler.coordinator.slice_routes import SliceRoutes
from lightning_bytescheduler.coordinator.state_store import StateStore, pack
from lightning_bytescheduler.coordinator.update_sum import view_of
from lightning_bytescheduler.diloco import coordinator_protocol as protocol
from lightning_bytescheduler.diloco import messages
from lightning_bytescheduler.diloco.coordinator_protocol import run_options
from lightning_bytescheduler.diloco.round_end import RoundOptions
from lightning_bytescheduler.serving import ServerAccess
from lightning_bytescheduler.slices.make import make_slices
from tests.coordinator.attacks import Attacker, Failure
from tests.coordinator.small_worker import SmallWorker

__all__ = ["fuzz"]

_SENDERS = 8
_GROWTH = 24 * 2**20  # bytes of the coordinator's process; allocators keep some of what was used at the same time
_WARM_UP = 0.2  # of the messages, before memory is looked at
_LEASE = 3600.0
_ANSWER_SECONDS = 120.0


class _Errors(logging.Handler):
    """What was logged as an error: a handler of a request that failed, above all."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(self.format(record))


_SETTLES_S = 60.0


def _digest(server: CoordinatorServer) -> str:
    """Of everything that makes up the run: weights, momentum, rounds, members and slices."""

    service = server.service
    slices, weights = service.slices, service.weights
    assert slices is not None
    assert weights is not None

    def plain() -> Any:
        members = sorted((member.name, member.digest) for member in service.run.members)
        return {
            "lineage": [service.run.lineage.version, service.run.lineage.chain],
            "round": service.run.rounds.round,
            "samples": service.run.samples,
            "members": [f"{name} {digest}" for name, digest in members],
            "outer": weights._snapshot(),
            "slices": slices.tracker.state_dict(),
            "room": service.room.taken,
        }

    text, tensors = pack(server.call(plain))
    digest = hashlib.sha256(text.encode())
    for tensor in tensors.values():
        digest.update(view_of(tensor.float()))
    return digest.hexdigest()


def _resident(pid: int) -> int:
    """Bytes of a process in memory."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def _target(folder: Path, token: str) -> Iterator[CoordinatorServer]:
    (folder / "a.txt").write_text("\n".join(f"line {number}" for number in range(400)))
    make_slices(str(folder / "a.txt"), str(folder / "slices"), slice_bytes=500)
    options = CoordinatorOptions(run=run_options(inner_steps=1000), rounds=RoundOptions(grace=_LEASE), lease=_LEASE)
    slices = SliceRoutes([str(folder / "slices")])
    store = StateStore(str(folder / "state"))
    with CoordinatorServer(options, access=ServerAccess(token=token), store=store, slices=slices) as server:
        yield server


def _serve(folder: str, token: str, pipe: Pipe) -> None:
    """The coordinator's process, so that its memory is not that of the attackers."""
    errors = _Errors()
    logging.getLogger().addHandler(errors)
    with _target(Path(folder), token) as server:
        answers: dict[str, Callable[[], Any]] = {
            "url": lambda: server.url,
            "digest": lambda: _digest(server),
            "collect": gc.collect,
            "tasks": lambda: server.call(lambda: len(asyncio.all_tasks())),
            "threads": threading.active_count,
            "counters": lambda: server.status().counters,
            "error": lambda: None if server.error is None else repr(server.error),
        }
        while (asked := pipe.recv()) != "end":
            pipe.send(answers[asked]())
    pipe.send(errors.said)


class _Target:
    """A coordinator in a process of its own. Use it in ``with``.

    Args:
        folder: Folder for its state.
        token: Token of clients that may talk to it.
    """

    def __init__(self, folder: Path, token: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(str(folder), token, theirs), name="coordinator")
        self._process.start()
        theirs.close()
        self.logged: list[str] = []

    def ask(self, what: str) -> Any:
        """Ask its process for something; see ``_serve``."""
        self._pipe.send(what)
        if not self._pipe.poll(_ANSWER_SECONDS):
            raise Failure(f"its process has not answered {what!r} within {_ANSWER_SECONDS:.0f} s")
        try:
            return self._pipe.recv()
        except EOFError:
            raise Failure("its process has ended") from None

    def resident(self) -> int:
        """Bytes of its process in memory, without garbage."""
        self.ask("collect")
        return _resident(self._process.pid or 0)

    def __enter__(self) -> _Target:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.is_alive():
            self.logged = self.ask("end")
        self._process.join(_ANSWER_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


async def _assault(server: _Target, token: str, count: int, seed: int, say: Callable[[str], None]) -> None:
    headers = {"Authorization": f"Bearer {token}"}
    weights = {"layer.weight": torch.ones(16, 8), "layer.bias": torch.zeros(16)}
    update = torch.full((16 * 9,), 0.5)
    url = server.ask("url")
    async with SmallWorker(url, "anna", weights) as anna, SmallWorker(url, "mallory", weights) as mallory:
        for worker in (anna, mallory):
            await worker.http.close()
            worker.http = aiohttp.ClientSession(headers=headers)
        await anna.join()
        round = await _round_of(anna, update)
        await anna.start()
        await mallory.hello()
        await mallory.socket.close()
        attackers = []
        for number in range(_SENDERS):
            sessions = {"anna": anna.session, "mallory": mallory.session}
            size = int(anna.wire.encode(update, seed=0).numel())
            one = Attacker(url, token, sessions, size, round + 1, random.Random(seed * 1000 + number))
            one._welcome = protocol.encode_frame(
                protocol.Hello(
                    protocol=protocol.PROTOCOL,
                    package=__version__,
                    worker="mallory",
                    session=mallory.session,
                    model=protocol.decode_frame(protocol.encode_frame(_hello_of(anna)), sender="anna").model,  # type: ignore[union-attr]
                )
            )
            attackers.append(one)
        before = await asyncio.to_thread(server.ask, "digest")
        await _send_all(server, attackers, anna, count, say)
        after = await asyncio.to_thread(server.ask, "digest")
        ends = time.monotonic() + _SETTLES_S
        while after != before and time.monotonic() < ends:  # bodies that were cut off may still be let go
            await asyncio.sleep(0.1)
            after = await asyncio.to_thread(server.ask, "digest")
        if after != before:
            raise Failure("the run's state has changed")
        answers: Counter[str] = sum((one.answers for one in attackers), Counter())
        say(f"answers: {', '.join(f'{name} {count}' for name, count in sorted(answers.items()))}")
        # All of that has done nothing to the worker's round.
        anna.round = round + 1
        await anna.step(1000, samples=8, batch_size=8)
        status, receipt = await anna.push(round + 1, update, samples=8)
        if (status, receipt.get("verdict")) != (200, "added"):
            raise Failure(f"the worker's own update was answered with {status} {receipt}")
        await anna.wait_for(messages.RoundEnded)
        await anna.pull(round + 1)


def _hello_of(worker: SmallWorker) -> protocol.Hello:
    from tests.coordinator.small_worker import described

    return protocol.Hello(
        protocol=protocol.PROTOCOL, package="0", worker=worker.name, model=described(worker.first_weights)
    )


async def _round_of(worker: SmallWorker, update: torch.Tensor) -> int:
    round = await worker.start()
    await worker.step(1000, samples=8, batch_size=8)
    await worker.push(round, update, samples=8)
    await worker.wait_for(messages.RoundEnded)
    await worker.pull(round)
    return round


async def _send_all(
    server: _Target, attackers: list[Attacker], anna: SmallWorker, count: int, say: Callable[[str], None]
) -> None:
    sent, base = 0, 0
    began = time.monotonic()

    async def send(one: Attacker, http: aiohttp.ClientSession) -> None:
        nonlocal sent, base
        while sent < count:
            sent += 1
            number = sent
            await one.attack(http)
            if number == max(int(count * _WARM_UP), 1):
                base = await asyncio.to_thread(server.resident)
            if number % max(count // 20, 1) == 0:
                rate = number / (time.monotonic() - began)
                used = await asyncio.to_thread(server.resident)
                say(f"{number:,} messages, {rate:,.0f} a second, {used / 2**20:,.0f} MiB")
        await one.close()

    async def stay() -> None:
        while sent < count:  # a round goes on without a worker that is silent, as on a slow machine
            await anna.say()
            await asyncio.sleep(0.2)

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as http:
        await asyncio.gather(stay(), *(send(one, http) for one in attackers))
    growth = await asyncio.to_thread(server.resident) - base
    say(f"the coordinator's memory has grown by {growth / 2**20:.1f} MiB after the first {_WARM_UP:.0%}")
    if growth > _GROWTH:
        raise Failure(f"the coordinator's memory has grown by {growth / 2**20:.0f} MiB")


def fuzz(count: int, *, seed: int = 0, say: Callable[[str], None] = lambda _: None) -> None:
    """Send wrong messages to a coordinator of its own.

    Args:
        count: Number of messages.
        seed: Seed of what is sent.
        say: Called with the progress.

    Raises:
        Failure: If the coordinator did what it must not.
    """
    token = "a-token-of-the-fuzzer"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _Target(folder, token) as server:
            asyncio.run(_assault(server, token, count, seed, say))
            if (error := server.ask("error")) is not None:
                raise Failure(f"the coordinator has failed: {error}")
            counters = server.ask("counters")
        _load_all(folder / "state", say)
    say(f"counted: {', '.join(f'{name} {value}' for name, value in sorted(counters.items()))}")
    if server.logged:
        raise Failure(f"errors were logged: {server.logged[0]}")


def _load_all(folder: Path, say: Callable[[str], None]) -> None:
    """Each saved state loads, not only the newest."""
    store = StateStore(str(folder))
    saved = sorted(folder.glob("state-*.safetensors"), reverse=True)
    for path in saved:
        state = store.load()
        if state is None or path.name != f"state-{state['run']['version']:010d}.safetensors":
            raise Failure(f"{path.name} does not load")
        path.unlink()
    store.close()
    say(f"{len(saved)} saved states load")


def main() -> int:
    """Run it; the exit code is 1 if the coordinator did what it must not."""
    parser = argparse.ArgumentParser(description="Send wrong messages to a coordinator.")
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        fuzz(options.messages, seed=options.seed, say=lambda line: print(line, flush=True))
    except Failure as failure:
        print(f"FAILED: {failure}")
        return 1
    print("The run is as it was, and goes on.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
