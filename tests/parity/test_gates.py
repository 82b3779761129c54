"""Every way to read a parameter in the forward pass waits for its update; without its gate, each test here fails."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch.optim import AdamW

from tests.parity import gate_models as models
from tests.parity.checks import assert_same_as_ddp
from tests.parity.sabotage import no_gate_on
from tests.support.fit import Recipe
from tests.support.rank_pool import RankPool

# A bucket for every parameter, so that no gate opens another's.
SIZES = {"bucket_cap_mb": 1e-6, "partition_size": 400, "credit": 800}
STEPS = 12
UNUSED = {"find_unused_parameters": True}


@pytest.mark.parametrize(
    ("model", "read", "ddp"),
    [
        pytest.param(models.Tied, ["embedding.weight"], {}, id="tied-weights"),
        pytest.param(models.ReadOutside, ["holder.weight"], {}, id="read-outside-its-layer"),
        pytest.param(models.ReadOutside, ["table.weight"], {}, id="embedding-as-output-layer", marks=pytest.mark.slow),
        pytest.param(
            models.OwnParameters, ["scale"], {}, id="parameter-of-the-lightning-module", marks=pytest.mark.slow
        ),
        pytest.param(models.OwnParameters, ["offsets.0"], {}, id="parameter-in-a-list", marks=pytest.mark.slow),
        pytest.param(models.UsedTwice, ["layers.0.weight"], {}, id="layer-used-twice", marks=pytest.mark.slow),
        pytest.param(models.UsedTwice, ["last.bias"], {}, id="last-layer-used-twice", marks=pytest.mark.slow),
        pytest.param(models.WithUnused, ["last.weight"], UNUSED, id="layer-never-used", marks=pytest.mark.slow),
        pytest.param(models.PartlyFrozen, ["layers.1.weight"], {}, id="frozen-layers", marks=pytest.mark.slow),
        pytest.param(models.Conditional, ["common.weight"], UNUSED, id="branch-taken-often", marks=pytest.mark.slow),
        pytest.param(
            models.Conditional, ["rare.weight", "rare.bias"], UNUSED, id="branch-taken-rarely", marks=pytest.mark.slow
        ),
        pytest.param(models.Recurrent, ["lstm.weight_hh_l0"], {}, id="LSTM", marks=pytest.mark.slow),
        pytest.param(models.Attention, ["attention.in_proj_weight"], {}, id="attention"),
        pytest.param(models.Attention, ["block.linear1.weight"], {}, id="transformer-layer", marks=pytest.mark.slow),
        pytest.param(models.Normalised, ["norm.weight"], {}, id="batch-norm", marks=pytest.mark.slow),
        pytest.param(
            partial(models.Checkpointed, reentrant=True),
            ["layers.1.weight"],
            {},
            id="checkpoint-reentrant",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            partial(models.Checkpointed, reentrant=False),
            ["layers.1.weight"],
            {},
            id="checkpoint-not-reentrant",
            marks=pytest.mark.slow,
        ),
        pytest.param(models.Reversed, ["layers.0.weight"], {}, id="reverse-order", marks=pytest.mark.slow),
        pytest.param(
            models.WeightNormed,
            ["layers.1.parametrizations.weight.original1"],
            {},
            id="parametrisation",
            marks=pytest.mark.slow,
        ),
        pytest.param(models.FunctionalCall, ["layers.1.weight"], UNUSED, id="functional-call"),
        pytest.param(
            models.CustomFunction, ["layers.1.weight"], UNUSED, id="autograd-function", marks=pytest.mark.slow
        ),
    ],
)
def test_read_in_the_forward_pass(two_ranks: RankPool, model: Any, read: list[str], ddp: dict[str, bool]) -> None:
    recipe = Recipe(model=partial(model, optimizer=partial(AdamW, lr=0.005)), steps=STEPS, ddp=ddp)
    assert_same_as_ddp(two_ranks, recipe, options=SIZES, broken=partial(no_gate_on, names=tuple(read)))
