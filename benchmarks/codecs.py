"""How fast compressors are on one core, beside copying memory.

Each compresses a gradient with the very different magnitudes that training makes, part by part as partitions are sent,
and reads it again. Speeds are MB of fp32 a second: the bytes to be compressed over the time taken. With error feedback,
the residual is computed and kept too. For an exact mean, forming and encoding it are timed, and decoding and adding it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.record import Record, Results, record
from lightning_bytescheduler.compression import WireFormat, make_compressor
from lightning_bytescheduler.compression.wire_format import WIRE_DTYPES
from lightning_bytescheduler.diloco.weighted_mean import WeightedMean

SPECS = (*("bf16", "fp16", "int8", "int8:nearest", "int4", "int4:nearest", "onebit", "topk:0.01", "topk:0.01:int4"),)
_ROUNDS = 5


def gradient(elements: int) -> torch.Tensor:
    """Normal numbers, whose scale changes every thousand elements, as it does between layers."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.exp(2 * torch.randn(-(-elements // 1000), 1, generator=generator))
    values = torch.randn(len(scales), 1000, generator=generator) * scales * 1e-3
    return values.reshape(-1)[:elements]


def best_seconds(work: Callable[[], object]) -> float:
    """The shortest of several times, after one that does not count; processor time if there is one thread."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    work()
    found = []
    for _ in range(_ROUNDS):
        began = clock()
        work()
        found.append(clock() - began)
    return min(found)


Speeds = dict[str, float]
"""MB of uncompressed data a second, and the factor by which bytes are reduced."""


def speed_of_copying(elements: int) -> Speeds:
    """The speed of copying memory, which no codec exceeds, as that of compressing and of reading."""
    whole = gradient(elements)
    target = torch.empty_like(whole)
    speed = whole.nbytes / 1e6 / best_seconds(lambda: target.copy_(whole))
    return {"compress": speed, "read": speed, "bytes by bytes sent": 1.0}


def speed_of(spec: str, elements: int, part: int) -> Speeds:
    """The speeds of a compressor."""
    whole = gradient(elements)
    parts, outs = whole.split(part), torch.empty_like(whole).split(part)
    sums = torch.zeros(elements).split(part)
    codec, residuals = make_compressor(spec), torch.zeros(elements).split(part)
    payloads: list[torch.Tensor] = []

    def compress() -> None:
        payloads[:] = [codec.compress(one, seed=n) for n, one in enumerate(parts)]

    def compress_fed() -> None:
        for n, (residual, one) in enumerate(zip(residuals, parts, strict=True)):
            codec.compress_with(residual, one, seed=n)

    def read() -> None:
        for payload, out in zip(payloads, outs, strict=True):
            codec.decompress(payload, part, out=out)

    def add() -> None:
        for payload, total in zip(payloads, sums, strict=True):
            codec.add(payload, total)

    size = whole.nbytes / 1e6
    speeds = {"compress": compress, "with error feedback": compress_fed, "read": read, "add up": add}
    found = {name: size / best_seconds(work) for name, work in speeds.items()}
    return {**found, "bytes by bytes sent": whole.nbytes / sum(payload.numel() for payload in payloads)}


def speed_of_mean(wire: WireFormat, elements: int) -> Speeds:
    """The speeds of forming and encoding the exact weighted mean, and of decoding and adding it."""
    whole = gradient(elements)
    sums, payload = WeightedMean(whole.numel()), wire.encode(whole)
    size = whole.nbytes / 1e6
    adding = best_seconds(lambda: sums.add(payload, wire, weight=1000))
    found = {"compress": size / best_seconds(lambda: sums.encode_mean(wire))}
    if wire.keeps_residuals:
        residual = torch.zeros_like(whole)
        found["with error feedback"] = size / best_seconds(lambda: sums.encode_mean(wire, residual=residual))
    return {**found, "read": size / adding, "bytes by bytes sent": whole.nbytes / len(payload)}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--elements", type=int, default=1 << 23, help="elements of the gradient (default: %(default)s)")
    parser.add_argument("--part", type=int, default=1 << 20, help="elements of a part (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: %(default)s)")


def measure(options: argparse.Namespace) -> Iterator[Results]:
    """Measure all codecs."""
    torch.set_num_threads(options.threads)
    elements = options.elements // options.part * options.part
    work: dict[str, Callable[[], Speeds]] = {"copying memory": partial(speed_of_copying, elements)}
    work |= {spec: partial(speed_of, spec, elements, options.part) for spec in SPECS}
    work |= {f"exact mean, {dtype}": partial(speed_of_mean, WireFormat(dtype=dtype), elements) for dtype in WIRE_DTYPES}
    console = Console(stderr=True)
    found = {what: one() for what, one in track(work.items(), "codecs", transient=True, console=console)}
    setting = {"elements": elements, "part": options.part, "threads": options.threads}
    copying = found["copying memory"]["compress"]
    records: list[Record] = []
    for what, speeds in found.items():
        ratios = {"copying / compress": copying / speeds["compress"]}
        records.append(record("codecs", what, setting, speeds, ratios))
    yield "MB of fp32 a second", records
