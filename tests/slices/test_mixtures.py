"""Mixtures: shares hold in any window, each sample of an epoch is trained on once, through any change of ranks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler import OptionError, SliceDataModule, TrackerStateError, UnsupportedError
from lightning_bytescheduler.slices.epoch_plan import EpochPlan, Mixture
from tests.slices.fits import Remembers, SaveEveryStep, fit, fit_rank, make_rows, trainer_for
from tests.slices.test_epoch_plan import RANKS, catalogue, train, used
from tests.slices.test_training_tracked import Hosts, data_of
from tests.support.rank_pool import RankPool

WEIGHTS = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=5)
SOURCES = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=6), min_size=1, max_size=4)


def plans_of(
    batch_sizes: Sequence[int], sources: Sequence[Sequence[int]], weights: Sequence[float], **more: Any
) -> list[EpochPlan]:
    """A plan for each rank; slices of the sources follow one another."""
    counts = [count for source in sources for count in source]
    numbers = np.array([number for number, source in enumerate(sources) for _ in source])
    return [
        EpochPlan(
            catalogue(counts), batch_sizes=batch_sizes, mixture=Mixture(weights, numbers), rank=rank, seed=3, **more
        )
        for rank in range(len(batch_sizes))
    ]


@given(WEIGHTS, st.integers(0, 100_000), st.integers(0, 1000))
def test_no_source_is_ahead_of_its_share(weights: list[float], first: int, more: int) -> None:
    mixture = Mixture(weights, np.zeros(0, np.int64))
    shares = np.array(mixture.shares) / sum(mixture.shares)
    assert np.abs(shares - np.array(weights) / sum(weights)).max() < 1e-3
    before, after = mixture.counts([first, first + more])
    assert (before <= after).all()
    assert after.sum() == first + more
    assert (after < (first + more) * shares + 1).all()
    assert (after > (first + more) * shares - max(len(weights) - 1, 1)).all()


@given(st.floats(0.01, 0.99), st.integers(0, 100_000))
def test_one_of_two_sources_is_half_a_sample_from_its_share(weight: float, first: int) -> None:
    mixture = Mixture([weight, 1 - weight], np.zeros(0, np.int64))
    shares = np.array(mixture.shares) / sum(mixture.shares)
    assert np.abs(mixture.counts([first])[0] - first * shares).max() <= 0.5 + 1e-6


@given(WEIGHTS, st.data())
def test_an_epoch_ends_with_the_source_that_is_used_up_first(weights: list[float], data: st.DataObject) -> None:
    mixture = Mixture(weights, np.zeros(0, np.int64))
    totals = data.draw(st.lists(st.integers(1, 5000), min_size=len(weights), max_size=len(weights)))
    whole, over = mixture.counts([mixture.samples(totals), mixture.samples(totals) + 1])
    assert (whole <= totals).all()
    assert (over > totals).any()


@given(SOURCES, st.lists(st.tuples(RANKS, st.floats(0, 1), st.integers(0, 6)), max_size=4), RANKS, st.data())
def test_any_history_of_ranks_and_batch_sizes_is_one_epoch(
    sources: list[list[int]],
    stages: list[tuple[list[int], float, int]],
    last: list[int],
    data: st.DataObject,
) -> None:
    weights = data.draw(st.lists(st.floats(0.05, 1.0), min_size=len(sources), max_size=len(sources)))
    source_of = [number for number, source in enumerate(sources) for _ in source]
    found, state = Counter[tuple[int, int]](), None
    for batch_sizes, part, ahead in [*stages, (last, 1.0, 0)]:
        plans = plans_of(batch_sizes, sources, weights)
        for plan in plans:
            if state is not None:
                plan.load_state_dict(state)
        steps = int(part * plans[0].left.steps)
        found += used(train(plans, steps, ahead=ahead))
        state = json.loads(json.dumps(plans[-1].state_dict()))
        assert state == json.loads(json.dumps(plans[0].state_dict())), "the same on every rank"
        drawn = Counter(source_of[index] for index, _ in found.elements())
        mixture = Mixture(weights, np.zeros(0, np.int64))
        assert [drawn[number] for number in range(len(sources))] == mixture.counts([found.total()])[0].tolist()
    assert set(found.values()) <= {1}
    assert found.total() == mixture.samples([sum(source) for source in sources])


@pytest.mark.slow
@given(SOURCES, RANKS, st.floats(0, 1))
def test_the_same_ranks_go_on_with_the_next_batch(
    sources: list[list[int]], batch_sizes: list[int], part: float
) -> None:
    weights = [1.0 + number for number in range(len(sources))]
    whole, before, after = (plans_of(batch_sizes, sources, weights) for _ in range(3))
    steps = int(part * before[0].left.steps)
    train(before, steps)
    for plan in after:
        plan.load_state_dict(before[0].state_dict())
    assert train(after) == [batches[steps:] for batches in train(whole)]


def test_shares_hold_in_any_window_of_100_batches_and_in_each_ranks_batch() -> None:
    found = train(plans_of([7, 5], [[50] * 60, [20] * 100], [0.65, 0.35]))
    assert len(found[0]) > 300
    first = np.array([[sum(index < 60 for index, _ in batch) for batch in batches] for batches in found])
    size = np.array([[len(batch) for batch in batches] for batches in found])
    assert np.abs(first - 0.65 * size).max() < 2
    sums = np.concatenate((np.zeros((2, 1)), np.stack((first.sum(0), size.sum(0))).cumsum(1)), axis=1)
    windows = sums[:, 100:] - sums[:, :-100]
    assert np.abs(windows[0] - 0.65 * windows[1]).max() < 2


def test_slices_that_cannot_be_read_end_their_sources_part_earlier() -> None:
    (plan,) = plans_of([4], [[10, 10], [10, 10]], [0.5, 0.5])
    state = plan.state_dict()
    state["together"]["quarantined"] = {"2": "on purpose"}
    plan.load_state_dict(state)
    plan.start_epoch(1)
    assert plan.left.samples == 20 or plan.left.samples == 21


def test_a_source_without_a_slice_that_can_be_read_is_named() -> None:
    (plan,) = plans_of([4], [[10, 10], [10, 10]], [0.5, 0.5])
    state = plan.state_dict()
    state["together"]["quarantined"] = {"2": "on purpose", "3": "on purpose"}
    plan.load_state_dict(state)
    plan.start_epoch(1)
    with pytest.raises(OptionError, match=r"train='/rows/2'.*all slices of the one with this file are quarantined"):
        plan.open(None)


def test_the_next_epochs_slices_are_named_where_the_first_source_is_used_up() -> None:
    """Of the other one there is more, which is not to be read in this epoch."""
    for plan in plans_of([4, 4], [[10] * 8, [10] * 40], [0.5, 0.5]):
        batches = list(plan)
        end = {run.slice_index for batch in batches[-3:] for run in batch.runs}
        plan.start_epoch(1)
        assert next(iter(plan)).runs[0].slice_index in batches[-1].ahead
        assert {run.slice_index for run in next(iter(plan)).runs} <= set(batches[-1].ahead) | end


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Samples 0 to 59 and 60 to 159: of the first one 45 are in an epoch with all of the second."""
    folder = tmp_path_factory.mktemp("mixture")
    make_rows(folder, [20, 40, 30, 30, 40])
    return {f"{folder}/rows-00[01].npy": 3, f"{folder}/rows-00[2-4].npy": 7}


