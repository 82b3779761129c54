"""What a coordinator's work costs beside its traffic: updates of a large model, and reports of a thousand workers.

Updates: workers send an update each and get the mean, through a coordinator and through the same HTTP server with no
work behind it (what comes in is dropped, what goes out is there already), in turn; both in a process of their own. A
ratio of 1 would mean that summing, encoding, hashing and stepping are free. Only times of one run compare. The mean of
one update is that update, so two workers and more show what sums cost; with ``--spread 1`` they cannot be formed in
doubles alone, as the updates' magnitudes differ too much.

Reports: simulated workers, each with a WebSocket, report their steps at fixed times, as frames that wait for the answer
to the last one, see ``report_workers.py``; the coordinator has one core and the workers another.

    python -m benchmarks.coordinator_throughput updates --parameters 100_000_000
    python -m benchmarks.coordinator_throughput reports --workers 1000
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
from collections.abc import AsyncIterator, Iterable
from typing import Any

import aiohttp
import torch
import xxhash
from aiohttp import web

from benchmarks.report_workers import ReportWorker, report
from lightning_bytescheduler.__about__ import __version__
from lightning_bytescheduler.compression.wire_format import WIRE_DTYPES, WireDtype, WireFormat
from lightning_bytescheduler.coordinator.run import CoordinatorOptions
from lightning_bytescheduler.coordinator.service import CoordinatorServer, collected_rarely
from lightning_bytescheduler.coordinator.update_sum import view_of
from lightning_bytescheduler.diloco import coordinator_protocol as protocol
from lightning_bytescheduler.diloco import messages
from lightning_bytescheduler.diloco.coordinator_protocol import run_options
from lightning_bytescheduler.diloco.round_end import RoundOptions

_CHUNK = 1 << 20
_MADE = 9  # first rounds, which make the memory: means of 8 are kept
_PARAMETERS_IN_TENSOR = 1 << 22


# ── Servers ───────────────────────────────────────────────────────────


def serve(options: argparse.Namespace) -> None:
    """Run what a client process measures, until stdin is closed."""
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    torch.set_num_threads(1)
    run = run_options(
        wire_dtype=options.wire_dtype, inner_steps=options.inner_steps, samples_per_round=options.samples_per_round
    )
    rounds = RoundOptions(start_workers=options.workers, quorum=0.0, grace=600.0, silent_after=600.0)
    own = CoordinatorOptions(run=run, rounds=rounds, lease=600.0)
    with CoordinatorServer(own) as server, collected_rarely():
        idle = _IdleServer(options.payload_bytes)
        print(json.dumps({"coordinator": server.url, "idle": idle.start(server)}), flush=True)
        sys.stdin.read()
        usage = time.process_time()
        print(json.dumps({"cpu_seconds": usage}), file=sys.stderr)


class _IdleServer:
    """The same HTTP server on the same event loop, whose requests have nothing to do."""

    def __init__(self, payload_bytes: int) -> None:
        self._payload = memoryview(bytearray(payload_bytes))
        self._url = ""

    def start(self, server: CoordinatorServer) -> str:
        asyncio.run_coroutine_threadsafe(self._start(), server._loop).result(10)
        return self._url

    async def _start(self) -> None:
        application = web.Application()
        application.router.add_put("/", self._put)
        application.router.add_get("/", self._get)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self._url = f"http://127.0.0.1:{runner.addresses[0][1]}/"

    async def _put(self, request: web.Request) -> web.Response:
        async for _ in request.content.iter_any():
            pass
        return web.Response(text="")

    async def _get(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = len(self._payload)
        await response.prepare(request)
        for start in range(0, len(self._payload), 1 << 18):
            await response.write(self._payload[start : start + (1 << 18)])
        await response.write_eof()
        return response


class _Server:
    """A server process."""

    def __init__(self, **options: object) -> None:
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
        command = [sys.executable, "-m", "benchmarks.coordinator_throughput", "serve", *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.urls = json.loads(self._process.stdout.readline())

    @property
    def cpu_seconds(self) -> float:
        """That it has computed for."""
        with open(f"/proc/{self._process.pid}/stat", encoding="ascii") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def peak_bytes(self) -> int:
        with open(f"/proc/{self._process.pid}/status", encoding="ascii") as file:
            line = next(line for line in file if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


# ── A worker ───────────────────────────────────────────────────────────


class _Worker:
    def __init__(self, http: aiohttp.ClientSession, url: str, name: str, model: Any) -> None:
        self._http = http
        self._url = url
        self._name = name
        self._model = model
        self._number = 0
        self._heard = 0
        self.welcome: protocol.Welcome
        self.inbox: list[Any] = []

    @property
    def name(self) -> str:
        return self.welcome.worker

    @property
    def headers(self) -> dict[str, str]:
        return {protocol.SESSION_HEADER: self.welcome.session}

    async def join(self) -> None:
        self.socket = await self._http.ws_connect(self._url + protocol.WORKER_PATH)
        hello = protocol.Hello(protocol=protocol.PROTOCOL, package=__version__, worker=self._name, model=self._model)
        await self.socket.send_str(protocol.encode_frame(hello))
        answer = protocol.decode_frame(await self.socket.receive_str(), sender="the coordinator")
        assert isinstance(answer, protocol.Welcome), answer
        self.welcome = answer

    async def send(self, *said: Any) -> int:
        self._number += 1
        frame = protocol.Batch(number=self._number, heard=self._heard, messages=said)
        await self.socket.send_str(protocol.encode_frame(frame))
        return self._number

    async def receive(self) -> protocol.Batch:
        frame = protocol.decode_frame(await self.socket.receive_str(), sender="the coordinator")
        assert isinstance(frame, protocol.Batch)
        self._heard = frame.number
        return frame

    async def wait_for(self, kind: type) -> Any:
        while True:
            while self.inbox:
                message = self.inbox.pop(0)
                if isinstance(message, kind):
                    return message
            self.inbox += (await self.receive()).messages


def _model(parameters: int) -> tuple[protocol.ModelParameter, ...]:
    sizes = [_PARAMETERS_IN_TENSOR] * (parameters // _PARAMETERS_IN_TENSOR)
    if parameters % _PARAMETERS_IN_TENSOR:
        sizes.append(parameters % _PARAMETERS_IN_TENSOR)
    return tuple(
        protocol.ModelParameter(name=f"layer{n}.weight", shape=(size,), dtype="float32") for n, size in enumerate(sizes)
    )


# ── Updates ───────────────────────────────────────────────────────────


def updates(options: argparse.Namespace) -> dict[str, Any]:
    """Measure a push and a pull, with and without work."""
    found: dict[str, Any] = {}
    asked = [wire_dtype for wire_dtype in WIRE_DTYPES if wire_dtype in options.wire_dtypes.split(",")]
    workers = [int(count) for count in options.workers.split(",")]
    for wire_dtype, options.workers in itertools.product(asked, workers):
        payload_bytes = WireFormat(dtype=wire_dtype).payload_bytes(options.parameters)
        server = _Server(wire_dtype=wire_dtype, inner_steps=1, workers=options.workers, payload_bytes=payload_bytes)
        try:
            times = asyncio.run(_updates(server.urls, options, wire_dtype))
            peak = server.peak_bytes
        finally:
            server.close()
        ratio = statistics.median(times["idle"]) / statistics.median(times["coordinator"])
        print(
            f"{wire_dtype}, {options.workers} workers: "
            f"{2 * payload_bytes / 1e6:.0f} MB up and down for each: "
            f"idle server {_shown(times['idle'])}, "
            f"coordinator {_shown(times['coordinator'])} "
            f"(push {_shown(times['push'])}, merge {_shown(times['merge'])}, "
            f"pull {_shown(times['pull'])}): {ratio:.2f}x; peak {peak / 1e9:.2f} GB",
            flush=True,
        )
        found[f"{wire_dtype}, {options.workers} workers"] = {
            "ratio": ratio,
            "peak_bytes": peak,
            **times,
        }
    return found


def _shown(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} s"


async def _updates(urls: dict[str, str], options: argparse.Namespace, wire_dtype: WireDtype) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in ("idle", "coordinator", "push", "merge", "pull")}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600), read_bufsize=_CHUNK) as http:
        url = urls["coordinator"]
        workers = [_Worker(http, url, f"w{n}", _model(options.parameters)) for n in range(options.workers)]
        for worker in workers:
            await worker.join()
            if worker is workers[0]:
                await _provide(http, url, worker)
        values = torch.randn(options.parameters)
        if options.spread:
            values.mul_(torch.randn(options.parameters).mul_(4.0).exp2_())
        body = view_of(WireFormat(dtype=wire_dtype).encode(values))
        del values
        digest = xxhash.xxh3_128_hexdigest(body)
        for worker in workers:
            await worker.send(messages.JoinRounds(worker=worker.name))
        for _ in range(options.rounds + _MADE):
            for worker in workers:
                started = await worker.wait_for(messages.StartRound)
                await worker.send(messages.RoundStarted(worker=worker.name, round=started.round))
            times["idle"].append(sum([await _through(http, urls["idle"], body) for _ in workers]))
            path = url + protocol.update_path(started.round, 0)
            began = time.perf_counter()
            for worker in workers:
                await _push(http, path, worker, body, digest)
            pushed = time.perf_counter()
            for worker in workers:
                await worker.wait_for(messages.RoundEnded)
            ended = time.perf_counter()
            for worker in workers:
                await _pull(http, path, worker)
            done_at = time.perf_counter()
            times["coordinator"].append(done_at - began)
            times["push"].append(pushed - began)
            times["merge"].append(ended - pushed)
            times["pull"].append(done_at - ended)
            await asyncio.sleep(options.pause)
    return {name: found[_MADE:] for name, found in times.items()}


async def _push(http: aiohttp.ClientSession, path: str, worker: _Worker, body: memoryview, digest: str) -> None:
    headers = {
        **worker.headers,
        protocol.DIGEST_HEADER: digest,
        protocol.SAMPLES_HEADER: "100",
        protocol.STEPS_HEADER: "1",
        "Content-Length": str(len(body)),
    }
    async with http.put(path, data=_chunks(body), headers=headers) as done:
        assert done.status == 200, await done.text()


async def _pull(http: aiohttp.ClientSession, path: str, worker: _Worker) -> None:
    async with http.get(path, headers=worker.headers) as response:
        assert response.status == 200, await response.text()
        async for _ in response.content.iter_any():
            pass


async def _chunks(body: memoryview) -> AsyncIterator[memoryview]:
    for start in range(0, len(body), _CHUNK):
        yield body[start : start + _CHUNK]


async def _through(http: aiohttp.ClientSession, url: str, body: memoryview) -> float:
    began = time.perf_counter()
    async with http.put(url, data=_chunks(body), headers={"Content-Length": str(len(body))}) as done:
        await done.read()
    async with http.get(url) as response:
        async for _ in response.content.iter_any():
            pass
    return time.perf_counter() - began


def _first_weights(model: Iterable[protocol.ModelParameter]) -> bytes:
    from safetensors.torch import save

    return save({f"weights.{one.name}": torch.zeros(one.shape) for one in model})


async def _provide(http: aiohttp.ClientSession, url: str, worker: _Worker) -> None:
    body = _first_weights(worker._model)
    async with http.put(url + protocol.STATE_PATH, data=body, headers=worker.headers) as response:
        assert response.status == 200, await response.text()


# ── Reports ───────────────────────────────────────────────────────────


def reports(options: argparse.Namespace) -> dict[str, float]:
    """Measure how long workers wait for answers to their reports."""
    server = _Server(workers=options.workers, samples_per_round=10**9, payload_bytes=1, core=0)
    os.sched_setaffinity(0, {1})
    url, model = server.urls["coordinator"], _model(1000)
    try:
        workers = [ReportWorker(url, "w0", model)]
        workers[0].provide(_first_weights(model))
        workers += [ReportWorker(url, f"w{n}", model) for n in range(1, options.workers)]
        for worker in workers:
            worker.say(messages.JoinRounds(worker=worker.name))
        rounds = [worker.await_round() for worker in workers]
        used, own, began = server.cpu_seconds, time.process_time(), time.perf_counter()
        latencies, frames = report(workers, rounds[0], rate=options.rate, seconds=options.seconds)
        wall = time.perf_counter() - began
        used, own = server.cpu_seconds - used, time.process_time() - own
    finally:
        server.close()
    latencies.sort()
    found = {
        "reports_per_second": len(latencies) / options.seconds,
        "frames_per_second": frames / options.seconds,
        "p50": latencies[len(latencies) // 2],
        "p99": latencies[len(latencies) * 99 // 100],
        "most": latencies[-1],
        "server_core": used / wall,
        "workers_core": own / wall,
    }
    print(
        f"{options.workers} workers, {options.rate:g} steps a second each: {found['reports_per_second']:.0f} reports a "
        f"second in {found['frames_per_second']:.0f} frames; answers take {found['p50'] * 1e3:.1f} ms (median), "
        f"{found['p99'] * 1e3:.1f} ms (p99), {found['most'] * 1e3:.1f} ms at most; busy: {found['server_core']:.0%} of "
        f"the coordinator's core, {found['workers_core']:.0%} of the workers'",
        flush=True,
    )
    return found


def main() -> None:
    """Read the arguments, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(required=True)
    one = actions.add_parser("updates")
    one.add_argument("--parameters", type=int, default=100_000_000)
    one.add_argument("--rounds", type=int, default=5)
    one.add_argument("--pause", type=float, default=0.4, help="seconds after each round, for the outer step")
    one.add_argument("--wire-dtypes", default="fp32,bf16,int8")
    one.add_argument("--workers", default="2", help="as many, or several numbers with commas")
    one.add_argument("--spread", type=int, default=0, help="1: magnitudes that differ by 2^40, log-normal")
    one.set_defaults(run=updates)
    other = actions.add_parser("reports")
    other.add_argument("--workers", type=int, default=1000)
    other.add_argument("--rate", type=float, default=10.0)
    other.add_argument("--seconds", type=float, default=20.0)
    other.set_defaults(run=reports)
    served = actions.add_parser("serve")
    served.add_argument("--wire-dtype", default="fp32")
    served.add_argument("--workers", type=int, default=1)
    served.add_argument("--inner-steps", type=int)
    served.add_argument("--samples-per-round", type=int)
    served.add_argument("--payload-bytes", type=int, default=1)
    served.add_argument("--core", type=int)
    served.set_defaults(run=serve)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
