"""DiLoCo against strategies that communicate in every step.

Two hosts of unequal speed train a GPT of 5.1 million parameters on real text. A step takes a fixed time on each, by
sleeping for what its arithmetic does not take. Figures:

- ``race`` (root, 7 minutes a seed): on a slow link, seconds to the validation losses that ``ddp`` has after N/3, 2N/3
  and N steps, and samples a second: for ``ddp`` and others that communicate in every step, for DiLoCo with rounds of
  equal steps and by pace at each length of a grid, and for DiLoCo's defaults.
- ``gap``: the loss at as many samples as ``ddp`` has processed in N steps, tuned and untuned.
- ``wire``: the loss after N steps with each wire dtype, and of ``ddp``; with ``--inner muon`` Muon trains the layers'
  matrices (``examples/muon.py``). A small ``--width`` makes its steps short on a processor.
- ``overlap`` (root): on a link of a tenth of the rate, seconds to some losses for int4 in long rounds and sparse in
  short ones, each without overlap and with half a round of it; no validation interrupts the training.

Time is that of training: validations are left out. Results are kept in a file and not measured again, so an
interrupted benchmark goes on where it stopped.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.diloco_figures import FIGURES, SYNCHRONOUS
from benchmarks.diloco_rank import RANKS, train
from benchmarks.picture import Line, Panel
from benchmarks.ranks import Job, MeasurementFailed, Place, ranks_of
from benchmarks.record import Record, Results, append, read, record
from benchmarks.shaped_link import ShapedLink

OUT = Path("benchmarks/results/diloco.jsonl")
FIXED, PACED, DEFAULTS = "diloco, H=", "diloco by pace", "diloco, defaults"
_ON_A_LINK = ("race", "overlap")
_START_S = 90.0  # until all ranks train, and from their last step to their end
_STEPS = {"race": 60, "gap": 200, "wire": 300, "overlap": 1}
_LOSSES = (2.7, 2.65, 2.6)

Times = dict[str, dict[int, float | None]]
"""By contender and seed, seconds to a loss; ``None`` if it was not reached."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("figure", choices=list(FIGURES), nargs="?", default="race")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, help="N (default: 60 in race, 200 in gap, 300 in wire)")
    parser.add_argument("--grid", type=int, nargs="+", default=[8, 20, 40], help="steps of the slow worker")
    parser.add_argument("--mbit", type=float, help="rate of each link (default: 5 in overlap, else 50)")
    parser.add_argument(
        "--ratio",
        type=float,
        default=3.0,
        help="step time of the slow worker over the fast one's (default: %(default)g)",
    )
    parser.add_argument("--step-s", type=float, default=0.05, help="step time of the fast one (default: %(default)g)")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--inner", choices=["muon"], help="the inner optimizer (default: AdamW)")
    parser.add_argument("--width", type=int, help="of the GPT (default: 288)")
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--outer-momentum", type=float, default=0.9)
    parser.add_argument("--wire", default="int4")
    parser.add_argument("--only", nargs="+", default=[""], help="contenders with this in their names")
    parser.add_argument("--again", action="store_true", help="measure again what is in the file")


def measure(options: argparse.Namespace) -> Iterator[Results]:
    """Measure what is missing, and summarise all results."""
    options.mbit = options.mbit or (5.0 if options.figure == "overlap" else 50.0)
    options.steps = options.steps or _STEPS[options.figure]
    if options.figure in _ON_A_LINK:
        available, reason = ShapedLink.available()
        if not available:
            raise MeasurementFailed(f"{reason} Nothing was measured.")
    name = f"diloco {options.figure}"
    kept = [one for one in read(options.out) if one.benchmark == name]
    groups = [[_asked(options, contender) for contender in group] for group in FIGURES[options.figure](options)]
    turns = list(itertools.product(options.seeds, groups))
    rows: list[Record] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed, group in track(turns, name, console=Console(stderr=True), transient=True):
            found = {asked["name"]: _kept(kept, {**asked, "seed": seed}) for asked in group}
            wanted = [asked for asked in group if any(part in asked["name"] for part in options.only)]
            missing = [asked for asked in wanted if options.again or found[asked["name"]] is None]
            if missing:
                ends = [_end(options, rows, seed, asked) for asked in missing]
                new = rows_of(name, missing, ends, seed=seed, folder=folder)
                append(options.out, new)
                found |= {one.what: one for one in new}
            rows += [one for one in found.values() if one is not None]
    yield f"{options.figure}, each training", rows
    for title, records in conclude(options, rows).items():
        yield f"{options.figure}, {len(options.seeds)} seeds: {title}", records


