"""Measures that nothing is lost where nothing is to be gained: ``python -m benchmarks.never_slower``, without root.

Two ranks on loopback, each on a processor of its own, train a model with real compute under ``ddp`` and under
``bytescheduler`` as it is by default, in turns and in both orders (ddp, ours, ours, ddp, ...), in the same processes.
Each pair of neighbours gives one ratio for each window of steps; medians of the ratios are printed, with the smallest
and the largest. A first pair of a few steps, with what a process loads once, does not count.

``--steps 60`` measures a short fit, ``--steps 500`` gives the first 100 steps, the first 500, and steps 200 to 450. A
machine that cannot be had for long is measured in slices: ``--add FILE`` adds each call's pairs to those in the file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.measure import MeasurementFailed, ranks_of
from benchmarks.models import REAL_MODELS

_WINDOWS = ((0, 60), (0, 100), (0, 500), (200, 450))
_WARM_UP_STEPS = 20

Fit = dict[str, Any]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.never_slower", description=__doc__)
    parser.add_argument("--model", choices=REAL_MODELS, default="100 layers")
    parser.add_argument("--steps", type=int, default=500, help="of each fit (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=8, help="fits of each (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--mode",
        choices=("bytescheduler", "as ddp", "overlapped"),
        default="bytescheduler",
        help="what is compared with ddp (default: %(default)s)",
    )
    parser.add_argument("--add", type=Path, metavar="FILE", help="JSON that this call's pairs are added to")
    return parser.parse_args(arguments)


def order(contender: str, pairs: int) -> list[str]:
    """Who trains when, without the first pair."""
    return [name for n in range(pairs) for name in (("ddp", contender) if n % 2 == 0 else (contender, "ddp"))]


def windows_of(steps: int) -> list[tuple[int, int]]:
    """Windows of steps that a fit of ``steps`` shows, the whole fit first."""
    return list(dict.fromkeys([(0, steps), *(window for window in _WINDOWS if window[1] <= steps)]))


def seconds_in(fit: Fit, window: tuple[int, int]) -> float:
    """How long these steps took."""
    first, last = window
    taken: float = fit["moments"][last] - fit["moments"][first]
    return taken


def ratios(fits: Sequence[Fit], window: tuple[int, int]) -> list[float]:
    """Ours over ddp's, of each pair of neighbours."""
    found = []
    for one, other in zip(fits[::2], fits[1::2], strict=True):
        ddp, ours = (one, other) if one["contender"] == "ddp" else (other, one)
        found.append(seconds_in(ours, window) / seconds_in(ddp, window))
    return found


def rows_of(fits: Sequence[Fit], steps: int) -> Iterator[tuple[str, str]]:
    """Pairs of a label and a value."""
    ddp = [fit for fit in fits if fit["contender"] == "ddp"]
    ours = [fit for fit in fits if fit["contender"] != "ddp"]
    for window in windows_of(steps):
        first, last = window
        found = ratios(fits, window)
        step_ms = [
            1e3 * statistics.median(seconds_in(f, window) for f in some) / (last - first) for some in (ddp, ours)
        ]
        yield (
            f"steps {first} to {last}",
            f"{statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f}), "
            f"{step_ms[0]:.2f} and {step_ms[1]:.2f} ms a step",
        )
    begun = [statistics.median(fit["moments"][0] for fit in some) for some in (ddp, ours)]
    whole = [statistics.median(fit["ended"] for fit in some) for some in (ddp, ours)]
    yield "before the first step", f"{begun[0]:.3f} and {begun[1]:.3f} s"
    yield "the whole fit", f"{whole[0]:.3f} and {whole[1]:.3f} s"
    yield "steps overlapped", ", ".join(str(fit["overlapped_steps"]) for fit in ours)
    yield "plan", ours[-1]["plan"]


def measure(contender: str, options: argparse.Namespace) -> list[Fit]:
    """All fits, in order, without the first pair.

    Raises:
        MeasurementFailed: If a rank fails.
    """
    fits_asked = [(name, _WARM_UP_STEPS) for name in ("ddp", contender)]
    fits_asked += [(name, options.steps) for name in order(contender, options.pairs)]
    asked = {"model": options.model, "fits": fits_asked}
    command = [sys.executable, "-m", "benchmarks.never_slower_rank", json.dumps(asked)]
    with ranks_of(command, options.workers, None) as (ranks, _):
        lines = (line for line in ranks[0].stdout or () if line.startswith(b"{"))
        console = Console(stderr=True)
        fits = [json.loads(line) for line in track(lines, "fits", total=len(fits_asked), console=console)]
        codes = [rank.wait() for rank in ranks]
    if any(codes) or len(fits) < len(fits_asked):
        raise MeasurementFailed(f"Ranks ended with codes {codes} after {len(fits)} fits. Run one by hand: {command}")
    return fits[2:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for; returns the exit code."""
    options = _options(arguments)
    console = Console()
    kept = json.loads(options.add.read_text(encoding="utf-8")) if options.add and options.add.exists() else []
    try:
        fits = [*kept, *measure(options.mode, options)]
    except MeasurementFailed as error:
        console.print(f"[bold]Stopped:[/bold] {error}")
        return 1
    if options.add is not None:
        options.add.write_text(json.dumps(fits) + "\n", encoding="utf-8")
    title = f"{options.mode} / ddp: {options.model}, {options.workers} ranks, {len(fits) // 2} pairs"
    table = Table(title=title, title_justify="left", show_header=False)
    for row in rows_of(fits, options.steps):
        table.add_row(*row)
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
