"""What a coordinator shows: the page for people at ``/``, and Prometheus's metrics.

The page is one file without anything from elsewhere, and is served with a policy that lets it load nothing else and
send nothing anywhere but to this coordinator. It holds no secret, so it needs no token; the status that it asks for
does. Where there is a token the page asks for it, keeps it in memory alone, and forgets it with the tab.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from importlib.resources import files

from aiohttp import web

from lightning_bytescheduler.coordinator.metrics import CONTENT_TYPE, metrics_text
from lightning_bytescheduler.coordinator.run_status import RunStatus
from lightning_bytescheduler.diloco.coordinator_protocol import HEALTH_PATH, METRICS_PATH

__all__ = ["PAGE_PATH", "PUBLIC_PATHS", "add_pages", "page_headers"]

PAGE_PATH = "/"
PUBLIC_PATHS = (PAGE_PATH, HEALTH_PATH)
"""What needs no token, see ``serving.guard``."""


def _source(kind: str, text: str) -> str:
    """The policy's word for what is between the page's own tags."""
    inner = "".join(re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL))
    return "'sha256-" + base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode() + "'"


def page_headers(text: str) -> dict[str, str]:
    """The headers of the page: its own script and style run, and nothing else is loaded, framed or sent away."""
    policy = (
        f"default-src 'none'; script-src {_source('script', text)}; style-src {_source('style', text)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-store",
    }


def add_pages(router: web.UrlDispatcher, status: Callable[[], RunStatus]) -> None:
    """Add the page and the metrics to a service.

    Args:
        router: Of its application.
        status: How the run stands; called for each request for metrics.
    """
    html = files("lightning_bytescheduler.coordinator").joinpath("page.html").read_text(encoding="utf-8")
    headers = page_headers(html)

    async def page(_: web.Request) -> web.Response:
        return web.Response(text=html, content_type="text/html", headers=headers)

    async def metrics(_: web.Request) -> web.Response:
        try:
            text = metrics_text(status())
        except ImportError as error:
            return web.Response(status=501, text=f"{error}\n")
        answer = web.Response(body=text, headers={"Cache-Control": "no-store"})
        answer.headers["Content-Type"] = CONTENT_TYPE
        return answer

    router.add_get(PAGE_PATH, page)
    router.add_get(METRICS_PATH, metrics)
