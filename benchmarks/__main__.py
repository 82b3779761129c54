"""Benchmarks: ``python -m benchmarks NAME``; ``NAME --help`` says what it measures. Without a name, all are listed.

Each prints tables and writes what it has measured, as lines of JSON with the same keys (see ``record.py``). A benchmark
is a module with ``add_options`` and ``measure``, which yields each table once it is complete, and raises
``MeasurementFailed`` or ``LinkError`` where it cannot go on. A module with ``panels`` also draws a picture.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.picture import draw
from benchmarks.ranks import MeasurementFailed
from benchmarks.record import Record, append, show
from benchmarks.shaped_link import LinkError

BENCHMARKS = {
    "networks": "four networks on shaped links, beside DDP with several bucket sizes (root; an hour)",
    "never_slower": "whether it is slower than ddp where there is nothing to gain (20 minutes)",
    "parameter_servers": "push and pull on spare machines, beside all-reduces (root; 3 minutes)",
    "scheduler_overhead": "10,000 tasks on a transport that does nothing; memory that a step leaves behind (seconds)",
    "codecs": "speed of compressors on one core, beside copying memory (half a minute)",
    "gradient_compression": "losses and bytes of a small GPT, exact and compressed (minutes)",
    "unequal_machines": "balanced batches against equal ones (2 minutes)",
    "diloco": "DiLoCo against strategies that communicate in every step (root; 5 to 20 minutes a figure)",
    "churn": "goodput of workers with a coordinator, of which one fails now and then (14 minutes)",
    "coordinator": "a large model through a coordinator; reports of a thousand workers (2 minutes)",
    "slices": "reading slices, beside litdata and MosaicML streaming where they are installed (minutes)",
    "gpu": "steps on one GPU, two ranks over gloo and one on NCCL, beside ddp (7 minutes)",
}
"""Modules of this package, and what each measures."""

_OUT = Path("benchmarks/results/latest.jsonl")
_WIDTH = 160  # of tables in files


def _listed() -> str:
    width = max(map(len, BENCHMARKS))
    lines = (f"  {name:{width}}  {what}" for name, what in BENCHMARKS.items())
    return "\n".join([(__doc__ or "").strip(), "", *lines])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for; returns the exit code."""
    name, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    if name not in BENCHMARKS:
        console.print(_listed(), markup=False, highlight=False)
        if name in ("-h", "--help"):
            return 0
        Console(stderr=True).print(f"There is no benchmark '{name}'.")
        return 2
    benchmark = importlib.import_module(f"benchmarks.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=benchmark.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    benchmark.add_options(parser)
    own_file = getattr(benchmark, "OUT", _OUT)
    parser.add_argument("--out", type=Path, default=own_file, help="JSON lines are added to it (default: %(default)s)")
    pictured = hasattr(benchmark, "panels")
    if pictured:
        parser.add_argument("--png", type=Path, metavar="FILE", help="a picture of what was measured")
    options = parser.parse_args(rest)
    records: list[Record] = []
    try:
        for title, found in benchmark.measure(options):
            show(console, title, found)
            append(options.out, found)  # as we go: a later failure loses nothing
            records += found
    except (MeasurementFailed, LinkError) as error:
        console.print(f"[bold]Stopped:[/bold] {error}")
        return 1
    panels = benchmark.panels(records) if pictured and options.png else []
    if panels:
        draw(options.png, panels)
    console.print(f"Written: {options.out}" + (f" and {options.png}" if panels else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
