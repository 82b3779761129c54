"""What the rows of ``benchmarks.diloco`` come to: tables, figures and a picture."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.diloco_figures import SYNCHRONOUS
from benchmarks.diloco_rank import RANKS
from benchmarks.diloco_results import Row, at_loss, at_samples

__all__ = ["best", "conclude", "draw", "gaps", "slowed", "sooner", "times"]

FIXED, PACED, DEFAULTS = "diloco, H=", "diloco by pace", "diloco, defaults"
_SLOWED = 1.2
_LOSSES = (2.7, 2.65, 2.6)


Times = dict[str, dict[int, float | None]]
"""By contender and seed, seconds to a loss; ``None`` if it was not reached."""


def times(rows: Sequence[Row], samples: float) -> Times:
    """Seconds to the loss that ``ddp`` has at so many samples, with the same seed."""
    targets = {row["seed"]: at_samples(row["points"], samples) for row in rows if row["name"] == "ddp"}
    found: Times = {}
    for row in rows:
        target = targets.get(row["seed"])
        if target is not None:
            found.setdefault(row["name"], {})[row["seed"]] = at_loss(row["points"], target)
    return found


def best(taken: Times, beginning: str | tuple[str, ...]) -> str | None:
    """Of the contenders whose names begin so, the one with the smallest median: the same one for all seeds.

    Returns:
        ``None`` if none gets there with every seed.
    """
    seeds = len(taken.get("ddp", {}))
    medians = {
        name: statistics.median(value for value in values.values() if value is not None)
        for name, values in taken.items()
        if name.startswith(beginning) and None not in values.values() and len(values) == seeds
    }
    return min(medians, key=lambda name: medians[name], default=None)


def sooner(taken: Times, first: str | None, second: str | None) -> list[float]:
    """How many times sooner than the second contender the first one gets there, with each seed."""
    mine, theirs = taken.get(first or "", {}), taken.get(second or "", {})
    pairs = [(mine[seed], theirs[seed]) for seed in sorted(mine.keys() & theirs.keys())]
    return [slow / fast for fast, slow in pairs if fast and slow]


def gaps(rows: Sequence[Row], samples: float) -> dict[str, list[float]]:
    """By contender: for each seed, the loss at so many samples less that of ``ddp``."""
    losses = {(row["name"], row["seed"]): at_samples(row["points"], samples) for row in rows}
    found: dict[str, list[float]] = {}
    for (name, seed), loss in losses.items():
        reference = losses.get(("ddp", seed))
        if loss is not None and reference is not None and name != "ddp":
            found.setdefault(name, []).append(loss - reference)
    return found


def slowed(row: Row) -> bool:
    """Whether a rank that trains by itself took longer for its steps than it was asked to."""
    if "diloco" not in row["asked"]:
        return False
    pairs = zip(row["step_s"], row["asked"]["step_s"], strict=True)
    return any(wanted and taken is not None and taken > _SLOWED * wanted for taken, wanted in pairs)


def conclude(console: Console, options: argparse.Namespace, rows: Sequence[Row]) -> dict[str, Any]:
    """Show what was measured; returns what it comes to."""
    for row in rows:
        if slowed(row):
            console.print(
                f"Steps of {row['name']}, seed {row['seed']}, took more than {_SLOWED - 1:.0%} longer than they should "
                "have: the machine was busy. Measure it again with --again and --only."
            )
    if options.figure == "race":
        return _race(console, options, rows)
    if options.figure == "gap":
        samples = _samples(rows)
        found, own = gaps(rows, samples), [row["points"][-1][2] for row in rows if row["name"] == "ddp"]
        _table(console, f"loss less ddp's, at {samples} samples", {"ddp's own": own, **found})
        return {"samples": samples, "ddp": own, "gap": found}
    if options.figure == "wire":
        losses = {row["name"]: [r["points"][-1][2] for r in rows if r["name"] == row["name"]] for row in rows}
        _table(console, f"loss after {options.steps} steps", losses)
        return {"loss": losses}
    if options.figure == "sparse":
        return _sparse(console, rows)
    if options.figure == "overlap":
        return _overlap(console, rows)
    shares = {row["name"]: [max(r["waited_in_rounds"]) for r in rows if r["name"] == row["name"]] for row in rows}
    _table(console, "share of its time that the worker that waits more has waited", shares)
    return {"waited": shares}


def _sparse(console: Console, rows: Sequence[Row]) -> dict[str, Any]:
    """How much sooner the best of sparse has the loss with which the best of int4 ends."""
    found: dict[str, list[float]] = {"int4's own loss": [], "s to it, int4": [], "s to it, sparse": [], "sooner by": []}
    for seed in sorted({row["seed"] for row in rows}):
        curves = {row["name"]: row["points"] for row in rows if row["seed"] == seed}
        ends = {name: points[-1][2] for name, points in curves.items()}
        console.print(f"Seed {seed}, losses after a minute: {', '.join(f'{n}: {x:.3f}' for n, x in ends.items())}")
        target = min(loss for name, loss in ends.items() if name.startswith("int4"))
        reached = {name: at_loss(points, target) for name, points in curves.items()}
        first = {
            kind: min((at for name, at in reached.items() if at and name.startswith(kind)), default=None)
            for kind in ("int4", "sparse")
        }
        if first["int4"] and first["sparse"]:
            values = (target, first["int4"], first["sparse"], first["int4"] / first["sparse"])
            for part, value in zip(found.values(), values, strict=True):
                part.append(value)
    _table(console, "sparse", found)
    return dict(found)


def _overlap(console: Console, rows: Sequence[Row]) -> dict[str, Any]:
    """Seconds to some losses, and what the worker that waits more has waited; the median of all seeds."""
    table = Table("", *(f"s to a loss of {loss:.2f}" for loss in _LOSSES), "waited", title_justify="left")
    found: dict[str, Any] = {}
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        reached = {f"{loss:.2f}": [at_loss(row["points"], loss) for row in own] for loss in _LOSSES}
        found[name] = {"s to a loss": reached, "waited": [max(row["waited_in_rounds"]) for row in own]}
        table.add_row(name, *(_spread(values, 1) for values in reached.values()), _spread(found[name]["waited"], 3))
    console.print(table)
    return found


def _race(console: Console, options: argparse.Namespace, rows: Sequence[Row]) -> dict[str, Any]:
    samples = _samples(rows)
    of_a_step = RANKS * options.batch
    marks = [part * samples // of_a_step // 3 for part in (1, 2, 3)]
    taken = {steps: times(rows, of_a_step * steps) for steps in marks}
    apart = gaps(rows, samples)
    speeds: dict[str, dict[int, float]] = {}
    for row in rows:
        seconds, processed, _ = row["points"][-1]
        speeds.setdefault(row["name"], {})[row["seed"]] = processed / seconds
    table = Table("", *(f"s to ddp's loss after {steps}" for steps in marks), "samples/s", "gap", title_justify="left")
    for name in speeds:
        cells = [_spread(list(taken[steps].get(name, {}).values()), 1) for steps in marks]
        table.add_row(name, *cells, _spread(list(speeds[name].values()), 1), _spread(apart.get(name, []), 3))
    console.print(table)
    summary: dict[str, Any] = {}
    for steps, values in taken.items():
        synchronous, paced, fixed = best(values, SYNCHRONOUS), best(values, PACED), best(values, FIXED)
        summary[f"N={steps}"] = found = {
            "best that communicates in every step": synchronous,
            "best by pace": paced,
            "best of equal steps": fixed,
            "sooner than the best in every step": sooner(values, paced, synchronous),
            "sooner than the best of equal steps": sooner(values, paced, fixed),
            "defaults, sooner than the best in every step": sooner(values, DEFAULTS, synchronous),
        }
        if paced and fixed:
            found["samples a second over those of equal steps"] = [
                speeds[paced][seed] / speeds[fixed][seed] for seed in sorted(speeds[paced])
            ]
        console.print(f"N={steps}:")
        for label, value in found.items():
            shown = _spread(value, 2) if isinstance(value, list) else value
            console.print(f"  {label}: {shown}", highlight=False)
    return summary


def _samples(rows: Sequence[Row]) -> int:
    """That ``ddp`` had processed at its last validation, with every seed."""
    return min((int(row["points"][-1][1]) for row in rows if row["name"] == "ddp"), default=0)


def _table(console: Console, title: str, values: dict[str, list[float]]) -> None:
    table = Table("", "median (smallest to largest)", "seeds", title=title, title_justify="left")
    for name, numbers in values.items():
        table.add_row(name, _spread(numbers, 3), str(len(numbers)))
    console.print(table)


def _spread(values: Sequence[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    missing = f", {len(values) - len(known)} never" if len(known) < len(values) else ""
    return f"{statistics.median(known):.{digits}f} ({min(known):.{digits}f} to {max(known):.{digits}f}{missing})"


def draw(path: Path, rows: Sequence[Row], *, seed: int) -> None:
    """Draw a seed's losses over time, of rounds of equal steps only the best, and the loss that is to be reached."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    taken = times(rows, _samples(rows))
    names = [*SYNCHRONOUS, best(taken, FIXED), DEFAULTS]
    figure, axes = pyplot.subplots(figsize=(7.5, 4.2))
    for row in rows:
        if row["seed"] == seed and (row["name"] in names or row["name"].startswith(PACED)):
            seconds, losses = [point[0] for point in row["points"]], [point[2] for point in row["points"]]
            line = "-" if row["name"].startswith("diloco") else "--"
            axes.plot(seconds, losses, linestyle=line, marker="o", markersize=3, label=row["name"])
        if row["seed"] == seed and row["name"] == "ddp":
            axes.axhline(row["points"][-1][2], color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("validation loss")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
