"""A worker's connection to the coordinator, and its exchange of updates, means and states over it.

One thread does everything that waits for the network. Encoding and decoding have a thread of their own,
``bytescheduler-coordinator-codec``, so that they delay neither messages nor the training.

The first, ``bytescheduler-coordinator-client``, runs an asyncio loop with one WebSocket for messages, and HTTP
requests beside it. It reconnects when a connection breaks. The pauses grow up to a few seconds and are random, so that
workers do not come back all at once. If trying again cannot help (a refusal, a rejected token or certificate), the
client ends with the coordinator's own words.

One frame of messages is in flight at a time. The next frame has all messages posted since. If it would have several
reports of a round in a row, only the last is sent, as it has the sums of all before it.

Calls from other threads return a ``concurrent.futures.Future``. Incoming messages go to a listener on this thread;
before there is a listener, they are kept. The lock for that is taken only by this thread and, once, by the thread that
sets the listener.

A ``CoordinatorAddress`` says where the coordinator is, and how a worker authenticates there. The token is in no
``repr``, message or error, and in no option. It comes from a file or from the environment, because every user of a
machine can read the arguments of its processes.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import logging
import os
import random
import re
import secrets
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import msgspec
import torch
from torch import Tensor

from lightning_bytescheduler.checks import importing, require_known, require_text
from lightning_bytescheduler.compression.wire_format import WireFormat
from lightning_bytescheduler.diloco.coordinator_protocol import (
    CHAIN_HEADER,
    DIGEST_HEADER,
    ROUND_SAMPLES_HEADER,
    SAMPLES_HEADER,
    SESSION_HEADER,
    STATE_PATH,
    STEPS_HEADER,
    TOTAL_HEADER,
    TRAINED_HEADER,
    VERSION_HEADER,
    WORKER_PATH,
    Batch,
    Hello,
    Refusal,
    UpdateReceipt,
    Welcome,
    chain_after,
    decode_frame,
    encode_frame,
    update_path,
)
from lightning_bytescheduler.diloco.messages import FromWorker, LeaveRounds, Message, coalesced
from lightning_bytescheduler.diloco.outer_optimizer import Contribution, Mean, Upload
from lightning_bytescheduler.exceptions import CoordinatorError, OptionError, SchedulerTimeoutError
from lightning_bytescheduler.serving import client_tls, end_others, end_tasks, is_loopback, read_token

if TYPE_CHECKING:
    import aiohttp


log = logging.getLogger(__name__)

ADDRESS_VARIABLE = "BYTESCHEDULER_COORDINATOR"
TOKEN_VARIABLE = "BYTESCHEDULER_COORDINATOR_TOKEN"
_NAME = re.compile(r"[A-Za-z0-9._:@/-]{1,150}")
_PARTS = ("url", "token_file", "authority", "name")
_URL = "https://HOST:PORT, or http://HOST:PORT for a coordinator on this machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorAddress:
    """Where a coordinator is, and how a worker authenticates there.

    Attributes:
        url: The URL, without a slash at its end.
        worker: The name that this worker asks for.
        authority: File of the authorities that sign the coordinator's certificate; ``None`` for those of the machine.
        token: The token that the coordinator requires.
    """

    url: str
    worker: str
    authority: str | None = None
    token: str | None = field(default=None, repr=False)

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS settings of connections; ``None`` for an address without TLS.

        Raises:
            OptionError: If a file cannot be used.
        """
        return client_tls(self.authority) if self.url.startswith("https:") else None


