"""Certificates that sign themselves, as ``openssl req -x509`` makes them: each is its own authority."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import NamedTuple


class Certificate(NamedTuple):
    """The files of a certificate and of its private key."""

    file: str
    key: str


def make_certificate(folder: Path, name: str) -> Certificate:
    """Make one for ``localhost``, of a name."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key, day = ec.generate_private_key(ec.SECP256R1()), datetime.timedelta(days=1)
    begin = datetime.datetime.now(datetime.timezone.utc) - day
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number(), begin, begin + 3 * day)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    folder.mkdir(parents=True, exist_ok=True)
    made = Certificate(str(folder / f"{name}.pem"), str(folder / f"{name}.key"))
    Path(made.file).write_bytes(certificate.public_bytes(pem))
    Path(made.key).write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return made
