"""Networks as people train them cross the step boundary with nearly all of their updates; the weights are DDP's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch.optim import SGD, AdamW

from tests.parity.architectures import Encoder, MobileBlock, ResNet
from tests.parity.checks import DDP, assert_same_as_ddp, train_on
from tests.parity.sabotage import no_gate_on
from tests.support.fit import Recipe, Run
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

adamw = partial(AdamW, lr=0.003)
momentum = partial(SGD, lr=0.05, momentum=0.9, weight_decay=1e-4)
# A bucket for every parameter, so that no gate opens another's.
SIZES = {"bucket_cap_mb": 1e-6, "partition_size": 400, "credit": 800}
STEPS = 12
STATIC, UNUSED = {"static_graph": True}, {"find_unused_parameters": True}


@pytest.mark.parametrize(
    ("checkpointed", "ddp"),
    [
        pytest.param(None, {}, id="kept", marks=pytest.mark.slow),
        pytest.param("reentrant", STATIC, id="reentrant-static-graph", marks=pytest.mark.slow),
        pytest.param("not reentrant", UNUSED, id="not-reentrant-find-unused", marks=pytest.mark.slow),
    ],
)
def test_transformer_with_activations(two_ranks: RankPool, checkpointed: str | None, ddp: dict[str, bool]) -> None:
    """Kept, or computed again in the backward pass: by then every update of the last step has been applied."""
    recipe = Recipe(model=partial(Encoder, checkpointed=checkpointed, optimizer=adamw), steps=STEPS, ddp=ddp)
    broken = partial(no_gate_on, names=("blocks.1.linear1.weight", "positions"))
    assert_same_as_ddp(two_ranks, recipe, options=SIZES, broken=broken)


@pytest.mark.parametrize(
    "ddp", [{}, pytest.param({"broadcast_buffers": False}, marks=pytest.mark.slow)], ids=lambda ddp: "-".join(ddp)
)
def test_residual_network(two_ranks: RankPool, ddp: dict[str, bool]) -> None:
    recipe = Recipe(model=partial(ResNet, optimizer=momentum), steps=STEPS, ddp=ddp)
    broken = partial(no_gate_on, names=("blocks.1.conv2.weight", "blocks.1.bn1.weight"))
    ddp_outcomes, _ = assert_same_as_ddp(two_ranks, recipe, options=SIZES, broken=broken)
    assert ddp_outcomes[0].weights["stem.1.num_batches_tracked"] == STEPS


@pytest.mark.slow
def test_residual_network_with_validation(two_ranks: RankPool) -> None:
    """Which runs on the running statistics of rank 0, and on updated weights."""
    trainer = {"val_check_interval": 5, "limit_val_batches": 1.0}
    recipe = Recipe(model=partial(ResNet, optimizer=momentum), steps=STEPS, trainer=trainer)
    broken = partial(no_gate_on, names=("blocks.1.conv2.weight",))
    assert_same_as_ddp(two_ranks, recipe, options=SIZES, network="late", broken=broken)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_channels_last(two_ranks: RankPool, precision: Any) -> None:
    """DDP keeps the memory format of a weight in the bucket's view."""
    recipe = Recipe(model=partial(MobileBlock, optimizer=adamw), steps=STEPS, trainer={"precision": precision})
    assert_same_as_ddp(two_ranks, recipe, options=SIZES, broken=partial(no_gate_on, names=("depthwise.weight",)))


class NormalisedOverRanks(ResNet):
    expected_error = True


def test_synchronised_batch_norm_is_refused_on_a_cpu_by_torch(two_ranks: RankPool) -> None:
    recipe = Recipe(model=NormalisedOverRanks, steps=4, trainer={"sync_batchnorm": True})
    ddp, ours = train_on(two_ranks, recipe, DDP, Run())
    for one, other in zip(ddp, ours, strict=True):
        assert one.error is not None
        assert "SyncBatchNorm layers only work with GPU modules" in one.error
        assert other.error == one.error


@pytest.mark.slow
def test_sizes_of_its_own_accord(two_ranks: RankPool) -> None:
    """With the sizes that follow from model and link, all of a small model is one bucket."""
    recipe = Recipe(model=partial(Encoder, optimizer=adamw), steps=STEPS)
    assert_same_as_ddp(
        two_ranks, recipe, options={"mode": "overlapped"}, broken=partial(no_gate_on, names=("last.bias",))
    )


@pytest.mark.slow
def test_a_deep_network(two_ranks: RankPool) -> None:
    """Twice as many layers as partitions in flight, and many more buckets than DDP would have."""
    recipe = Recipe(model=partial(Tower, depth=24, optimizer=adamw), steps=STEPS)
    assert_same_as_ddp(two_ranks, recipe, options=SIZES, broken=partial(no_gate_on, names=("layers.20.bias",)))
