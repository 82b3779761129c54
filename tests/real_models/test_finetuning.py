"""finetuning-scheduler: phases begin in the same epochs as with DDP, and train the same, to the last bit."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from tests.parity.checks import DDP, assert_same, train_on
from tests.parity.sabotage import only_buckets_step
from tests.real_models.finetuning import (
    AveragedPhases,
    KeepsCheckpoints,
    NormedTower,
    NotesPhases,
    OnlyTrainable,
    Phases,
    RefusedTower,
    StopsPhases,
)
from tests.real_models.optimizers import adamw
from tests.support.fit import SIZES, Outcome, Recipe, Run, differences
from tests.support.models import Tower, sgd
from tests.support.rank_pool import RankPool

BY_NAME = Run(options={})
OVERLAPPED = Run(options=SIZES)
TRAINER = {"max_epochs": 8, "limit_train_batches": 4, "limit_val_batches": 2, "enable_checkpointing": True}
BY_EPOCH = """
0:
  params: [last.weight, last.bias]
  max_transition_epoch: 2
1:
  params: ['layers.[23].*']
  max_transition_epoch: 5
  lr: 0.003
2:
  params: [first.weight, first.bias, 'layers.[01].*']
  max_transition_epoch: 8
  lr: 0.001
"""
THREE_PHASES = [(0, 0), (1, 0), (2, 1), (3, 1), (4, 1), (5, 2), (6, 2), (7, 2)]  # epoch and phase
ANOTHER_OPTIMIZER = """
0:
  params: [last.weight, last.bias]
  max_transition_epoch: 2
1:
  params: ['layers.*']
  new_optimizer:
    optimizer_init: {class_path: torch.optim.SGD, init_args: {lr: 0.02, momentum: 0.9}}
  new_lr_scheduler:
    lr_scheduler_init: {class_path: torch.optim.lr_scheduler.StepLR, init_args: {step_size: 1, gamma: 0.5}}
    pl_lrs_cfg: {interval: epoch}
"""
UNUSED = "find_unused_parameters_true"
STRATEGIES = (f"ddp_{UNUSED}", "ddpstrategy", f"bytescheduler_{UNUSED}", "byteschedulerstrategy")
ADAPTED = {
    "custom_strategy_adapters": dict.fromkeys(STRATEGIES, "tests.real_models.finetuning:AveragedPhases"),
}
KEPT = {"restore_best": False}
UNTRACKED = {"frozen_bn_track_running_stats": False}
UNTESTED = "Allowing untested strategy '<ByteSchedulerStrategy of 'lightning'>'"
UNAVERAGED = "are not averaged over ranks"


def phases(folder: Path, schedule: str | None = None, **options: Any) -> Any:
    """What makes the callback, with a schedule in a file or one of its own making."""
    if schedule is not None:
        path = folder / "schedule.yaml"
        path.write_text(schedule)
        options["ft_schedule"] = str(path)
    return partial(Phases, folder, **options)


def recipe(model: Any, folder: Path, fts: Any, **others: Any) -> Recipe:
    callbacks = (fts, NotesPhases, StopsPhases, partial(KeepsCheckpoints, folder / "checkpoints"))
    return Recipe(**{"model": model, "steps": -1, "trainer": TRAINER, "callbacks": callbacks, **others})


def entered(outcome: Outcome) -> list[tuple[int, int]]:
    return [(note[1], note[2]) for note in outcome.notes if note[0] == "phase"]


def unlike(outcomes: Sequence[Outcome]) -> set[str]:
    """What is not the same on both ranks."""
    one, other = (outcome.weights for outcome in outcomes)
    return {name for name in one if not torch.equal(one[name], other[name])}


@pytest.mark.parametrize(
    ("model", "schedule", "options", "ddp"),
    [
        pytest.param(partial(Tower, optimizer=adamw), BY_EPOCH, {}, {}, id="by-epoch"),
        pytest.param(partial(OnlyTrainable, optimizer=adamw), BY_EPOCH, KEPT, {}, id="not-restored"),
        pytest.param(partial(OnlyTrainable, optimizer=sgd), ANOTHER_OPTIMIZER, KEPT, {}, id="another-optimizer"),
        pytest.param(partial(NormedTower, optimizer=adamw), BY_EPOCH, UNTRACKED, {}, id="normalised"),
        pytest.param(partial(Tower, optimizer=sgd), None, {"max_depth": 2}, {}, id="generated"),
        pytest.param(partial(Tower, optimizer=sgd), BY_EPOCH, {}, {"find_unused_parameters": True}, id="unused"),
        pytest.param(partial(Tower, optimizer=sgd), BY_EPOCH, {}, {"static_graph": True}, id="static-graph"),
    ],
)
def test_phases_are_ddps(
    two_ranks: RankPool, tmp_path: Path, model: Any, schedule: str | None, options: Any, ddp: Any
) -> None:
    runs = [DDP, OVERLAPPED] if ddp else [DDP, BY_NAME, OVERLAPPED]  # by its name, it has no options
    recipes = recipe(model, tmp_path, phases(tmp_path, schedule, **options), ddp=ddp)
    expected, *others = train_on(two_ranks, recipes, *runs)
    for actual in others:
        assert_same(expected, actual)
        told = set(actual[0].warnings) - set(expected[0].warnings)
        assert all(warning.startswith(UNTESTED) or UNAVERAGED in warning for warning in told), told
    found = entered(expected[0])
    assert len({phase for _, phase in found}) == (2 if schedule == ANOTHER_OPTIMIZER else 3)
    overlapped = others[-1][0].statistics
    assert overlapped is not None
    assert overlapped.deferred_updates > 0
    assert unlike(expected), "with DDP, each rank trains alone what is thawed after the first phase"


def test_by_epoch_alone(two_ranks: RankPool, tmp_path: Path) -> None:
    """Without early stopping, and with a schedule that is a dictionary."""
    schedule = {
        0: {"params": ["last.weight", "last.bias"], "max_transition_epoch": 2},
        1: {"params": ["layers.*"], "max_transition_epoch": 5},
        2: {"params": ["first.weight", "first.bias"], "max_transition_epoch": 8},
    }
    fts = partial(Phases, tmp_path, ft_schedule=schedule, epoch_transitions_only=True)
    callbacks = (fts, NotesPhases, partial(KeepsCheckpoints, tmp_path / "checkpoints"))
    recipes = recipe(partial(Tower, optimizer=adamw), tmp_path, fts, callbacks=callbacks)
    expected, actual = train_on(two_ranks, recipes, DDP, OVERLAPPED)
    assert_same(expected, actual)
    assert entered(actual[0]) == THREE_PHASES


def test_with_lightnings_callbacks(two_ranks: RankPool, tmp_path: Path) -> None:
    """It puts callbacks of its own in the place of Lightning's, while the fit is set up."""
    monitor = {"monitor": "validation_loss"}
    stops = partial(EarlyStopping, patience=1, **monitor)
    saves = partial(ModelCheckpoint, tmp_path / "saved", **monitor)
    fts = phases(tmp_path, BY_EPOCH)
    recipes = recipe(partial(Tower, optimizer=adamw), tmp_path, fts, callbacks=(fts, NotesPhases, stops, saves))
    expected, actual = train_on(two_ranks, recipes, DDP, OVERLAPPED)
    assert_same(expected, actual)
    assert any("FTSEarlyStopping" in warning for warning in actual[0].warnings)


