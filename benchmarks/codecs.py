"""How fast compressors are on one core, beside copying memory: ``python -m benchmarks.codecs``.

Each compresses a gradient as training makes them (of very different magnitudes), part by part, as partitions are sent,
and reads it again. Speeds are of fp32: bytes of what is compressed by the time that takes. With error feedback, what is
not sent is worked out and kept, too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lightning_bytescheduler.compression import WireFormat, make_compressor
from lightning_bytescheduler.compression.wire_format import WIRE_DTYPES
from lightning_bytescheduler.diloco.weighted_mean import WeightedMean

SPECS = (*("bf16", "fp16", "int8", "int8:nearest", "int4", "int4:nearest", "onebit", "topk:0.01", "topk:0.01:int4"),)
_ROUNDS = 5


def gradient(elements: int) -> torch.Tensor:
    """Normal numbers, whose scale differs from thousand to thousand as it does from layer to layer."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.exp(2 * torch.randn(-(-elements // 1000), 1, generator=generator))
    values = torch.randn(len(scales), 1000, generator=generator) * scales * 1e-3
    return values.reshape(-1)[:elements]


def best_seconds(work: Callable[[], object]) -> float:
    """Of several times, after one that does not count; of one thread its time on a processor, whatever else runs."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    work()
    found = []
    for _ in range(_ROUNDS):
        began = clock()
        work()
        found.append(clock() - began)
    return min(found)


@dataclass(frozen=True)
class Speed:
    """In MB of what is compressed, a second."""

    name: str
    compress: float
    read: float
    add: float | None
    ratio: float  # bytes of what is compressed, by bytes sent
    with_feedback: float | None = None


def speed_of_copying(elements: int) -> Speed:
    whole = gradient(elements)
    target = torch.empty_like(whole)
    speed = whole.nbytes / 1e6 / best_seconds(lambda: target.copy_(whole))
    return Speed("copying memory", speed, speed, None, 1.0)


def speed_of(spec: str, elements: int, part: int) -> Speed:
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
    feedback = size / best_seconds(compress_fed)
    compressing = best_seconds(compress)
    ratio = whole.nbytes / sum(payload.numel() for payload in payloads)
    return Speed(spec, size / compressing, size / best_seconds(read), size / best_seconds(add), ratio, feedback)


def speed_of_mean(wire: WireFormat, elements: int) -> Speed:
    """To form the exact weighted mean and to encode it, and to decode and to add to it."""
    whole = gradient(elements)
    sums, payload = WeightedMean(whole.numel()), wire.encode(whole)
    residual = torch.zeros_like(whole) if wire.keeps_residuals else None
    size = whole.nbytes / 1e6
    adding = best_seconds(lambda: sums.add(payload, wire, weight=1000))
    forming = best_seconds(lambda: sums.encode_mean(wire))
    fed = None if residual is None else size / best_seconds(lambda: sums.encode_mean(wire, residual=residual))
    return Speed(f"exact mean, {wire.dtype}", size / forming, size / adding, None, whole.nbytes / len(payload), fed)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codecs", description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 23, help="of the gradient (default: %(default)s)")
    parser.add_argument("--part", type=int, default=1 << 20, help="elements of a part (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    elements = options.elements // options.part * options.part
    work: list[Callable[[], Speed]] = [partial(speed_of, spec, elements, options.part) for spec in SPECS]
    work += [partial(speed_of_mean, WireFormat(dtype=dtype), elements) for dtype in WIRE_DTYPES]
    copying = speed_of_copying(elements)
    rows = [copying, *(measure() for measure in track(work, description="Codecs", transient=True))]
    table = Table(
        "Codec", "compress", "with error feedback", "read", "add up", "copying / compress", "bytes by bytes sent"
    )
    for row in rows:
        fed = "" if row.with_feedback is None else f"{row.with_feedback:,.0f}"
        ratio = f"{copying.compress / row.compress:.1f}"
        added = "" if row.add is None else f"{row.add:,.0f}"
        table.add_row(row.name, f"{row.compress:,.0f}", fed, f"{row.read:,.0f}", added, ratio, f"{row.ratio:.2f}")
    Console().print(table)
    Console().print("MB of fp32 a second. An exact mean is formed and encoded, or decoded and added to.")


if __name__ == "__main__":
    main()
