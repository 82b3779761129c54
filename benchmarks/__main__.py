"""Benchmarks: ``python -m benchmarks NAME``; ``NAME --help`` says what it measures. Without a name, all are listed.

Each prints tables and writes what it has measured, as lines of JSON with the same keys (see ``record.py``). A benchmark
is a module with ``add_options`` and ``measure``, which yields each table once it is complete, and raises
``MeasurementFailed`` or ``LinkError`` where it cannot go on. A module with ``panels`` also draws a picture.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.picture import draw
from benchmarks.ranks import MeasurementFailed
from benchmarks.record import Record, append, show
from benchmarks.shaped_link import LinkError

BENCHMARKS = [
    *("networks", "never_slower", "parameter_servers", "scheduler_overhead", "codecs", "gradient_compression"),
    *("unequal_machines", "diloco", "churn", "coordinator", "slices", "gpu"),
]
"""Modules of this package; the first line of each says what it measures."""

_OUT = Path("benchmarks/results/latest.jsonl")
_WIDTH = 160  # of tables in files


def _listed() -> str:
    width = max(map(len, BENCHMARKS))
    lines = (f"  {name:{width}}  {_measures(name)}" for name in BENCHMARKS)
    return "\n".join([(__doc__ or "").strip(), "", *lines])


def _measures(name: str) -> str:
    """The first line of a benchmark's docstring; not by importing it, which takes seconds."""
    module = ast.parse(Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8"))
    return (ast.get_docstring(module) or "").partition("\n")[0]


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