def _asked(options: argparse.Namespace, contender: Job) -> Job:
    """The setting of a measurement, without its seed."""
    return {
        "batch": options.batch,
        "learning_rate": options.learning_rate,
        "step_s": [options.step_s, options.ratio * options.step_s],
        "mbit": options.mbit if options.figure in _ON_A_LINK else None,
        **{name: chosen for name in ("inner", "width") if (chosen := getattr(options, name)) is not None},
        **contender,
    }


def _kept(kept: Sequence[Record], setting: Job) -> Record | None:
    """The last record with this setting."""
    return next((one for one in reversed(kept) if one.setting == setting), None)


def _end(options: argparse.Namespace, rows: Sequence[Record], seed: int, asked: Job) -> Job:
    """When training may end: at the last loss and samples of a reference, or at its samples."""
    until = (one for one in rows if (one.what, one.setting["seed"]) == (asked.get("until"), seed))
    reference = next(until, None)
    if reference is None:
        return {}
    _, samples, loss = reference.seen["points"][-1]
    return {"samples": samples, **({"loss": loss} if options.figure == "race" else {})}


def rows_of(name: str, contenders: Sequence[Job], ends: Sequence[Job], *, seed: int, folder: str) -> list[Record]:
    """Train contenders until each may end, at the same time and on links of their own; gives a record for each."""
    settings = [{**asked, "seed": seed} for asked in contenders]
    sets = [[{**asked, **end, "folder": folder}] for asked, end in zip(settings, ends, strict=True)]
    seconds = max(asked["seconds"] for asked in contenders) + _START_S
    rows = []
    with ranks_of(Place(ranks=RANKS, mbit=contenders[0]["mbit"]), train, *sets, timeout=seconds) as ranks:
        for number, setting in enumerate(settings):
            (answers,) = ranks.results(number)
            parts = ("compute_s", "step_s", "waited", "waited_in_rounds")
            seen: dict[str, Any] = {part: [answer[part] for answer in answers] for part in parts}
            trained, samples, loss = answers[0]["points"][-1]
            waited = float(max(seen["waited_in_rounds"]))
            values = {"trained [s]": trained, "samples": samples, "loss": loss, "waited": waited}
            pairs = zip(seen["step_s"], setting["step_s"], strict=True)
            # If a rank that trains by itself took longer, the machine was busy with other work.
            longer = max((taken / wanted for taken, wanted in pairs if taken and wanted), default=0.0)
            values |= {"a step / asked": longer} if "diloco" in setting and longer else {}
            rows.append(record(name, setting["name"], setting, values, points=answers[0]["points"], **seen))
    return rows


def at_loss(points: Sequence[Sequence[float]], loss: float) -> float | None:
    """Seconds until the loss was reached, or ``None``."""
    return next((seconds for seconds, _, reached in points if reached <= loss), None)


def at_samples(points: Sequence[Sequence[float]], samples: float) -> float | None:
    """The loss at so many samples, between the validations next to it; ``None`` before the first and after the last."""
    for before, after in itertools.pairwise([points[0], *points]):
        if before[1] <= samples <= after[1]:
            share = (samples - before[1]) / max(after[1] - before[1], 1)
            return float(before[2] + share * (after[2] - before[2]))
    return None


def times(rows: Sequence[Record], samples: float) -> Times:
    """Seconds to the loss that ``ddp`` has at so many samples, with the same seed."""
    targets = {row.setting["seed"]: at_samples(row.seen["points"], samples) for row in rows if row.what == "ddp"}
    found: Times = {}
    for row in rows:
        target = targets.get(row.setting["seed"])
        if target is not None:
            found.setdefault(row.what, {})[row.setting["seed"]] = at_loss(row.seen["points"], target)
    return found


def best(taken: Times, beginning: str | tuple[str, ...]) -> str | None:
    """The contender with the smallest median, of those whose names begin so and that get there with every seed."""
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


