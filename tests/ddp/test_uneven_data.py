"""Ranks with unequally many batches and ``weighting="samples"``: the training is one process's on all samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from lightning_bytescheduler import UnsupportedError
from tests.parity.test_sample_weights import assert_as_one_process
from tests.parity.weighted_fits import Case, Stream, Unequal, batches_of, fitted, fitted_all
from tests.support.compare import bit_differences
from tests.support.fit import SIZES, Outcome, Recipe, Run, train
from tests.support.rank_pool import RankPool

UNEVEN = Case(sizes=[(4, 3, 2, 5, 1), (6, 2)])
FEWER_FIRST = replace(UNEVEN, sizes=UNEVEN.sizes[::-1])
CASES = {
    "the first has more": UNEVEN,
    "the last has more": replace(FEWER_FIRST, optimizer="AdamW"),
    "accumulated": replace(UNEVEN, accumulate=2, clip=(0.05, "norm")),
    "streams, accumulated": replace(FEWER_FIRST, accumulate=2, stream=True, optimizer="AdamW"),
    "a rank without data": replace(UNEVEN, sizes=[(4, 3, 2), ()]),
    "a stream without data": replace(UNEVEN, sizes=[(), (4, 3, 2)], stream=True, accumulate=2),
    "as DDP": replace(UNEVEN, options={"mode": "ddp"}),
    "no overlap": replace(FEWER_FIRST, options={"cross_barrier": False}),
    "losses scaled": replace(UNEVEN, scaled=True),
    "as many": replace(UNEVEN, sizes=[(4, 3), (6, 2)], stream=True),
}


def test_weights_are_those_of_one_process(two_ranks: RankPool) -> None:
    by_rank = two_ranks.run(fitted_all, cases=list(CASES.values()))
    for index, case in enumerate(CASES):
        found = [ranks[index] for ranks in by_rank]
        assert_as_one_process(found, case)
        for (outcome, _), sizes in zip(found, CASES[case].sizes, strict=True):
            assert len(outcome.losses) == len(sizes), f"{case}: training_step was called without a batch"


MORE = [
    Case(sizes=[(4, 3), (1, 9, 2, 3), (7,)]),
    Case(sizes=[(1,), (4, 3, 5), ()], accumulate=2, optimizer="AdamW", stream=True),
    Case(sizes=[(), (4, 3, 5), (2, 2)], options={"mode": "ddp"}),
]


@pytest.mark.slow
def test_three_ranks(three_ranks: RankPool) -> None:
    by_rank = three_ranks.run(fitted_all, cases=MORE)
    for index, case in enumerate(MORE):
        assert_as_one_process([found[index] for found in by_rank], str(case))


# ---------------------------------------------------------------------- what else belongs to a training


class Loader:
    """Knows where it stands, and goes on there once."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches
        self.at = self.begins_at = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.at, self.begins_at = self.begins_at, 0
        while self.at < len(self.batches):
            self.at += 1
            yield self.batches[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begins_at = state["at"]


class Whole(Unequal):
    """Normalises, logs, counts, has a layer that nobody uses and one with sparse gradients, and hooks of the user's."""

    def __init__(self, case: Case, rank: int, *, stateful: bool = False, unused: bool = False) -> None:
        super().__init__(case, rank)
        self.stateful = stateful
        self.norm = nn.BatchNorm1d(12)
        self.table = nn.Embedding(8, 12, sparse=True)
        if unused:
            self.spare = nn.Linear(2, 2)
        self.seen = SumMetric()
        self.last.weight.register_hook(lambda gradient: gradient.clamp(-9, 9))
        self.rates: list[float] = []

    def train_dataloader(self) -> Any:
        return Loader(batches_of(self.case, self.rank)) if self.stateful else super().train_dataloader()

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, gamma=0.9), "interval": "step"}]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        rows = self.table(torch.arange(len(inputs)) % 8)
        loss = nn.functional.mse_loss(self.predict(self.norm(inputs) + rows), targets)
        self.losses.append(loss.item())
        if self.stateful:  # a rank without a batch since a resume does not know what is logged
            return loss
        self.seen.update(len(inputs))
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        self.log("of_ranks", loss, sync_dist=True)
        self.log("most", float(len(inputs)), reduce_fx="max", on_step=True, on_epoch=True, sync_dist=True)
        self.log("size", float(len(inputs)), on_step=False, on_epoch=True, sync_dist=True, batch_size=len(inputs))
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.notes.append(("step", self.trainer.global_step, self.trainer.is_last_batch))

    def val_dataloader(self) -> Any:
        return DataLoader(self._data(8, seed=2), batch_size=4)


