"""Rules for servers of this package: address, TLS, tokens, and how requests are refused.

``slices serve`` and the coordinator share them. A server that others can reach must have TLS and a token, or it is not
started: otherwise the data, the weights and the run would be open to all. A token comes from a file or from the
environment, because every user of a machine can read the arguments of its processes. Tokens are compared in constant
time, and are in no ``repr``, log or error. A refused client gets a status or a broken handshake, is counted by reason,
and changes nothing.

``BackgroundServer`` serves by these rules in a thread of its own. aiohttp is imported only where a server needs it, so
commands can declare their options without it.

A thread with an event loop of its own ends with ``end_others``, whether it serves or connects to a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import ipaddress
import logging
import os
import ssl
import stat
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_bytescheduler.exceptions import OptionError, SchedulerTimeoutError

if TYPE_CHECKING:
    from aiohttp import web
    from aiohttp.typedefs import Handler, Middleware


log = logging.getLogger(__name__)

_START_SECONDS = 60.0
_STOP_SECONDS = 90.0  # the coordinator saves its last state
_SHUTDOWN_SECONDS = 2.0  # for running requests
_LINGER_SECONDS = 1.0  # a refused body, or data after a closed WebSocket, keeps its handler in memory this long
_IDLE_SECONDS = 75.0  # of a connection, between two requests
_CANCEL_AGAIN_SECONDS = 1.0  # a WebSocket says goodbye within this time
_Server = TypeVar("_Server", bound="BackgroundServer")

# ── Who is refused ───────────────────────────────────────────────────────────


class Refusals:
    """Counts refused clients, by reason. For any thread.

    Reasons are words of this package, never from a client, so that there are few.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}

    def count(self, reason: str, *, who: str = "") -> None:
        """Count a refusal. Log the first for its reason, the tenth, the hundredth, and every thousandth.

        Args:
            reason: The reason, in a word.
            who: The client's address or the worker's name, for the log.
        """
        with self._lock:
            self._counts[reason] = count = self._counts.get(reason, 0) + 1
        if count in (1, 10, 100) or count % 1000 == 0:
            log.warning("Refused%s: %s (%d so far for this reason).", f" {who[:100]}" if who else "", reason, count)

    def counts(self) -> dict[str, int]:
        """Number of refusals, by reason."""
        with self._lock:
            return dict(self._counts)


# ── Where it listens, and whom it lets in ───────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class ServerAccess:
    """Where a server listens, and which clients it accepts.

    Attributes:
        host: Address to listen at.
        token: The token that clients must send as ``Authorization: Bearer <token>``; ``None`` if they need none.
        certificate: File of the TLS certificate chain; ``None`` serves without TLS.
        key: File of its private key.

    Raises:
        OptionError: If a file of TLS cannot be used, or the address is not of this machine alone and TLS or the token
            is missing. Names the option, never the token.
    """

    host: str = "127.0.0.1"
    token: str | None = field(default=None, repr=False)
    certificate: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            missing = "key" if self.key is None else "certificate"
            raise OptionError(missing, None, "given: TLS needs a certificate and its key")
        if self.token is not None:
            require_token("token", self.token)
        if not is_loopback(self.host) and (self.certificate is None or self.token is None):
            allowed = (
                "an address of this machine alone, such as 127.0.0.1, unless a certificate, its key and a token are "
                "given to the command as well: otherwise anyone could read the data, and change it on its way"
            )
            raise OptionError("host", self.host, allowed)
        self.tls()  # a wrong file is an error here, not when the server starts

    def url(self, port: int) -> str:
        """The address for clients on this machine, with ``/`` at the end."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.certificate is None else 'https'}://{host}:{port}/"

    def tls(self) -> ssl.SSLContext | None:
        """The TLS context with the certificate; ``None`` without one. TLS 1.2 at least.

        Raises:
            OptionError: If a file cannot be read, or the certificate and the key do not belong together.
        """
        if self.certificate is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2

        def refuse() -> str:  # else OpenSSL asks for a password at the terminal, and waits
            raise OptionError("key", self.key, "without a password; openssl pkey -in KEY -out PLAIN takes it away")

        key = self.key or ""
        chain = f"a certificate chain in PEM format, whose private key is {key!r}"
        with _reading("certificate", self.certificate, chain):
            with _reading("key", key, "a private key in PEM format"):
                warn_if_others_read(key, "private key")
            context.load_cert_chain(self.certificate, key, password=refuse)
        return context


def client_tls(authority: str | None = None) -> ssl.SSLContext:
    """A client's TLS context, which checks the server and its name. At least TLS 1.2.

    Args:
        authority: File of the certificates that sign the server's; None takes those that the machine trusts, or the
            file that the environment variable ``SSL_CERT_FILE`` names.

    Raises:
        OptionError: If the file cannot be used.
    """
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if authority is not None:
        with _reading("authority", authority, "a file of certificates in PEM format"):
            context.load_verify_locations(cafile=authority)
    return context


@contextlib.contextmanager
def _reading(option: str, path: str, allowed: str) -> Iterator[None]:
    """Make errors name the file."""
    try:
        with open(path, "rb"):
            yield
    except ssl.SSLError as error:
        raise OptionError(option, path, f"{allowed}: {error.reason or error}") from error
    except OSError as error:
        raise OptionError(option, path, f"a file in PEM format that can be read: {error.strerror}") from error


def is_loopback(host: str) -> bool:
    """Whether an address, or a name, is of this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def parse_bind(option: str, text: str) -> tuple[str, int]:
    """Host and port of a text such as ``127.0.0.1:8000`` or ``[::1]:8000``; port 0 is any free one.

    Raises:
        OptionError: If the text has no host or no valid port; names ``option``.
    """
    host, _, port = text.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and len(port) < 6 and int(port) < 65536
    if not host or not is_port:
        raise OptionError(option, text, "an address such as 127.0.0.1:8000")
    return host.removeprefix("[").removesuffix("]"), int(port)


