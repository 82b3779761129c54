"""A fit that is saved anywhere and resumed trains on exactly the rest of its epoch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightning_bytescheduler import SliceDataModule, TrackerStateError
from tests.slices.fits import Evaluates, Remembers, SaveEveryStep, fit, make_rows, trainer_for

COUNTS = [5, 7, 3, 9]
SAMPLES = sum(COUNTS)
STEPS = 6  # of an epoch, with batches of 4


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_rows(tmp_path_factory.mktemp("data") / "rows", COUNTS)


def trained(*batches: list[list[int]]) -> Counter[int]:
    return Counter(number for some in batches for batch in some for number in batch)


@pytest.fixture(scope="module")
def uninterrupted(rows: str) -> list[list[int]]:
    batches = fit(SliceDataModule(rows, batch_size=4), max_epochs=2).batches
    assert trained(batches) == Counter(dict.fromkeys(range(SAMPLES), 2))
    assert batches[:STEPS] != batches[STEPS:]  # another order
    return batches


@pytest.mark.parametrize(
    ("moment", "limit"),
    [
        ("on_train_batch_end", {"max_epochs": 2}),
        ("on_validation_end", {"max_epochs": -1, "max_steps": 12}),
        ("on_train_epoch_end", {"max_epochs": 2}),
    ],
)
def test_the_next_batch_is_the_one_that_would_have_come(
    tmp_path: Path, rows: str, uninterrupted: list[list[int]], moment: str, limit: dict[str, int]
) -> None:
    save = SaveEveryStep(str(tmp_path), at=moment)
    whole = fit(
        SliceDataModule(rows, val=rows, batch_size=4),
        model=Evaluates(),
        callbacks=[save],
        num_sanity_val_steps=0,
        **limit,
    )
    assert whole.batches == uninterrupted
    each = moment == "on_train_batch_end"
    assert len(save.saved) == (2 * STEPS if each else 2)
    for step in (1, 3, STEPS, STEPS + 1, 2 * STEPS) if each else (STEPS, 2 * STEPS):
        saved = save.saved[step - 1 if each else step // STEPS - 1]
        resumed = fit(SliceDataModule(rows, val=rows, batch_size=4), model=Evaluates(), resume=saved, **limit)
        assert resumed.batches == uninterrupted[step:]


@pytest.mark.parametrize(
    ("moment", "batch_size"),
    [("on_train_batch_end", 1), ("on_train_batch_end", 5), ("on_validation_end", 3), ("on_train_epoch_end", SAMPLES)],
)
def test_with_other_batch_sizes_each_sample_is_trained_once(
    tmp_path: Path, rows: str, uninterrupted: list[list[int]], moment: str, batch_size: int
) -> None:
    save = SaveEveryStep(str(tmp_path), at=moment)
    fit(SliceDataModule(rows, val=rows, batch_size=4), model=Evaluates(), callbacks=[save], num_sanity_val_steps=0)
    for saved in save.saved[-3:]:
        step = int(saved.removesuffix(".ckpt").rpartition("-")[2])
        data = SliceDataModule(rows, val=rows, batch_size=batch_size)
        resumed = fit(data, model=Evaluates(), resume=saved, max_epochs=2)
        assert trained(uninterrupted[:step], resumed.batches) == Counter(dict.fromkeys(range(SAMPLES), 2))


@pytest.mark.parametrize(
    ("how", "stop"), [("max_steps", 2), ("should_stop", 2), ("should_stop", STEPS), ("max_steps", STEPS + 1)]
)
def test_after_a_stop_in_mid_epoch(
    tmp_path: Path, rows: str, uninterrupted: list[list[int]], how: str, stop: int
) -> None:
    model = Remembers()
    trainer = trainer_for(max_epochs=-1, max_steps=stop if how == "max_steps" else 100)
    if how == "should_stop":
        model.on_step = lambda step: setattr(trainer, "should_stop", step == stop)
    data = SliceDataModule(rows, batch_size=4)
    trainer.fit(model, datamodule=data)
    assert model.batches == uninterrupted[:stop]
    trainer.save_checkpoint(tmp_path / "stopped.ckpt")
    limit = {"max_epochs": -1, "max_steps": 2 * STEPS}
    resumed = fit(SliceDataModule(rows, batch_size=4), resume=str(tmp_path / "stopped.ckpt"), **limit)
    assert resumed.batches == uninterrupted[stop:]
    # The same data module goes on too, in a fit that is not a resumed one.
    again = fit(data, max_epochs=-1, max_steps=2 * STEPS - stop)
    assert again.batches == uninterrupted[stop:]


def test_after_an_error_in_mid_epoch(tmp_path: Path, rows: str, uninterrupted: list[list[int]]) -> None:
    def fail(step: int) -> None:
        if step == 4:
            raise RuntimeError("boom")

    model = Remembers()
    model.on_step = fail
    trainer = trainer_for()
    with pytest.raises(RuntimeError, match="boom"):
        trainer.fit(model, datamodule=SliceDataModule(rows, batch_size=4))
    trainer.save_checkpoint(tmp_path / "failed.ckpt")
    resumed = fit(SliceDataModule(rows, batch_size=4), resume=str(tmp_path / "failed.ckpt"), max_epochs=2)
    assert resumed.batches == uninterrupted[3:]


def test_what_workers_read_ahead_is_not_trained(tmp_path: Path, rows: str, uninterrupted: list[list[int]]) -> None:
    save = SaveEveryStep(str(tmp_path))
    data = SliceDataModule(rows, batch_size=4, num_workers=2, shuffle="samples")
    whole = fit(data, callbacks=[save])
    assert trained(whole.batches) == Counter(range(SAMPLES))
    resumed = fit(SliceDataModule(rows, batch_size=4, shuffle="samples"), resume=save.saved[1])
    assert resumed.batches == whole.batches[2:]
    assert whole.batches != uninterrupted[:STEPS]


def test_other_data_between_epochs_but_not_within_one(tmp_path: Path, rows: str) -> None:
    save = SaveEveryStep(str(tmp_path))
    fit(SliceDataModule(rows, batch_size=4), callbacks=[save])
    others = make_rows(tmp_path / "others", [10, 3])
    resumed = fit(SliceDataModule(others, batch_size=4), resume=save.saved[-1], max_epochs=2)
    assert trained(resumed.batches) == Counter(range(13))
    with pytest.raises(TrackerStateError, match="middle of an epoch of other data"):
        fit(SliceDataModule(others, batch_size=4), resume=save.saved[0])
    with pytest.raises(TrackerStateError, match="seed was 0, is 1 now"):
        fit(SliceDataModule(rows, batch_size=4, seed=1), resume=save.saved[0])


def test_a_damaged_state_is_an_error(rows: str) -> None:
    data = SliceDataModule(rows, batch_size=4)
    data.setup("fit")
    state = data.state_dict()
    damages: list[dict[str, Any]] = [
        {"version": 9},
        {"version": True},
        {"position": [[True, []]]},
        {"epoch": None},
        {"epoch": -1},
        {"quarantined": {"a": None}},
        {"left_out": ["a"]},
        {"order": None},
    ]
    for damage in damages:
        with pytest.raises(TrackerStateError):
            data.load_state_dict({"together": {**state["together"], **damage}})
    with pytest.raises(TrackerStateError, match="did not step together"):
        data.load_state_dict({"tracker": {}})
    assert data.state_dict() == state
