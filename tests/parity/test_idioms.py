"""Every common way to look at weights between two steps shows them after the step."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from torch import nn
from torch.optim import AdamW

from tests.parity.checks import DDP, assert_same, train_on
from tests.parity.observers import sums
from tests.parity.sabotage import blind_between_steps
from tests.support.fit import Recipe, Run
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

model = partial(Tower, optimizer=partial(AdamW, lr=0.005))


def saved_and_loaded(module: Any) -> list[float]:
    file = io.BytesIO()
    torch.save(list(module.parameters()), file)
    file.seek(0)
    return sums(torch.load(file, weights_only=False))


def norms_by_name(module: Any) -> list[float]:
    return [p.detach().norm(2).item() for name, p in module.named_parameters() if name.endswith("weight")]


def histograms(module: Any) -> list[Any]:
    return [np.histogram(p.detach().cpu().numpy(), bins=5)[0].tolist() for p in module.parameters()]


# What people write to look at weights, each as the first touch after a step.
IDIOMS: dict[str, Callable[[Any], Any]] = {
    "vector": lambda module: nn.utils.parameters_to_vector(module.parameters()).sum().item(),
    "data": lambda module: sums(p.data for p in module.parameters()),
    "numpy of data": lambda module: [float(p.data.numpy().sum()) for p in module.parameters()],
    "array": lambda module: [float(np.asarray(p.detach()).sum()) for p in module.parameters()],
    "tolist": lambda module: [p.tolist() for p in module.last.parameters()],
    "item": lambda module: module.last.bias[0].item(),
    "float": lambda module: float(module.last.bias[1]),
    "index": lambda module: module.first.weight[2, 3:5].tolist(),
    "get_parameter": lambda module: module.get_parameter("layers.2.weight").abs().max().item(),
    "get_submodule": lambda module: module.get_submodule("layers.2").weight.mean().item(),
    "norms": norms_by_name,
    "histograms": histograms,
    "histc": lambda module: torch.histc(module.last.weight.detach(), bins=4).tolist(),
    "repr": lambda module: repr(module.last.bias),
    "format": lambda module: f"{module.last.bias}",
    "foreach": lambda module: [n.item() for n in torch._foreach_norm(list(module.parameters()))],
    "get_total_norm": lambda module: torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(p) for p in module.parameters()])
    ).item(),
    "cat": lambda module: torch.cat([p.flatten() for p in module.parameters()]).std().item(),
    "equal": lambda module: torch.equal(module.last.bias, torch.zeros(3)),
    "comparison": lambda module: (module.last.weight > 0).sum().item(),
    "isfinite": lambda module: all(torch.isfinite(p).all() for p in module.parameters()),
    "saved": saved_and_loaded,
    "storage": lambda module: sum(module.last.bias.untyped_storage().tolist()),
    "cpu": lambda module: sums(p.cpu() for p in module.parameters()),
    "converted": lambda module: sums(p.to(torch.float64) for p in module.parameters()),
    "clone": lambda module: sums(p.clone() for p in module.parameters()),
    "iteration": lambda module: [row.sum().item() for row in module.last.weight],
    "optimizer's groups": lambda module: sums(module.optimizers().param_groups[0]["params"]),
    "dataparallel's": lambda module: sums(module.trainer.model.parameters()),
    "strategy's": lambda module: sums(module.trainer.strategy.lightning_module_state_dict().values()),
    "no_grad": torch.no_grad()(lambda module: sums(p * 2 for p in module.parameters())),
}


class LooksInEveryWay(Callback):
    """One way after each step, so that no other has opened the gates before; the first one again at the end."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        names = list(IDIOMS)
        name = names[trainer.global_step % len(names)]
        module.notes.append((name, IDIOMS[name](module)))


def test_every_idiom_to_look_at_weights(two_ranks: RankPool) -> None:
    recipe = Recipe(model=model, steps=len(IDIOMS) + 1, callbacks=(LooksInEveryWay,))
    ddp, ours, broken = train_on(two_ranks, recipe, DDP, Run(), Run(sabotage=blind_between_steps))
    assert_same(ddp, ours)
    # The sabotage leaves the training as it is, so each idiom shows on its own whether it would be stale.
    seen = zip(ddp[0].notes, broken[0].notes, strict=True)
    stale = {name for (name, one), (_, other) in seen if repr(one) != repr(other)}
    assert set(IDIOMS) - stale <= {"equal", "comparison", "isfinite", "histograms", "histc"}, "these show little"
