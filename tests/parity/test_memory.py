"""Parameters whose memory is read by others than PyTorch are updated in the step, and the plan says so."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.optim import AdamW

from tests.parity.checks import assert_same_as_ddp
from tests.parity.observers import sums
from tests.parity.sabotage import blind_to_aliases
from tests.support.fit import Recipe
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

NAME = "layers.1.weight"


def numpys(weight: Tensor) -> tuple[Tensor, Any]:
    array = weight.detach().clone().numpy().copy()
    return torch.from_numpy(array), array


def dlpack(weight: Tensor) -> tuple[Tensor, Any]:
    array = weight.detach().numpy().copy()
    return torch.from_dlpack(array), array


def buffer(weight: Tensor) -> tuple[Tensor, Any]:
    memory = bytearray(weight.detach().numpy().tobytes())
    return torch.frombuffer(memory, dtype=weight.dtype).view(weight.shape), np.frombuffer(memory, dtype=np.float32)


def file(weight: Tensor) -> tuple[Tensor, Any]:
    with tempfile.NamedTemporaryFile() as opened:
        opened.write(weight.detach().numpy().tobytes())
        opened.flush()
        mapped = torch.from_file(opened.name, shared=True, size=weight.numel(), dtype=weight.dtype)
        return mapped.view(weight.shape), np.memmap(opened.name, dtype=np.float32, mode="r")


def another_process(weight: Tensor) -> tuple[Tensor, Any]:
    """The same pages a second time, as another process would have them."""
    shared = weight.detach().clone().share_memory_()
    handle, size = shared.untyped_storage()._share_fd_cpu_()
    other = torch.UntypedStorage._new_shared_fd_cpu(os.dup(handle), size)
    return shared, torch.empty(0).set_(other).view(-1)


class OverForeignMemory(Tower):
    """One weight lies in memory that other code reads, from the start or from the fifth step on."""

    def __init__(self, lay: Any, *, later: bool, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.lay, self.seen = lay, [None]
        if not later:
            self.place()

    def place(self) -> None:
        weight = self.get_parameter(NAME)
        weight.data, seen = self.lay(weight)
        self.seen[0] = seen

    def on_train_batch_end(self, *_: Any) -> None:
        if self.seen[0] is not None:
            self.notes.append(sums([torch.as_tensor(self.seen[0])]))
        elif self.global_step == 5:
            self.place()


@pytest.mark.parametrize(
    ("lay", "later"),
    [
        (numpys, True),
        pytest.param(dlpack, False, marks=pytest.mark.slow),
        (buffer, False),
        pytest.param(file, True, marks=pytest.mark.slow),
        pytest.param(another_process, False, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", "later" if value else "from the start"),
)
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_memory_that_others_read(two_ranks: RankPool, lay: Any, later: bool) -> None:
    recipe = Recipe(model=partial(OverForeignMemory, lay, later=later, optimizer=partial(AdamW, lr=0.005)), steps=10)
    _, ours = assert_same_as_ddp(two_ranks, recipe, overlap=False, broken=blind_to_aliases)
    plan = ours[0].plan
    assert plan is not None
    assert plan.held_elsewhere == (NAME,)
    assert "p.data.clone()" in repr(plan)
    assert plan.deferred_share is not None
    assert plan.deferred_share > 0.5, "the other weights keep their overlap"


class SharesInMidFit(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == 4:
            module.share_memory()


def test_a_model_that_is_shared_in_mid_fit(two_ranks: RankPool) -> None:
    recipe = Recipe(model=Tower, steps=8, callbacks=(SharesInMidFit,))
    _, ours = assert_same_as_ddp(two_ranks, recipe, overlap=False)
    assert ours[0].plan is not None
    assert len(ours[0].plan.held_elsewhere) == len(list(Tower().parameters()))


class SpectrallyNormed(Tower):
    """Weights that are computed in a hook before each layer's forward pass, and stay there as plain attributes."""

    def __init__(self, norm: Any, **arguments: Any) -> None:
        super().__init__(**arguments)
        for layer in (self.first, *self.layers, self.last):
            norm(layer)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "norm",
    [
        pytest.param(nn.utils.spectral_norm, id="spectral"),
        pytest.param(nn.utils.parametrizations.weight_norm, id="weight-parametrization"),
        pytest.param(nn.utils.parametrizations.orthogonal, id="orthogonal", marks=pytest.mark.slow),
    ],
)
def test_normed_weights_overlap(two_ranks: RankPool, norm: Any) -> None:
    recipe = Recipe(model=partial(SpectrallyNormed, norm, depth=2, optimizer=partial(AdamW, lr=0.005)), steps=12)
    _, ours = assert_same_as_ddp(two_ranks, recipe)
    assert ours[0].plan is not None
    assert ours[0].plan.gated_at_start == ()
    assert ours[0].plan.held_elsewhere == ()
