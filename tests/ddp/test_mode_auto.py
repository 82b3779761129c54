"""Which steps are as DDP's: decided as in a fit, by a step time for each kind and what is exposed on each rank."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler import CreditTuner
from lightning_bytescheduler.ddp.decided_fit import PointInForce
from lightning_bytescheduler.tuning import credit_tuner
from lightning_bytescheduler.tuning.record import TuningIdentity
from lightning_bytescheduler.tuning.sizes import SearchSpace, TuningPoint

START = TuningPoint(credit=4096, partition_size=2048)
IDENTITY = TuningIdentity(parameters=6_250_000, bytes_per_parameter=4, workers=4, backend="gloo")
ONE_POINT = SearchSpace(credits=(4096, 4096), partitions=(2048, 2048))


class Exchange:
    """`AgreedValues` of several ranks in one process: each has its own end, and they are called in turns."""

    def __init__(self, ranks: int) -> None:
        self.messages: list[list[list[int]]] = []
        self.ends = [_End(self, rank) for rank in range(ranks)]


class _End:
    def __init__(self, exchange: Exchange, rank: int) -> None:
        self._exchange, self._rank, self._count, self._next = exchange, rank, 0, 0
        self.steps: list[int] = []

    def before_step(
        self, step: int, wanted: Sequence[int] | None, *, interval: int, seen: Sequence[int]
    ) -> list[int] | None:
        if step < self._next:
            return None
        agreed, apart, messages = None, 1, self._exchange.messages
        if self._count:
            rows = messages[self._count - 1]
            assert len(rows) == len(self._exchange.ends), "ranks meet"
            apart, *sizes = rows[0][:3]
            agreed = [*sizes, *(min(numbers) for numbers in zip(*(row[3:] for row in rows), strict=True))]
        if len(messages) == self._count:
            messages.append([])
        messages[self._count].append([interval, *(wanted or (0, 0)), *seen])
        self._count, self._next = self._count + 1, step + apart
        self.steps.append(step)
        return agreed

    def close(self) -> None:
        pass


class Fit:
    """Ranks that step together; rank 0 decides.

    Args:
        ddp_mode: Seconds of a step.
        overlapped: The same.
        exposed: Of a step as DDP's, for each rank.
        ranks: How many.
        slow: Whether the link is known to be slow.
        space: Where sizes are searched.
    """

    def __init__(
        self,
        *,
        ddp_mode: float,
        overlapped: float,
        exposed: Callable[[int], float] = lambda _: 0.0,
        ranks: int = 1,
        slow: bool = False,
        space: SearchSpace = ONE_POINT,
    ) -> None:
        self.ddp_mode, self.overlapped, self.exposed = ddp_mode, overlapped, exposed
        self.modes: list[bool] = []
        self.noise: Callable[[], float] = lambda: 1.0
        self.lines: list[str] = []
        self.now = 0.0
        self.tuner = CreditTuner()
        with patch.object(credit_tuner, "prepare", lambda: None):
            first = self.tuner.begin(
                space=space,
                start=START,
                identity=IDENTITY,
                plain_ddp=True,
                as_ddp=not slow,
                folder=None,
            )
        self.ends = Exchange(ranks).ends
        self.ranks = [
            PointInForce(
                core=SimpleNamespace(),  # type: ignore[arg-type]
                values=end,  # type: ignore[arg-type]
                point=first,
                tuner=None if rank else self.tuner,
                device=torch.device("cpu"),
                clock=lambda: self.now,
            )
            for rank, end in enumerate(self.ends)
        ]

    def run(self, steps: int) -> Fit:
        for step in range(len(self.modes) + 1, len(self.modes) + steps + 1):
            with patch.object(credit_tuner, "rank_zero_info", self.lines.append):
                for rank in self.ranks:
                    rank.before_forward(step)
                    rank.before_forward(step)  # accumulated gradients
            modes = {rank.ddp_mode for rank in self.ranks}
            assert len(modes) == 1, "the same on all ranks"
            (mode,) = modes
            changed = bool(self.modes) and self.modes[-1] != mode
            self.modes.append(mode)
            self.now += 10.0 if step == 1 or changed else (self.ddp_mode if mode else self.overlapped) * self.noise()
            for number, rank in enumerate(self.ranks):
                if mode and step > 1:
                    rank.add_exposed(self.exposed(number))
        return self

    @property
    def seconds(self) -> float:
        """Without the first step, and what a change costs."""
        return sum(self.ddp_mode if mode else self.overlapped for mode in self.modes[1:])


def test_nothing_is_tried_where_nothing_is_exposed() -> None:
    fit = Fit(ddp_mode=1.0, overlapped=1.2, exposed=lambda _: 0.04).run(5000)
    assert all(fit.modes)
    assert fit.lines == [
        "bytescheduler: steps stay synchronised: 40.0 ms of a step's 1000.0 ms could be hidden: too little."
    ]
    assert len([step for step in fit.ends[0].steps if step > 32]) <= 5000 // 16, "exchanges are rare"


def test_what_one_rank_alone_waits_for_is_nothing_to_hide() -> None:
    assert all(Fit(ranks=2, ddp_mode=1.0, overlapped=0.5, exposed=lambda rank: 0.5 * rank).run(1000).modes)


def test_what_takes_a_moment_is_not_hidden() -> None:
    assert all(Fit(ddp_mode=0.004, overlapped=0.003, exposed=lambda _: 0.0025).run(500).modes)


def test_much_that_is_exposed_is_hidden_soon() -> None:
    fit = Fit(ddp_mode=1.0, overlapped=0.7, exposed=lambda _: 0.3).run(60)
    assert fit.modes == [True] * 5 + [False] * 55
    (line,) = fit.lines
    assert line.startswith("bytescheduler: steps are from here on overlapped: overlapped steps with credit")
    assert "(700.0 ms against 1000.0 ms synchronised)" in line


def test_a_trial_that_does_not_pay_is_short_and_not_soon_repeated() -> None:
    fit = Fit(ddp_mode=1.0, overlapped=1.3, exposed=lambda _: 0.3).run(400)
    assert fit.modes == [True] * 5 + [False] * 4 + [True] * 391
    fit.run(600)
    assert fit.modes.count(False) <= 12
    fit.run(9000)
    assert fit.modes.count(False) <= 50
    assert len(fit.lines) == 1, "the same again is no news"


def test_some_that_is_exposed_can_wait() -> None:
    fit = Fit(ddp_mode=1.0, overlapped=0.9, exposed=lambda _: 0.1).run(300)
    first = fit.modes.index(False)
    assert 99 <= first <= 150
    assert not any(fit.modes[first : first + 100])


def test_a_tie_is_ddps() -> None:
    fit = Fit(ddp_mode=1.0, overlapped=0.99, exposed=lambda _: 0.3).run(400)
    assert fit.modes.count(False) <= 13
    assert fit.modes[-1]


def test_what_is_not_known_is_tried() -> None:
    assert not Fit(ddp_mode=1.0, overlapped=0.8, exposed=lambda _: math.inf).run(20).modes[-1]
    assert Fit(ddp_mode=1.0, overlapped=1.2, exposed=lambda _: math.inf).run(20).modes[-1]


def test_on_a_slow_link_it_is_ddps_way_that_is_tried() -> None:
    fit = Fit(slow=True, ddp_mode=1.4, overlapped=1.0).run(1000)
    assert fit.modes[:20] == [False] * 20
    assert 1 <= fit.modes.count(True) <= 6
    fit = Fit(slow=True, ddp_mode=0.9, overlapped=1.0).run(400)
    assert all(fit.modes[200:])


def test_a_link_that_becomes_slow() -> None:
    fit = Fit(ddp_mode=1.0, overlapped=1.2, exposed=lambda _: 0.0).run(1000)
    fit.ddp_mode, fit.overlapped, fit.exposed = 2.0, 1.2, lambda _: 1.0
    fit.run(200)
    assert not any(fit.modes[1100:])


def test_sizes_are_searched_once_overlap_is_seen_to_pay() -> None:
    space = SearchSpace(credits=(2048, 1_048_576), partitions=(2048, 2048))
    fit = Fit(ddp_mode=1.0, overlapped=0.7, exposed=lambda _: 0.3, space=space).run(60)
    assert fit.modes == [True] * 5 + [False] * 55
    assert fit.lines[0].endswith("2 of 15 trials made. How much travels at once is tuned while training.")
    assert [entry.kind for entry in fit.tuner.entries[:2]] == ["start", "guess"]
    fit = Fit(ddp_mode=1.0, overlapped=1.3, exposed=lambda _: 0.3, space=space).run(400)
    assert fit.modes.count(False) == 4
    assert len([entry for entry in fit.tuner.entries if entry.is_trial]) == 2, "no other sizes are tried"


@given(
    ranks=st.integers(1, 3),
    overlapped=st.floats(0.4, 1.3),
    exposed=st.floats(0.0, 0.6),
    slow=st.booleans(),
    noise=st.sampled_from([0.0, 0.01, 0.03]),
    seed=st.integers(0, 1000),
)
def test_never_much_slower_than_the_better_way(
    ranks: int, overlapped: float, exposed: float, slow: bool, noise: float, seed: int
) -> None:
    draw = random.Random(seed)
    fit = Fit(
        ranks=ranks,
        slow=slow,
        ddp_mode=1.0,
        overlapped=overlapped,
        exposed=lambda _: exposed * draw.uniform(0.8, 1.2),
    )
    fit.noise = lambda: max(draw.gauss(1.0, noise), 0.1)
    fit.run(500)
    if not slow:
        assert fit.seconds <= 1.02 * len(fit.modes), "never slower than DDP"
        if exposed < 0.04:
            assert all(fit.modes)
    if overlapped < 0.9 and (slow or exposed > 0.3):
        assert fit.seconds <= 1.1 * overlapped * len(fit.modes), "and what is to be gained is gained"


@pytest.mark.parametrize("exposed", [0.0, 0.3])
def test_a_resumed_fit_begins_as_it_was_decided(exposed: float) -> None:
    fit = Fit(ddp_mode=1.0, overlapped=0.7, exposed=lambda _: exposed).run(200)
    checkpoint: dict[str, Any] = {}
    fit.tuner.on_save_checkpoint(None, None, checkpoint)  # type: ignore[arg-type]
    tuner = CreditTuner()
    tuner.on_load_checkpoint(None, None, checkpoint)  # type: ignore[arg-type]
    assert checkpoint["bytescheduler_tuning"]["settled"] == (exposed > 0), "what was never tried was not chosen"
    first = tuner.begin(
        space=ONE_POINT,
        start=START,
        identity=IDENTITY,
        plain_ddp=True,
        as_ddp=True,
        folder=None,
    )
    assert first.is_plain_ddp == (exposed == 0.0)
