"""Outer synchronisations with sizes that follow the link, against fixed ones: ``python -m benchmarks.outer_sizes``.

Four hosts exchange pseudo-gradients of ten million parameters over a shaped link (root), a synchronisation with each
pair of sizes in turn, so that whatever else the machine does falls on all of them. The rate is that of each host's
link, both ways.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.shaped_link import ShapedLink
from lightning_bytescheduler.compression.wire_format import WIRE_DTYPES, WireFormat
from lightning_bytescheduler.diloco.pseudo_gradient_exchange import PseudoGradientExchange

_BEFORE = (1_000_000, 2_000_000)  # what was sent at once, and what was in flight, on any link
_HOSTS = 4
_TIMEOUT_S = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure on links of several rates, and print seconds and ratios."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outer_sizes", description=__doc__)
    parser.add_argument("--mbit", type=float, nargs="+", default=[50.0, 500.0], help="rates of the link")
    parser.add_argument("--wire", nargs="+", choices=WIRE_DTYPES, default=["fp32"], help="what travels")
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=3, help="synchronisations with each pair of sizes")
    parser.add_argument("--sizes", type=int, nargs="*", default=[], help="further partitions, with twice the credit")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank:
        _exchange(options)
        return 0
    own = ["--rank", *(sys.argv[1:] if arguments is None else arguments)]
    for mbit, wire in itertools.product(options.mbit, options.wire):
        with ShapedLink(hosts=_HOSTS, mbit=mbit) as link:
            command = [sys.executable, "-m", "benchmarks.outer_sizes", *own, "--wire", wire]
            env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["src", "."])}
            ranks = [
                link.popen(host, command, env=env, stdout=subprocess.PIPE if host == 0 else None)
                for host in range(_HOSTS)
            ]
            output = ranks[0].communicate()[0].decode()
            if any(rank.wait() for rank in ranks):
                raise RuntimeError(f"A rank failed. The first one said: {output}")
        found = json.loads(output.splitlines()[-1])
        before = found[0]["seconds"]
        for row in found:
            print(
                f"{mbit:g} Mbit/s {wire}: {row['name']:>9} {row['partition']:>9,} {row['credit']:>10,} "
                f"{row['seconds']:7.3f} s, {row['seconds'] / before:.3f} of before"
            )
    return 0


def _exchange(options: argparse.Namespace) -> None:
    """One rank's part; the first one prints what it has seen."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = timedelta(seconds=_TIMEOUT_S)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, rank == 0, limit)
    wire = WireFormat(dtype=options.wire[-1])
    pseudo_gradient = torch.randn(options.parameters, generator=torch.Generator().manual_seed(rank))
    pairs = [("before", _BEFORE), ("default", (None, None)), *((f"{n}", (n, 2 * n)) for n in options.sizes)]
    with contextlib.ExitStack() as stack:
        ends = {}
        for name, (partition_size, credit) in pairs:
            group: Any = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, limit)
            end = ends[name] = PseudoGradientExchange(
                group, wire=wire, partition_size=partition_size, credit=credit, on_error=lambda error: error
            )
            stack.callback(end.stop, 5.0)
            link = end.follow_link(options.parameters, timeout=_TIMEOUT_S)
            if link is not None and rank == 0:
                print(link, file=sys.stderr)
        seconds: dict[str, list[float]] = {name: [] for name in ends}
        for repeat in range(options.repeats + 1):
            for name, end in ends.items():
                token = torch.zeros(1)
                group.allreduce([token]).wait()  # all begin together
                began = time.perf_counter()
                end.start("all", pseudo_gradient, weight=1, on_end=lambda error: None).wait(_TIMEOUT_S)
                if repeat:
                    seconds[name].append(time.perf_counter() - began)
        group.allreduce([token]).wait()
        if rank == 0:
            rows = [
                {"name": name, "partition": end.sizes[0], "credit": end.sizes[1], "seconds": median(seconds[name])}
                for name, end in ends.items()
            ]
            print(json.dumps(rows))


if __name__ == "__main__":
    sys.exit(main())
