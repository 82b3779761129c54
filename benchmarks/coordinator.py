"""What a coordinator's work costs beside its traffic: updates of a large model, and reports of a thousand workers.

``updates``: workers send an update each and get the mean, through a coordinator and through the same HTTP server with
no work behind it (what comes in is dropped, what goes out is there already), in turn; both in a process of their own. A
ratio of 1 would mean that summing, encoding, hashing and stepping are free. Only times of one run compare. The mean of
one update is that update, so two workers and more show what sums cost; with ``--spread`` they cannot be formed in
doubles alone, as the updates' magnitudes differ too much.

``reports``: simulated workers, each with a WebSocket, report their steps at fixed times, as frames that wait for the
answer to the last one, see ``report_workers.py``; the coordinator has one core and the workers another.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import torch
import xxhash
from aiohttp import web
from safetensors.torch import save

from benchmarks.delayed_link import processor_seconds
from benchmarks.ranks import REPOSITORY
from benchmarks.record import Record, Results, record
from benchmarks.report_workers import ReportWorker, report
from lightning_bytescheduler.compression.wire_format import WIRE_DTYPES, WireDtype, WireFormat
from lightning_bytescheduler.coordinator.run import CoordinatorOptions
from lightning_bytescheduler.coordinator.service import CoordinatorServer, collected_rarely
from lightning_bytescheduler.coordinator.update_sum import view_of
from lightning_bytescheduler.diloco import coordinator_protocol as protocol
from lightning_bytescheduler.diloco import messages
from lightning_bytescheduler.diloco.coordinator_protocol import run_options
from lightning_bytescheduler.diloco.round_end import RoundOptions

__all__ = ["add_options", "measure"]

_CHUNK = 1 << 20
_MADE = 9  # first rounds, which make the memory: means of 8 are kept
_PARAMETERS_IN_TENSOR = 1 << 22

Model = tuple[protocol.ModelParameter, ...]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("what", choices=("updates", "reports"))
    parser.add_argument("--workers", type=int, nargs="+", help="default: 2 for updates, 1000 for reports")
    parser.add_argument("--parameters", type=int, default=100_000_000, help="of updates (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of updates (default: %(default)s)")
    parser.add_argument("--pause", type=float, default=0.4, help="seconds after each round, for the outer step")
    parser.add_argument("--wire-dtypes", nargs="+", choices=WIRE_DTYPES, default=["fp32", "bf16", "int8"])
    parser.add_argument("--spread", action="store_true", help="magnitudes that differ by 2^40, log-normal")
    parser.add_argument("--rate", type=float, default=10.0, help="steps a second of reports (default: %(default)g)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of reports (default: %(default)g)")


def measure(options: argparse.Namespace) -> Iterator[Results]:
    """Measure what was asked for."""
    if options.what == "reports":
        for workers in options.workers or [1000]:
            yield f"{options.rate:g} steps a second of each worker", [reports(workers, options)]
        return
    for dtype, workers in itertools.product(options.wire_dtypes, options.workers or [2]):
        yield f"{options.parameters:,} parameters up and down", [updates(dtype, workers, options)]


# ── Servers ───────────────────────────────────────────────────────────


def serve(
    *,
    workers: int,
    wire_dtype: WireDtype = "fp32",
    inner_steps: int | None = None,
    samples_per_round: int | None = None,
    payload_bytes: int = 1,
    core: int | None = None,
) -> None:
    """Run a coordinator and a server without work, until stdin is closed."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    run = run_options(wire_dtype=wire_dtype, inner_steps=inner_steps, samples_per_round=samples_per_round)
    rounds = RoundOptions(start_workers=workers, quorum=0.0, grace=600.0, silent_after=600.0)
    with CoordinatorServer(CoordinatorOptions(run=run, rounds=rounds, lease=600.0)) as server, collected_rarely():
        # On the same event loop.
        idle = asyncio.run_coroutine_threadsafe(_idle(memoryview(bytearray(payload_bytes))), server._loop).result(10)
        print(json.dumps({"coordinator": server.url, "idle": idle}), flush=True)
        sys.stdin.read()


async def _idle(payload: memoryview) -> str:
    """Start the same HTTP server, whose requests have nothing to do; returns where it is."""

    async def put(request: web.Request) -> web.Response:
        async for _ in request.content.iter_any():
            pass
        return web.Response(text="")

    async def get(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = len(payload)
        await response.prepare(request)
        for start in range(0, len(payload), 1 << 18):
            await response.write(payload[start : start + (1 << 18)])
        await response.write_eof()
        return response

    application = web.Application()
    application.router.add_put("/", put)
    application.router.add_get("/", get)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}/"