def fit_whole(
    rank: int,
    case: Case,
    *,
    stateful: bool = False,
    ddp: dict[str, Any] | None = None,
    resume: str | None = None,
    save: str | None = None,
    save_every: str = "every_n_train_steps",
    **trainer: Any,
) -> tuple[Outcome, list[float]]:
    made: list[Whole] = []

    def model() -> Whole:
        torch.manual_seed(7)
        made.append(Whole(case, rank, stateful=stateful, unused=bool(ddp)))
        return made[0]

    saves = partial(ModelCheckpoint, save, "{step}", save_top_k=-1, **{save_every: 1})
    arguments = {"use_distributed_sampler": False, "max_epochs": 2, "accumulate_grad_batches": case.accumulate}
    recipe = Recipe(
        model=model,
        steps=-1,
        ddp=ddp or {},
        resume=resume,
        callbacks=() if save is None else (saves,),
        trainer={**arguments, "enable_checkpointing": save is not None, **trainer},
    )
    return train(rank, recipe, Run(options={**SIZES, "weighting": "samples", **case.options})), made[0].rates


@pytest.mark.parametrize(
    ("sizes", "stream"),
    [
        pytest.param([(4, 3, 2, 5), (6, 2)], True, id="streams, the first has more"),
        pytest.param([(6, 2), (4, 3, 2, 5)], False, id="lengths, the last has more", marks=pytest.mark.slow),
    ],
)
def test_metrics_schedules_and_validations_stay_in_step(
    two_ranks: RankPool, stream: bool, sizes: list[tuple[int, ...]]
) -> None:
    case = Case(sizes=sizes, stream=stream)
    found = two_ranks.run(fit_whole, case=case, val_check_interval=2, limit_val_batches=2)
    (first, rates), (last, others) = found
    assert rates == others
    assert len(rates) == 8
    assert first.notes == last.notes
    steps = [note for note in first.notes if note[0] == "step"]
    assert [note[1:] for note in steps] == [(n, n in (4, 8)) for n in range(1, 9)]
    assert sum(note[0] == "validation" for note in first.notes) == 8
    samples = [size for each in sizes for size in each]
    for outcome, _ in found:
        assert outcome.metrics["seen"] == sum(samples)
        assert outcome.metrics["most_epoch"] == max(samples)
        assert outcome.metrics["size"] == pytest.approx(sum(n * n for n in samples) / sum(samples))
    for name, parameter in first.weights.items():
        if "norm" not in name:
            assert torch.equal(parameter, last.weights[name]), name
    assert first.weights["norm.num_batches_tracked"] == 2 * len(sizes[0]), "an empty batch has changed statistics"
    assert not first.plan or not first.plan.read_unseen


def test_what_no_rank_uses_has_no_gradient(two_ranks: RankPool) -> None:
    case = Case(sizes=[(4, 3, 2, 5), (6, 2)])
    for outcome, _ in two_ranks.run(fit_whole, case=case, ddp={"find_unused_parameters": True}):
        state = outcome.optimizers[0]["state"]
        names = [name for name in outcome.weights if "norm.running" not in name and "tracked" not in name]
        without = [name for index, name in enumerate(names) if index not in state]
        assert sorted(without) == ["spare.bias", "spare.weight"]


