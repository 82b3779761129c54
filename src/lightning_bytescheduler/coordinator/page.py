"""The coordinator's page for people at ``/``, and its metrics for Prometheus.

The page is one file that needs nothing from elsewhere. It is served with a policy under which it can load nothing else,
and can send data only to this coordinator. It holds no secret, so it needs no token; the status that it requests does.
Where there is a token the page asks for it, keeps it in memory only, and forgets it with the tab.

Metrics are read from the status at each scrape, in a registry of their own. No label has a value from outside: workers
come and go, and a time series for each would fill Prometheus's memory.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from aiohttp import web

from lightning_bytescheduler.coordinator.status import RunStatus
from lightning_bytescheduler.diloco.coordinator_protocol import HEALTH_PATH, METRICS_PATH

if TYPE_CHECKING:
    from prometheus_client.core import Metric


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "bytescheduler_"
_STATES = ("waiting", "starting", "training", "sending", "arrived", "lost", "paused", "joining")


def metrics_text(status: RunStatus) -> bytes:
    """The status in Prometheus's text format.

    Args:
        status: The run's status.
    """
    from prometheus_client import generate_latest

    registry: Any = SimpleNamespace(collect=lambda: _metrics(status))  # no other method is called
    text: bytes = generate_latest(registry)
    return text


def _metrics(status: RunStatus) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    def gauge(name: str, text: str, value: float | None) -> Iterator[Metric]:
        if value is not None:
            yield GaugeMetricFamily(f"{_PREFIX}{name}", text, value=value)

    def by(family: Callable[..., Any], name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        made = family(f"{_PREFIX}{name}", text, labels=[label])
        for word, value in values.items():
            made.add_metric([word], value)
        metric: Metric = made
        return metric

    info = GaugeMetricFamily(f"{_PREFIX}info", "Version of the package.", labels=["version"])
    info.add_metric([status.version], 1)
    yield info
    yield from gauge("uptime_seconds", "Seconds since this coordinator was started.", status.uptime)
    yield from gauge("round", "The current round.", status.round)
    yield from gauge("round_left", "What remains of this round, in the target's unit.", status.left)
    yield from gauge("weights_version", "Rounds that are part of the weights.", status.weights_version)
    yield from gauge("parameters", "Elements that are trained.", status.parameters)
    yield from gauge("saved_round", "The last round that is part of a saved state.", status.saved_round)
    yield from gauge("spool_bytes", "Bytes of updates that are not added yet.", status.spool_bytes)
    yield CounterMetricFamily(f"{_PREFIX}samples", "Samples that are part of the weights.", value=status.samples)

    known = dict.fromkeys(_STATES, 0) | Counter(worker.state for worker in status.workers)
    yield by(GaugeMetricFamily, "workers", "Workers by what they do.", "state", known)
    connected = [worker for worker in status.workers if worker.connected]
    yield from gauge("workers_connected", "Workers whose connection is open.", len(connected))
    speeds = [worker.samples_per_second for worker in connected if worker.samples_per_second is not None]
    yield from gauge("samples_per_second", "Of all connected workers.", sum(speeds))

    if status.rounds:
        last = status.rounds[-1]
        yield from gauge("last_round_seconds", "Seconds that the last round took.", last.seconds)
        yield from gauge("last_round_samples", "Samples that the last round merged.", last.samples)
        yield from gauge("last_round_merged", "Workers whose updates the last round merged.", last.merged)
        yield from gauge("last_round_participation", "Share of live workers that it merged.", last.participation)
        yield from gauge("loss", "Mean of the last round, where workers report one.", last.loss)
    if status.slices is not None:
        slices = {"unfinished": float(status.slices.unfinished), "quarantined": float(len(status.slices.quarantined))}
        yield from gauge("epoch", "Epoch of the data, from 0.", status.slices.epoch)
        yield by(GaugeMetricFamily, "slices", "Slices of this epoch.", "state", slices)
        samples = {"all": status.slices.samples, "trained": status.slices.trained, "dropped": status.slices.dropped}
        samples["trained_of_the_next"] = status.slices.ahead
        yield by(GaugeMetricFamily, "epoch_samples", "Samples of this epoch.", "state", samples)
    yield by(CounterMetricFamily, "events", "Events since this coordinator was started.", "event", status.counters)


PAGE_PATH = "/"
PUBLIC_PATHS = (PAGE_PATH, HEALTH_PATH)
"""Paths that need no token, see ``serving.guard``."""


def _source(kind: str, text: str) -> str:
    """The policy's entry for the text between the page's ``kind`` tags: its hash."""
    inner = "".join(re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL))
    return "'sha256-" + base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode() + "'"


def page_headers(text: str) -> dict[str, str]:
    """The page's headers: only its own script and style run; it cannot be framed, or send data elsewhere."""
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
        router: The application's router.
        status: Returns the run's status; called for each request for metrics.
    """
    html = files("lightning_bytescheduler.coordinator").joinpath("page.html").read_text(encoding="utf-8")
    headers = page_headers(html)

    async def page(_: web.Request) -> web.Response:
        return web.Response(text=html, content_type="text/html", headers=headers)

    async def metrics(_: web.Request) -> web.Response:
        headers = {"Cache-Control": "no-store", "Content-Type": CONTENT_TYPE}
        return web.Response(body=metrics_text(status()), headers=headers)

    router.add_get(PAGE_PATH, page)
    router.add_get(METRICS_PATH, metrics)
