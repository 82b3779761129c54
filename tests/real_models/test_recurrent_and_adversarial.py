"""Recurrent networks, a GAN, and optimizers of third parties."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.real_models.callbacks import NotesCheckpoints
from tests.real_models.comparison import STEPS, VALIDATED, assert_close_to_ddp, assert_same_as_ddp
from tests.real_models.language_models import GPT2
from tests.real_models.optimizers import OPTIMIZERS, SwitchesMode, adamw, one_cycle, warm_up
from tests.real_models.recurrent_and_adversarial import GAN, CarriesState, Recurrent
from tests.support.fit import Recipe
from tests.support.rank_pool import RankPool

ACCUMULATED = {"accumulate_grad_batches": 2}
BF16 = {"precision": "bf16-mixed"}


@pytest.mark.parametrize(
    ("model", "trainer"),
    [
        pytest.param(partial(Recurrent, cell="LSTM", schedule=warm_up), {}, id="LSTM"),
        pytest.param(partial(Recurrent, cell="GRU", schedule=one_cycle), ACCUMULATED, id="GRU-accumulated"),
        pytest.param(partial(Recurrent, cell="LSTM"), BF16, id="LSTM-bf16"),
        pytest.param(CarriesState, {}, id="carries-state"),
    ],
)
def test_recurrent(two_ranks: RankPool, model: Any, trainer: dict[str, Any]) -> None:
    recipe = Recipe(model=partial(model, optimizer=adamw), steps=STEPS, trainer={**VALIDATED, **trainer})
    assert_same_as_ddp(two_ranks, recipe)


def test_recurrent_with_clipped_norm(two_ranks: RankPool) -> None:
    model = partial(Recurrent, cell="LSTM", optimizer=adamw)
    assert_close_to_ddp(two_ranks, Recipe(model=model, steps=STEPS, trainer={"gradient_clip_val": 0.1}))


def test_two_networks_against_each_other(two_ranks: RankPool) -> None:
    recipe = Recipe(
        model=GAN,
        steps=2 * STEPS,
        trainer=VALIDATED,
        ddp={"find_unused_parameters": True},
    )
    assert_same_as_ddp(two_ranks, recipe, reason="manual")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(two_ranks: RankPool, tmp_path: Path, name: str) -> None:
    """What is not known to update each parameter on its own is stepped whole."""
    recipe = Recipe(
        model=partial(GPT2, optimizer=OPTIMIZERS[name], schedule=warm_up if name == "Lion" else None),
        steps=STEPS,
        trainer={**VALIDATED, "enable_checkpointing": True},
        callbacks=(SwitchesMode, partial(NotesCheckpoints, tmp_path)),
    )
    assert_same_as_ddp(two_ranks, recipe, reason=None if name == "Muon" else "not known to update each parameter")