class _Server:
    """A process that serves."""

    def __init__(self, **options: Any) -> None:
        command = [sys.executable, "-m", "benchmarks.coordinator", json.dumps(options)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=REPOSITORY, **pipes)
        assert self.process.stdout is not None
        self.urls: dict[str, str] = json.loads(self.process.stdout.readline())

    @property
    def peak_bytes(self) -> int:
        """The most memory that it has had."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process as process:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)


# ── Updates ───────────────────────────────────────────────────────────


def updates(wire_dtype: WireDtype, workers: int, options: argparse.Namespace) -> Record:
    """Measure a push and a pull, with and without work."""
    payload_bytes = WireFormat(dtype=wire_dtype).payload_bytes(options.parameters)
    asked = {"wire_dtype": wire_dtype, "inner_steps": 1, "workers": workers, "payload_bytes": payload_bytes}
    with _Server(**asked) as server:
        values = torch.randn(options.parameters)
        if options.spread:
            values.mul_(torch.randn(options.parameters).mul_(4.0).exp2_())
        body = view_of(WireFormat(dtype=wire_dtype).encode(values))
        del values
        times = asyncio.run(_rounds(server.urls, body, workers, options))
        peak = server.peak_bytes
    ratio = statistics.median(times["idle server [s]"]) / statistics.median(times["coordinator [s]"])
    setting = {**asked, "parameters": options.parameters, "rounds": options.rounds, "spread": options.spread}
    numbers: dict[str, Any] = {**times, "peak [GB]": peak / 1e9}
    return record("coordinator", f"{wire_dtype}, {workers} workers", setting, numbers, {"idle / coordinator": ratio})


async def _rounds(
    urls: dict[str, str], body: memoryview, count: int, options: argparse.Namespace
) -> dict[str, list[float]]:
    model, url = _model(options.parameters), urls["coordinator"]
    workers = [ReportWorker(url, "w0", model)]
    workers[0].provide(_first_weights(model))
    workers += [ReportWorker(url, f"w{n}", model) for n in range(1, count)]
    for worker in workers:
        worker.say(messages.JoinRounds(worker=worker.name))
    digest = xxhash.xxh3_128_hexdigest(body)
    times: dict[str, list[float]] = {
        f"{name} [s]": [] for name in ("idle server", "coordinator", "push", "merge", "pull")
    }
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600), read_bufsize=_CHUNK) as http:
        for _ in range(options.rounds + _MADE):
            for worker in workers:
                number = worker.wait_for(messages.StartRound).round
                worker.say(messages.RoundStarted(worker=worker.name, round=number))
            began = time.perf_counter()
            for _ in workers:
                await _push(http, urls["idle"], body, {})
                await _pull(http, urls["idle"], {})
            idle = time.perf_counter() - began
            path = url + protocol.update_path(number, 0)
            counts = {protocol.DIGEST_HEADER: digest, protocol.SAMPLES_HEADER: "100", protocol.STEPS_HEADER: "1"}
            began = time.perf_counter()
            for worker in workers:
                await _push(http, path, body, {**worker.headers, **counts})
            pushed = time.perf_counter()
            for worker in workers:
                worker.wait_for(messages.RoundEnded)
            ended = time.perf_counter()
            for worker in workers:
                await _pull(http, path, worker.headers)
            done = time.perf_counter()
            found = (idle, done - began, pushed - began, ended - pushed, done - ended)
            for some, seconds in zip(times.values(), found, strict=True):
                some.append(seconds)
            await asyncio.sleep(options.pause)
    return {name: found[_MADE:] for name, found in times.items()}


async def _push(http: aiohttp.ClientSession, url: str, body: memoryview, headers: dict[str, str]) -> None:
    async with http.put(url, data=_chunks(body), headers={**headers, "Content-Length": str(len(body))}) as done:
        assert done.status == 200, await done.text()


async def _pull(http: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> None:
    async with http.get(url, headers=headers) as response:
        assert response.status == 200, await response.text()
        async for _ in response.content.iter_any():
            pass


async def _chunks(body: memoryview) -> AsyncIterator[memoryview]:
    for start in range(0, len(body), _CHUNK):
        yield body[start : start + _CHUNK]


def _model(parameters: int) -> Model:
    sizes = [_PARAMETERS_IN_TENSOR] * (parameters // _PARAMETERS_IN_TENSOR)
    if parameters % _PARAMETERS_IN_TENSOR:
        sizes.append(parameters % _PARAMETERS_IN_TENSOR)
    return tuple(
        protocol.ModelParameter(name=f"layer{n}.weight", shape=(size,), dtype="float32") for n, size in enumerate(sizes)
    )


def _first_weights(model: Model) -> bytes:
    return save({f"weights.{one.name}": torch.zeros(one.shape) for one in model})


# ── Reports ───────────────────────────────────────────────────────────


def reports(workers: int, options: argparse.Namespace) -> Record:
    """Measure how long workers wait for answers to their reports."""
    asked = {"workers": workers, "samples_per_round": 10**9, "core": 0}
    with _Server(**asked) as server:
        os.sched_setaffinity(0, {1})
        url, model = server.urls["coordinator"], _model(1000)
        simulated = [ReportWorker(url, "w0", model)]
        simulated[0].provide(_first_weights(model))
        simulated += [ReportWorker(url, f"w{n}", model) for n in range(1, workers)]
        for worker in simulated:
            worker.say(messages.JoinRounds(worker=worker.name))
        rounds = [worker.wait_for(messages.StartRound).round for worker in simulated]
        used, own, began = processor_seconds(server.process.pid), time.process_time(), time.perf_counter()
        latencies, frames = report(simulated, rounds[0], rate=options.rate, seconds=options.seconds)
        wall = time.perf_counter() - began
        used, own = processor_seconds(server.process.pid) - used, time.process_time() - own
    latencies.sort()
    values = {
        "reports/s": len(latencies) / options.seconds,
        "frames/s": frames / options.seconds,
        "median [ms]": 1e3 * latencies[len(latencies) // 2],
        "p99 [ms]": 1e3 * latencies[len(latencies) * 99 // 100],
        "most [ms]": 1e3 * latencies[-1],
        "coordinator's core": used / wall,
        "workers' core": own / wall,
    }
    setting = {**asked, "rate": options.rate, "seconds": options.seconds}
    return record("coordinator", f"reports of {workers:,} workers", setting, values)


if __name__ == "__main__":
    serve(**json.loads(sys.argv[1]))
