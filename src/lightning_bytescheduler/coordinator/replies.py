"""What is answered to requests that are refused: JSON with ``error``, and nothing has changed."""

from __future__ import annotations

import msgspec
from aiohttp import web

__all__ = ["problem"]


def problem(status: int, error: str, *, retry_after: float | None = None) -> web.Response:
    """An answer that says what is wrong.

    Args:
        status: Of HTTP.
        error: In words.
        retry_after: Seconds after which it may be tried again.
    """
    headers = {} if retry_after is None else {"Retry-After": str(max(round(retry_after), 1))}
    body = msgspec.json.encode({"error": error})
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)
