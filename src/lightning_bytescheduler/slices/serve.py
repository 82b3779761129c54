"""A data node: serves a folder over HTTP, read-only, with ranges, so that fsspec reads slices from it.

aiohttp serves the ranges. All links and dots of a path are resolved; a path outside of the folder is answered with 404.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from urllib.parse import quote

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.serving import BackgroundServer, ServerAccess, guard


class SliceServer(BackgroundServer):
    """Serves the files of a folder until it is closed.

    Args:
        port: 0 takes a free one.
        token: Token that readers must send as ``Authorization: Bearer <token>``; ``None`` for none.
        certificate: File of the TLS certificate chain; ``None`` serves without TLS.

    Raises:
        OptionError: If there is no such folder, a file of TLS cannot be used, or the address is not local to this
            machine and TLS or the token is missing.
        OSError: If it cannot listen at the address.
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
        access = ServerAccess(host=host, token=token, certificate=certificate, key=key)
        super().__init__(access, port, name="bytescheduler-slice-server")

    async def application(self) -> web.Application:
        """The application with the folder's only route."""
        application = web.Application(middlewares=[guard(self._access, self.refusals)])
        application.router.add_get("/{name:.*}", self._answer)
        return application

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            path = (self._folder / request.match_info["name"]).resolve()
        except (OSError, RuntimeError, ValueError):  # too long, a loop of links, or an invalid character
            raise web.HTTPNotFound from None
        if path.is_relative_to(self._folder):
            if path.is_file():
                return _AsItIs(path)
            if path.is_dir():
                return web.Response(text=_listing(path), content_type="text/html")
        raise web.HTTPNotFound


class _AsItIs(web.FileResponse):
    """Sends the file itself; aiohttp would send a .gz beside it to clients that accept that."""

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        headers = request.headers.copy()
        headers.popall("Accept-Encoding", None)
        return await super().prepare(request.clone(headers=headers))


def _listing(folder: Path) -> str:
    """Return a page of links, in which fsspec finds a folder's contents."""
    names = sorted(f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir())
    links = (f'<li><a href="{quote(name)}">{escape(name)}</a></li>' for name in names)
    return f"<!doctype html><title>{escape(folder.name)}</title><ul>{''.join(links)}</ul>"
