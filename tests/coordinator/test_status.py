"""How a run stands is seen on the page and by Prometheus: all of it, and no secrets."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager

import msgspec
import pytest

from lightning_bytescheduler.coordinator.status import RunStatus, summary_of
from lightning_bytescheduler.diloco.round_record import RoundRecord, WorkerRound
from lightning_bytescheduler.serving import Refusals, ServerAccess, guard
from tests.coordinator.made_up_status import made_up_status
from tests.coordinator.runs import options_of

web = pytest.importorskip("aiohttp.web")
parser = pytest.importorskip("prometheus_client.parser")

page = pytest.importorskip("lightning_bytescheduler.coordinator.page")
SECRET = "sesame-77aa"


@contextmanager
def served(status: RunStatus, access: ServerAccess | None = None):
    """A server with the page, the metrics and the status; yields its address."""
    access = access or ServerAccess()
    loop = asyncio.new_event_loop()
    started, addresses = threading.Event(), []

    async def start():
        application = web.Application(middlewares=[guard(access, Refusals(), public=page.PUBLIC_PATHS)])
        page.add_pages(application.router, lambda: status)

        async def answer(_):
            return web.Response(body=msgspec.json.encode(status), content_type="application/json")

        application.router.add_get("/v1/status", answer)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, access.host, 0, ssl_context=access.tls()).start()
        addresses.append(access.url(runner.addresses[0][1]).rstrip("/"))
        started.set()
        return runner

    def run():
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(60)
    try:
        yield addresses[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)


def test_an_empty_run_has_metrics():
    empty = RunStatus(
        version="1",
        uptime=0.0,
        round=0,
        phase="waiting",
        last_round=None,
        target="100 steps of the fastest worker",
        left=100,
        weights_version=0,
        parameters=0,
        samples=0,
        workers=(),
        rounds=(),
        slices=None,
        counters={},
    )
    assert b"bytescheduler_round 0.0" in page.metrics_text(empty)


def test_prometheus_reads_the_metrics():
    families = {
        family.name: family
        for family in parser.text_string_to_metric_families(page.metrics_text(made_up_status()).decode())
    }
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert samples["bytescheduler_round",] == 41
    assert samples["bytescheduler_samples_total",] == 65_536 * 40
    assert samples["bytescheduler_workers", "training"] == 3
    assert samples["bytescheduler_workers", "lost"] == 1
    assert samples["bytescheduler_events_total", "updates_added"] == 312
    assert samples["bytescheduler_events_total", "refused_token"] == 3
    assert samples["bytescheduler_loss",] == pytest.approx(made_up_status().rounds[-1].loss)
    assert samples["bytescheduler_last_round_participation",] == made_up_status().rounds[-1].participation == 7 / 8
    assert families["bytescheduler_events"].type == "counter"


def test_names_from_outside_make_no_time_series():
    """A thousand workers with names of their own are as many series as one."""
    few, many = made_up_status(1), made_up_status(1000)
    many = msgspec.structs.replace(many, counters=few.counters)
    text = page.metrics_text(many)
    assert text.count(b"\n") == page.metrics_text(few).count(b"\n")
    assert b"node-" not in text


def test_the_page_loads_nothing_and_runs_only_its_own_script():
    import aiohttp

    async def ask(url):
        async with aiohttp.ClientSession() as session:
            async with session.get(url + "/") as answer:
                text, headers = await answer.text(), answer.headers
            async with session.get(url + "/metrics") as answer:
                refused = answer.status
            async with session.get(url + "/metrics", headers={"Authorization": f"Bearer {SECRET}"}) as answer:
                return text, headers, refused, answer.status, answer.headers["Content-Type"]

    with served(made_up_status(), ServerAccess(token=SECRET)) as url:
        text, headers, refused, allowed, kind = asyncio.run(ask(url))
    assert (refused, allowed) == (401, 200)
    assert kind.startswith("text/plain; version=0.0.4")
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert policy.count("'sha256-") == 2
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert SECRET not in text
    assert "//" not in text.replace("http://www.w3.org/2000/svg", "").split("<script>")[0]
    for forbidden in ("innerHTML", "src=", "@import", "url(", "eval(", "localStorage", "document.cookie", "style="):
        assert forbidden not in text


def test_a_coordinator_that_is_busy_is_not_over(monkeypatch):
    """The command asks twice a second; a loop that does not answer in time is no reason to end."""
    server_module = pytest.importorskip("lightning_bytescheduler.coordinator.service")
    monkeypatch.setattr(server_module, "_ASK_SECONDS", 0.05)
    with server_module.CoordinatorServer(options_of()) as server:
        held = threading.Event()
        server._loop.call_soon_threadsafe(held.wait, 10)
        assert not server.over
        held.set()
        assert not server.over


def test_participation_is_the_share_of_live_workers_that_are_merged() -> None:
    workers = tuple(
        WorkerRound(worker=name, steps=5, samples=10, merged=name != "c", spans=()) for name in ("a", "b", "c")
    )
    record = RoundRecord(round=1, start=0.0, end=9.0, decided=None, workers=workers)
    ended = summary_of(record, 0.0, live=4)
    assert (ended.merged, ended.live, ended.participation) == (2, 4, 0.5)
    empty = summary_of(msgspec.structs.replace(record, workers=()), 0.0, live=0)
    assert empty.participation == 0.0