def counts_of(batches: list[list[int]]) -> Counter[int]:
    return Counter(number for batch in batches for number in batch)


def require_epoch(counts: Counter[int]) -> None:
    """Which samples of the first source are in it depends on the order of their slices alone."""
    assert set(counts.values()) == {1}
    assert set(range(60, 160)) <= set(counts)
    assert counts.total() == 142 or counts.total() == 143


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("shuffle", [True, "samples"])
def test_a_fit_goes_on_exactly_with_other_batch_sizes_and_workers(
    tmp_path: Path, rows: dict[str, float], shuffle: Any
) -> None:
    save = SaveEveryStep(str(tmp_path))
    whole = fit(SliceDataModule(rows, batch_size=10, shuffle=shuffle), callbacks=[save], max_epochs=2).batches
    steps = len(whole) // 2
    for batches in (whole[:steps], whole[steps:]):
        require_epoch(counts_of(batches))
        assert {sum(number < 60 for number in batch) for batch in batches[:-1]} == {3}
    assert whole[:steps] != whole[steps:]
    same = SliceDataModule(rows, batch_size=10, shuffle=shuffle, num_workers=2)
    assert fit(same, resume=save.saved[5], max_epochs=2).batches == whole[6:]
    other = fit(SliceDataModule(rows, batch_size=7, num_workers=1, shuffle=shuffle), resume=save.saved[5])
    assert counts_of(whole[:6]) + counts_of(other.batches) == counts_of(whole[:steps])