def test_a_thawed_layer_that_is_forgotten_shows(two_ranks: RankPool, tmp_path: Path) -> None:
    recipes = recipe(partial(Tower, optimizer=adamw), tmp_path, phases(tmp_path, BY_EPOCH))
    expected, actual = train_on(two_ranks, recipes, DDP, Run(options=SIZES, sabotage=only_buckets_step))
    assert all(differences(one, other) for one, other in zip(expected, actual, strict=True))


@pytest.mark.parametrize("adapted", [False, True], ids=["", "averaged"])
def test_resumed_in_mid_schedule(two_ranks: RankPool, tmp_path: Path, adapted: bool) -> None:
    """From each other's checkpoints, in the second phase."""
    model, first, second = partial(OnlyTrainable, optimizer=adamw), tmp_path / "first", tmp_path / "second"
    first.mkdir()
    options: Any = ADAPTED if adapted else {}
    others: Any = {"ddp": {"find_unused_parameters": True}} if adapted else {}
    fts = phases(first, BY_EPOCH, **options)
    assert_same(*train_on(two_ranks, recipe(model, first, fts, **others), DDP, OVERLAPPED))
    saved = {"ddp": first / "checkpoints/ddp/epoch=3.ckpt", "overlapped": first / "checkpoints/overlapped/epoch=3.ckpt"}
    outcomes = []
    for source in ("ddp", "overlapped"):
        resumed = recipe(model, second / source, fts, resume=str(saved[source]), **others)
        outcomes += train_on(two_ranks, resumed, DDP, OVERLAPPED)
    for actual in outcomes[1:]:
        assert_same(outcomes[0], actual)
    assert entered(outcomes[0][0]) == THREE_PHASES[4:]
    assert bool(unlike(outcomes[0])) != adapted


@pytest.mark.parametrize(
    "model", [partial(Tower, optimizer=sgd), partial(OnlyTrainable, optimizer=adamw)], ids=["all", "some"]
)
def test_phases_that_are_averaged(two_ranks: RankPool, tmp_path: Path, model: Any) -> None:
    """With the adapter of the documentation, ranks stay alike, and what is thawed overlaps too."""
    fts = phases(tmp_path, BY_EPOCH, **ADAPTED)
    recipes = recipe(model, tmp_path, fts, ddp={"find_unused_parameters": True})
    ddp = Run(strategy=f"ddp_{UNUSED}", options={}, network="plain")
    by_name = Run(strategy=f"bytescheduler_{UNUSED}", options={})
    expected, *others = train_on(two_ranks, recipes, ddp, by_name, OVERLAPPED)
    for actual in others:
        assert_same(expected, actual)
        assert not [warning for warning in actual[0].warnings if UNAVERAGED in warning]
        assert not unlike(actual)
    assert len({phase for _, phase in entered(expected[0])}) == 3
    statistics = others[-1][0].statistics
    assert statistics is not None
    assert statistics.deferred_share > 0.95


def test_the_documentation_has_the_adapter() -> None:
    page = Path(__file__).parents[2].joinpath("docs/overlap.md").read_text(encoding="utf-8")
    body = inspect.getsource(AveragedPhases).split('"""', 2)[2]
    assert body.strip() in page


def test_without_allow_untested(two_ranks: RankPool, tmp_path: Path) -> None:
    fts = phases(tmp_path, BY_EPOCH, allow_untested=False)
    (ours,) = train_on(two_ranks, recipe(RefusedTower, tmp_path, fts), BY_NAME)
    for outcome in ours:
        assert outcome.error is not None
        assert "allow_untested=True" in outcome.error
