"""Where a coordinator is and how a worker shows itself there: its address, certificates, the token, the worker's name.

The token is in no ``repr``, message or error, and in no option: it comes from a file or from the environment, as the
arguments of a process can be read by every user of its machine.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from lightning_bytescheduler.checks import require_known, require_text
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.serving import client_tls, is_loopback, read_token

ADDRESS_VARIABLE = "BYTESCHEDULER_COORDINATOR"
TOKEN_VARIABLE = "BYTESCHEDULER_COORDINATOR_TOKEN"
_NAME = re.compile(r"[A-Za-z0-9._:@/-]{1,150}")
_PARTS = ("url", "token_file", "authority", "certificate", "key", "name")
_URL = "https://HOST:PORT, or http://HOST:PORT for a coordinator on this machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorAddress:
    """Where a coordinator is, and who asks.

    Attributes:
        url: Without a path.
        worker: The name that this worker would like.
        authority: File of the certificates that sign the coordinator's; None for those that the machine trusts.
        certificate: File of this worker's own certificate, for mutual TLS.
        key: File of its private key.
        token: What the coordinator asks for.
    """

    url: str
    worker: str
    authority: str | None = None
    certificate: str | None = None
    key: str | None = None
    token: str | None = field(default=None, repr=False)

    def tls(self) -> ssl.SSLContext | None:
        """How connections are made; None where the address has no TLS.

        Raises:
            OptionError: If a file cannot be used.
        """
        if not self.url.startswith("https:"):
            return None
        return client_tls(authority=self.authority, certificate=self.certificate, key=self.key)


def resolve_coordinator(
    given: str | Mapping[str, str] | None, *, environ: Mapping[str, str] = os.environ
) -> CoordinatorAddress | None:
    """The address that the option and the environment make, or ``None`` without a coordinator.

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
    if not url.startswith("https:"):
        for name in ("authority", "certificate", "key"):
            if name in parts:
                allowed = f"left out where the coordinator is not https://..., but {url!r}"
                raise OptionError(f"coordinator.{name}", parts[name], allowed)
    worker = parts.get("name", "")
    if worker and not _NAME.fullmatch(worker):
        raise OptionError("coordinator.name", worker, "up to 150 letters, digits and . _ : @ / -")
    address = CoordinatorAddress(
        url=url,
        worker=worker or _own_name(),
        authority=parts.get("authority"),
        certificate=parts.get("certificate"),
        key=parts.get("key"),
        token=read_token(
            parts.get("token_file"), variable=TOKEN_VARIABLE, option="coordinator.token_file", environ=environ
        ),
    )
    address.tls()  # a wrong file is said here, and not when the data are there
    if address.token is not None and url.startswith("http:") and not is_loopback(urlsplit(url).hostname or ""):
        raise OptionError(option, url, "https://HOST:PORT where a token is sent, which others could read else")
    return address


def _require_url(option: str, url: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise OptionError(option, url, _URL) from None
    if parts.username or parts.password:
        raise OptionError(
            option,
            f"{parts.scheme}://...",
            f"{_URL}, without a password; the token goes into token_file",
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query or parts.fragment:
        raise OptionError(option, url, _URL)
    return url.rstrip("/")


def _own_name() -> str:
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:100] or "worker"
    return f"{host}-{secrets.token_hex(3)}"
