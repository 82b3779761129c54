"""Certificates for development are ones that TLS accepts, their keys are private, and nothing is overwritten."""

from __future__ import annotations

import datetime
import stat

import pytest

from lightning_bytescheduler.cli import main
from lightning_bytescheduler.coordinator.certificates import make_certificates
from lightning_bytescheduler.exceptions import OptionError

x509 = pytest.importorskip("cryptography.x509")
NOW = datetime.datetime(2030, 1, 1, tzinfo=datetime.timezone.utc)


def read(path):
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_what_is_in_them(tmp_path):
    made = make_certificates(tmp_path / "c", hosts=["a.example.org", "10.0.0.7"], clients=["anna"], days=30, now=NOW)
    assert made.server is not None
    authority, server, client = read(made.authority), read(made.server[0]), read(made.clients["anna"][0])
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "a.example.org"]
    assert [str(one) for one in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1", "10.0.0.7"]
    assert server.not_valid_after_utc == client.not_valid_after_utc == made.until == NOW + datetime.timedelta(days=30)
    assert authority.not_valid_after_utc > NOW + datetime.timedelta(days=3000)
    for one in (server, client):
        one.verify_directly_issued_by(authority)
        assert not one.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    for key in (tmp_path / "c").glob("*.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600, key
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o700


def test_nothing_is_overwritten_and_an_authority_signs_later_clients(tmp_path):
    first = make_certificates(tmp_path, clients=["anna"])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    second = make_certificates(tmp_path, clients=["berta"])
    assert second.server is None
    read(second.clients["berta"][0]).verify_directly_issued_by(read(first.authority))
    for wrong in ({"clients": ["anna"]}, {"hosts": ["b.example.org"]}, {}):
        with pytest.raises(OptionError, match="folder="):
            make_certificates(tmp_path, **wrong)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_they_do_not_outlive_their_authority(tmp_path):
    make_certificates(tmp_path, now=NOW)
    late = make_certificates(tmp_path, clients=["late"], now=NOW + datetime.timedelta(days=3649), days=30)
    assert late.until == NOW + datetime.timedelta(days=3650)
    with pytest.raises(OptionError, match="run out"):
        make_certificates(tmp_path, clients=["later"], now=NOW + datetime.timedelta(days=3651))


@pytest.mark.parametrize(
    "wrong",
    [{"hosts": ["a:80"]}, {"hosts": ["ü.de"]}, {"clients": ["../up"]}, {"clients": ["a", "a"]}, {"days": 0}],
    ids=str,
)
def test_what_is_refused(tmp_path, wrong):
    with pytest.raises(OptionError):
        make_certificates(tmp_path / "c", **wrong)
    assert not (tmp_path / "c").exists()


def test_a_time_that_no_certificate_can_have_is_refused(tmp_path):
    with pytest.raises(OptionError, match=r"days=1000000000000.0 is not allowed.*36500 at most"):
        make_certificates(tmp_path / "made", days=1e12)
    assert not (tmp_path / "made").exists()


def test_an_authority_that_cannot_be_used_is_named(tmp_path):
    make_certificates(tmp_path / "a")
    make_certificates(tmp_path / "b")
    (tmp_path / "a" / "ca.key").write_bytes((tmp_path / "b" / "ca.key").read_bytes())
    with pytest.raises(OptionError, match=r"ca\.key is not the key of ca\.pem"):
        make_certificates(tmp_path / "a", clients=["anna"])
    (tmp_path / "a" / "ca.key").write_text("no key")
    with pytest.raises(OptionError, match="can sign"):
        make_certificates(tmp_path / "a", clients=["anna"])


def test_the_command_says_what_goes_where(tmp_path, capsys):
    folder = tmp_path / "certs"
    assert main(["certificates", str(folder), "--host", "b.example.org", "--client", "anna", "--days", "2"]) == 0
    said = capsys.readouterr().out
    for text in (f"--tls {folder}/server.pem {folder}/server.key", "b.example.org", "client-anna.key", "ca.key"):
        assert text in said
    assert "BEGIN" not in said
    assert main(["certificates", str(folder), "--host", "c"]) == 2
    assert "DIR=" in capsys.readouterr().err
    assert main(["certificates", str(tmp_path / "new"), "--host", "a:80"]) == 2
    assert "--host='a:80'" in capsys.readouterr().err