# ── Tokens ───────────────────────────────────────────────────────────


def require_token(option: str, value: str) -> str:
    """Return ``value`` if it can be a token.

    Raises:
        OptionError: If it is empty, or cannot be sent in a header. Names ``option``, and does not show the value.
    """
    if not value.strip() or value != value.strip() or not value.isprintable():
        allowed = "a text that is not empty, of one line, without spaces at its ends"
        says = f"The token of {option} must be {allowed}; it is not shown here."
        raise OptionError(option, "...", allowed, says=says)
    return value


def read_token(
    path: str | None, *, variable: str, option: str = "--token-file", environ: Mapping[str, str] = os.environ
) -> str | None:
    """The token from a file, or else from an environment variable; ``None`` without either.

    Args:
        path: The file; white space around the token is ignored. Logs a warning if every user of the machine may read
            it.
        variable: Name of the environment variable.
        option: The option that named the file, for errors.
        environ: The environment.

    Raises:
        OptionError: If the file cannot be read, or there is no token in what is given.
    """
    if path is None:
        given = environ.get(variable)
        return None if given is None else require_token(variable, given.strip())
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        # Not the UnicodeError itself, which shows what is in the file.
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise OptionError(option, path, f"a text file that can be read: {reason}") from None
    if not token:
        raise OptionError(option, path, "a file with a token, and is empty")
    warn_if_others_read(path, "token")
    return require_token(option, token)


def warn_if_others_read(path: str, what: str) -> None:
    """Log a warning if every user of this machine may read a file with a secret in it.

    Args:
        path: The file.
        what: The secret in it, for the message.
    """
    if os.stat(path).st_mode & stat.S_IROTH:
        log.warning(
            "The %s in %s can be read by every user of this machine. 'chmod 600 %s' keeps it yours.", what, path, path
        )


def guard(access: ServerAccess, refusals: Refusals, *, public: Collection[str] = ()) -> Middleware:
    """An aiohttp middleware that accepts requests with the token.

    A server without one answers only under the names of this machine. Otherwise a page of a foreign site in a browser
    here could ask it for anything, once the site's name points to 127.0.0.1.

    Args:
        access: The server's access rules.
        refusals: Counts the other requests.
        public: Paths that need no token.
    """
    from aiohttp import web

    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        # In a time that reveals nothing of the token.
        permitted = access.token is None or hmac.compare_digest(given, f"Bearer {access.token}".encode())
        if request.path not in public and not permitted:
            refusals.count("token", who=str(request.remote or ""))
            said = "A token is needed: send it as 'Authorization: Bearer TOKEN'.\n"
            raise web.HTTPUnauthorized(text=said, headers={"WWW-Authenticate": "Bearer"})
        if access.token is None and not _is_for_this_machine(request):
            refusals.count("host", who=str(request.remote or ""))
            said = "Without a token it answers only as localhost or 127.0.0.1, and to no other site's pages.\n"
            raise web.HTTPForbidden(text=said)
        return await handler(request)

    return checked


