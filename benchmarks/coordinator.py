"""What a coordinator's work costs beside its traffic: updates of a large model, and reports of a thousand workers.

``updates``: each worker sends an update and gets the mean, in turn from a coordinator and from the same HTTP server
without work (it drops updates, and has its answer ready). Both are in one separate process. A ratio of 1 would mean
that summing, encoding, hashing and stepping are free. Compare only times of one run. The mean of one update is that
update, so two or more workers show what sums cost. With ``--spread`` the updates' magnitudes differ so much that sums
need more than doubles.

``reports``: simulated workers, each with a WebSocket, report their steps at fixed times, in frames that wait for the
answer to the one before, see ``report_workers.py``; the coordinator has one core and the workers another.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import torch
import xxhash
from aiohttp import web
from safetensors.torch import save

from benchmarks.delayed_link import processor_seconds
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

_CHUNK = 1 << 20
_MADE = 9  # first rounds, which allocate memory, as 8 means are kept
_PARAMETERS_IN_TENSOR = 1 << 22

Model = tuple[protocol.ModelParameter, ...]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("updates", "reports"))
    parser.add_argument("--workers", type=int, nargs="+", help="default: 2 for updates, 1000 for reports")
    parser.add_argument(
        "--parameters", type=int, default=100_000_000, help="size of the model for updates (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of updates (default: %(default)s)")
    parser.add_argument("--pause", type=float, default=0.4, help="seconds after each round, for the outer step")
    parser.add_argument("--wire-dtypes", nargs="+", choices=WIRE_DTYPES, default=["fp32", "bf16", "int8"])
    parser.add_argument("--spread", action="store_true", help="magnitudes that differ by 2^40, log-normal")
    parser.add_argument("--rate", type=float, default=10.0, help="steps a second of reports (default: %(default)g)")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of reports (default: %(default)g)")


def measure(options: argparse.Namespace) -> Iterator[Results]:
    if options.what == "reports":
        for workers in options.workers or [1000]:
            yield f"{options.rate:g} steps a second of each worker", [reports(workers, options)]
        return
    for dtype, workers in itertools.product(options.wire_dtypes, options.workers or [2]):
        yield f"{options.parameters:,} parameters up and down", [updates(dtype, workers, options)]


Options = dict[str, Any]


def _serve(pipe: Connection, options: Options, core: int | None, payload_bytes: int) -> None:
    """Run a coordinator and a server without work on the same event loop, until something comes through the pipe."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    rounds = RoundOptions(start_workers=options.pop("workers"), quorum=0.0, grace=600.0, silent_after=600.0)
    own = CoordinatorOptions(run=run_options(**options), rounds=rounds, lease=600.0)
    with CoordinatorServer(own) as server, collected_rarely():
        idle = asyncio.run_coroutine_threadsafe(_idle(memoryview(bytearray(payload_bytes))), server._loop).result(10)
        pipe.send((server.url, idle))
        with suppress(EOFError):
            pipe.recv()


async def _idle(payload: memoryview) -> str:
    """Start the same HTTP server, whose routes do no work; returns its URL."""

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


@contextmanager
def _served(options: Options, *, core: int | None = None, payload_bytes: int = 1) -> Iterator[tuple[int, str, str]]:
    """Serve in a separate process; yields its id, and the URLs of the coordinator and of the server without work."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, options, core, payload_bytes))
    process.start()
    theirs.close()
    try:
        url, idle = ours.recv()
        yield process.pid or 0, url, idle
    finally:
        ours.close()  # ends what the process waits for
        process.join(60)


def _peak_gb(pid: int) -> float:
    """The most memory that a process has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024 / 1e9


def updates(wire_dtype: WireDtype, workers: int, options: argparse.Namespace) -> Record:
    """Measure a push and a pull, with and without work."""
    payload_bytes = WireFormat(dtype=wire_dtype).payload_bytes(options.parameters)
    asked: Options = {"wire_dtype": wire_dtype, "inner_steps": 1, "workers": workers}
    with _served(asked, payload_bytes=payload_bytes) as (pid, url, idle):
        values = torch.randn(options.parameters)
        if options.spread:
            values.mul_(torch.randn(options.parameters).mul_(4.0).exp2_())
        body = view_of(WireFormat(dtype=wire_dtype).encode(values))
        del values
        times = asyncio.run(_rounds(url, idle, body, workers, options))
        peak = _peak_gb(pid)
    ratio = statistics.median(times["idle server [s]"]) / statistics.median(times["coordinator [s]"])
    setting = {**asked, "parameters": options.parameters, "rounds": options.rounds, "spread": options.spread}
    numbers: dict[str, Any] = {**times, "peak [GB]": peak}
    return record("coordinator", f"{wire_dtype}, {workers} workers", setting, numbers, {"idle / coordinator": ratio})


async def _rounds(
    url: str, idle: str, body: memoryview, count: int, options: argparse.Namespace
) -> dict[str, list[float]]:
    model = _model(options.parameters)
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
                await _push(http, idle, body, {})
                await _pull(http, idle, {})
            without = time.perf_counter() - began
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
            found = (without, done - began, pushed - began, ended - pushed, done - ended)
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


def reports(workers: int, options: argparse.Namespace) -> Record:
    """Measure how long workers wait for answers to their reports."""
    asked: Options = {"workers": workers, "samples_per_round": 10**9}
    with _served(asked, core=0) as (pid, url, _):
        os.sched_setaffinity(0, {1})
        model = _model(1000)
        simulated = [ReportWorker(url, "w0", model)]
        simulated[0].provide(_first_weights(model))
        simulated += [ReportWorker(url, f"w{n}", model) for n in range(1, workers)]
        for worker in simulated:
            worker.say(messages.JoinRounds(worker=worker.name))
        rounds = [worker.wait_for(messages.StartRound).round for worker in simulated]
        used, own, began = processor_seconds(pid), time.process_time(), time.perf_counter()
        latencies, frames = report(simulated, rounds[0], rate=options.rate, seconds=options.seconds)
        wall = time.perf_counter() - began
        used, own = processor_seconds(pid) - used, time.process_time() - own
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
