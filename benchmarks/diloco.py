"""DiLoCo against strategies that communicate in every step: ``python -m benchmarks.diloco FIGURE``.

Two hosts of unequal speed train a GPT of 5.1 million parameters on real text. A step takes a fixed time on each, by
sleeping for what its arithmetic does not take. Figures:

- ``race`` (root, 7 minutes a seed): on a slow link, seconds to the validation losses that ``ddp`` has after N/3, 2N/3
  and N steps, and samples a second: for ``ddp`` and others that communicate in every step, for DiLoCo with rounds of
  equal steps and by pace at each length of a grid, and for DiLoCo's defaults.
- ``gap``: the loss at as many samples as ``ddp`` has processed in N steps, tuned and untuned.
- ``wire``: the loss after N steps with each wire dtype.
- ``sparse`` (root): on a link of a tenth of the rate, seconds to the loss that the best of int4 has after a minute.
- ``overlap`` (root): on such a link, seconds to some losses for int4 in long rounds and sparse in short ones, each
  without overlap and with ``overlap_steps="auto"``; no validation interrupts the training.
- ``stall`` (root): the share of their time that workers wait for communication on a slow link, with the whole model
  sent after each round, and with fragments that are sent beside training.

Time is that of training: validations are left out. What was measured is kept in a file and not measured again, so that
a benchmark that was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.diloco_figures import FIGURES
from benchmarks.diloco_rank import MARK, RANKS, train
from benchmarks.diloco_results import Kept, Row
from benchmarks.diloco_summary import conclude, draw
from benchmarks.measure import free_port
from benchmarks.shaped_link import ShapedLink, stop_sessions

_ON_A_LINK = ("race", "stall", "sparse", "overlap")
_START_S = 90.0  # until all ranks train, and from their last step to their end
_STEPS = {"race": 60, "gap": 200, "wire": 300, "stall": 1, "sparse": 1, "overlap": 1}


def measure(
    contenders: Sequence[dict[str, Any]], ends: Sequence[dict[str, Any]], *, seed: int, folder: str
) -> list[Row]:
    """Train contenders at the same time, each on links of its own; returns a row for each.

    Args:
        contenders: What their ranks are asked for.
        ends: For each, when training may end.
        seed: Of all.
        folder: For files.

    Raises:
        RuntimeError: If one has failed; says with what.
    """
    mbit = contenders[0]["mbit"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    shared = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["src", "."]), "WORLD_SIZE": str(RANKS)}
    places = [(number, rank) for number in range(len(contenders)) for rank in range(RANKS)]
    ordered = [{**asked, **end, "seed": seed, "folder": folder} for asked, end in zip(contenders, ends, strict=True)]
    commands = [[sys.executable, "-m", "benchmarks.diloco", "--rank", json.dumps(one)] for one in ordered]
    own = [{**shared, "RANK": str(rank), "NODE_RANK": str(rank), "LOCAL_RANK": "0"} for _, rank in places]
    if mbit is not None:
        with ShapedLink(hosts=len(places), mbit=mbit) as link:
            ranks = [
                link.popen(
                    RANKS * number + rank,
                    commands[number],
                    env={**own[rank], "MASTER_ADDR": link.address(RANKS * number)},
                    **pipes,
                )
                for number, rank in places
            ]
            return _rows(ranks, contenders, seed)
    ports = [str(free_port()) for _ in contenders]
    loopback = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = []
    try:
        for number, rank in places:
            environment = {**os.environ, **own[rank], **loopback, "MASTER_PORT": ports[number]}
            ranks.append(subprocess.Popen(commands[number], env=environment, start_new_session=True, **pipes))
        return _rows(ranks, contenders, seed)
    finally:
        stop_sessions(ranks)


def _rows(ranks: Sequence[subprocess.Popen[bytes]], contenders: Sequence[dict[str, Any]], seed: int) -> list[Row]:
    rows = []
    for number, asked in enumerate(contenders):
        results = []
        for rank in ranks[RANKS * number : RANKS * (number + 1)]:
            out, errors = rank.communicate(timeout=asked["seconds"] + _START_S)
            lines = [line for line in out.decode().splitlines() if line.startswith(MARK)]
            if not lines:
                raise RuntimeError(f"{asked['name']} has failed:\n{errors.decode(errors='replace')[-3000:]}")
            results.append(json.loads(lines[-1].removeprefix(MARK)))
        results.sort(key=lambda result: int(result["rank"]))
        parts = ("compute_s", "step_s", "waited", "waited_in_rounds")
        row = {"seed": seed, "name": asked["name"], "asked": asked, "points": results[0]["points"]}
        rows.append({**row, **{part: [result[part] for result in results] for part in parts}})
    return rows


def _asked(options: argparse.Namespace, contender: dict[str, Any]) -> dict[str, Any]:
    """What is measured, seed apart."""
    return {
        "size": "5M",
        "batch": options.batch,
        "learning_rate": options.learning_rate,
        "step_s": [options.step_s, options.ratio * options.step_s],
        "mbit": options.mbit if options.figure in _ON_A_LINK else None,
        **contender,
    }


def _end(options: argparse.Namespace, reference: Row | None) -> dict[str, Any]:
    """When training may end: at the last loss and samples of a reference, or at its samples."""
    if reference is None:
        return {}
    _, samples, loss = reference["points"][-1]
    return {"samples": samples, **({"loss": loss} if options.figure == "race" else {})}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diloco", description=__doc__.split("\n\n")[0])
    parser.add_argument("figure", choices=list(FIGURES), nargs="?", default="race")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, help="N (default: 60 in race, 200 in gap, 300 in wire)")
    parser.add_argument(
        "--grid", type=int, nargs="+", default=[8, 20, 40], metavar="H", help="steps of the slow worker"
    )
    parser.add_argument("--mbit", type=float, help="of each link (default: 5 in sparse and overlap, else 50)")
    parser.add_argument("--ratio", type=float, default=3.0, help="of the two workers' steps (default: %(default)g)")
    parser.add_argument("--step-s", type=float, default=0.05, help="a step of the fast one (default: %(default)g)")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--outer-momentum", type=float, default=0.9)
    parser.add_argument("--wire", default="int4")
    parser.add_argument("--only", nargs="+", default=[""], help="contenders with this in their names")
    parser.add_argument("--again", action="store_true", help="measure also what was measured before")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/diloco.json"))
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.mbit = options.mbit or (5.0 if options.figure in ("sparse", "overlap") else 50.0)
    options.steps = options.steps or _STEPS[options.figure]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for; returns the exit code."""
    options = _options(arguments)
    console = Console()
    if options.rank is not None:
        train(json.loads(options.rank))
        return 0
    if options.figure in _ON_A_LINK:
        available, reason = ShapedLink.available()
        if not available:
            console.print(f"{reason} Nothing was measured.")
            return 1
    # By default SIGTERM ends Python at once, and the ranks would be left.
    previous = signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    try:
        _measure_all(options, console)
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


def _measure_all(options: argparse.Namespace, console: Console) -> None:
    kept = Kept(options.results, options.figure)
    groups = [[_asked(options, contender) for contender in group] for group in FIGURES[options.figure](options)]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, tempfile.TemporaryDirectory() as folder:
        task = progress.add_task("", total=len(groups) * len(options.seeds))
        for seed in options.seeds:
            for group in groups:
                missing = [asked for asked in group if _is_missing(options, asked, kept.find(seed, asked["name"]))]
                if missing:
                    progress.update(task, description=f"seed {seed}: {' and '.join(one['name'] for one in missing)}")
                    ends = [_end(options, kept.find(seed, asked.get("until", ""))) for asked in missing]
                    for row in measure(missing, ends, seed=seed, folder=folder):
                        kept.add(row)
                progress.advance(task)
    kept.conclude(conclude(console, options, kept.rows))
    if options.figure == "race":
        draw(options.results.with_suffix(".png"), kept.rows, seed=options.seeds[0])


def _is_missing(options: argparse.Namespace, asked: dict[str, Any], row: Row | None) -> bool:
    wanted = any(part in asked["name"] for part in options.only)
    return wanted and (options.again or row is None or row["asked"] != asked)


if __name__ == "__main__":
    sys.exit(main())