def resolve_coordinator(
    given: str | Mapping[str, str] | None, *, environ: Mapping[str, str] = os.environ
) -> CoordinatorAddress | None:
    """Return the address that the option and the environment give; ``None`` without a coordinator.

    Args:
        given: The option ``coordinator`` of ``DiLoCoStrategy``.
        environ: The environment: ``BYTESCHEDULER_COORDINATOR`` has the URL, and ``BYTESCHEDULER_COORDINATOR_TOKEN`` the
            token, if they are left out.

    Raises:
        OptionError: If something is not allowed. Never shows the token.
    """
    if given is not None and not isinstance(given, (str, Mapping)):
        raise OptionError("coordinator", given, f"{_URL}, or a dict with that as 'url'")
    parts = dict(given) if isinstance(given, Mapping) else {} if given is None else {"url": given}
    require_known(parts, _PARTS, of="coordinator")
    parts = {name: value for name, value in parts.items() if value is not None}
    option = "coordinator" if "url" in parts else ADDRESS_VARIABLE
    url = parts.pop("url", None) or environ.get(ADDRESS_VARIABLE)
    if not url and given is not None:
        raise OptionError("coordinator", given, f"one with a url, where {ADDRESS_VARIABLE} is not set")
    if not url:
        return None
    url = _require_url(option, require_text(option, url))
    for name, value in parts.items():
        require_text(f"coordinator.{name}", value)
    if not url.startswith("https:") and "authority" in parts:
        allowed = f"left out where the coordinator is not https://..., but {url!r}"
        raise OptionError("coordinator.authority", parts["authority"], allowed)
    worker = parts.get("name", "")
    if worker and not _NAME.fullmatch(worker):
        raise OptionError("coordinator.name", worker, "up to 150 letters, digits and . _ : @ / -")
    address = CoordinatorAddress(
        url=url,
        worker=worker or _own_name(),
        authority=parts.get("authority"),
        token=read_token(
            parts.get("token_file"), variable=TOKEN_VARIABLE, option="coordinator.token_file", environ=environ
        ),
    )
    address.tls()  # a wrong file is reported here, not only at the first connection
    if address.token is not None and url.startswith("http:") and not is_loopback(urlsplit(url).hostname or ""):
        raise OptionError(option, url, "https://HOST:PORT, as a token is sent, which others could read otherwise")
    return address


def _require_url(option: str, url: str) -> str:
    rest = url.partition("://")[2]
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or set(rest) & set("?#@"):
        shown = url if "@" not in rest else "..."  # there may be a password in it
        raise OptionError(option, shown, f"{_URL}, without a password; the token goes into token_file")
    return url.rstrip("/")


def _own_name() -> str:
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:100] or "worker"
    return f"{host}-{secrets.token_hex(3)}"