def _is_for_this_machine(request: web.Request) -> bool:
    host, origin = request.host, request.headers.get("Origin")  # browsers say which site's page asks
    name = host.partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return is_loopback(name) and (origin is None or origin.partition("://")[2] == host)


# ── Serving ───────────────────────────────────────────────────────────


class BackgroundServer:
    """Serves an aiohttp application until it is closed, in a thread and on an event loop of its own.

    A subclass sets what :meth:`application` needs before it calls this constructor.

    Args:
        access: Where it listens, and which clients it accepts.
        port: 0 takes a free one.
        name: Name of the thread.
        make_loop: Makes the event loop.

    Attributes:
        error: The error with which it has failed.
        refusals: Counts of refused clients.

    Raises:
        OSError: If it cannot listen at the address.
    """

    def __init__(
        self,
        access: ServerAccess,
        port: int,
        *,
        name: str,
        make_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    ) -> None:
        self.error: BaseException | None = None
        self.refusals = Refusals()
        self._access = access
        self._port = port
        self._loop = make_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        if not self._started.wait(_START_SECONDS):
            self.error = SchedulerTimeoutError(f"{self.url} was not served within {_START_SECONDS:.0f} s.")
        if (error := self.error) is not None:  # kept, as close() may make another one
            self.close()
            raise error

    @property
    def url(self) -> str:
        """The address for clients on this machine."""
        return self._access.url(self._port)

    async def application(self) -> web.Application:
        """Make the application to serve. Called on the event loop."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Called on the event loop before connections are closed."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has failed or is closed; return whether it still runs."""
        self._thread.join(timeout)
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop serving; running requests are cut off. May be repeated."""
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_SECONDS)

    def __enter__(self: _Server) -> _Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            runner = self._loop.run_until_complete(self._listen())
            self._started.set()
            self._loop.run_forever()
            for end in (self.stop, runner.cleanup, end_others, self._loop.shutdown_asyncgens):
                self._loop.run_until_complete(end())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        except BaseException as error:  # raised where the server was made, or is waited for
            self.error = error
        finally:
            self._started.set()
            self._loop.close()

    async def _listen(self) -> web.AppRunner:
        from aiohttp import web

        runner = web.AppRunner(
            await self.application(),
            access_log=None,
            logger=_http_log(),
            shutdown_timeout=_SHUTDOWN_SECONDS,
            keepalive_timeout=_IDLE_SECONDS,
            lingering_time=_LINGER_SECONDS,
        )
        await runner.setup()
        host, port = self._access.host, self._port
        try:
            await web.TCPSite(runner, host, port, ssl_context=self._access.tls()).start()
        except BaseException as error:
            await self.stop()
            await runner.cleanup()
            if not isinstance(error, OSError):
                raise
            reason = error.strerror or str(error)
            if error.errno == errno.EADDRINUSE:
                reason = "it is in use by another program; choose another port, or 0 for any free one"
            raise OSError(error.errno, f"{host}:{port} cannot be listened at: {reason}") from error
        self._port = runner.addresses[0][1]
        return runner


def _http_log() -> logging.Logger:
    """The logger for aiohttp. It drops messages about requests that are not HTTP, which could fill the log."""
    from aiohttp.http_exceptions import HttpProcessingError

    logger = logging.Logger(f"{__name__}.http")
    logger.parent = log
    logger.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))
    return logger


# ── The end of an event loop ───────────────────────────────────────────────────────────


async def end_tasks(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel tasks until all have ended. Their errors are dropped."""
    await asyncio.sleep(0)  # lets tasks begin: one that is cancelled before that does not close what it holds
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=_CANCEL_AGAIN_SECONDS)  # wait_for can lose a cancel, up to Python 3.11
    await asyncio.gather(*tasks, return_exceptions=True)


async def end_others() -> None:
    """End all tasks of the event loop but this one, also those that begin in the meantime, as of a new connection."""
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        await end_tasks(tasks)
