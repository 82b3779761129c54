"""Plays schedules of the launch order, see ``world.py``::

    python -m tests.launch_order.explore --schedules 1000000
    python -m tests.launch_order.explore --design two-communicators --schedules 1000
    python -m tests.launch_order.explore --systematic

Each schedule is drawn from its number: who goes on, with ranks of unequal speed. ``--systematic`` plays all schedules
of small cases instead: every state that can be reached is seen once.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence

import torch

from tests.launch_order.world import DESIGNS, Case, Deadlock, Mismatch, Step, World, stepped

__all__ = ["SMALL", "explore", "main", "play", "reach_all"]

SMALL = (
    Case(layers=1, steps=1, foreign=1.0, lonely=0.0),
    Case(layers=1, steps=2, foreign=0.3, lonely=1.0, seed=1),
    Case(layers=2, steps=1, foreign=0.5, lonely=1.0, seed=3),
)
_SPEEDS = (1.0, 0.2, 0.03)
_SHOWN = 3


def play(seed: int, design: str) -> int:
    """Play the schedule of number ``seed``; returns the number of its steps.

    Raises:
        Deadlock: If the schedule deadlocks.
        Mismatch: If ranks start different collectives.
    """
    draw = random.Random(seed)
    world = World(Case.drawn(seed, design))
    speeds = [draw.choice(_SPEEDS) for _ in world.ranks]
    of_kind = {kind: draw.choice(_SPEEDS) for kind in ("thread", "stream", "mail", "told", "reports")}
    taken = 0
    while steps := world.steps():
        if len(steps) > 1:
            (step,) = draw.choices(steps, [speeds[rank] * of_kind.get(kind, 1.0) for rank, kind, _ in steps])
        else:
            step = steps[0]
        step[2]()
        taken += 1
    return taken


def explore(design: str, first: int, schedules: int) -> tuple[Counter[str], list[str], int]:
    """Play ``schedules`` of them from number ``first`` on.

    Returns:
        How many ended in which way, a few failures in words, and how many steps were taken.
    """
    ends: Counter[str] = Counter()
    shown: list[str] = []
    steps = 0
    with stepped():
        for seed in range(first, first + schedules):
            try:
                steps += play(seed, design)
                ends["ended"] += 1
            except (Deadlock, Mismatch) as error:
                ends[type(error).__name__.lower()] += 1
                if len(shown) < _SHOWN:
                    shown.append(f"{seed}: {error}")
    return ends, shown, steps


def reach_all(case: Case, limit: int) -> tuple[int, bool]:
    """Go through all states that ``case`` can get into, depth first.

    What has been played cannot be taken back: a state is reached by playing anew what led to it. Steps whose moment
    makes no difference are taken at once.

    Args:
        case: A small one.
        limit: States after which to stop.

    Returns:
        How many there are, and whether these are all.

    Raises:
        Deadlock: If there is one.
        Mismatch: If ranks can start different collectives.
    """
    seen: set[object] = set()
    with stepped():
        todo: list[list[tuple[int, str]]] = [[]]
        while todo:
            path = todo.pop()
            world = World(case)
            for label in path:
                next(step for step in world.steps() if step[:2] == label)[2]()
            while steps := world.steps():
                at_once = next((step for step in steps if _may_go_first(step, case)), None)
                if at_once is not None:
                    path = [*path, at_once[:2]]
                    at_once[2]()
                    continue
                standing = _frozen(world.standing())
                if standing in seen:
                    break
                seen.add(standing)
                if len(seen) >= limit:
                    return len(seen), False
                todo += [[*path, step[:2]] for step in steps[1:]]
                path = [*path, steps[0][:2]]
                steps[0][2]()
    return len(seen), True


def _may_go_first(step: Step, case: Case) -> bool:
    """Whether taking ``step`` before all others hides no schedule, because its order makes no difference.

    What differs with its moment is what rank 0 knows when it decides: of data, of credit, and of the others' threads.
    """
    rank, kind, _ = step
    if kind in ("stream", "mail") or kind.startswith("end"):
        return True
    if kind.startswith("start"):  # nothing else wants the slot
        return case.design != "two-communicators"
    return rank > 0 and kind != "thread"


def _frozen(value: object) -> object:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module; returns 1 if a schedule did not end."""
    parser = argparse.ArgumentParser(description="Plays schedules of the launch order.")
    parser.add_argument("--design", choices=DESIGNS, default=DESIGNS[0])
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--systematic", action="store_true")
    parser.add_argument("--limit", type=int, default=1_000_000, help="states of a small case")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    began = time.monotonic()
    if chosen.systematic:
        for case in SMALL:
            states, all_of_them = reach_all(case, chosen.limit)
            print(f"{case}: {states:,} states{'' if all_of_them else ', not all'}, {time.monotonic() - began:.0f} s")
        return 0
    ends, shown, steps = explore(chosen.design, chosen.first, chosen.schedules)
    counts = ", ".join(f"{count:,} {end}" for end, count in ends.most_common())
    print(f"{chosen.design}: {counts}; {steps:,} steps in {time.monotonic() - began:.0f} s")
    print("\n".join(shown))
    return int(ends["ended"] != chosen.schedules)


if __name__ == "__main__":
    sys.exit(main())
