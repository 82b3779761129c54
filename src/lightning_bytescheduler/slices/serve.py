"""A data node: serves a folder over HTTP, read-only, with ranges, so that fsspec reads slices from it.

aiohttp does the serving, ranges included. A path counts as what it is after all links and dots are resolved, and what
is then not in the folder does not exist.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import ipaddress
import ssl
import threading
from html import escape
from pathlib import Path
from urllib.parse import quote

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.typedefs import Handler

from lightning_bytescheduler.exceptions import OptionError, SchedulerTimeoutError

__all__ = ["SliceServer"]

_START_SECONDS = 10.0


class SliceServer:
    """Serves the files of a folder until it is closed.

    Args:
        folder: What is served, subfolders included.
        host: Address to listen at.
        port: 0 takes a free one.
        token: What readers must send as ``Authorization: Bearer <token>``; None for none.
        certificate: File of the TLS certificate chain; None serves without TLS.
        key: File of its private key.

    Raises:
        OptionError: If the folder is none, a file of TLS cannot be used, or the address is not of this machine alone
            and TLS or the token is missing.
        OSError: If the address cannot be listened at.
    """

    def __init__(
        self,
        folder: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        certificate: str | None = None,
        key: str | None = None,
    ) -> None:
        self._folder = Path(folder).resolve()
        if not self._folder.is_dir():
            raise OptionError("folder", folder, f"a folder that exists, and there is no folder {self._folder}")
        if (certificate is None) != (key is None):
            raise OptionError(
                "key" if key is None else "certificate", None, "given: TLS needs a certificate and its key"
            )
        if token is not None and not token.strip():
            raise OptionError("token", token, "a text that is not empty")
        if not _is_loopback(host) and (certificate is None or token is None):
            allowed = (
                "an address of this machine alone, such as 127.0.0.1, unless a certificate, its key and a token are "
                "given (--cert, --key and --token-file of the command): otherwise anyone could read the data, and "
                "change it on its way"
            )
            raise OptionError("host", host, allowed)
        self._token = token
        self._host = host
        self._port = port
        self._tls = None
        if certificate is not None:
            self._tls = _tls_of(certificate, key)
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._runner: web.AppRunner | None = None
        self._thread = threading.Thread(target=self._run, name="bytescheduler-slice-server", daemon=True)
        self._thread.start()
        if not self._started.wait(_START_SECONDS):
            raise SchedulerTimeoutError(f"Serving {folder} at {host} did not begin within {_START_SECONDS:.0f} s.")
        if self._error is not None:
            self._thread.join(_START_SECONDS)
            raise self._not_listening(self._error) from self._error

    @property
    def url(self) -> str:
        """Where the folder is now."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'http' if self._tls is None else 'https'}://{host}:{self._port}/"

    def wait(self) -> None:
        """Serve until someone closes it, or the process is interrupted."""
        while self._thread.is_alive():
            self._thread.join(1.0)

    def close(self) -> None:
        """Stop serving; requests under way are cut off."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_START_SECONDS)

    def __enter__(self) -> SliceServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _not_listening(self, error: BaseException) -> BaseException:
        if not isinstance(error, OSError):
            return error
        place = f"{self._host}:{self._port}"
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            reason = "it is in use by another program; choose another port, or 0 for any free one"
        return OSError(error.errno, f"{place} cannot be listened at: {reason}")

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._start())
        except BaseException as error:  # raised where the server was made
            self._error = error
        self._started.set()
        try:
            if self._error is None:
                self._loop.run_forever()
            if self._runner is not None:
                self._loop.run_until_complete(self._runner.cleanup())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()

    async def _start(self) -> None:
        application = web.Application(middlewares=[self._checked])
        application.router.add_get("/{name:.*}", self._answer)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, ssl_context=self._tls)
        await site.start()
        self._port = self._runner.addresses[0][1]

    @web.middleware
    async def _checked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        # Compared in a time that does not tell how much of it is right.
        if self._token is not None and not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            raise web.HTTPUnauthorized(headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            path = (self._folder / request.match_info["name"]).resolve()
        except (OSError, RuntimeError, ValueError):  # too long, a loop of links, or a character no path has
            raise web.HTTPNotFound from None
        if path.is_relative_to(self._folder):
            if path.is_file():
                return _AsItIs(path)
            if path.is_dir():
                return web.Response(text=_listing(path), content_type="text/html")
        raise web.HTTPNotFound


class _AsItIs(web.FileResponse):
    """A file, and not the .gz beside it, which aiohttp would send to whoever can unpack it: ranges are of the file."""

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        headers = request.headers.copy()
        headers.popall("Accept-Encoding", None)
        return await super().prepare(request.clone(headers=headers))


def _tls_of(certificate: str, key: str | None) -> ssl.SSLContext:
    """What serves with a certificate.

    Raises:
        OptionError: If a file cannot be read, or they do not belong together.
    """
    for option, path in (("certificate", certificate), ("key", key)):
        try:
            with open(path or "", "rb"):
                pass
        except OSError as error:
            raise OptionError(option, path, f"a file in PEM format that can be read: {error.strerror}") from error
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)

    def refuse() -> str:  # else OpenSSL asks for a password at the terminal, and waits
        raise OptionError("key", key, "without a password; openssl pkey -in KEY -out PLAIN takes it away")

    try:
        context.load_cert_chain(certificate, key, password=refuse)
    except ssl.SSLError as error:
        allowed = f"a certificate chain in PEM format, whose private key is {key!r}: {error.reason or error}"
        raise OptionError("certificate", certificate, allowed) from error
    return context


def _listing(folder: Path) -> str:
    """Links, in which fsspec finds what is in a folder."""
    names = sorted(f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir())
    links = (f'<li><a href="{quote(name)}">{escape(name)}</a></li>' for name in names)
    return f"<!doctype html><title>{escape(folder.name)}</title><ul>{''.join(links)}</ul>"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
