"""A client without a token, or without a good certificate, is refused, counted, and told nothing. No token is shown."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from contextlib import asynccontextmanager

import pytest

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.serving import (
    BackgroundServer,
    Refusals,
    ServerAccess,
    client_tls,
    end_others,
    guard,
    is_loopback,
    parse_bind,
    read_token,
    require_token,
)
from tests.support.certificates import make_certificate
from tests.support.waiting import WAIT

aiohttp = pytest.importorskip("aiohttp")
web = pytest.importorskip("aiohttp.web")
pytest.importorskip("cryptography")
SECRET = "sesame-9f31"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    place = tmp_path_factory.mktemp("certificates")
    for name in ("server", "eve"):
        make_certificate(place, name)
    return place


def access(certificates, **options):
    return ServerAccess(
        certificate=str(certificates / "server.pem"), key=str(certificates / "server.key"), token=SECRET, **options
    )


@asynccontextmanager
async def served(access: ServerAccess, **options):
    """A server that answers ``ok``; its port, its refusals, and the paths that reached it."""
    refusals, reached = Refusals(), []

    async def answer(request):
        reached.append(request.path)
        return web.Response(text="ok")

    application = web.Application(middlewares=[guard(access, refusals, **options)])
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, access.host, 0, ssl_context=access.tls()).start()
    try:
        yield runner.addresses[0][1], refusals, reached
    finally:
        await runner.cleanup()


async def ask(port, *, tls=None, headers=None, path="/"):
    scheme = "http" if tls is None else "https"
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{scheme}://127.0.0.1:{port}{path}", ssl=tls or True, headers=headers or {}) as answer,
    ):
        return answer.status, await answer.text()


RIGHT = {"Authorization": f"Bearer {SECRET}"}


def test_a_token_lets_in_and_nothing_like_it(caplog):
    caplog.set_level(logging.DEBUG)

    async def attempt():
        async with served(ServerAccess(token=SECRET), public=("/healthz",)) as (port, refusals, reached):
            assert await ask(port, headers=RIGHT) == (200, "ok")
            assert await ask(port, path="/healthz") == (200, "ok")
            nearly = (SECRET[:-1], f"{SECRET[:-1]}x", f"{SECRET}x", f"{SECRET} ", "\xfc")
            wrong = ("", SECRET, f"bearer {SECRET}", *(f"Bearer {token}" for token in nearly))
            # What follows white space at an end is cut off by HTTP itself.
            for number, given in enumerate([one for one in wrong if one == one.strip()], start=1):
                status, text = await ask(port, headers={"Authorization": given})
                assert status == 401
                assert SECRET not in text
                assert refusals.counts() == {"token": number}
            assert reached == ["/", "/healthz"]

    asyncio.run(attempt())
    assert "Refused 127.0.0.1: token" in caplog.text
    assert SECRET not in caplog.text


def test_tls_and_the_token(certificates):
    authority = str(certificates / "server.pem")

    async def attempt():
        async with served(access(certificates)) as (port, _, reached):
            assert await ask(port, tls=client_tls(authority), headers=RIGHT) == (200, "ok")
            assert (await ask(port, tls=client_tls(authority)))[0] == 401
            with pytest.raises(aiohttp.ClientError):
                await ask(port, tls=None, headers=RIGHT)
            assert reached == ["/"]

    asyncio.run(attempt())


def test_a_client_refuses_a_server_that_it_does_not_know_or_an_old_tls(certificates):
    async def attempt():
        async with served(access(certificates)) as (port, _, reached):
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await ask(port, tls=client_tls(str(certificates / "eve.pem")), headers=RIGHT)
            old = ssl.create_default_context(cafile=str(certificates / "server.pem"))
            with pytest.warns(DeprecationWarning, match="TLSv1_1"):
                old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
            with pytest.raises(aiohttp.ClientError):
                await ask(port, tls=old, headers=RIGHT)
            assert not reached

    asyncio.run(attempt())


def test_without_a_token_pages_of_other_sites_are_refused():
    async def attempt():
        async with served(ServerAccess()) as (port, refusals, reached):
            for headers in ({}, {"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}"}):
                assert (await ask(port, headers=headers))[0] == 200
            for headers in ({"Host": f"evil.example:{port}"}, {"Origin": "http://evil.example"}, {"Origin": "null"}):
                assert (await ask(port, headers=headers))[0] == 403
            assert refusals.counts() == {"host": 3}
            assert len(reached) == 2

    asyncio.run(attempt())


def test_what_a_server_needs_beyond_this_machine(certificates):
    paths = {"certificate": str(certificates / "server.pem"), "key": str(certificates / "server.key")}
    for given in ({}, {"token": SECRET}, paths):
        with pytest.raises(OptionError, match=r"host='0\.0\.0\.0'") as caught:
            ServerAccess(host="0.0.0.0", **given)
        assert SECRET not in str(caught.value)
    made = ServerAccess(host="0.0.0.0", token=SECRET, **paths)
    assert SECRET not in repr(made)
    assert made.url(80) == "https://0.0.0.0:80/"
    assert made.tls().minimum_version >= ssl.TLSVersion.TLSv1_2
    for option, given in (
        ("key", {"certificate": "c"}),
        ("certificate", {**paths, "certificate": paths["key"]}),
        ("certificate", {"certificate": "/missing", "key": "/missing"}),
        ("token", {"token": " "}),
    ):
        with pytest.raises(OptionError) as caught:
            ServerAccess(**given)
        assert caught.value.option == option


@pytest.mark.parametrize("token", ["", " ", " a", "a\nb", "a\x00"])
def test_what_is_no_token_is_not_shown(token):
    with pytest.raises(OptionError, match="not shown"):
        require_token("token", token)


def test_a_token_is_read_from_a_file_or_the_environment(tmp_path, caplog):
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    assert read_token(str(file), variable="T", environ={"T": "other"}) == SECRET
    assert not caplog.text
    file.chmod(0o644)
    assert read_token(str(file), variable="T", environ={}) == SECRET
    assert "every user" in caplog.text
    assert SECRET not in caplog.text
    assert read_token(None, variable="T", environ={"T": SECRET}) == SECRET
    assert read_token(None, variable="T", environ={}) is None
    file.write_bytes(SECRET.encode() + b"\xff")
    for path, environ in ((str(file), {}), (str(tmp_path / "missing"), {}), (None, {"T": " "})):
        with pytest.raises(OptionError) as caught:
            read_token(path, variable="T", environ=environ)
        assert SECRET not in str(caught.value)
        assert caught.value.__cause__ is None


def test_addresses():
    assert parse_bind("--bind", "127.0.0.1:0") == ("127.0.0.1", 0)
    assert parse_bind("--bind", "[::1]:8000") == ("::1", 8000)
    for wrong in ("8000", ":8000", "a:", "a:b", "a:65536", "a:-1", "a:٣"):
        with pytest.raises(OptionError, match="--bind="):
            parse_bind("--bind", wrong)
    assert [is_loopback(host) for host in ("localhost", "127.9.9.9", "::1", "[::1]")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "localhost.evil", "")] == [False] * 4


def test_refusals_are_logged_ever_more_seldom(caplog):
    refusals = Refusals()
    for _ in range(1001):
        refusals.count("token", who="10.0.0.1")
    assert len(caplog.records) == 4
    assert "1000 so far" in caplog.text
    assert refusals.counts() == {"token": 1001}


class FailsToListen(BackgroundServer):
    """Its application is made; the key that it would listen with is gone."""

    stopped = False

    async def application(self):
        return web.Application()

    async def stop(self):
        FailsToListen.stopped = True


def test_a_server_whose_key_became_unreadable_stops_what_it_had_begun(certificates, tmp_path):
    key = tmp_path / "server.key"
    key.write_bytes((certificates / "server.key").read_bytes())
    reached = ServerAccess(certificate=str(certificates / "server.pem"), key=str(key), token=SECRET)
    key.write_text("no key")
    with pytest.raises(OptionError, match="key"):
        FailsToListen(reached, 0, name="bytescheduler-test")
    assert FailsToListen.stopped


class NeverAnswers(BackgroundServer):
    """Notes when a handler begins, and when it is cut off."""

    def __init__(self):
        self.begun, self.cut = threading.Event(), threading.Event()
        super().__init__(ServerAccess(), 0, name="bytescheduler-test-server")

    async def application(self):
        application = web.Application()
        application.router.add_get("/", self._wait)
        return application

    async def _wait(self, request):
        self.begun.set()
        try:
            await asyncio.sleep(2 * WAIT)
        finally:
            self.cut.set()


def test_a_server_that_closes_cuts_off_requests_of_clients_that_have_gone():
    with NeverAnswers() as server:
        port = int(server.url.rstrip("/").rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert server.begun.wait(WAIT)
    assert server.cut.is_set()


def test_tasks_end_with_what_they_hold_also_those_that_have_not_begun():
    ended = []

    async def holds(name):
        try:
            await asyncio.sleep(2 * WAIT)
        finally:
            ended.append(name)

    async def begins_another():
        try:
            await holds("one that begins another")
        finally:
            begun.append(asyncio.ensure_future(holds("another")))

    begun = []

    async def end():
        begun.append(asyncio.ensure_future(begins_another()))
        await end_others()

    asyncio.run(end())
    assert ended == ["one that begins another", "another"]
