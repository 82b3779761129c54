"""Trainings at random, each compared with DDP's, until one differs: ``python -m tests.parity.fuzz``.

The same factors as those of the matrix, random sizes of model, buckets, partitions and window, and callbacks that read
weights in ways that no touch shows. Each training has a
seed of its own, so that one that differs is repeated alone.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tests.parity import checks, rule
from tests.parity.factors import Combination, random_combination
from tests.parity.matrix import Scale, check, recipe
from tests.parity.silent_readers import READERS
from tests.support.rank_pool import RankPool, RanksFailed

__all__ = ["case", "fuzz", "main"]

Check = Callable[[RankPool, Combination, Path, Scale], None]
_LAST_LINES = 30


def case(seed: int) -> tuple[Combination, Scale]:
    """The training of a seed; what keeps steps from overlapping is rare, as one of nine factors nearly always would."""
    generator = random.Random(seed)
    combination = random_combination(generator, rare=rule.EFFECTS)
    scale = Scale(
        depth=generator.randint(2, 6),
        width=generator.choice([5, 8, 16, 24, 33, 48]),
        extra_steps=generator.randint(0, 20),
        options={
            "bucket_cap_mb": _any_magnitude(generator, 1e-6, 0.1),
            "partition_size": round(_any_magnitude(generator, 100, 20_000)),
            "credit": round(_any_magnitude(generator, 100, 50_000)),
        },
        reader=generator.choice([None, *READERS]),
    )
    return combination, scale


def fuzz(pool: RankPool, seeds: Sequence[int], console: Console, *, compare: Check = check) -> int:
    """Compare the trainings of ``seeds``, up to the first that is not DDP's.

    Args:
        pool: Two ranks.
        seeds: A seed for each training.
        console: Where to show it.
        compare: Raises an AssertionError where a training is not DDP's.

    Returns:
        How many were compared and are DDP's.

    Raises:
        SystemExit: With what differs, and how to see it again.
    """
    modes = dict.fromkeys(rule.Mode, 0)
    refused = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name, Progress(*columns, console=console) as progress:
        folder = Path(name)
        bar = progress.add_task("fuzz", total=len(seeds))
        for seed in seeds:
            combination, scale = case(seed)
            progress.update(bar, description=f"seed {seed}")
            try:
                pool.run(_keep_quiet, folder=folder)
                compare(pool, combination, folder, scale)
            except AssertionError as difference:
                if isinstance(difference, RanksFailed) and _fails_with_ddp(pool, combination, scale, folder):
                    refused.append(seed)
                else:
                    progress.stop()
                    raise SystemExit(_report(seed, combination, scale, difference, folder)) from difference
            else:
                modes[rule.mode(combination)] += 1
            progress.advance(bar)
    compared = sum(modes.values())
    summary = ", ".join(f"{count} {mode.name.lower()}" for mode, count in modes.items())
    console.print(f"{compared} trainings, all of them DDP's ({summary}).", highlight=False)
    if refused:
        console.print(f"DDP itself fails with {len(refused)} others: seeds {refused}.", highlight=False)
    return compared


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, help="seed of the first training; later ones have the next seeds")
    parser.add_argument("--count", type=int, default=200, help="how many trainings (default: %(default)s)")
    options = parser.parse_args(arguments)
    seed: int = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    console = Console(stderr=True)
    console.print(f"Seeds {seed} to {seed + options.count - 1}", highlight=False)
    with RankPool(2) as pool:
        fuzz(pool, range(seed, seed + options.count), console)


def _any_magnitude(generator: random.Random, least: float, most: float) -> float:
    return float(least * (most / least) ** generator.random())


def _keep_quiet(rank: int, folder: Path) -> None:
    """Send what this rank says, torch's own warnings too, to a file that is shown when something differs."""
    with _log(folder, rank).open("w") as log:
        sys.stderr.flush()
        os.dup2(log.fileno(), sys.stderr.fileno())


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def _fails_with_ddp(pool: RankPool, combination: Combination, scale: Scale, folder: Path) -> bool:
    try:
        pool.run(_keep_quiet, folder=folder)
        checks.train_on(pool, recipe(combination, scale), checks.DDP)
    except RanksFailed:
        return True
    return False


def _report(seed: int, combination: Combination, scale: Scale, difference: AssertionError, folder: Path) -> str:
    said = []
    for rank in range(2):
        lines = _log(folder, rank).read_text(errors="replace").splitlines() if _log(folder, rank).exists() else []
        said += [f"rank {rank} said:", *lines[-_LAST_LINES:]]
    return "\n".join(
        [
            *said,
            "",
            f"The training of seed {seed} is not DDP's: {difference}",
            "",
            f"  {combination!r}",
            f"  {scale!r}",
            "",
            f'To see it again:  make fuzz FUZZ_ARGS="--seed {seed} --count 1"',
        ]
    )


if __name__ == "__main__":
    main()
