"""For each pair of features a training with both is compared with DDP's; and the comparison can fail."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from torch import nn

from lightning_bytescheduler.ddp import steps as steps_module
from tests.parity import checks, rule
from tests.parity.combined_models import CLIP
from tests.parity.factors import FACTORS, FORBIDDEN, Combination, allowed, random_combination
from tests.parity.matrix import Scale, check, matrix, recipe
from tests.parity.pairwise import covering_array, pairs_in, possible_pairs
from tests.support.fit import Run
from tests.support.rank_pool import RankPool


def _calm(rows: Iterable[Combination]) -> Iterator[Combination]:
    """The same pairs, without three values that clash: with DDP, too, weights explode."""
    for row in rows:
        if (row.optimizer, row.precision, row.loop) == ("Adafactor", "fp16-scaler", "two-optimizers"):
            yield replace(row, optimizer="Adam")
            yield replace(row, precision="32-true")
        else:
            yield row


def _marked(rows: Iterable[Combination]) -> Iterator[Any]:
    """Few rows in which every value occurs; the others, which have the other pairs, are slow."""
    rows = list(rows)
    missing = {item for row in rows for item in row.items()}
    quick = set[Combination]()
    while missing:
        best = max(rows, key=lambda row: len(missing.intersection(row.items())))
        quick.add(best)
        missing.difference_update(best.items())
    for row in rows:
        yield pytest.param(row, id=str(row), marks=() if row in quick else pytest.mark.slow)


MATRIX = list(_calm(matrix()))
PLAIN = Combination(**{factor: next(iter(values)) for factor, values in FACTORS.items()})


@pytest.mark.parametrize("combination", list(_marked(MATRIX)))
def test_is_ddps_training(two_ranks: RankPool, tmp_path: Path, combination: Combination) -> None:
    if combination.loop == "weight-averaging" and not hasattr(lightning_callbacks, "WeightAveraging"):
        pytest.skip("this version of Lightning has no WeightAveraging")
    check(two_ranks, combination, tmp_path)


# ---------------------------------------------------------------------- which combinations


def test_every_allowed_pair_of_values_occurs() -> None:
    assert len(MATRIX) >= 60
    expected = {
        frozenset(((one, value), (other, with_value)))
        for one, values in FACTORS.items()
        for other, others in FACTORS.items()
        if one != other
        for value in values
        for with_value in others
        if not any(
            {one: value, other: with_value} in ({a: v, b: w}, {b: w, a: v})
            for a, these, b, those, *_ in FORBIDDEN
            for v in these
            for w in those
        )
    }
    occurring = {pair for combination in MATRIX for pair in pairs_in(combination.items())}
    assert occurring == expected


def test_the_choice_is_the_same_each_time() -> None:
    assert list(_calm(matrix())) == MATRIX


def test_a_pair_that_no_row_can_have_is_an_error() -> None:
    def never_with_x(one: tuple[str, str], other: tuple[str, str]) -> bool:
        return "x" not in (one[1], other[1]) or {one[0], other[0]} == {"a", "b"}

    with pytest.raises(ValueError, match="No row may have"):
        covering_array({"a": ["x", "y"], "b": ["y"], "c": ["y"]}, never_with_x)


def test_few_rows_for_many_combinations() -> None:
    factors = {name: [f"{name}{value}" for value in range(4)] for name in "abcdefgh"}
    rows = covering_array(factors, lambda *_: True)
    assert {pair for row in rows for pair in pairs_in(row.items())} == possible_pairs(factors, lambda *_: True)
    assert len(rows) <= 32  # of 65536; 16 pairs of each two factors


def test_random_combinations_are_allowed() -> None:
    generator = random.Random(3)
    for _ in range(50):
        pairs = [tuple(pair) for pair in pairs_in(random_combination(generator).items())]
        assert all(allowed(one, other) for one, other in pairs)


@contextmanager
def error_expected(module: LightningModule) -> Iterator[None]:
    """Break nothing. With a sabotage, an error is an outcome and is not raised."""
    yield


@pytest.mark.slow
@pytest.mark.parametrize("ban", FORBIDDEN, ids=lambda ban: f"{ban.these[0]}-{ban.those[0]}")
def test_what_is_forbidden_fails_under_ddp(two_ranks: RankPool, ban: Any) -> None:
    """Nothing is left out of the matrix that could be in it."""
    generator = random.Random(0)
    pair = {ban.one: generator.choice(ban.these), ban.other: generator.choice(ban.those)}
    training = replace(recipe(replace(PLAIN, **pair), Scale()), steps=8)
    (outcomes,) = checks.train_on(two_ranks, training, Run(strategy="ddp", sabotage=error_expected))
    assert all(outcome.error for outcome in outcomes)


def test_effects_name_known_values() -> None:
    known = {(factor, value) for factor, values in FACTORS.items() for value in values}
    assert set(rule.EFFECTS) <= known
    assert known >= rule.OTHER_ORDER


# ---------------------------------------------------------------------- that it can fail


class NotesNorm(Callback):
    """Notes the norm of all gradients, before they are clipped."""

    def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
        module.notes.append(nn.utils.get_total_norm(p.grad for p in module.parameters() if p.grad is not None).item())


@pytest.mark.parametrize("model", ["plain", "batch-norm"])
def test_one_limit_clips_and_the_other_does_not(two_ranks: RankPool, model: str) -> None:
    clipped = recipe(replace(PLAIN, clipping="norm", model=model), Scale())
    (outcomes,) = checks.train_on(two_ranks, replace(clipped, callbacks=(NotesNorm,)), checks.DDP)
    norms = outcomes[0].notes
    assert len(norms) > 10
    assert CLIP["norm"][0] < min(norms)
    assert max(norms) < CLIP["norm-unreached"][0]


@contextmanager
def scaled_gradients(module: LightningModule) -> Iterator[None]:
    """Step with gradients that are a hundredth too large, as those of a norm that is not DDP's."""
    step_partially = steps_module.step_partially

    def step_scaled(due: Any, chosen: Any) -> None:
        step_partially(due, [(group, p, g * (1 + 1e-2)) for group, p, g in chosen])

    with patch.object(steps_module, "step_partially", step_scaled):
        yield


def test_other_bits_are_noticed(two_ranks: RankPool, tmp_path: Path) -> None:
    check(two_ranks, PLAIN, tmp_path)
    with pytest.raises(AssertionError, match="became"):
        check(two_ranks, PLAIN, tmp_path, sabotage=scaled_gradients)


def test_a_step_that_is_not_within_rounding_is_noticed(
    two_ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule, "OTHER_ORDER", {("optimizer", "AdamW")})
    combination = replace(PLAIN, optimizer="AdamW")
    assert rule.comparison(combination) is rule.Comparison.ONE_STEP
    check(two_ranks, combination, tmp_path)
    with pytest.raises(AssertionError, match="more than"):
        check(two_ranks, combination, tmp_path, sabotage=scaled_gradients)


def test_another_mode_than_expected_is_noticed(
    two_ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fewer = {item: effect for item, effect in rule.EFFECTS.items() if item != ("ddp", "no-bucket-views")}
    monkeypatch.setattr(rule, "EFFECTS", fewer)
    with pytest.raises(AssertionError, match="gradient_as_bucket_view"):
        check(two_ranks, replace(PLAIN, ddp="no-bucket-views"), tmp_path)
