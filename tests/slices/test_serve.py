"""A served folder is a source; nothing beside it is, and other machines cannot read it by accident."""

from __future__ import annotations

import gzip
import http.client
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import fsspec
import pytest

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices.make import make_slices
from lightning_bytescheduler.slices.options import StoreOptions
from lightning_bytescheduler.slices.serve import SliceServer
from lightning_bytescheduler.slices.source import open_source
from tests.slices.faults import Store

TEXT = [f"line {number}" for number in range(5000)]


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "a.txt").write_text("\n".join(TEXT))
    make_slices(str(tmp_path / "a.txt"), str(tmp_path / "served"), slice_bytes=10_000)
    return tmp_path / "served"


def read_all(url, tmp_path, **storage_options):
    source = open_source(url, storage_options=storage_options)
    with Store(source, StoreOptions(str(tmp_path / "cache"))) as store:
        store.prefetch(source.slices)
        return [sample for slice_ in source.slices for sample in store.samples(slice_)]


def test_slices_are_read_over_http(folder, tmp_path):
    with SliceServer(str(folder)) as server:
        assert read_all(server.url, tmp_path) == TEXT
        assert fsspec.filesystem("http").cat_file(f"{server.url}slice-000000.txt", start=5, end=11) == b"0\nline"
        # Neither an index nor ranges: globs and whole files.
        assert read_all(f"{server.url}slice-*.txt", tmp_path) == TEXT


def test_a_compressed_twin_is_not_sent_in_a_files_place(folder):
    (folder / "slice-000000.txt.gz").write_bytes(gzip.compress(b"other"))
    with SliceServer(str(folder)) as server:
        request = urllib.request.Request(f"{server.url}slice-000000.txt", headers={"Accept-Encoding": "gzip"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.read() == (folder / "slice-000000.txt").read_bytes()


def status(server: SliceServer, path: str, method: str = "GET") -> int:
    host, _, port = server.url.removeprefix("http://").rstrip("/").rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection.putrequest(method, path, skip_host=False)
    connection.putheader("Content-Length", "0")
    connection.endheaders()
    answer = connection.getresponse().status
    connection.close()
    return answer


def test_nothing_beside_the_folder_is_served_and_nothing_is_changed(folder, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "out").symlink_to(tmp_path)
    with SliceServer(str(folder)) as server:
        for path in (
            "/../secret",
            "/%2e%2e/secret",
            "/..%2fsecret",
            "//" + str(tmp_path / "secret"),
            "/link",
            "/out/secret",
        ):
            assert status(server, path) in (400, 403, 404), path
        for method in ("PUT", "POST", "DELETE"):
            assert status(server, "/slice-000000.txt", method) == 405
        assert status(server, "/slice-000000.txt") == 200


def test_a_token_is_asked_for(folder, tmp_path):
    with SliceServer(str(folder), token="open sesame") as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            request = urllib.request.Request(f"{server.url}slices.index", headers=headers)
            with pytest.raises(urllib.error.HTTPError, match="401") as caught:
                urllib.request.urlopen(request, timeout=60)
            caught.value.close()
        assert read_all(server.url, tmp_path, headers={"Authorization": "Bearer open sesame"}) == TEXT


def test_beyond_this_machine_it_takes_tls_and_a_token(folder):
    for given in ({}, {"token": "a"}, {"certificate": "c", "key": "k"}):
        with pytest.raises(OptionError, match=r"host='0\.0\.0\.0'"):
            SliceServer(str(folder), host="0.0.0.0", **given)
    with pytest.raises(OptionError, match="TLS needs a certificate and its key"):
        SliceServer(str(folder), certificate="c")
    with pytest.raises(OptionError, match="folder"):
        SliceServer(str(folder / "missing"))
    with pytest.raises(OptionError, match="token"):
        SliceServer(str(folder), token=" ")


def test_a_port_in_use_is_an_error(folder):
    with SliceServer(str(folder)) as server:
        port = int(server.url.rstrip("/").rpartition(":")[2])
        with pytest.raises(OSError, match="in use"):
            SliceServer(str(folder), port=port)


def test_tls(folder, tmp_path):
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
    command += "-addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
    try:
        subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed, which makes the certificate")
    certificate, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    with SliceServer(str(folder), host="0.0.0.0", token="t", certificate=certificate, key=key) as server:
        request = urllib.request.Request(
            server.url.replace("0.0.0.0", "127.0.0.1") + "slices.index", headers={"Authorization": "Bearer t"}
        )
        with urllib.request.urlopen(
            request, timeout=60, context=ssl.create_default_context(cafile=certificate)
        ) as answer:
            assert answer.read() == (folder / "slices.index").read_bytes()
