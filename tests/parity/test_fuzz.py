"""The fuzz repeats itself, and stops at what is not DDP's with the command that shows it again."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.parity import fuzz as fuzz_module
from tests.parity import rule
from tests.parity.factors import allowed
from tests.parity.fuzz import case, fuzz
from tests.parity.matrix import check
from tests.parity.pairwise import pairs_in
from tests.parity.sabotage import blind_to_gradients
from tests.support.rank_pool import RankPool, RanksFailed


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Not the pool of the other tests, as the fuzzer silences its ranks."""
    with RankPool(2) as ranks:
        yield ranks


def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def first(wanted: Any) -> int:
    """The first seed whose training is ``wanted``."""
    return next(seed for seed in range(10_000) if wanted(*case(seed)))


def test_a_seed_is_a_training() -> None:
    assert case(7) == case(7)
    assert len({str(case(seed)) for seed in range(100)}) == 100
    for seed in range(100):
        assert all(allowed(*pair) for pair in map(tuple, pairs_in(case(seed)[0].items())))


def test_about_half_of_the_trainings_overlap() -> None:
    modes = [rule.mode(case(seed)[0]) for seed in range(2000)]
    assert 0.35 < modes.count(rule.Mode.OVERLAPPED) / len(modes) < 0.7
    assert set(modes) == set(rule.Mode)


@pytest.mark.slow
def test_trainings_that_are_ddps(pool: RankPool) -> None:
    shown = console()
    seeds = [first(lambda c, _, schedule=schedule: c.schedule == schedule) for schedule in ("constant", "one-cycle")]
    assert fuzz(pool, seeds, shown) == 2
    assert "2 trainings, all of them DDP's" in shown.file.getvalue()


@pytest.mark.slow
def test_it_stops_at_the_first_that_is_not(pool: RankPool) -> None:
    plain = {
        "loop": "reads-gradients",
        "precision": "32-true",
        "ddp": "default",
        "clipping": "unclipped",
    }
    wanted = plain.items()
    reads = first(lambda c, _: rule.mode(c) is not rule.Mode.SYNCHRONISED and wanted <= set(c.items()))
    compared = []

    def sabotaged(pool: RankPool, combination: Any, folder: Path, scale: Any) -> None:
        compared.append(combination)
        check(pool, combination, folder, scale, sabotage=blind_to_gradients)

    with pytest.raises(SystemExit) as stopped:
        fuzz(pool, [reads, reads + 1], console(), compare=sabotaged)
    assert compared == [case(reads)[0]]
    message = str(stopped.value.code)
    assert f'make fuzz FUZZ_ARGS="--seed {reads} --count 1"' in message
    assert "became" in message
    assert repr(case(reads)[1]) in message


@pytest.mark.parametrize("ddp_fails", [True, False])
def test_what_ddp_refuses_too_is_no_difference(monkeypatch: pytest.MonkeyPatch, ddp_fails: bool) -> None:
    """Three values may clash where each two of them get on."""

    class Pool:
        def run(self, *_: Any, **__: Any) -> None:
            pass

    def failing(*_: Any) -> None:
        raise RanksFailed("not allowed")

    monkeypatch.setattr(fuzz_module.checks, "train_on", failing if ddp_fails else lambda *_: None)
    shown = console()
    if ddp_fails:
        assert fuzz(Pool(), [3, 4], shown, compare=failing) == 0
        assert "DDP itself fails with 2 others: seeds [3, 4]" in shown.file.getvalue()
    else:
        with pytest.raises(SystemExit):
            fuzz(Pool(), [3, 4], shown, compare=failing)
