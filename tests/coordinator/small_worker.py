"""A worker of few lines, without Lightning: what the protocol asks of one, for tests and benchmarks."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import aiohttp
import torch
import xxhash
from safetensors.torch import load, save
from torch import Tensor

from lightning_bytescheduler import __version__
from lightning_bytescheduler.diloco import coordinator_protocol as protocol
from lightning_bytescheduler.diloco import messages
from lightning_bytescheduler.diloco.fragments import split_fragments
from lightning_bytescheduler.diloco.outer_optimizer import OuterOptimizer


def described(weights: dict[str, Tensor]) -> tuple[protocol.ModelParameter, ...]:
    return tuple(
        protocol.ModelParameter(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for name, tensor in weights.items()
    )


class SmallWorker:
    """One worker. Use it in ``async with``."""

    def __init__(self, url: str, name: str, weights: dict[str, Tensor], **options: Any) -> None:
        self.url = url
        self.name = name
        self.first_weights = weights
        self.options = options
        self.session = ""
        self.version = 0
        self.chain = "0" * 32
        self.welcome: protocol.Welcome | None = None
        self.ended: deque[messages.RoundEnded] = deque()
        self.heard: deque[Any] = deque()
        self.round = 0
        self._number = 0
        self._received = 0

    async def __aenter__(self) -> SmallWorker:
        self.http = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.close()

    @property
    def headers(self) -> dict[str, str]:
        return {protocol.SESSION_HEADER: self.session}

    async def hello(self, **changes: Any) -> protocol.Frame:
        """Connect; returns the answer."""
        self.socket = await self.http.ws_connect(self.url + protocol.WORKER_PATH)
        self._number = self._received = 0
        said = {
            "protocol": protocol.PROTOCOL,
            "package": __version__,
            "worker": self.name,
            "session": self.session,
            "model": described(self.first_weights),
            "options": self.options,
            "version": self.version,
            "chain": self.chain,
            **changes,
        }
        await self.socket.send_str(protocol.encode_frame(protocol.Hello(**said)))
        answer = protocol.decode_frame(await self.socket.receive_str(timeout=60), sender="the coordinator")
        if isinstance(answer, protocol.Welcome):
            self.welcome, self.name, self.session = answer, answer.worker, answer.session
        return answer

    async def join(self) -> protocol.Welcome:
        """Connect, get or give the weights, and join the rounds."""
        welcome = await self.hello()
        assert isinstance(welcome, protocol.Welcome), welcome
        if not welcome.fetch:
            await self.catch_up(welcome.version)
        elif not await self.fetch():
            if (await self.provide()).status == 409:  # another worker was first
                await self.fetch()
            else:
                self._begin(self.first_weights, {}, welcome.options)
                self.version, self.chain = welcome.version, welcome.chain
        await self.say(messages.JoinRounds(worker=self.name))
        return welcome

    async def provide(self, momentum: dict[str, Tensor] | None = None) -> aiohttp.ClientResponse:
        state = {f"weights.{name}": tensor for name, tensor in self.first_weights.items()}
        body = save({**state, **{f"momentum.{name}": tensor for name, tensor in (momentum or {}).items()}})
        return await self.http.put(self.url + protocol.STATE_PATH, data=body, headers=self.headers)

    async def fetch(self) -> bool:
        """Get the state; returns whether there is any."""
        while True:
            async with self.http.get(self.url + protocol.STATE_PATH, headers=self.headers) as response:
                if response.status == 503:
                    await asyncio.sleep(0.02)
                    continue
                if response.status == 404:
                    return False
                assert response.status == 200, await response.text()
                tensors = load(await response.read())
                self.version = int(response.headers[protocol.VERSION_HEADER])
                self.chain = response.headers[protocol.CHAIN_HEADER]
                break
        weights = {name[8:]: tensor for name, tensor in tensors.items() if name.startswith("weights.")}
        momentum = {name[9:]: tensor for name, tensor in tensors.items() if name.startswith("momentum.")}
        assert self.welcome is not None
        ordered = {name: weights[name] for name in self.first_weights}
        self._begin(ordered, momentum, self.welcome.options)
        return True

    def _begin(self, weights: dict[str, Tensor], momentum: dict[str, Tensor], options: protocol.RunOptions) -> None:
        self.outer = OuterOptimizer(weights, lr=options.outer_lr, momentum=options.outer_momentum)
        state = self.outer.state_dict()
        for index, name in enumerate(weights):
            if name in momentum:
                state["optimizer"]["state"][index] = {"momentum_buffer": momentum[name]}
        self.outer.load_state_dict(state)
        self.fragments = split_fragments({name: t.numel() for name, t in weights.items()}, options.fragments)
        self.wire = options.wire

    # ── Messages ───────────────────────────────────────────────────────────

    async def say(self, *said: Any) -> protocol.Batch:
        """Send a frame, and wait for the one that has heard it."""
        self._number += 1
        frame = protocol.Batch(number=self._number, heard=self._received, messages=said)
        await self.socket.send_str(protocol.encode_frame(frame))
        while True:
            answer = await self.listen()
            if answer.heard >= self._number:
                return answer

    async def listen(self, timeout: float = 60) -> protocol.Batch:
        """Receive one frame."""
        frame = protocol.decode_frame(await self.socket.receive_str(timeout=timeout), sender="the coordinator")
        assert isinstance(frame, protocol.Batch)
        assert frame.number == self._received + 1
        self._received = frame.number
        for message in frame.messages:
            self.heard.append(message)
            if isinstance(message, messages.RoundEnded):
                self.ended.append(message)
            elif isinstance(message, messages.StartRound):
                self.round = message.round
        return frame

    async def wait_for(self, kind: type) -> Any:
        """The next message of a kind; what came before it is dropped."""
        while True:
            while self.heard:
                message = self.heard.popleft()
                if isinstance(message, kind):
                    return message
            await self.listen()

    async def start(self) -> int:
        """Wait for a round, and begin it."""
        started = await self.wait_for(messages.StartRound)
        await self.say(messages.RoundStarted(worker=self.name, round=started.round))
        return started.round

    async def step(self, steps: int, *, samples: int, batch_size: int = 1, seconds: float = 0.01) -> protocol.Batch:
        report = messages.StepReport(
            worker=self.name, round=self.round, steps=steps, samples=samples, batch_size=batch_size, seconds=seconds
        )
        return await self.say(report)

    # ── Updates ───────────────────────────────────────────────────────────

    async def push(
        self, round: int, update: Tensor, *, samples: int, steps: int = 1, fragment: int = 0, **headers: str
    ) -> tuple[int, Any]:
        """Send a flat update; returns the status and the answer."""
        body = bytes(self.wire.encode(update, seed=samples).numpy())
        return await self.push_bytes(round, body, samples=samples, steps=steps, fragment=fragment, **headers)

    async def push_bytes(
        self, round: int, body: bytes, *, samples: int, steps: int = 1, fragment: int = 0, **headers: str
    ) -> tuple[int, Any]:
        said = {
            **self.headers,
            protocol.DIGEST_HEADER: xxhash.xxh3_128_hexdigest(body),
            protocol.SAMPLES_HEADER: str(samples),
            protocol.STEPS_HEADER: str(steps),
            **headers,
        }
        async with self.http.put(self.url + protocol.update_path(round, fragment), data=body, headers=said) as response:
            return response.status, await response.json(content_type="application/json")

    async def pull(self, round: int, fragment: int = 0) -> None:
        """Get the mean of a round, and take the outer step."""
        async with self.http.get(self.url + protocol.update_path(round, fragment), headers=self.headers) as response:
            assert response.status == 200, await response.text()
            body = await response.read()
            total = int(response.headers[protocol.TOTAL_HEADER])
            digest = response.headers[protocol.DIGEST_HEADER]
            chain = response.headers[protocol.CHAIN_HEADER]
        assert digest == (xxhash.xxh3_128_hexdigest(body) if total else "")
        self.chain = protocol.chain_after(self.chain, round=round, fragment=fragment, digest=digest, total=total)
        assert self.chain == chain
        self.version = round
        if total:
            names = self.fragments[fragment]
            weights = self.outer.weights
            flat = self.wire.of_means.decode(torch.frombuffer(bytearray(body), dtype=torch.uint8), self.size(fragment))
            parts = flat.split([weights[name].numel() for name in names])
            self.outer.step({n: part.view_as(weights[n]) for n, part in zip(names, parts, strict=True)})

    def size(self, fragment: int = 0) -> int:
        return sum(self.outer.weights[name].numel() for name in self.fragments[fragment])

    async def catch_up(self, version: int) -> None:
        for round in range(self.version + 1, version + 1):
            await self.pull(round, (round - 1) % len(self.fragments))

    async def take_part(self, update: Tensor, *, samples: int) -> messages.RoundEnded:
        """One round: begin it, take a step, send, and merge."""
        round = await self.start()
        fragment = (round - 1) % len(self.fragments)
        await self.step(1, samples=samples, batch_size=samples)
        status, receipt = await self.push(round, update, samples=samples, fragment=fragment)
        assert (status, receipt["verdict"]) == (200, "added"), receipt
        ended = await self.wait_for(messages.RoundEnded)
        await self.pull(round, fragment)
        return ended