def gaps(rows: Sequence[Record], samples: float) -> dict[str, list[float]]:
    """By contender: for each seed, the loss at so many samples less that of ``ddp``."""
    losses = {(row.what, row.setting["seed"]): at_samples(row.seen["points"], samples) for row in rows}
    found: dict[str, list[float]] = {}
    for (name, seed), loss in losses.items():
        reference = losses.get(("ddp", seed))
        if loss is not None and reference is not None and name != "ddp":
            found.setdefault(name, []).append(loss - reference)
    return found


def conclude(options: argparse.Namespace, rows: Sequence[Record]) -> dict[str, list[Record]]:
    """Summarise each contender over all seeds, and how much sooner the best ones are."""
    samples = min((int(row.seen["points"][-1][1]) for row in rows if row.what == "ddp"), default=0)
    of_a_step = RANKS * options.batch
    marks = [part * samples // of_a_step // 3 for part in (1, 2, 3)] if options.figure == "race" else []
    taken = {steps: times(rows, of_a_step * steps) for steps in marks}
    apart = gaps(rows, samples) if options.figure != "overlap" else {}
    name = f"diloco {options.figure}, all seeds"
    made = []
    for what in dict.fromkeys(row.what for row in rows):
        own = [row for row in rows if row.what == what]
        values = {column: [row.medians[column] for row in own] for column in ("loss", "waited")}
        for steps in marks:
            values[f"s to ddp's loss after {steps}"] = _known(taken[steps].get(what, {}).values())
        for loss in _LOSSES if options.figure == "overlap" else ():
            values[f"s to a loss of {loss:.2f}"] = _known(at_loss(row.seen["points"], loss) for row in own)
        values["samples/s"] = [row.medians["samples"] / row.medians["trained [s]"] for row in own]
        values[f"loss less ddp's, at {samples} samples"] = apart.get(what, [])
        made.append(record(name, what, {**own[0].setting, "seed": options.seeds}, values))
    compared = [_compared(name, steps, values_at, made) for steps, values_at in taken.items()]
    return {"medians": made, **({"how much sooner": compared} if compared else {})}


def _compared(name: str, steps: int, taken: Times, contenders: Sequence[Record]) -> Record:
    """How much sooner the best by pace, and the defaults, have the loss that ``ddp`` has after so many steps."""
    synchronous, paced, fixed = best(taken, SYNCHRONOUS), best(taken, PACED), best(taken, FIXED)
    speeds = {one.what: one.seen["samples/s"] for one in contenders if "samples/s" in one.seen}
    faster = zip(speeds.get(paced or "", []), speeds.get(fixed or "", []), strict=False)
    ratios = {
        "pace, sooner than in every step": sooner(taken, paced, synchronous),
        "pace, sooner than equal steps": sooner(taken, paced, fixed),
        "defaults, sooner than in every step": sooner(taken, DEFAULTS, synchronous),
        "pace, samples/s over equal steps": [mine / theirs for mine, theirs in faster],
    }
    chosen = {"in every step": synchronous, "by pace": paced, "of equal steps": fixed}
    return record(name, f"N={steps}", {"best": chosen}, {}, ratios)


def _known(values: Any) -> list[float]:
    """The values, if there is one for each seed; else none."""
    found = list(values)
    return [] if None in found else found


def panels(records: Sequence[Record]) -> list[list[Panel]]:
    """A seed's losses over time, and the loss that is to be reached; of rounds of equal steps only the best."""
    curves = [one for one in records if "points" in one.seen]
    samples = min((int(row.seen["points"][-1][1]) for row in curves if row.what == "ddp"), default=0)
    left_out = {one.what for one in curves if one.what.startswith(FIXED)} - {best(times(curves, samples), FIXED)}
    shown = [one for one in curves if one.setting["seed"] == curves[0].setting["seed"] and one.what not in left_out]
    lines = [
        Line(
            label=one.what,
            points=[(seconds, loss) for seconds, _, loss in one.seen["points"]],
            style={"linestyle": "-" if one.what.startswith("diloco") else "--"},
        )
        for one in shown
    ]
    level = next((one.medians["loss"] for one in shown if one.what == "ddp"), None)
    return [[Panel(lines=lines, x="seconds of training", y="validation loss", level=level, logarithm=10)]]
