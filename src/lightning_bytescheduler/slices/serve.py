"""A data node: serves a folder over HTTP, read-only, with ranges, so that fsspec reads slices from it.

aiohttp does the serving, ranges included. A path counts as what it is after all links and dots are resolved, and what
is then not in the folder does not exist.
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
        access = ServerAccess(host=host, token=token, certificate=certificate, key=key)
        super().__init__(access, port, name="bytescheduler-slice-server")

    async def application(self) -> web.Application:
        """The folder's only route."""
        application = web.Application(middlewares=[guard(self._access, self.refusals)])
        application.router.add_get("/{name:.*}", self._answer)
        return application

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
