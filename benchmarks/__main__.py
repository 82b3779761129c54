"""The command line: ``python -m benchmarks``, or ``make bench``."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.configuration import Configuration
from benchmarks.contenders import ALONE, DDP_BUCKETS, POLICIES
from benchmarks.delayed_link import DelayedLink
from benchmarks.measure import MeasurementFailed, measure
from benchmarks.models import REAL_MODELS
from benchmarks.report import Cell, draw, prediction_errors, save, show
from benchmarks.shaped_link import LinkError, ShapedLink
from lightning_bytescheduler.simulation.profiles import NETWORKS

_DDP = ["ddp", *(f"ddp, {size} MB buckets" for size in DDP_BUCKETS)]
_EMULATED = [ALONE, *_DDP, "ddp, bf16 on the wire", "bytescheduler, overlapped", "bytescheduler, norm clipping"]
_REAL = [ALONE, *_DDP, "bytescheduler, overlapped"]
_LOOPBACK = ["ddp", "bytescheduler, as ddp", "bytescheduler"]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.25, 0.5, 1.0, 2.0, 4.0], metavar="RATIO")
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4], metavar="N")
    parser.add_argument("--megabytes", type=float, default=30.0, help="of gradients (default: %(default)g)")
    parser.add_argument("--not-ahead", action="store_true", help="an accelerator that is a sleep in each layer")
    parser.add_argument("--raw-kernels", action="store_true", help="only custom autograd functions get the weights")
    parser.add_argument("--statistics", action="store_true", help="layers have buffers, as of a batch normalization")
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help="of emulated networks, beside 'alone'")
    parser.add_argument("--mbit", type=float, default=500.0, help="rate of each worker's link (default: %(default)g)")
    parser.add_argument(
        "--round-trip-ms",
        type=float,
        default=20.0,
        metavar="MS",
        help="round trip of one configuration more: the first network at ratio 1, with the most workers (default: "
        "%(default)g; 0: none)",
    )
    parser.add_argument("--real", nargs="*", choices=REAL_MODELS, default=list(REAL_MODELS), help="real models")
    parser.add_argument("--real-mbit", type=float, default=700.0, help="link of the real models (default: %(default)g)")
    parser.add_argument("--steps", type=int, default=15, help="measured steps a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds over all contenders (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/latest"), metavar="STEM")
    return parser.parse_args(arguments)


def _contenders(configuration: Configuration, options: argparse.Namespace) -> list[str]:
    """What is measured: also the scheduling policies where their order has most to decide, with the most workers."""
    if options.contenders:
        return [ALONE, *options.contenders]
    decides = configuration.workers == max(options.workers) and configuration.ratio == min(
        options.ratios, key=lambda ratio: abs(ratio - 1.0)
    )
    return [*_EMULATED, *POLICIES] if decides and not configuration.round_trip_seconds else _EMULATED


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for; returns the exit code."""
    options = _options(arguments)
    console = Console()
    available, reason = ShapedLink.available()
    if not available:
        console.print(f"{reason} Left out: everything but loopback.")
    emulated = [
        Configuration(
            network=network,
            ratio=ratio,
            workers=workers,
            mbit=options.mbit,
            megabytes=options.megabytes,
            runs_ahead=not options.not_ahead,
            raw_kernels=options.raw_kernels,
            statistics=options.statistics,
        )
        for network in options.networks
        for workers in options.workers
        for ratio in options.ratios
    ]
    if options.round_trip_ms:
        possible, why = DelayedLink.available()
        if possible:
            emulated.append(
                Configuration(
                    network=options.networks[0],
                    ratio=1.0,
                    workers=max(options.workers),
                    mbit=options.mbit,
                    round_trip_seconds=options.round_trip_ms / 1e3,
                    statistics=options.statistics,
                )
            )
        elif available:
            console.print(f"{why} Left out: the round-trip time.")
    contenders_of = {configuration: _contenders(configuration, options) for configuration in emulated}
    cells: list[Cell] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    runs = len(options.real) * len(_LOOPBACK)
    if available:
        runs += sum(map(len, contenders_of.values())) + len(options.real) * len(_REAL)
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("measuring", total=runs * options.rounds)

        def run(name: str, work: dict[str, Any], contenders: Sequence[str], **how: Any) -> Any:
            progress.update(task, description=name)
            return measure(
                work,
                contenders,
                steps=options.steps,
                rounds=options.rounds,
                on_contender=lambda _: progress.advance(task),
                **how,
            )

        def keep(cell: Cell) -> None:
            cells.append(cell)
            show(console, cell)
            save(options.out.with_suffix(".json"), cells)  # as we go: a later failure loses nothing

        try:
            for configuration in emulated if available else ():
                link = {"mbit": configuration.mbit, "round_trip_seconds": configuration.round_trip_seconds}
                work = {"emulated": asdict(configuration)}
                contenders = contenders_of[configuration]
                found = run(configuration.name, work, contenders, workers=configuration.workers, **link)
                keep(
                    Cell(
                        name=configuration.name,
                        # The plots are over the ratio, of links without a round-trip time.
                        ratio=None if configuration.round_trip_seconds else configuration.ratio,
                        network=configuration.network,
                        workers=configuration.workers,
                        communication_seconds=configuration.communication_seconds,
                        bounds=configuration.bounds(found[ALONE].median),
                        measured=found,
                        predicted=configuration.predictions(found[ALONE].median),
                    )
                )
            for model in options.real:
                for mbit in (None, options.real_mbit) if available else (None,):
                    where = "loopback" if mbit is None else f"{mbit:g} Mbit/s"
                    name = f"{model}, 2 workers, {where}"
                    contenders = _LOOPBACK if mbit is None else _REAL
                    found = run(name, {"model": model}, contenders, workers=2, mbit=mbit)
                    keep(
                        Cell(
                            name=name,
                            ratio=None,
                            network=model,
                            workers=2,
                            communication_seconds=0.0,
                            bounds={},
                            measured=found,
                        )
                    )
        except (MeasurementFailed, LinkError) as error:
            console.print(f"[bold]Stopped:[/bold] {error}")
            return 1
    if errors := prediction_errors(cells):
        console.print(f"The simulator was off by {100 * statistics.median(errors):.1f}% in the median.")
    draw(options.out.with_suffix(".png"), cells)
    console.print(f"Written: {options.out.with_suffix('.json')} and {options.out.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
