"""A data node: serves a folder over HTTP, read-only, with ranges, so that fsspec reads slices from it.

aiohttp does the serving, ranges included. A path counts as what it is after all links and dots are resolved, and what
is then not in the folder does not exist.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from html import escape
from pathlib import Path
from urllib.parse import quote

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from lightning_bytescheduler.exceptions import OptionError, SchedulerTimeoutError
from lightning_bytescheduler.serving import Refusals, ServerAccess, guard

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
        self._access = ServerAccess(host=host, token=token, certificate=certificate, key=key)
        self._refusals = Refusals()
        self._port = port
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
        return self._access.url(self._port)

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
        place = f"{self._access.host}:{self._port}"
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
        application = web.Application(middlewares=[guard(self._access, self._refusals)])
        application.router.add_get("/{name:.*}", self._answer)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._access.host, self._port, ssl_context=self._access.tls(self._refusals))
        await site.start()
        self._port = self._runner.addresses[0][1]

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


def _listing(folder: Path) -> str:
    """Links, in which fsspec finds what is in a folder."""
    names = sorted(f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir())
    links = (f'<li><a href="{quote(name)}">{escape(name)}</a></li>' for name in names)
    return f"<!doctype html><title>{escape(folder.name)}</title><ul>{''.join(links)}</ul>"