@pytest.mark.parametrize(
    ("sizes", "steps", "more"),
    [
        pytest.param([(4, 3, 2, 5), (6, 2)], (1, 3), {}, id="in an epoch"),
        pytest.param(
            [(6, 2), (4, 3, 2, 5)],
            (4,),
            {"save_every": "every_n_epochs", "max_epochs": -1, "max_steps": 8},
            id="counted in steps",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_training_goes_on_from_a_checkpoint(
    two_ranks: RankPool, tmp_path: Path, sizes: list[tuple[int, ...]], steps: tuple[int, ...], more: dict[str, Any]
) -> None:
    """Also from an epoch's last batch, after which DDP, on as many batches on each rank, leaves out the next epoch."""
    case = Case(sizes=sizes)
    whole = two_ranks.run(fit_whole, case=case, stateful=True, save=str(tmp_path), **more)
    for (outcome, _), batches in zip(whole, sizes, strict=True):
        assert len(outcome.losses) == 2 * len(batches)
    for step in steps:
        path = str(tmp_path / f"step={step}.ckpt")
        resumed = two_ranks.run(fit_whole, case=case, stateful=True, resume=path, **more)
        for (expected, _), (outcome, _) in zip(whole, resumed, strict=True):
            assert not bit_differences(expected.weights, outcome.weights), step
            assert not bit_differences(expected.optimizers, outcome.optimizers), step


def resumes(rank: int, case: Case, path: str) -> str:
    try:
        fit_whole(rank, case, stateful=True, resume=path)
    except UnsupportedError as error:
        return str(error)
    return ""


def test_a_checkpoint_that_does_not_say_where_ranks_stood_is_refused(two_ranks: RankPool, tmp_path: Path) -> None:
    case = Case(sizes=[(6, 2), (4, 3, 2, 5)])
    two_ranks.run(fit_whole, case=case, stateful=True, save=str(tmp_path), max_epochs=1)
    for said in two_ranks.run(resumes, case=case, path=str(tmp_path / "step=3.ckpt")):
        assert "when rank 0's training data was used up" in said


def refused(rank: int, manual: bool) -> str:
    options = {} if manual else {"static_graph": True}
    try:
        fitted(rank, Case(sizes=[(4, 3), (6,)], manual=manual, options=options))
    except UnsupportedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("manual", [True, False], ids=["by hand", "static graph"])
def test_what_an_empty_batch_cannot_do_is_refused_with_the_way_out(two_ranks: RankPool, manual: bool) -> None:
    for said in two_ranks.run(refused, manual=manual):
        assert "ranks have 1 to 2 batches, and Unequal optimizes by hand or has static_graph=True" in said
        assert "use automatic optimization without static_graph" in said


class Several(Unequal):
    """Has two loaders, of which the shorter one begins anew."""

    def train_dataloader(self) -> Any:
        short = DataLoader(Stream(batches_of(self.case, self.rank)[:2]), batch_size=None)
        return {"long": super().train_dataloader(), "short": short}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["long"], batch_idx)


def fit_several(rank: int, case: Case) -> int:
    recipe = Recipe(model=partial(Several, case, rank), steps=-1, trainer={"max_epochs": 1})
    return len(train(rank, recipe, Run(options={**SIZES, "weighting": "samples"})).losses)


def test_several_loaders_are_left_as_they_are(two_ranks: RankPool) -> None:
    assert two_ranks.run(fit_several, case=Case(sizes=[(3, 3, 3)] * 2, stream=True)) == [3, 3]


class Anew(Unequal):
    """Has unequally many batches in the first epoch, which ends early, and as many on all ranks in the second one."""

    def train_dataloader(self) -> Any:
        if self.trainer.current_epoch == 0:
            return super().train_dataloader()
        return DataLoader(batches_of(Case(sizes=[(2, 2)] * 2), self.rank), batch_size=None)  # type: ignore[arg-type]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 1 and self.trainer.current_epoch == 0 else None


def fit_anew(rank: int, case: Case) -> int:
    each = {"use_distributed_sampler": False, "max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}
    recipe = Recipe(model=partial(Anew, case, rank), steps=-1, trainer=each)
    return len(train(rank, recipe, Run(options={**SIZES, "weighting": "samples"})).losses)


def test_loaders_that_are_made_anew_forget_the_batches_that_were_drawn_ahead(two_ranks: RankPool) -> None:
    assert two_ranks.run(fit_anew, case=Case(sizes=[(4,), (4, 3, 2)], stream=True)) == [1 + 2, 1 + 2]


class Opened(Loader):
    """Notes whether a pass through it is held, as a DataLoader's workers are."""

    is_open = False

    def __iter__(self) -> Iterator[Any]:
        self.is_open = True
        try:
            yield from super().__iter__()
        finally:
            self.is_open = False


class Holds(Unequal):
    def __init__(self, case: Case, rank: int) -> None:
        super().__init__(case, rank)
        self.opened = Opened(batches_of(case, rank))

    def train_dataloader(self) -> Any:
        return self.opened


def fit_held(rank: int, case: Case) -> bool:
    left: list[bool] = []
    recipe = Recipe(
        model=partial(Holds, case, rank),
        trainer={"use_distributed_sampler": False, "max_epochs": 1},
        steps=-1,
        after=lambda _, model: left.append(model.opened.is_open),
    )
    assert train(rank, recipe, Run(options={**SIZES, "weighting": "samples"})).losses
    return left[0]


def test_no_pass_through_the_data_is_held_after_the_fit(two_ranks: RankPool) -> None:
    assert two_ranks.run(fit_held, case=Case(sizes=[(4, 3, 2), (6,)])) == [False, False]
