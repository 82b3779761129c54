"""Language models of Hugging Face: tied weights, checkpointing, adapters and `generate()` in validation."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.parity.checks import DDP, assert_same, train_on
from tests.parity.sabotage import blind_between_steps, no_gate_on
from tests.real_models.callbacks import NotesCheckpoints, average
from tests.real_models.comparison import SIZES, STEPS, VALIDATED, assert_close_to_ddp, assert_same_as_ddp
from tests.real_models.language_models import BERT, GPT2, T5, Llama, LoRA
from tests.real_models.optimizers import adamw, one_cycle, warm_up
from tests.support.fit import Recipe, Run, differences
from tests.support.rank_pool import RankPool

ACCUMULATED = {"accumulate_grad_batches": 2}
BF16 = {"precision": "bf16-mixed"}
CLIPPED = {"gradient_clip_val": 0.1}


@pytest.mark.parametrize(
    ("model", "trainer"),
    [
        pytest.param(partial(GPT2, schedule=warm_up), {}, id="GPT2"),
        pytest.param(partial(GPT2, checkpointed="reentrant", schedule=one_cycle), ACCUMULATED, id="GPT2-reentrant"),
        pytest.param(partial(GPT2, checkpointed="not reentrant"), BF16, id="GPT2-not-reentrant-bf16"),
        pytest.param(BERT, {}, id="BERT"),
        pytest.param(partial(BERT, schedule=warm_up), ACCUMULATED | BF16, id="BERT-accumulated-bf16"),
        pytest.param(partial(T5, schedule=one_cycle), {}, id="T5"),
        pytest.param(partial(T5, checkpointed="not reentrant"), ACCUMULATED, id="T5-not-reentrant"),
        pytest.param(Llama, BF16, id="Llama-bf16"),
        pytest.param(partial(Llama, checkpointed="not reentrant", schedule=warm_up), {}, id="Llama-not-reentrant"),
        pytest.param(LoRA, {}, id="LoRA"),
        pytest.param(partial(LoRA, checkpointed="not reentrant", schedule=warm_up), BF16, id="LoRA-not-reentrant"),
    ],
)
def test_is_ddps_training(two_ranks: RankPool, model: Any, trainer: dict[str, Any]) -> None:
    recipe = Recipe(model=partial(model, optimizer=adamw), steps=STEPS, trainer={**VALIDATED, **trainer})
    assert_same_as_ddp(two_ranks, recipe)


@pytest.mark.parametrize("model", [GPT2, T5, LoRA])
def test_with_clipped_norm(two_ranks: RankPool, model: Any) -> None:
    assert_close_to_ddp(two_ranks, Recipe(model=partial(model, optimizer=adamw), steps=STEPS, trainer=CLIPPED))


def test_averages_and_checkpoints(two_ranks: RankPool, tmp_path: Path) -> None:
    """The moving average reads all weights after each step; files hold final ones."""
    callbacks = (average, partial(NotesCheckpoints, tmp_path))
    recipe = Recipe(
        model=partial(Llama, optimizer=adamw, schedule=warm_up),
        steps=STEPS,
        trainer={**VALIDATED, "enable_checkpointing": True},
        callbacks=callbacks,
    )
    assert_same_as_ddp(two_ranks, recipe)


def test_with_nothing_but_the_name(two_ranks: RankPool) -> None:
    """Sizes by the link, and tuning as it comes."""
    recipe = Recipe(model=partial(GPT2, optimizer=adamw), steps=3 * STEPS, trainer=VALIDATED)
    expected, actual = train_on(two_ranks, recipe, DDP, Run(options={}))
    assert_same(expected, actual)


@pytest.mark.parametrize(
    ("callbacks", "broken"),
    [
        pytest.param((), partial(no_gate_on, names=("network.transformer.wte.weight",)), id="no-gate-on-embedding"),
        pytest.param((average,), blind_between_steps, id="blind-between-steps"),
    ],
)
def test_a_late_update_is_noticed(two_ranks: RankPool, callbacks: Any, broken: Any) -> None:
    recipe = Recipe(model=partial(GPT2, optimizer=adamw), steps=STEPS, callbacks=callbacks)
    expected, actual = train_on(two_ranks, recipe, DDP, Run(options=SIZES, network="held", sabotage=broken))
    assert any(differences(one, other) for one, other in zip(expected, actual, strict=True))
