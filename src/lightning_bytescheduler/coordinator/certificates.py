"""Certificates for development: an authority that signs a server's certificate and those of clients.

They are for places that have no authority yet: a lab, a small cluster, tests. With the authority's key one can make
certificates that all who trust ``ca.pem`` accept, so that key stays on the machine where it was made; other machines
need only the other files. The keys are of the curve P-256, and only their owner may read them. Existing files are never
overwritten.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lightning_bytescheduler.checks import importing, named, require_positive
from lightning_bytescheduler.exceptions import OptionError

DAYS = 365.0
_AUTHORITY_DAYS = 3650.0
_MOST_DAYS = 36500.0
_AUTHORITY = "lightning-bytescheduler development authority"
_HOSTS = ("localhost", "127.0.0.1", "::1")
_SKEW = datetime.timedelta(minutes=5)  # clocks of other machines may be behind
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}")
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)*\.?")


class MadeCertificates(NamedTuple):
    """The certificates that were made, and where they are.

    Attributes:
        authority: File of the authority's certificate; its key is beside it, as ``ca.key``.
        server: Files of the server's certificate and its key; ``None`` if only clients' were made.
        clients: Files of each client's certificate and key, by name.
        hosts: Names and addresses under which the server may be reached.
        until: When the first certificate expires.
    """

    authority: Path
    server: tuple[Path, Path] | None
    clients: dict[str, tuple[Path, Path]]
    hosts: tuple[str, ...]
    until: datetime.datetime


def make_certificates(
    folder: str | os.PathLike[str],
    *,
    hosts: Sequence[str] = (),
    clients: Sequence[str] = (),
    days: float = DAYS,
    now: datetime.datetime | None = None,
) -> MadeCertificates:
    """Make certificates, and an authority that signs them. A folder that has an authority keeps it.

    Args:
        folder: Where ``ca.pem``, ``server.pem`` and ``client-NAME.pem`` go, each with its ``.key``. It is made if it is
            missing, for its owner alone.
        hosts: Names and addresses under which the server is reached. ``localhost`` and its addresses are always
            included. Without any, a server's certificate is made only if there is none.
        clients: Names of clients.
        days: How long the certificates are valid, from now on.
        now: The time; the machine's clock if left out.

    Raises:
        OptionError: If a file exists already, or a name or a number is invalid.
        ImportError: If the package cryptography is missing; the message names the extra.
        OSError: If a file cannot be written.
    """
    with importing("certificates", extra="coordinator"):
        from cryptography import x509
    if require_positive("days", days, of="days") > _MOST_DAYS:
        raise OptionError("days", days, f"{_MOST_DAYS:.0f} at most, a hundred years")
    for name in clients:
        if not _NAME.fullmatch(name) or clients.count(name) > 1:
            raise OptionError("client", name, "a name of letters, digits, dots, '-' and '_', 60 at most, given once")
    reached, place = tuple(dict.fromkeys((*_HOSTS, *hosts))), Path(folder)
    names = {"server": [_general_name(host) for host in reached]}
    if not hosts and _files(place, "server")[0].exists():
        del names["server"]
    names |= {f"client-{name}": [x509.DNSName(name)] for name in clients}
    there = [stem for stem in names if any(file.exists() for file in _files(place, stem))]
    if there or not names:
        what = f"without {there[0]}.pem and .key" if there else "in which something is missing, or with --client NAME"
        raise OptionError("folder", os.fspath(folder), f"one {what}: nothing is overwritten")
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    start, day = now or datetime.datetime.now(datetime.timezone.utc), datetime.timedelta(days=1)
    if any(file.exists() for file in _files(place, "ca")):
        signer = _read_authority(place, start)
    else:
        signer = _make(_files(place, "ca"), _AUTHORITY, None, start, start + max(days, _AUTHORITY_DAYS) * day, [])
    until = min(start + days * day, signer[0].not_valid_after_utc)
    for stem, own in names.items():
        _make(_files(place, stem), stem.removeprefix("client-"), signer, start, until, own)
    made = {stem: _files(place, stem) for stem in names}
    server = made.pop("server", None)
    files = {stem.removeprefix("client-"): both for stem, both in made.items()}
    return MadeCertificates(place / "ca.pem", server, files, reached, until)


def _files(place: Path, stem: str) -> tuple[Path, Path]:
    return place / f"{stem}.pem", place / f"{stem}.key"


def _general_name(host: str) -> Any:
    from cryptography import x509

    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    if not _HOST.fullmatch(host) or len(host) > 253:
        raise OptionError("host", host, "a name such as coordinator.example.org, or an address, without a port")
    return x509.DNSName(host)


def _read_authority(place: Path, now: datetime.datetime) -> tuple[Any, Any]:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        certificate, key = (file.read_bytes() for file in _files(place, "ca"))
        authority = x509.load_pem_x509_certificate(certificate), load_pem_private_key(key, password=None)
        if authority[0].public_key() != authority[1].public_key():
            raise ValueError("ca.key is not the key of ca.pem")
        if authority[0].not_valid_after_utc <= now:
            raise ValueError("it has run out")
    except (OSError, ValueError, TypeError) as error:
        allowed = f"a folder whose authority, ca.pem and ca.key, can sign ({type(error).__name__}: {error})"
        raise OptionError("folder", os.fspath(place), allowed, "Take another folder.") from error
    return authority


def _make(
    files: tuple[Path, Path],
    name: str,
    signer: tuple[Any, Any] | None,
    start: datetime.datetime,
    end: datetime.datetime,
    names: list[Any],
) -> tuple[Any, Any]:
    """Make one certificate and its key, and write both. Without a signer it is an authority, and signs itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    key, signs = ec.generate_private_key(ec.SECP256R1()), signer is None
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    issuer, signing = (subject, key) if signer is None else (signer[0].subject, signer[1])
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if files[0].stem == "server" else ExtendedKeyUsageOID.CLIENT_AUTH
    extensions: list[Any] = [
        x509.BasicConstraints(ca=signs, path_length=0 if signs else None),
        x509.KeyUsage(True, *(False,) * 4, signs, signs, False, False),
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()),
        *([] if signs else [x509.ExtendedKeyUsage([purpose]), x509.SubjectAlternativeName(names)]),
    ]
    number = x509.random_serial_number()
    builder = x509.CertificateBuilder(issuer, subject, key.public_key(), number, start - _SKEW, end)
    for extension in extensions:
        critical = isinstance(extension, x509.BasicConstraints | x509.KeyUsage)
        builder = builder.add_extension(extension, critical=critical)
    certificate, pem = builder.sign(signing, hashes.SHA256()), serialization.Encoding.PEM
    plain = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    for file, content, mode in zip(files, (certificate.public_bytes(pem), plain), (0o644, 0o600), strict=True):
        # Opened with its mode, so that no other user can read it before the mode is set.
        with os.fdopen(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as opened:
            opened.write(content)
    return certificate, key


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("folder", metavar="DIR", help="where they are made; what is there is not overwritten")
    host = "name or address under which workers reach it; may be given several times (localhost always counts)"
    parser.add_argument("--host", action="append", default=[], metavar="NAME", help=host)
    client = "one for a client; may be given several times"
    parser.add_argument("--client", action="append", default=[], metavar="NAME", help=client)
    parser.add_argument("--days", type=float, default=DAYS, metavar="N", help="how long they are good (default: 365)")


def run(options: argparse.Namespace) -> int:
    """Make the certificates, and say what to use where."""
    with named(folder="DIR"):
        made = make_certificates(options.folder, hosts=options.host, clients=options.client, days=options.days)
    print(f"Certificates in {options.folder}, good until {made.until:%Y-%m-%d %H:%M} UTC:")
    if made.server is not None:
        print(f"  coordinator: --tls {made.server[0]} {made.server[1]}  (as {', '.join(made.hosts)})")
    print(f"  clients: {made.authority}, to check the coordinator with; also as SSL_CERT_FILE={made.authority}")
    for certificate, key in made.clients.values():
        print(f"  a client: {certificate} and {key}")
    if made.clients:
        print(f"  coordinator, to let in only such clients: --tls CERT KEY {made.authority}")
    print(f"Keep {made.authority.with_suffix('.key')} where it is: who has it can make more of them.")
    return 0
