"""What opened each gate is told to whoever asks."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch.optim import AdamW

from lightning_bytescheduler.ddp.gates import Opening
from tests.parity.checks import train_on
from tests.support.fit import Recipe, Run
from tests.support.models import Tower
from tests.support.rank_pool import RankPool


class Asks(Callback):
    def __init__(self) -> None:
        self.names: dict[int, str] = {}

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self.names = {id(p): name for name, p in module.named_parameters()}
        strategy: Any = trainer.strategy
        strategy.runtime.engine.tell_openings(lambda opening: self.note(module, opening))

    def note(self, module: Any, opening: Opening) -> None:
        touched = None if opening.touched is None else self.names[id(opening.touched)]
        module.notes.append((opening.step, opening.kind, touched, len(opening.parameters), opening.how))

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == 4:
            module.last.weight.sum()


def test_every_parameter_is_told_apart_with_what_touched_it(two_ranks: RankPool) -> None:
    recipe = Recipe(model=partial(Tower, optimizer=partial(AdamW, lr=0.005)), steps=5, callbacks=(Asks,))
    (ours,) = train_on(two_ranks, recipe, Run(network="plain"))
    notes = ours[0].notes
    names = {name for name in ours[0].weights if not name.startswith("dropout")}
    touched = {name: how for step, kind, name, _, how in notes if step == 2 and kind == "touch"}
    assert set(touched) == names
    assert "linear" in touched["first.weight"]
    assert "in Linear.forward" in touched["first.weight"]
    assert "Tower.predict (models.py" in touched["first.weight"]
    by_callback = [how for step, kind, name, _, how in notes if step == 4 and name == "last.weight"]
    assert by_callback
    assert "from Asks.on_train_batch_end (test_openings.py" in by_callback[0]
    assert {kind for step, kind, *_ in notes if step == 5} == {"flush"}, "at the end of the fit"
