"""Workers of unequal speed on one tracker, each with a data module of its own."""

from __future__ import annotations

import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_bytescheduler import OptionError, SliceDataModule, TrackerStateError, UnsupportedError
from lightning_bytescheduler.slices.make import make_slices
from lightning_bytescheduler.slices.source import open_source
from lightning_bytescheduler.slices.tracker import Assignment, SliceTracker, TrackerClient
from tests.slices.fits import Evaluates, SaveEveryStep, fit, make_rows
from tests.slices.tracker_workers import Worker

LONG = 60.0
COUNTS = [5, 7, 3, 9, 1, 6]
SAMPLES = sum(COUNTS)


class Hosts:
    """What a strategy does, for workers in threads."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.made = threading.Event()
        self.tracker: SliceTracker | None = None

    def of(self, worker: int) -> Host:
        return Host(self, worker)


class Host:
    waits = True

    def __init__(self, hosts: Hosts, worker: int) -> None:
        self.hosts, self.worker, self.workers = hosts, worker, hosts.workers

    def connect(self, make: Callable[[], SliceTracker]) -> TrackerClient:
        if self.worker == 0:
            self.hosts.tracker = make()
            self.hosts.made.set()
        assert self.hosts.made.wait(LONG)
        assert self.hosts.tracker is not None
        return self.hosts.tracker


def data_of(host: Host, rows: str, **options: Any) -> SliceDataModule:
    data = SliceDataModule(rows, **{"batch_size": [4, 2, 3][: host.workers], **options})
    data.bind_tracker(host)
    return data


@pytest.fixture
def rows(tmp_path: Path) -> str:
    return make_rows(tmp_path / "rows", COUNTS)


def plain_loop(data: SliceDataModule, epochs: int, batches: list[list[int]]) -> None:
    """Training without Lightning."""
    data.setup("fit")
    for _ in range(epochs):
        for batch in data.train_dataloader():
            batches.append([int(number) for number in batch.flatten()])
            data.training.trained()
    data.teardown("fit")


def trained(*workers: list[list[int]]) -> Counter[int]:
    return Counter(number for batches in workers for batch in batches for number in batch)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}])
def test_workers_share_the_epochs(rows: str, options: dict[str, Any]) -> None:
    hosts = Hosts(3)
    others: list[list[list[int]]] = [[], []]
    model, begun = Evaluates(), threading.Event()
    model.on_step = lambda step: begun.set()

    def beside(number: int, batches: list[list[int]]) -> None:
        assert begun.wait(LONG)  # else the others may leave no batch, and no validation, to the first one
        plain_loop(data_of(hosts.of(number + 1), rows), 2, batches)

    threads = [threading.Thread(target=beside, args=each) for each in enumerate(others)]
    for thread in threads:
        thread.start()
    fit(data_of(hosts.of(0), rows, val=rows, **options), model=model, max_epochs=2)
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    assert hosts.tracker is not None
    # Some may have found an epoch to be over, and gone on to the next: all but the last one is whole.
    counts = trained(model.batches, *others)
    whole = hosts.tracker.report().epoch + hosts.tracker.over
    assert {counts[number] for number in range(SAMPLES)} <= {whole, whole + 1}
    assert sum(counts.values()) == whole * SAMPLES + (0 if hosts.tracker.over else hosts.tracker.report().trained)
    assert {len(batch) for batch in model.batches} <= {1, 2, 3, 4}
    assert set(model.seen) == set(range(SAMPLES))


def test_alone_it_ends_epochs_as_lightning_does(rows: str) -> None:
    model = fit(data_of(Hosts(1).of(0), rows, val=rows), model=Evaluates(), max_epochs=3, num_sanity_val_steps=0)
    assert trained(model.batches) == Counter(dict.fromkeys(range(SAMPLES), 3))
    assert Counter(model.seen) == Counter(dict.fromkeys(range(SAMPLES), 3))
    assert len(model.batches) == 3 * -(-SAMPLES // 4)


@pytest.mark.parametrize("moment", ["on_train_batch_end", "on_validation_end", "on_train_epoch_end"])
def test_resumed_alone_the_next_batch_is_the_same(tmp_path: Path, rows: str, moment: str) -> None:
    save = SaveEveryStep(str(tmp_path), at=moment)
    whole = fit(
        data_of(Hosts(1).of(0), rows, val=rows),
        model=Evaluates(),
        callbacks=[save],
        max_epochs=2,
        num_sanity_val_steps=0,
    )
    for saved in save.saved:
        step = int(saved.removesuffix(".ckpt").rpartition("-")[2])
        resumed = fit(data_of(Hosts(1).of(0), rows, val=rows), model=Evaluates(), resume=saved, max_epochs=2)
        assert resumed.batches == whole.batches[step:]


class Elsewhere(Host):
    """As with a coordinator, whose tracker it is."""

    def __init__(self, tracker: SliceTracker) -> None:
        self.tracker, self.worker, self.workers = tracker, 0, 1

    def connect(self, make: Callable[[], SliceTracker]) -> TrackerClient:
        return self.tracker


@pytest.mark.parametrize("moment", ["on_train_batch_end", "on_validation_end", "on_train_epoch_end"])
def test_a_fit_resumed_at_an_epochs_end_has_the_next_one_also_where_another_worker_holds_all_of_it(
    tmp_path: Path, moment: str
) -> None:
    rows = make_rows(tmp_path / "rows", [6])
    tracker = SliceTracker(open_source(rows).catalogue, clock=time.monotonic)
    save = SaveEveryStep(str(tmp_path), at=moment)
    options: dict[str, Any] = {"val": rows, "batch_size": 2}
    fit(data_of(Elsewhere(tracker), rows, **options), model=Evaluates(), callbacks=[save], num_sanity_val_steps=0)
    other = Worker(tracker, "other", Counter())
    other.epoch = 1
    assert isinstance(other.ask(), Assignment)
    model = Evaluates()

    def let_go(step: int) -> None:
        other.train(6)

    model.on_step = let_go
    fit(data_of(Elsewhere(tracker), rows, **options), model=model, resume=save.saved[-1], max_epochs=3)
    assert trained(model.batches) == Counter(range(6))
    assert tracker.report().epoch == 2


def test_resumed_by_more_workers_with_other_batch_sizes(tmp_path: Path, rows: str) -> None:
    save = SaveEveryStep(str(tmp_path))
    start = fit(data_of(Hosts(1).of(0), rows), max_epochs=-1, max_steps=3, callbacks=[save])
    hosts = Hosts(2)
    others: list[list[int]] = []
    thread = threading.Thread(target=plain_loop, args=(data_of(hosts.of(1), rows, batch_size=1), 1, others))
    thread.start()
    rest = fit(data_of(hosts.of(0), rows, batch_size=5), resume=save.saved[-1])
    thread.join(LONG)
    counts = trained(start.batches, rest.batches, others)
    assert hosts.tracker is not None
    if hosts.tracker.report().epoch == 0:
        assert counts == Counter(range(SAMPLES))
    assert set(counts) == set(range(SAMPLES))


def test_a_fit_that_ends_early_has_reported_all_and_the_next_one_goes_on(rows: str) -> None:
    hosts = Hosts(1)
    data = data_of(hosts.of(0), rows)
    first = fit(data, max_epochs=-1, max_steps=2)
    assert hosts.tracker is not None
    assert (len(hosts.tracker._workers), hosts.tracker.report().trained) == (1, 8)
    second = fit(data)
    assert trained(first.batches, second.batches) == Counter(range(SAMPLES))


def test_a_corrupt_slice_is_left_out_at_once(tmp_path: Path) -> None:
    make_slices(make_rows(tmp_path / "rows", [6, 2, 6]), str(tmp_path / "slices"))
    damaged = sorted((tmp_path / "slices").glob("*.npy"))[1]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    hosts = Hosts(1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = fit(data_of(hosts.of(0), str(tmp_path / "slices"), batch_size=2, shuffle=False), max_epochs=2)
    assert sum("is quarantined" in str(warning.message) for warning in seen) == 1
    assert trained(model.batches) == Counter(dict.fromkeys([*range(6), *range(8, 14)], 2))
    assert hosts.tracker is not None
    assert len(hosts.tracker.report().quarantined) == 1


def test_misuse(rows: str) -> None:
    data = data_of(Hosts(1).of(0), rows)
    data.setup("fit")
    with pytest.raises(TrackerStateError, match="ranks that step together"):
        data.load_state_dict({"together": {}})
    with pytest.raises(OptionError, match=r"bound before setup\(\)"):
        data.bind_tracker(None)
    data.teardown("fit")
    with pytest.raises(OptionError, match="a list of 2"):
        data_of(Hosts(2).of(1), rows, batch_size=[1, 2, 3]).setup("fit")


def test_loaders_that_begin_a_pass_twice_in_an_epoch_are_refused(rows: str) -> None:
    with pytest.raises(UnsupportedError, match="needs no reloading"):
        fit(data_of(Hosts(1).of(0), rows), reload_dataloaders_every_n_epochs=1)


def test_a_worker_of_several_ranks_is_refused(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = data_of(Hosts(1).of(0), rows)
    monkeypatch.setattr(data, "_rank_and_ranks", lambda: (0, 2))
    with pytest.raises(UnsupportedError, match="one rank for each worker"):
        data.setup("fit")
