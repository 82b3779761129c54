"""Vision transformers, diffusion, residual networks and detection."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.real_models import WHY_NO_TORCHVISION
from tests.real_models.callbacks import AveragesAsDiffusers, NotesCheckpoints
from tests.real_models.comparison import STEPS, VALIDATED, assert_close_to_ddp, assert_same_as_ddp
from tests.real_models.image_models import DETR, ConditionedUNet, RetinaNet, TorchvisionResNet, UNet, ViT
from tests.real_models.optimizers import adamw, one_cycle, warm_up
from tests.support.fit import Recipe
from tests.support.models import sgd
from tests.support.rank_pool import RankPool

ACCUMULATED = {"accumulate_grad_batches": 2}
BF16 = {"precision": "bf16-mixed"}
CLIPPED = {"gradient_clip_val": 0.1}
# Weights in the thousands.
LARGER = {"bucket_cap_mb": 0.05, "partition_size": 10_000, "credit": 20_000}


@pytest.mark.parametrize(
    ("model", "trainer"),
    [
        pytest.param(partial(ViT, schedule=warm_up), {}, id="ViT"),
        pytest.param(partial(ViT, checkpointed=True), BF16 | ACCUMULATED, id="ViT-checkpointed-bf16"),
        pytest.param(partial(UNet, schedule=warm_up), {}, id="UNet"),
        pytest.param(partial(UNet, checkpointed=True), ACCUMULATED, id="UNet-checkpointed"),
        pytest.param(ConditionedUNet, BF16, id="ConditionedUNet-bf16"),
        pytest.param(DETR, {}, id="DETR"),
    ],
)
def test_is_ddps_training(two_ranks: RankPool, model: Any, trainer: dict[str, Any]) -> None:
    recipe = Recipe(model=partial(model, optimizer=adamw), steps=STEPS, trainer={**VALIDATED, **trainer})
    assert_same_as_ddp(two_ranks, recipe, options=LARGER)


@pytest.mark.skipif(WHY_NO_TORCHVISION is not None, reason=f"torchvision cannot be imported: {WHY_NO_TORCHVISION}")
@pytest.mark.parametrize(
    ("model", "trainer"),
    [
        pytest.param(partial(TorchvisionResNet, optimizer=sgd, schedule=one_cycle), {}, id="ResNet"),
        pytest.param(partial(TorchvisionResNet, optimizer=adamw), BF16, id="ResNet-bf16"),
        pytest.param(partial(RetinaNet, optimizer=sgd), {}, id="RetinaNet"),
        pytest.param(partial(RetinaNet, optimizer=adamw, schedule=warm_up), ACCUMULATED, id="RetinaNet-accumulated"),
    ],
)
def test_torchvision(two_ranks: RankPool, model: Any, trainer: dict[str, Any]) -> None:
    recipe = Recipe(model=model, steps=STEPS, trainer={**VALIDATED, **trainer})
    assert_same_as_ddp(two_ranks, recipe, options=LARGER)


@pytest.mark.parametrize("model", [ViT, UNet])
def test_with_clipped_norm(two_ranks: RankPool, model: Any) -> None:
    assert_close_to_ddp(two_ranks, Recipe(model=partial(model, optimizer=adamw), steps=STEPS, trainer=CLIPPED))


def test_averages_of_diffusers(two_ranks: RankPool, tmp_path: Path) -> None:
    """Validation looks at the average, which is put in the place of the weights and taken out again."""
    recipe = Recipe(
        model=partial(UNet, optimizer=adamw),
        steps=STEPS,
        trainer={**VALIDATED, "enable_checkpointing": True},
        callbacks=(AveragesAsDiffusers, partial(NotesCheckpoints, tmp_path)),
    )
    assert_same_as_ddp(two_ranks, recipe, options=LARGER)
