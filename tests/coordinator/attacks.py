"""Messages to a coordinator that are all wrong in some way, on every route; see ``fuzz.py``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import xxhash

from lightning_bytescheduler.diloco import coordinator_protocol as protocol
from lightning_bytescheduler.diloco import messages
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices import tracker as slice_messages

__all__ = ["Attacker", "Failure"]

_ALLOWED = (501, 503)  # of the errors from 500 on
_JUNK = ("", "0", "-1", "1e9", "9" * 400, "٣", "NaN", "None", "true", "../..", "\x7f", "'", "a" * 4000, "0x10", "1 ")


class Failure(Exception):
    """The coordinator did what it must not; says what."""


class Attacker:
    """Sends wrong messages from one connection after the other.

    Args:
        url: URL of the coordinator.
        token: Token of the coordinator.
        sessions: Sessions of honest workers, and its own, by name.
        payload: Bytes of an update.
        round: The current round.
        chance: Random numbers that decide everything.
    """

    def __init__(
        self, url: str, token: str, sessions: dict[str, str], payload: int, round: int, chance: random.Random
    ) -> None:
        self._port = int(url.rpartition(":")[2])
        self._url = url
        self._token = token
        self._sessions = sessions
        self._payload = payload
        self._round = round
        self._chance = chance
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._said = b""
        self.answers: Counter[str] = Counter()
        self._kinds: tuple[tuple[int, Callable[[], Awaitable[None]]], ...] = (
            (10, self.garbage),
            (20, self.wrong_route),
            (12, self.stranger),
            (25, self.wrong_update),
            (5, self.wrong_state),
            (20, self.wrong_slices),
            (3, self.half_sent),
            (2, self.slow),
            (6, self.wrong_hello),
            (6, self.wrong_frame),
        )

    async def attack(self, http: aiohttp.ClientSession) -> None:
        """Send one message."""
        self._http = http
        kinds = [kind for _, kind in self._kinds]
        kind = self._chance.choices(kinds, [weight for weight, _ in self._kinds])[0]
        try:
            await asyncio.wait_for(kind(), 60)
        except (OSError, asyncio.IncompleteReadError, aiohttp.ClientError):
            self.answers["closed"] += 1
            await self.close()

    async def close(self) -> None:
        """End the connection."""
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        self._reader = self._writer = None

    # ── HTTP, byte by byte ───────────────────────────────────────────────────────────

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None or self._writer.is_closing():
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self._reader, self._writer

    async def _ask(
        self, method: str, path: str, headers: dict[str, str], body: bytes = b"", *, length: str | None = None
    ) -> int:
        """Send a request; returns the status of the answer."""
        reader, writer = await self._open()
        said = str(len(body)) if length is None else length
        lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {said}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogateescape") + body)
        await writer.drain()
        if said != str(len(body)):
            if writer.can_write_eof():
                writer.write_eof()
            status = await self._answer(reader)
            await self.close()
            return status
        return await self._answer(reader, has_body=method != "HEAD")

    async def _answer(self, reader: asyncio.StreamReader, *, has_body: bool = True) -> int:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(head[0].split()[1])
        fields = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
        if has_body:
            self._said = await reader.readexactly(int(fields.get("content-length", 0)))
        if fields.get("connection") == "close":
            await self.close()
        self.answers[str(status)] += 1
        if status >= 500 and status not in _ALLOWED:
            raise Failure(f"it answered {status}")
        return status

    def _headers(self, session: str | None = "mallory", **headers: str) -> dict[str, str]:
        found = {"Authorization": f"Bearer {self._token}", **headers}
        if session is not None:
            found[protocol.SESSION_HEADER] = self._sessions.get(session, session)
        return found

    def _junk(self) -> str:
        return self._chance.choice(_JUNK).replace("\x7f", "%7f")

    def _bytes(self, longest: int) -> bytes:
        return self._chance.randbytes(self._chance.randrange(longest))

    async def garbage(self) -> None:
        """Bytes that are not HTTP, or hardly."""
        await self.close()
        reader, writer = await self._open()
        lines = [
            b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: " + b"b" * 20_000 + b"\r\n\r\n",
            b"PUT /v1/state HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            b"POST /v1/slices HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
            b"GET " + self._bytes(200) + b" HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01" + self._bytes(300),
            self._bytes(2000),
            b"GET /v1/worker HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ]
        writer.write(self._chance.choice(lines))
        writer.write_eof()
        answer = await reader.read(65_536)
        self.answers[answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.") else "closed"] += 1
        if answer[9:12] == b"500":
            raise Failure("it answered 500 to what is no HTTP")
        await self.close()

    async def wrong_route(self) -> None:
        """Paths and methods that do not exist, and wrong requests to those that do."""
        path = self._chance.choice(
            [
                "/v1/status",
                "/v1/state",
                "/v1/slices",
                "/v1/worker",
                "/metrics",
                "/healthz",
                "/",
                f"/v1/rounds/{self._round}/fragments/0",
                f"/v1/rounds/{self._junk()[:60]}/fragments/{self._junk()[:60]}".replace(" ", ""),
                f"/v1/rounds/{2**49}/fragments/{2**49}",
                f"/{'a/' * self._chance.randrange(50)}%2e%2e/{'?' * self._chance.randrange(9)}",
            ]
        )
        method = self._chance.choice(["POST", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW", "HEAD", "PUT"])
        path = path.encode("ascii", "ignore").decode()
        session = self._chance.choice([None, "", "0" * 32, "f" * 31, "mallory", self._junk()])
        status = await self._ask(method, path, self._headers(session), self._bytes(100))
        if status == 200 and method not in ("HEAD", "OPTIONS"):
            raise Failure(f"{method} {path} was answered with 200")

    async def stranger(self) -> None:
        """Right requests without the token, or with another one."""
        tokens = ["", "Bearer", "Bearer x", f"Basic {self._token}", f"Bearer {self._token}x", f"bearer {self._token}"]
        headers = self._headers("anna")
        headers["Authorization"] = self._chance.choice([*tokens, self._junk()])
        place = f"/v1/rounds/{self._round}/fragments/0"
        method, path = self._chance.choice(
            [
                ("GET", "/v1/status"),
                ("GET", "/v1/state"),
                ("GET", "/metrics"),
                ("PUT", place),
                ("GET", place),
                ("POST", "/v1/slices"),
                ("GET", "/v1/worker"),
            ]
        )
        status = await self._ask(method, path, headers, b"" if method == "GET" else self._bytes(1000))
        if status != 401 and status != 400:
            raise Failure(f"{method} {path} without the token was answered with {status}")

    async def wrong_update(self) -> None:
        """An update with one thing wrong at least."""
        chance, size = self._chance, self._payload
        body = bytearray(bytes(size))
        round, fragment, session = self._round, 0, "anna"
        length: str | None = None
        headers = {
            protocol.DIGEST_HEADER: "",
            protocol.SAMPLES_HEADER: "8",
            protocol.STEPS_HEADER: "1",
        }
        wrong = chance.randrange(10)
        if wrong == 0:
            body = bytearray(self._bytes(4 * size + 1))
            if len(body) == size:
                body += b"x"
        elif wrong == 1:
            numbers = memoryview(body).cast("f")
            numbers[chance.randrange(len(numbers))] = chance.choice([float("nan"), float("inf"), -float("inf")])
        elif wrong == 2:
            round = chance.choice([0, round - 1, round + 1, round + 5, 2**40])
        elif wrong == 3:
            fragment = chance.choice([1, 7, 2**40])
        elif wrong == 4:
            session = chance.choice(["", "0" * 32, "stranger", self._junk()])
        elif wrong == 5:
            names = [protocol.SAMPLES_HEADER, protocol.STEPS_HEADER, protocol.ROUND_SAMPLES_HEADER]
            junk = [one for one in _JUNK if one not in ("0", "") and one.isprintable()]
            headers[chance.choice(names)] = chance.choice([*junk, "1" * 17]).strip() + "x"
        elif wrong == 6:
            length = chance.choice(["1000000000000000", "0", "-1", "1e3", "9" * 30])
        headers[protocol.DIGEST_HEADER] = xxhash.xxh3_128_hexdigest(bytes(body))
        if wrong == 7:
            headers[protocol.DIGEST_HEADER] = chance.choice(["", "0" * 32, "g" * 32, "0" * 31, self._junk()])
        elif wrong == 8:
            del headers[chance.choice([protocol.SAMPLES_HEADER, protocol.STEPS_HEADER, protocol.DIGEST_HEADER])]
        elif wrong == 9:
            round, session = self._round - 1, "anna"  # what was merged already
        path = protocol.update_path(round, fragment)
        before = self.answers["200"]
        await self._ask("PUT", path, self._headers(session, **headers), bytes(body), length=length)
        if self.answers["200"] > before and wrong not in (2, 9):  # these are told that they come again, or too late
            raise Failure(f"an update was taken in spite of fault {wrong}: {self._said!r}")

    async def wrong_state(self) -> None:
        """Weights that were not asked for."""
        body = self._chance.choice([b"", self._bytes(5000), (10**18).to_bytes(8, "little") + b"{}", b"\x80\x04N."])
        status = await self._ask(
            "PUT", protocol.STATE_PATH, self._headers(self._chance.choice(["anna", "mallory"])), body
        )
        if status == 200:
            raise Failure("weights were taken that were not asked for")

    async def wrong_slices(self) -> None:
        """Invalid messages about slices, or messages with another worker's session."""
        calls: list[slice_messages.Call] = [
            slice_messages.JoinTracker(worker="anna", incarnation="x"),
            slice_messages.RequestSlice(session=1, epoch=0),
            slice_messages.ReportProgress(session=1, grant=1, trained=1),
            slice_messages.QuarantineSlice(session=1, key="a", reason="broken"),
        ]
        call = self._chance.choice(calls)
        text = slice_messages.encode(call)
        if self._chance.random() < 0.7:
            text = self._mutated(text, lambda changed: bool(slice_messages.decode(changed)))
        elif isinstance(call, slice_messages.JoinTracker):
            text = slice_messages.encode(slice_messages.JoinTracker(worker="anna/evil", incarnation="x"))
        await self._ask("POST", protocol.SLICES_PATH, self._headers("mallory"), text.encode("utf-8", "replace"))

    async def half_sent(self) -> None:
        """A connection that breaks in the middle of a body."""
        await self.close()
        _, writer = await self._open()
        headers = self._headers("anna", **{protocol.DIGEST_HEADER: "0" * 32, protocol.SAMPLES_HEADER: "8"})
        headers[protocol.STEPS_HEADER] = "1"
        lines = [f"PUT {protocol.update_path(self._round, 0)} HTTP/1.1", "Host: 127.0.0.1"]
        lines += [f"Content-Length: {self._payload}", *(f"{name}: {value}" for name, value in headers.items())]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode() + bytes(self._chance.randrange(self._payload)))
        await writer.drain()
        if self._chance.random() < 0.5:
            await asyncio.sleep(self._chance.random() * 0.02)
        writer.transport.abort()
        self._reader = self._writer = None
        self.answers["broken off"] += 1

    async def slow(self) -> None:
        """A body that comes in drops, and is wrong."""
        await self.close()
        reader, writer = await self._open()
        headers = self._headers("mallory")
        lines = [f"POST {protocol.SLICES_PATH} HTTP/1.1", "Host: 127.0.0.1", "Content-Length: 5"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        for drop in (b"{", b'"', b"k", b"i", b"n"):
            await asyncio.sleep(self._chance.random() * 0.02)
            writer.write(drop)
        await self._answer(reader)

    # ── WebSocket ───────────────────────────────────────────────────────────

    def _mutated(self, text: str, accepted: Callable[[str], bool]) -> str:
        """Return ``text``, changed so that it is not a valid message."""
        while True:
            changed = self._changed(text)
            try:
                if not accepted(changed):
                    return changed
            except (OptionError, RecursionError):
                return changed

    def _changed(self, text: str) -> str:
        chance = self._chance
        way = chance.randrange(6)
        if way == 0:
            return text[: chance.randrange(len(text))]
        if way == 1:
            place = chance.randrange(len(text))
            return text[:place] + chance.choice('{}[]",:\x00é0-') + text[place + 1 :]
        if way == 2:
            return "[" * chance.choice([10, 5000]) + text
        if way == 3:
            return self._bytes(300).decode("utf-8", "replace")
        value: Any = json.loads(text)
        holder = value
        while isinstance(holder, dict) and chance.random() < 0.5:
            inner = [one for one in holder.values() if isinstance(one, (dict, list)) and one]
            if not inner:
                break
            holder = chance.choice(inner)
            if isinstance(holder, list):
                holder = holder[0]
        if not isinstance(holder, dict):
            return json.dumps([value])
        strange: Any = chance.choice(
            [None, -1, 2**70, 1.5, True, "x" * 5000, [], {}, [[]], "é\u0000", {"kind": "Hello"}]
        )
        holder[chance.choice([*holder, "unknown"])] = strange
        return json.dumps(value)

    def _hello(self, session: str) -> protocol.Hello:
        return protocol.Hello(protocol=protocol.PROTOCOL, package="0", worker="mallory", session=session, model=())

    async def wrong_hello(self) -> None:
        """A first frame that is no Hello, or of a worker that cannot take part."""
        way = self._chance.randrange(4)
        text: str | bytes = protocol.encode_frame(self._hello(""))  # of another release, and without a model
        if way == 1:
            text = self._mutated(str(text), lambda changed: bool(protocol.decode_frame(changed, sender="x")))
        elif way == 2:
            text = protocol.encode_frame(protocol.Batch(number=1))
        elif way == 3:
            text = self._bytes(1000)
        async with self._http.ws_connect(self._url + protocol.WORKER_PATH, headers=self._headers(None)) as socket:
            await (socket.send_str(text) if isinstance(text, str) else socket.send_bytes(text))
            answer = await socket.receive(timeout=60)
            self._note(answer)

    async def wrong_frame(self) -> None:
        """Frames that a member may not send: about others, out of order, repeated, too large, or nonsense."""
        chance = self._chance
        number = chance.choice([0, 2, 99, 2**60])
        report = messages.StepReport(worker="anna", round=self._round, steps=5, samples=5, batch_size=1, seconds=0.1)
        frames: list[str | bytes] = [
            protocol.encode_frame(protocol.Batch(number=1, messages=(report,))),
            protocol.encode_frame(protocol.Batch(number=1, messages=(messages.LeaveRounds(worker="anna"),))),
            protocol.encode_frame(protocol.Batch(number=number)),
            protocol.encode_frame(self._hello("")),
            self._mutated(
                protocol.encode_frame(protocol.Batch(number=1, messages=(report,))),
                lambda changed: bool(protocol.decode_frame(changed, sender="x")),
            ),
            self._bytes(2000),
        ]
        if chance.random() < 0.002:
            frames = ["x" * (2**25)]
        async with self._http.ws_connect(self._url + protocol.WORKER_PATH, headers=self._headers(None)) as socket:
            await socket.send_str(self._welcome)
            answer = await socket.receive(timeout=60)
            if answer.type is not aiohttp.WSMsgType.TEXT:
                self._note(answer)
                return
            frame = chance.choice(frames)
            await (socket.send_str(frame) if isinstance(frame, str) else socket.send_bytes(frame))
            while (answer := await socket.receive(timeout=60)).type is aiohttp.WSMsgType.TEXT:
                pass
            self._note(answer)

    _welcome = ""
    """The Hello with which its own member comes back."""

    def _note(self, answer: Any) -> None:
        self.answers["refused" if answer.type is aiohttp.WSMsgType.TEXT else f"closed {answer.data}"] += 1