@pytest.mark.parametrize("strategy", ["ddp", "bytescheduler"])
def test_two_ranks_share_a_mixture_and_one_goes_on(
    two_ranks: RankPool, tmp_path: Path, rows: dict[str, float], strategy: str
) -> None:
    saved = str(tmp_path / "saved.ckpt")
    trainer = {"strategy": strategy, "max_steps": 4, "max_epochs": -1}
    found = two_ranks.run(fit_rank, options={"train": rows, "batch_size": [6, 4]}, trainer=trainer, save_to=saved)
    for batches, _, _ in found:
        own = counts_of(batches)
        assert abs(sum(number < 60 for number in own) - 0.3 * own.total()) <= 1
    rest = fit(SliceDataModule(rows, batch_size=16), resume=saved, max_epochs=2)
    require_epoch(sum((counts_of(batches) for batches, _, _ in found), counts_of(rest.batches)))


def test_a_limit_of_batches_ends_the_epoch_and_the_next_one_begins_anew(rows: dict[str, float]) -> None:
    model = fit(SliceDataModule(rows, batch_size=10), max_epochs=3, limit_train_batches=4)
    epochs = [model.batches[first : first + 4] for first in (0, 4, 8)]
    for batches in epochs:
        assert set(counts_of(batches).values()) == {1}
        assert sum(number < 60 for number in counts_of(batches)) == 12
    assert epochs[0] != epochs[1] != epochs[2]


def test_other_shares_in_mid_epoch_are_refused_by_name(tmp_path: Path, rows: dict[str, float]) -> None:
    save = SaveEveryStep(str(tmp_path))
    fit(SliceDataModule(rows, batch_size=10), callbacks=[save])
    other = SliceDataModule(dict.fromkeys(rows, 1), batch_size=10)
    with pytest.raises(TrackerStateError, match=r"shares of its sources were \(3, 7\), are \(1, 1\) now"):
        fit(other, resume=save.saved[5])
    trainer = trainer_for(max_epochs=2)
    data = SliceDataModule(dict.fromkeys(rows, 1), batch_size=10)
    ended = trainer_for()
    ended.fit(Remembers(), datamodule=SliceDataModule(rows, batch_size=10))
    ended.save_checkpoint(tmp_path / "ended.ckpt")
    trainer.fit(model := Remembers(), datamodule=data, ckpt_path=tmp_path / "ended.ckpt", weights_only=True)
    assert abs(sum(number < 60 for number in counts_of(model.batches)) - 5 * len(model.batches)) <= 5


@pytest.mark.parametrize(
    "train",
    [
        {},
        {"a": 0.0},
        {"a": -1.0, "b": 2.0},
        {"a": "much"},
        {"a": True},
        {"a": float("nan")},
        {"a": 1.0, "b": 1e-5},
        {"a": 10**400},
    ],
)
def test_weights_that_are_none(train: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"train=.*weights by URL, such as \{'data/a': 0.7, 'data/b': 0.3\}"):
        SliceDataModule(train)


def test_weights_of_numpy_and_of_one_source(rows: dict[str, float]) -> None:
    data = SliceDataModule({url: np.float32(weight) for url, weight in rows.items()})
    data.setup("fit")
    (first, *_) = rows
    alone = data_of(Hosts(1).of(0), {first: 1.0})  # type: ignore[arg-type]
    alone.setup("fit")  # it is no mixture


def test_without_any_sample_of_a_source_there_is_no_epoch() -> None:
    assert Mixture([0.99, 0.01], np.zeros(0, np.int64)).samples([1000, 0]) == 0
    assert Mixture([0.5, 0.5], np.zeros(0, np.int64)).samples([0, 1000]) == 0


def test_misuse(rows: dict[str, float]) -> None:
    with pytest.raises(OptionError, match="val="):
        SliceDataModule(rows, val=rows)  # type: ignore[arg-type]
    first, second = rows
    data = SliceDataModule({first: 1, second: 1, first.replace("[01]", "0"): 1})
    with pytest.raises(OptionError, match=r"a source with samples that no other source of the mixture has"):
        data.setup("fit")
    tracked = data_of(Hosts(1).of(0), rows)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="Workers that take slices from a tracker"):
        tracked.setup("fit")
