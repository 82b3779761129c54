"""Measures tuning: ``python -m benchmarks.tuning KIND``, as root where a link is shaped.

``grid``: tuned, with partitions, against the best of a 4 x 4 grid; both are measured again in turns with the sizes
before tuning and steps as DDP's. With ``--probed``, those sizes are made for another link, and are off. ``cost``:
what tuning as it is by default costs in its first 500 steps. ``loopback``: where nothing is to be gained, tuned steps
against DDP's. ``reshape``: the link gets another rate in mid-run.

Each call measures one model on one link, so that measurements can be made in slices; ``--out`` keeps every step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.configuration import Configuration
from benchmarks.measure import MeasurementFailed, ranks_of
from benchmarks.models import REAL_MODELS
from benchmarks.report import machine
from benchmarks.shaped_link import LinkError
from lightning_bytescheduler.simulation.profiles import NETWORKS

_FIRST_STEPS = 500  # in which tuning may cost 2%
_WARM_UP = 10
_SHORT = 100  # of fits that take turns
_TURN = 5
_POINTS = 18  # of a grid, with the start and steps as DDP's
_VISIT = _TURN + 4  # steps, with those in which a change comes into force

Point = tuple[int, int]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuning", description=__doc__)
    parser.add_argument("kind", choices=("grid", "cost", "loopback", "reshape"))
    parser.add_argument("--network", choices=NETWORKS, default="uniform")
    parser.add_argument("--model", choices=REAL_MODELS, default="perceptron", help="of loopback")
    parser.add_argument("--ratio", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--mbit", type=float, default=500.0)
    parser.add_argument("--then-mbit", type=float, default=200.0, help="of reshape (default: %(default)g)")
    parser.add_argument("--round-trip-ms", type=float, default=0.0)
    parser.add_argument(
        "--probed",
        type=float,
        nargs=2,
        metavar=("MBIT", "ROUND_TRIP_MS"),
        help="make the sizes before tuning for this link instead, as if the probe had met a burst or another tenant",
    )
    parser.add_argument("--megabytes", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=600, help="of the tuned fit (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="over the grid (default: %(default)s)")
    parser.add_argument("--again", type=int, default=6, help="rounds over the best (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON")
    return parser.parse_args(arguments)


def fits_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What the ranks do, one after the other."""
    tuned = {"kind": "tuned", "options": {"tuning": "both"}, "steps": options.steps}
    by_default = {"kind": "tuned", "options": {}, "steps": options.steps}
    off = {"kind": "off", "steps": options.steps // 5}
    grid = {"kind": "grid", "turn": _TURN, "steps": options.rounds * _POINTS * _VISIT}
    again = {"kind": "again", "turn": _TURN, "steps": options.again * 5 * _VISIT}
    if options.kind == "cost":
        return [off, by_default, off]
    if options.kind == "loopback":
        ddp = {"kind": "ddp", "steps": _SHORT}
        return [by_default, *[ddp, {**by_default, "steps": _SHORT}] * options.again]
    if options.kind == "reshape":
        return [{**tuned, "reshape_at": options.steps // 2}, grid, again]
    return [tuned, grid, again]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for; returns the exit code."""
    options = _options(arguments)
    console = Console()
    configuration = Configuration(
        network=options.network,
        ratio=options.ratio,
        workers=options.workers,
        mbit=options.mbit,
        megabytes=options.megabytes,
        round_trip_seconds=options.round_trip_ms / 1e3,
    )
    loopback = options.kind == "loopback"
    work = {"model": options.model} if loopback else {"emulated": asdict(configuration)}
    name = f"{options.model}, loopback" if loopback else f"{configuration.name}, {options.mbit:g} Mbit/s"
    try:
        results = list(_measured({**work, "fits": fits_of(options), "probed": options.probed}, options, console))
    except (MeasurementFailed, LinkError) as error:
        console.print(f"[bold]Stopped:[/bold] {error}")
        return 1
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        content = {"name": name, "machine": machine(), "asked": {**vars(options), "out": None}, "results": results}
        options.out.write_text(json.dumps(content) + "\n", encoding="utf-8")
    table = Table(title=f"{options.kind}: {name}", title_justify="left", show_header=False)
    for row in rows_of(options.kind, results):
        table.add_row(*row)
    console.print(table)
    return 0


def _measured(asked: dict[str, Any], options: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.tuning_rank", json.dumps(asked)]
    mbit = None if options.kind == "loopback" else options.mbit
    with ranks_of(command, options.workers, mbit, options.round_trip_ms / 1e3) as (ranks, link):
        output = ranks[0].stdout
        count = 0
        for line in output or ():
            if not line.startswith(b"{"):
                continue
            result = json.loads(line)
            if "reshape" in result and link is not None:
                link.reshape(options.then_mbit)
                console.print(f"The link has {options.then_mbit:g} Mbit/s from here on.")
                continue
            count += 1
            yield result
        codes = [rank.wait() for rank in ranks]
    if any(codes) or count < len(asked["fits"]):
        raise MeasurementFailed(f"Ranks ended with codes {codes} after {count} fits. Run one by hand: {command}")


def rows_of(kind: str, results: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Pairs of a label and a value."""
    tuned = [result for result in results if result["fit"]["kind"] == "tuned"]
    first = tuned[0]
    for entry in first["entries"]:
        point = _text((entry["credit"] or 0, entry["partition_size"] or 0))
        yield (
            f"step {entry['step']}, {entry['kind']}",
            f"{point}: {1e3 * entry['step_seconds']:.1f} ± {1e3 * entry['error_seconds']:.1f} ms {entry['note']}",
        )
    trials = [entry for entry in first["entries"] if entry["kind"] in ("start", "ddp", "guess", "search")]
    searches = 1 + max((entry["search"] for entry in trials), default=0)
    yield "trials", f"{len(trials)} in {searches} search(es), {'settled' if first['settled'] else 'not settled'}"
    if kind in ("grid", "reshape"):
        yield from _against_grid(first, results)
    if kind != "reshape":
        yield from _cost(first)
    if kind == "cost":
        off = [_median(r["seconds"][_WARM_UP:]) for r in results if r["fit"]["kind"] == "off"]
        total = sum(seconds for _, seconds in first["steps"][_WARM_UP:_FIRST_STEPS])
        mean = total / len(first["steps"][_WARM_UP:_FIRST_STEPS])
        yield "not tuned, before and after", ", ".join(f"{1e3 * seconds:.1f} ms" for seconds in off)
        yield "mean tuned step / median not tuned", f"{mean / statistics.mean(off):.4f}"
    if kind == "loopback":
        yield from _against_ddp(results)


def _against_grid(first: dict[str, Any], results: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    (visited,) = (_medians(result) for result in results if result["fit"]["kind"] == "grid")
    (again,) = (_medians(result) for result in results if result["fit"]["kind"] == "again")
    for point, seconds in sorted(visited.items(), key=lambda entry: entry[1]):
        yield f"grid {_text(point)}", f"{1e3 * seconds:.1f} ms"
    for point, seconds in again.items():
        yield f"again {_text(point)}", f"{1e3 * seconds:.1f} ms"
    current, start = tuple(first["current"]), tuple(first["start"])
    best = min(again[point] for point in again if point in visited and point != (0, 0))
    yield "tuned / best of the grid", f"{again[current] / best:.3f}"
    yield "not tuned / best of the grid", f"{again[start] / best:.3f}"
    yield "as DDP / best of the grid", f"{again[0, 0] / best:.3f}"


def _cost(first: dict[str, Any]) -> Iterator[tuple[str, str]]:
    steps = [(tuple(point or ()), seconds) for point, seconds in first["steps"][_WARM_UP:_FIRST_STEPS]]
    start = tuple(first["start"])
    at_start = _median(seconds for point, seconds in steps if point == start)
    total = sum(seconds for _, seconds in steps)
    yield f"the first {len(steps)} steps / as many at the start", f"{total / (at_start * len(steps)):.4f}"
    # Without the outliers, which are the machine's.
    kept = sum(min(seconds, 3 * at_start) for _, seconds in steps)
    yield "the same, no step above three of them", f"{kept / (at_start * len(steps)):.4f}"


def _against_ddp(results: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    rounds = results[1:]
    ratios = []
    for ddp, ours in zip(rounds[::2], rounds[1::2], strict=True):
        ratios.append(_median(ours["seconds"][20:]) / _median(ddp["seconds"][20:]))
        yield "ddp, tuned", f"{1e3 * _median(ddp['seconds'][20:]):.2f}, {1e3 * _median(ours['seconds'][20:]):.2f} ms"
    settled = sum(ours["settled"] for ours in rounds[1::2])
    yield "point in force", f"{_text(rounds[-1]['current'])}; settled after {settled} of {len(ratios)} rounds"
    yield "tuned / ddp, median of the rounds", f"{_median(ratios):.3f}"


def _medians(result: dict[str, Any]) -> dict[Point, float]:
    return {(point[0], point[1]): _median(seconds) for point, seconds in result["points"]}


def _median(seconds: Any) -> float:
    return statistics.median(list(seconds))


def _text(point: Sequence[int]) -> str:
    return f"credit {point[0]:,}, partition {point[1]:,}" if point[0] else "plain DDP"


if __name__ == "__main__":
    sys.exit(main())