_T = TypeVar("_T")
_F = TypeVar("_F", Welcome, Batch)
_THREAD = "bytescheduler-coordinator-client"
_of_its_own = random.SystemRandom()  # Python's global generator may be seeded alike on all workers
_SHORTEST_S, _LONGEST_S = 0.05, 5.0  # between two tries
_HURRY_S, _HURRIED_S = 10.0, 0.5  # after a connection was lost, and the longest pause then
_CONNECT_S = 10.0  # for a connection, and for the answer to a Hello
_FIRST_QUIET_S, _QUIET_S = 5.0, 30.0  # before a warning: without a first connection, and without one later
_READ_S = 60.0  # longest wait for the next byte of an answer
_SIGNS = 4  # signs of life in the time of a lease
_FRAME_BYTES = 2**24
_PIECE_BYTES = 2**20
_REFUSED = (401, 403)
_BUSY = (429, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to an HTTP request.

    Attributes:
        status: The HTTP status.
        headers: Headers by name, in upper or lower case.
        body: The whole body.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def words(self) -> str:
        """The error's text, or its status if it has none."""
        return self.body[:500].decode("utf-8", "replace").strip() or f"status {self.status}"


class CoordinatorClient:
    """The connection to the coordinator.

    Args:
        address: Where the coordinator is.
        hello: Makes the ``Hello`` of each connection; called with the worker's name and the session that the
            coordinator gave last.
        timeout: Longest wait for the first connection, in seconds.

    Attributes:
        worker: This worker's name, as the coordinator gave it; before that, the name that the worker asks for.
        first: The first welcome, or the error that ended the client before one.
        error: The error that ended the client.
    """

    def __init__(self, address: CoordinatorAddress, *, hello: Callable[[str, str], Hello], timeout: float) -> None:
        with importing("DiLoCoStrategy(coordinator=...)", extra="coordinator"):
            import aiohttp

            self._aiohttp = aiohttp
        self.worker = address.worker
        self._address = address
        self._hello = hello
        self._timeout = timeout
        self.first: Future[Welcome] = Future()
        self.error: BaseException | None = None
        self._telling = threading.Lock()
        self._listener: object = None
        self._untold: list[tuple[str, tuple[Any, ...]]] = []
        self._loop = _Loop()
        # The attributes below are for the thread alone.
        self._session = ""
        self._connected = asyncio.Event()
        self._stopping = asyncio.Event()
        self._talk: _Conversation | None = None  # while it is connected
        self._warned = False  # that there is no coordinator
        self._ended = threading.Event()  # the loop accepts no more work
        self._entering = threading.Lock()
        self._http: aiohttp.ClientSession  # while the thread runs
        self._thread = threading.Thread(target=self._run, name=_THREAD, daemon=True)
        self._thread.start()
        atexit.register(self.stop, 0.5)

    # ------------------------------------------------------------------ for other threads

    def listen(self, listener: object) -> None:
        """Tell a ``Session`` of each event, beginning with those that have come so far. Called once."""
        with self._telling:
            self._listener = listener
            for event, values in self._untold:
                getattr(listener, event)(*values)

    def post(self, *messages: FromWorker) -> None:
        """Queue messages to be sent, if there is a connection; never blocks. Messages are lost with the connection."""
        self._call(self._put, messages)

    def start(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run a coroutine on the thread; its future fails with the client's error, or is cancelled by :meth:`stop`."""
        with self._entering:
            if not self._ended.is_set():
                return asyncio.run_coroutine_threadsafe(self._carry_out(work), self._loop)
        work.close()
        future: Future[_T] = Future()
        if self.error is None:
            future.cancel()
        else:
            future.set_exception(self.error)
        return future

    async def request(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, body: bytes | None = None
    ) -> Answer:
        """Send a request while there is a connection, again and again until there is an answer. On the thread.

        The request is also repeated when the coordinator is busy, and when the connection breaks.

        Args:
            method: The HTTP method.
            path: The path at the coordinator.
            headers: Headers besides the session and the token.
            body: The request's body.

        Raises:
            CoordinatorError: If the token is not accepted.
        """
        tries = 0
        while True:
            await self._connected.wait()
            pause = _pause(tries)
            tries += 1
            try:
                own = {SESSION_HEADER: self._session, **(headers or {})}
                pieces = None
                if body is not None:
                    own["Content-Length"], pieces = str(len(body)), _Pieces(body)
                async with self._http.request(method, self._address.url + path, headers=own, data=pieces) as found:
                    answer = Answer(found.status, found.headers.copy(), await found.read())
            except (self._aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
                log.debug("coordinator: %s %s failed: %s", method, path, error)
            else:
                if answer.status == 401:
                    raise CoordinatorError(f"The coordinator does not accept the token: {answer.words}")
                if answer.status not in _BUSY:
                    return answer
                pause = max(pause, _retry_after(answer))
            await asyncio.sleep(pause)

    def flush(self, timeout: float) -> bool:
        """Wait until the coordinator has heard all messages; returns whether it has in time. For other threads."""
        try:
            return self.start(self._until_heard()).result(timeout)
        except BaseException:
            return False

    def stop(self, timeout: float) -> bool:
        """End the connection and the thread; idempotent.

        Returns:
            Whether the thread ended within ``timeout`` seconds.
        """
        atexit.unregister(self.stop)
        self.first.cancel()
        self._call(self._stopping.set)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    # ------------------------------------------------------------------ the thread

    def _tell(self, event: str, *values: Any) -> None:
        with self._telling:
            if self._listener is None:
                self._untold.append((event, values))
            else:
                getattr(self._listener, event)(*values)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._live())
        except BaseException as error:
            self.error = error
        finally:
            try:
                if self.error is not None:
                    with suppress(InvalidStateError):
                        self.first.set_exception(self.error)
                    self._tell("fail", self.error)
            finally:
                with self._entering:
                    self._ended.set()
                self._loop.run_until_complete(end_others())
                self._loop.abort_connections()
                self._loop.run_until_complete(self._loop.shutdown_asyncgens())
                self._loop.close()

    async def _carry_out(self, work: Coroutine[Any, Any, _T]) -> _T:
        try:
            return await work
        except asyncio.CancelledError:
            if self.error is not None:
                raise self.error from None
            raise

    async def _live(self) -> None:
        timeout = self._aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_READ_S)
        token = self._address.token
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        ended = asyncio.ensure_future(self._stopping.wait())
        async with self._aiohttp.ClientSession(
            timeout=timeout, headers=headers, connector=self._aiohttp.TCPConnector(ssl=self._address.tls() or True)
        ) as self._http:
            life = asyncio.ensure_future(self._stay_connected())
            try:
                await asyncio.wait([ended, life], return_when=asyncio.FIRST_COMPLETED)
                if life.done():
                    self.error = life.exception()
                    self._stopping.set()
            finally:
                await end_others()

    async def _stay_connected(self) -> None:
        began = time.monotonic()
        log.info("coordinator: connecting to %s as %s", self._address.url, self.worker)
        failed, last, lost = 0, "", float("-inf")
        while True:
            before = time.monotonic()
            has_left = False
            try:
                has_left = await self._connection()
            except (self._aiohttp.ClientError, OSError, asyncio.TimeoutError, OptionError) as error:
                self._require_hope(error)
                last = f"{error}" or type(error).__name__
                if not self._connected.is_set():
                    self._warn_of_silence(time.monotonic() - max(began, lost), last)
                log.log(logging.DEBUG if failed else logging.INFO, "coordinator: %s: %s", self._address.url, last)
            finally:
                was_connected = self._connected.is_set()
                self._connected.clear()
                self._talk = None
                if was_connected:
                    lost = time.monotonic()
                    self._tell("lost")
            if has_left:  # it would come back as a new worker
                await self._stopping.wait()
                return
            failed = 0 if was_connected and time.monotonic() - before > _LONGEST_S else failed + 1
            if not self.first.done() and time.monotonic() - began >= self._timeout:
                raise SchedulerTimeoutError(
                    f"No coordinator answered at {self._address.url} for {self._timeout:.0f} s ({last}). "
                    f"Start it with 'lightning-bytescheduler coordinator', or raise the strategy's timeout."
                )
            pause = _pause(failed - 1)
            if time.monotonic() - lost < _HURRY_S:  # a round waits for this worker, but not for long
                pause = min(pause, _HURRIED_S)
            await asyncio.sleep(pause)

    def _warn_of_silence(self, seconds: float, last: str) -> None:
        """Warn once that there is no coordinator, and say what follows from that."""
        was_there = self.first.done()
        if self._warned or seconds < (_QUIET_S if was_there else _FIRST_QUIET_S):
            return
        self._warned = True
        follows = (
            f"This worker tries for {self._timeout:.0f} s in all. Start one with 'lightning-bytescheduler "
            "coordinator', or check the address: it has a port and no path, and with TLS it begins with https://."
        )
        if was_there:
            follows = (
                "Training goes on. Updates are sent when it is back. A worker that ends before that waits for a minute "
                "at most; updates not sent by then are lost."
            )
        log.warning("No coordinator has answered at %s for %.0f s (%s). %s", self._address.url, seconds, last, follows)

    async def _connection(self) -> bool:
        """Talk over one connection until it ends; returns whether the coordinator has heard that the worker leaves."""
        async with self._http.ws_connect(
            self._address.url + WORKER_PATH, max_msg_size=_FRAME_BYTES, heartbeat=None
        ) as socket:
            talk = _Conversation(socket, receive=lambda message: self._tell("receive", message))
            await asyncio.wait_for(socket.send_str(encode_frame(self._hello(self.worker, self._session))), _CONNECT_S)
            answer = await asyncio.wait_for(talk.next_frame(Welcome), _CONNECT_S)
            self._session, self.worker = answer.session, answer.worker
            self._talk = talk
            self._connected.set()
            if self._warned:
                self._warned = False
                log.warning("The coordinator at %s is there: %s is connected.", self._address.url, self.worker)
            with suppress(InvalidStateError):
                self.first.set_result(answer)
            self._tell("welcomed", answer)
            try:
                await talk.go_on(max(answer.lease, 0.1))
            except ConnectionError:
                if not talk.has_left:
                    raise
            return talk.has_left

    async def _until_heard(self) -> bool:
        while (talk := self._talk) is not None and not talk.is_heard:
            await asyncio.sleep(0.005)
        return talk is not None

    def _put(self, messages: Sequence[FromWorker]) -> None:
        if self._talk is not None:
            self._talk.put(messages)

    def _require_hope(self, error: BaseException) -> None:
        """Raise an error that ends the client, if trying again cannot help."""
        where = f"The coordinator at {self._address.url}"
        status = getattr(error, "status", None)
        if status in _REFUSED:
            raise CoordinatorError(
                f"{where} does not accept this worker's token, or the lack of one (status {status}). Put the token "
                "into BYTESCHEDULER_COORDINATOR_TOKEN, or into a file: coordinator={'url': ..., 'token_file': FILE}."
            ) from None
        if status is not None and status < 500 and status not in _BUSY and not self.first.done():
            raise CoordinatorError(
                f"What answers at {self._address.url} is no coordinator of this version: it says status {status} at "
                f"{WORKER_PATH}, as another web server does. Give the address that the coordinator prints."
            ) from None
        for cause in _causes(error):
            if isinstance(cause, ssl.SSLCertVerificationError):
                why = getattr(cause, "verify_message", None) or cause  # aiohttp's error of that kind has none
                raise CoordinatorError(
                    f"{where} has a certificate that is not trusted here: {why}. Give the file of the "
                    "authority that has signed it, as in coordinator={'url': ..., 'authority': FILE}."
                ) from None
            reason = getattr(cause, "reason", None) or ""  # aiohttp's error of that kind has none
            if isinstance(cause, ssl.SSLError) and ("ALERT" in reason or not self.first.done()):
                raise CoordinatorError(
                    f"There is no TLS connection to {self._address.url}: {reason or cause}. Check that the coordinator "
                    "serves with TLS; else its address begins with http://."
                ) from None


class _Loop(asyncio.SelectorEventLoop):
    """Records its connections, to end those that aiohttp closes without waiting, such as that of a cut upload."""

    def __init__(self) -> None:
        super().__init__()
        self._sockets = WeakKeyDictionary[asyncio.Transport, Any]()

    async def create_connection(self, *given: Any, **options: Any) -> Any:
        transport, protocol = await super().create_connection(*given, **options)
        self._sockets[transport] = transport.get_extra_info("socket")
        return transport, protocol

    def abort_connections(self) -> None:
        """Close all connections without sending what is buffered; the loop has to run once more."""
        for transport, opened in list(self._sockets.items()):
            if opened.fileno() >= 0:
                transport.abort()


class _Conversation:
    """Exchanges frames over one connection. One own frame is in flight; the next has all messages put since.

    Args:
        socket: Aiohttp's WebSocket.
        receive: Called with each message of the coordinator.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse[bool], *, receive: Callable[[Message], None]) -> None:
        self._socket = socket
        self._receive = receive
        self._outbox: list[FromWorker] = []
        self._changed = asyncio.Event()  # something to send, or something heard
        self._sent = self._answered = 0
        self._leaves = False

    @property
    def is_heard(self) -> bool:
        """Whether the coordinator has heard everything."""
        return not self._outbox and self._answered >= self._sent

    @property
    def has_left(self) -> bool:
        """Whether the coordinator has heard that the worker leaves."""
        return self._leaves and self.is_heard

    def put(self, messages: Sequence[FromWorker]) -> None:
        """Send messages with the next frame."""
        self._leaves = self._leaves or any(isinstance(message, LeaveRounds) for message in messages)
        self._outbox = coalesced([*self._outbox, *messages])
        self._changed.set()

    async def go_on(self, lease: float) -> None:
        """Send and receive until the connection ends, or no answer comes for ``lease`` seconds; raises the reason."""
        sides = [asyncio.ensure_future(self._speak(lease)), asyncio.ensure_future(self._listen())]
        try:
            done, _ = await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
            for side in done:
                side.result()
        finally:
            await end_tasks(sides)

    async def _speak(self, lease: float) -> None:
        while True:
            if not self._outbox:
                self._changed.clear()
                with suppress(asyncio.TimeoutError):  # a frame without messages says that this worker lives
                    await asyncio.wait_for(self._changed.wait(), lease / _SIGNS)
            messages, self._outbox = tuple(self._outbox), []
            self._sent += 1
            frame = encode_frame(Batch(number=self._sent, messages=messages))
            try:
                await asyncio.wait_for(self._exchange(frame), lease)
            except asyncio.TimeoutError:
                raise ConnectionError(f"the coordinator said nothing for {lease:.0f} s") from None

    async def _exchange(self, frame: str) -> None:
        await self._socket.send_str(frame)  # this may wait, too, if the link is cut
        while self._answered < self._sent:
            self._changed.clear()
            await self._changed.wait()

    async def _listen(self) -> None:
        while True:
            frame = await self.next_frame(Batch)
            self._answered = max(self._answered, frame.heard)
            self._changed.set()
            for message in frame.messages:
                self._receive(message)

    async def next_frame(self, kind: type[_F]) -> _F:
        """Return the next frame, which has to be of this kind.

        Raises:
            CoordinatorError: If the frame is a refusal.
            ConnectionError: If the connection has ended.
            OptionError: If the frame is of another kind.
        """
        message = await self._socket.receive()
        if message.type.name != "TEXT":
            if message.type.name == "ERROR":
                raise ConnectionError(f"the connection broke: {self._socket.exception()}")
            reason = message.extra if isinstance(message.extra, str) else ""
            raise ConnectionError(f"the coordinator closed the connection ({reason or 'without a reason'})")
        frame = decode_frame(message.data, sender="the coordinator")
        if isinstance(frame, Refusal):
            raise CoordinatorError(f"The coordinator refuses this worker: {frame.reason}")
        if not isinstance(frame, kind):
            raise OptionError("message of the coordinator", type(frame).__name__, f"a {kind.__name__}")
        return frame


def _pause(tries: int) -> float:
    """Return the seconds before another try: longer each time up to a limit, and random."""
    longest = min(_SHORTEST_S * 2.0 ** min(max(tries, 0), 10), _LONGEST_S)
    return longest * _of_its_own.uniform(0.5, 1.0)


class _Pieces:
    """A body in pieces, between which the event loop does other work; aiohttp would buffer a whole body, and warn.

    Each iteration begins anew, as aiohttp sends a request again by itself where its connection has ended.
    """

    def __init__(self, body: bytes) -> None:
        self._body = memoryview(body)

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        for start in range(0, len(self._body), _PIECE_BYTES):
            yield self._body[start : start + _PIECE_BYTES]


def _retry_after(answer: Answer) -> float:
    try:
        return max(min(float(answer.headers.get("Retry-After", "0")), _LONGEST_S), 0.0)
    except ValueError:
        return 0.0


def _causes(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = getattr(error, "os_error", None) or error.__cause__ or error.__context__
    return found


_ASK_AGAIN_S = 0.2
_NOT_NOW = 409
_NO_WEIGHTS = 404
_WRONG_WEIGHTS = (413, 422)
_CODEC = "bytescheduler-coordinator-codec"


class CoordinatorTransport:
    """The exchange through the coordinator: each upload, mean and state is a future. For the training thread.

    Args:
        client: The connection.
        wire: The format of updates and means.
        sizes: Elements of each fragment.

    Attributes:
        client: As given.
        wire: As given.
        residuals: What was left out of updates that count, by fragment; replaced, never changed.
    """

    def __init__(self, client: CoordinatorClient, *, wire: WireFormat, sizes: list[int]) -> None:
        with importing("DiLoCoStrategy(coordinator=...)", extra="coordinator"):
            from xxhash import xxh3_128_hexdigest

            self._digest: Callable[[Any], str] = xxh3_128_hexdigest
        self.client = client
        self.wire = wire
        self._sizes = sizes
        self.residuals: dict[int, Tensor | None] = {}
        self._codec = ThreadPoolExecutor(1, thread_name_prefix=_CODEC)
        self._coding: Future[Any] | None = None  # the last job that the codec was given

    @property
    def source(self) -> CoordinatorTransport:
        """See ``Exchange``."""
        return self

    def start(self, contribution: Contribution) -> Upload:
        """Begin to encode and upload an update, until there is an answer."""
        upload = Upload(fragment=contribution.fragment)
        upload.receipt = self.client.start(self._upload(contribution, upload))
        return upload

    def settle(self, upload: Upload, *, total: int) -> None:
        """See ``Exchange``. If the update counts, keep what was left out of it to send later."""
        if total and not self.wire.keeps_residuals:
            return
        receipt = upload.answer
        if receipt is None:
            upload.receipt.cancel()
        elif receipt.weight and total:
            # The coordinator may have had another version of this update before, whose residual is unknown here.
            self.residuals[upload.fragment] = None if receipt.verdict == "again" else upload.residual

    def fetch_mean(self, round: int, chain: str) -> Future[Mean | None]:
        """Fetch the mean of a round that has ended; ``None`` unless it follows weights of that chain."""
        return self.client.start(self._fetch_mean(round, chain))

    def flush(self, timeout: float) -> bool:
        """Wait until all messages are heard; returns whether they were, in time."""
        return self.client.flush(timeout)

    def fetch_state(self, own: Callable[[], bytes]) -> Future[tuple[bytes, int, str]]:
        """Fetch the current global state, as ``outer_optimizer`` reads it, with its version and its chain.

        Args:
            own: Makes this worker's state, to be sent as the first one if there is none. The result fails with a
                ``CoordinatorError`` if that is refused for its content.
        """
        return self.client.start(self._state(own))

    def stop(self, timeout: float) -> bool:
        """End the connection and the threads; returns whether they ended within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        ended, coding = self.client.stop(timeout), self._coding
        self._codec.shutdown(wait=False, cancel_futures=True)
        # A running encoding cannot be interrupted, and takes seconds for a large model: it is left to end by itself.
        if coding is None or not wait([coding], max(deadline - time.monotonic(), 0.0)).not_done:
            self._codec.shutdown(wait=True)  # the thread is idle
            return ended
        return False

    # ------------------------------------------------------------------ coroutines

    async def _fetch_mean(self, round: int, chain: str) -> Mean | None:
        fragment = (round - 1) % len(self._sizes)
        answer = await self.client.request("GET", update_path(round, fragment))
        if answer.status != 200:
            log.info("coordinator: no mean of round %d: %s", round, answer.words)
            return None
        total = int(answer.headers.get(TOTAL_HEADER, "0"))
        digest = answer.headers.get(DIGEST_HEADER, "") if total else ""
        then = answer.headers.get(CHAIN_HEADER, "")
        values = torch.empty(0, dtype=torch.float32)
        if total:
            values = await self._coded(self._decode, answer.body, fragment, digest)
        if chain_after(chain, round=round, fragment=fragment, digest=digest, total=total) != then:
            return None
        return Mean(values=values, total=total, chain=then)

    def _decode(self, body: bytes, fragment: int, digest: str) -> Tensor:
        if self._digest(body) != digest:
            raise CoordinatorError(f"The mean of fragment {fragment} was damaged on its way.")
        payload = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        return self.wire.of_means.decode(payload, self._sizes[fragment])

    async def _upload(self, contribution: Contribution, upload: Upload) -> UpdateReceipt | None:
        body, digest = await self._coded(self._encode, contribution, upload)
        path = update_path(contribution.round, contribution.fragment)
        headers = {
            DIGEST_HEADER: digest,
            SAMPLES_HEADER: str(contribution.samples),
            STEPS_HEADER: str(contribution.steps),
            ROUND_SAMPLES_HEADER: str(contribution.round_samples),
        }
        if contribution.trained:
            trained = msgspec.json.encode(contribution.trained)
            headers[TRAINED_HEADER] = str(len(trained))
            body = trained + body
        for tries in count(2):
            answer = await self.client.request("PUT", path, headers=headers, body=body)
            # A restarted coordinator may not have begun this round yet, or not know this worker's part in it.
            if answer.status != _NOT_NOW:
                break
            await asyncio.sleep(_pause(tries))
        if answer.status != 200:
            log.warning(
                "coordinator: the pseudo-gradient of round %d was not taken: %s", contribution.round, answer.words
            )
            return None
        receipt = msgspec.json.decode(answer.body, type=UpdateReceipt)
        if receipt.verdict != "added":
            log.info("coordinator: the pseudo-gradient of round %d: %s", contribution.round, receipt.verdict)
        return receipt

    def _encode(self, contribution: Contribution, upload: Upload) -> tuple[bytes, str]:
        place = f"{contribution.worker} {contribution.round} {contribution.fragment}"
        seed = int.from_bytes(hashlib.blake2b(place.encode(), digest_size=7).digest(), "big")
        residual = None
        if self.wire.keeps_residuals and contribution.samples:
            known = self.residuals.get(contribution.fragment)
            residual = torch.zeros_like(contribution.pseudo_gradient) if known is None else known.clone()
        body = self.wire.encode(contribution.pseudo_gradient, seed=seed, residual=residual).numpy().tobytes()
        upload.residual = residual
        return body, self._digest(body)

    async def _state(self, own: Callable[[], bytes]) -> tuple[bytes, int, str]:
        while True:
            answer = await self.client.request("GET", STATE_PATH)
            if answer.status == 200:
                version = int(answer.headers.get(VERSION_HEADER, "0"))
                return answer.body, version, answer.headers.get(CHAIN_HEADER, "0" * 32)
            if answer.status == _NO_WEIGHTS:
                payload = await self._coded(own)
                headers = {DIGEST_HEADER: await self._coded(self._digest, payload)}
                answer = await self.client.request("PUT", STATE_PATH, headers=headers, body=payload)
                if answer.status in _WRONG_WEIGHTS:
                    raise CoordinatorError(f"The coordinator refuses this worker's weights: {answer.words}")
            if answer.status >= 300:
                log.debug("coordinator: no state yet: %s", answer.words)
                await asyncio.sleep(_ASK_AGAIN_S)

    async def _coded(self, function: Callable[..., _T], *arguments: object) -> _T:
        coding = self._coding = self._codec.submit(function, *arguments)
        return await asyncio.wrap_future(coding)
