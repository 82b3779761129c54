"""Runs ``train.py`` with one failure in it, and checks what every scenario has to show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.ranks import Ended, Nursery

__all__ = ["Scenario", "check_end", "run", "run_together"]

_BOUND_S = 60.0  # for what takes seconds; a rank that hangs waits for half an hour
_SCRIPT = Path(__file__).with_name("train.py")
_CLEAN = "threads=[] gated=0 groups=1"
# What a process prints that did not end in order.
_UGLY = ("terminate called", "Fatal Python error", "Segmentation fault")
_STORE_NOISE = "[c10d]"  # torch's stack trace when a store goes away while it is being asked


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One run of the script.

    Attributes:
        world_size: Number of ranks.
        options: Options of the script.
        own_options: Changes for single ranks.
    """

    world_size: int
    options: Mapping[str, Any]
    own_options: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)


def run(
    nursery: Nursery, scenario: Scenario, folder: Path, *, timeout: float = 120.0, await_only: int | None = None
) -> list[Ended]:
    folder.mkdir(parents=True, exist_ok=True)
    return nursery.run(
        _SCRIPT,
        dict(scenario.options),
        world_size=scenario.world_size,
        folder=folder,
        timeout=timeout,
        await_only=await_only,
        own_arguments={rank: dict(options) for rank, options in scenario.own_options.items()},
    )


def run_together(nursery: Nursery, scenarios: Sequence[Scenario], folder: Path) -> list[list[Ended]]:
    """Two at a time: much of a scenario is waiting."""
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run, nursery, s, folder / f"scenario{n}") for n, s in enumerate(scenarios)]
        return [each.result() for each in runs]


def check_end(
    ranks: Sequence[Ended],
    *,
    failed: int,
    says: str,
    code: int = 1,
    survivors_code: int = 1,
    clean: bool = True,
    quiet: bool = True,
) -> None:
    """Every rank has ended in time and in order, and every survivor's log names the rank and the cause.

    Args:
        ranks: From :func:`run`.
        failed: Which rank failed.
        says: What the others' logs contain.
        code: Exit code of that rank.
        survivors_code: Exit code of the others.
        clean: Whether the survivors' training threads come back, so that nothing is left.
        quiet: Whether the store's host leaves in order, so that no rank asks the store when it is gone.
    """
    start = ranks[failed].stamp("FAILED_AT")
    assert start is not None, ranks[failed].log
    took = [round(rank.ended - start, 2) for rank in ranks]
    print(f"ended after {took} s")
    for number, rank in enumerate(ranks):
        where = f"rank {number} of {len(ranks)}, ended {took[number]} s after the failure:\n{rank.log}"
        assert rank.code == (code if number == failed else survivors_code), where
        assert took[number] < _BOUND_S, where
        assert not any(ugly in rank.log for ugly in _UGLY), where
        assert not quiet or _STORE_NOISE not in rank.log, where
        if number == failed:
            continue
        assert says in rank.log, where
        if clean:
            assert f" {_CLEAN}" in rank.log, where
