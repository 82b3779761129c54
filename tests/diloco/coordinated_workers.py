"""Workers of a coordinator as threads of this process, without Lightning; and a link that can be cut."""

from __future__ import annotations

import asyncio
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bytescheduler.diloco.coordinator_client import resolve_coordinator
from lightning_bytescheduler.diloco.process_groups import WorkerGroup
from lightning_bytescheduler.diloco.runtime import CoordinatedRuntime
from lightning_bytescheduler.serving import end_others

__all__ = ["Link", "ThreadWorker", "until"]


def until(ready: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.005)


class _NoBoard:
    fault: BaseException | None = None

    def watch(self, *watched: object) -> None:
        pass

    def unwatch(self, watched: object) -> None:
        pass

    def no_hope(self) -> BaseException | None:
        return self.fault


class ThreadWorker:
    """Takes steps that are a function of its name, until the run or its own steps are over.

    Weights and steps are multiples of 1/1024, so that sums of them have no rounding, however they are cut into rounds.

    Args:
        url: URL of the coordinator.
        name: The name that it asks for.
        seconds: Seconds of a step.
        steps: Steps after which it leaves.
        given: Options of ``RunOptions``.
        width: Width of its model.
    """

    def __init__(
        self,
        url: str,
        name: str,
        *,
        seconds: float = 0.002,
        steps: int | None = None,
        given: Mapping[str, Any] | None = None,
        width: int = 5,
        timeout: float = 60.0,
        **address: Any,
    ) -> None:
        self.name = name
        self.width = width
        self.module = self._untrained()
        self.seconds = seconds
        self.steps = steps
        self.taken = 0
        self.error: BaseException | None = None
        self.weights: list[Tensor] = []
        self.versions: list[int] = []
        self.taken_at: list[int] = []  # steps, at each of these
        self.validated: list[int] = []  # versions of the global weights
        self._ends = threading.Event()
        self._dies = threading.Event()
        made = resolve_coordinator({"url": url, "name": name, **address}, environ={})
        assert made is not None
        self.board = _NoBoard()
        self.runtime = CoordinatedRuntime(
            made,
            self.module,
            given=given or {},
            group=WorkerGroup(no_hope=self.board.no_hope),
            board=self.board,
            flush=lambda: None,
            timeout=timeout,
        )
        self._thread = threading.Thread(target=self._run, name=f"test-{name}", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """Rounds that are part of its weights, once it takes steps; it may have fetched them before it has begun."""
        return self.runtime.session.version if self.taken else 0

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> None:
        """Have it leave politely."""
        self._ends.set()

    def die(self) -> None:
        """End without a word."""
        self._dies.set()
        self.join()

    def join(self, timeout: float = 120.0) -> None:
        self._thread.join(timeout)
        assert not self._thread.is_alive(), f"{self.name} hangs"

    def checked(self) -> ThreadWorker:
        self.join()
        if self.error is not None:
            raise self.error
        return self

    def given_up(self) -> set[int]:
        """Steps that an older state has none of, by number, if it was alone: until the worker had taken that."""
        at, version, gone = {0: 0}, 0, set[int]()
        for now, taken in zip(self.versions, self.taken_at, strict=True):
            if now < version:
                gone |= set(range(max(at[known] for known in at if known <= now), taken))
            else:
                at[now] = taken
            version = now
        return gone

    def uninterrupted(self, *, without: set[int]) -> list[Tensor]:
        """The weights of all steps but some, without a coordinator."""
        module, generator = self._untrained(), self._generator()
        for number in range(self.taken):
            self._step(module, generator, counts=number not in without)
        return [parameter.detach() for parameter in module.parameters()]

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(self.name.encode()))

    @torch.no_grad()
    def _untrained(self) -> nn.Module:
        torch.manual_seed(zlib.crc32(self.name.encode()))
        module = nn.Linear(self.width, 3)
        for parameter in module.parameters():
            parameter.mul_(1024).round_().div_(1024)
        return module

    @torch.no_grad()
    def _step(self, module: nn.Module, generator: torch.Generator, *, counts: bool = True) -> None:
        for parameter in module.parameters():
            change = torch.randint(-16, 17, parameter.shape, generator=generator) / 1024
            parameter.sub_(change if counts else torch.zeros(()))

    def _validate(self, session: Any) -> None:
        session.pause()
        weights = session.state.weights
        assert all(torch.equal(value, weights[name]) for name, value in self.module.named_parameters())
        self.validated.append(session.version)
        session.resume()

    def _run(self) -> None:
        runtime = self.runtime
        try:
            runtime.connect()
            runtime.prepare()
            runtime.session.begin()
            session = runtime.session
            generator = self._generator()
            while not (session.over or self._ends.is_set() or self._dies.is_set() or self.taken == self.steps):
                time.sleep(self.seconds)
                self._step(self.module, generator)
                self.taken += 1
                session.count(samples=2, seconds=self.seconds, loss=1.0)
                while not session.over and session.is_due():
                    session.synchronise()
                    self.versions.append(session.version)
                    self.taken_at.append(self.taken)
                    if session.leads and not session.over:
                        self._validate(session)
            if not self._dies.is_set():
                session.leave(quickly=self._ends.is_set())
        except BaseException as error:
            self.error = error
        finally:
            runtime.stop(failed=False)
        self.weights = [parameter.detach().clone() for parameter in self.module.parameters()]


class Link:
    """Forwards connections to a port, until it is cut.

    Args:
        port: The port to forward to.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._up = True
        self._stop = asyncio.Event()
        ready = threading.Event()

        async def serve() -> None:
            server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            ready.set()
            await self._stop.wait()
            server.close()
            await end_others()
            self._drop()

        def run() -> None:
            self._loop.run_until_complete(serve())
            self._loop.close()

        self._thread = threading.Thread(target=run, name="test-link", daemon=True)
        self._thread.start()
        assert ready.wait(60.0)

    def cut(self) -> None:
        self._up = False
        self._loop.call_soon_threadsafe(self._drop)

    def heal(self, port: int | None = None) -> None:
        self.port = self.port if port is None else port
        self._up = True

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60.0)

    def _drop(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            if not self._up:
                return
            there, back = await asyncio.open_connection("127.0.0.1", self.port)
            self._writers.add(back)
            await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
        except OSError:
            pass
        finally:
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except (OSError, ConnectionError):
            pass
        finally:
            writer.transport.abort()
