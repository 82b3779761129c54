from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from lightning_bytescheduler.checking.report import RankRecord, RunSpec, compare, first_difference, investigate
from tests.checking.runs import NAMES, Trainings, made


def test_what_is_the_same_takes_four_runs() -> None:
    trainings = Trainings()
    report = investigate(trainings, steps=10)
    assert report.verdict == "identical"
    assert [spec.strategy for spec, _ in trainings.made] == ["ddp", "configured", "ddp", "strict"]
    assert report.exit_code == 0
    assert report.headline() == "identical"
    assert "OMP_NUM_THREADS" not in report.text()


def test_where_a_parameter_is_read_unseen_is_found() -> None:
    trainings = Trainings(stale=True)
    report = investigate(trainings, steps=10)
    assert report.verdict == "different"
    assert report.first is not None
    assert report.first.step == 4
    assert report.first.tensors == NAMES
    assert len(trainings.made) == 4 + 1  # as it is, and with no update deferred
    assert report.exit_code == 1
    assert report.headline() == f"different from step 4 on, first tensor {NAMES[0]!r}"
    assert "nothing differs: a weight is read before the update of the last step has landed" in report.text()


def test_a_difference_that_no_deferral_explains_is_told_from_that() -> None:
    def always(spec, record):
        return record if spec.strategy == "ddp" else replace(record, losses=("0x1p+0", *record.losses[1:], "0x1p+9"))

    report = investigate(Trainings(change=always), steps=10)
    assert report.verdict == "different"
    assert "an unseen read of a weight does not explain it" in report.text()


def test_ddp_that_differs_from_itself_is_not_blamed_on_anybody() -> None:
    trainings = Trainings(noisy=True)
    report = investigate(trainings, steps=10)
    assert report.verdict == "not reproducible"
    assert len(trainings.made) == 3
    assert report.exit_code == 2
    assert report.headline().startswith("could not check: the script is not reproducible under ddp itself from step 1")
    assert "OMP_NUM_THREADS=1 may help" in report.text()


def test_a_metric_that_changes_by_itself_is_left_out() -> None:
    times = itertools.count()

    def with_time(_, record):
        return replace(record, metrics={**record.metrics, "samples_per_second": str(next(times))})

    report = investigate(Trainings(change=with_time), steps=10)
    assert report.verdict == "identical"
    assert report.changing_metrics == ("samples_per_second",)


def test_a_metric_that_differs_counts() -> None:
    def other(spec, record):
        return record if spec.strategy == "ddp" else replace(record, metrics={"loss": "0x1p+7"})

    trainings = Trainings(change=other)
    report = investigate(trainings, steps=10)
    assert report.exit_code == 1
    assert len(trainings.made) == 4  # no step differs, so there is none to look for
    assert report.headline() == "different in what is logged: 'loss'; weights are identical"


ANOTHER_ORDER = pytest.mark.parametrize("setup", [{"world_size": 4}, {"needs_norm": True}])


@ANOTHER_ORDER
def test_another_order_of_sums_is_rounding(setup: dict) -> None:
    trainings = Trainings(sum_order=1e-7, **setup)
    report = investigate(trainings, steps=10)
    assert report.verdict == "rounding"
    assert [spec.strategy for spec, _ in trainings.made] == ["ddp", "configured", "ddp", "strict", "undeferred"]
    assert report.exit_code == 0
    assert report.headline().startswith("equal to rounding")


@ANOTHER_ORDER
def test_no_order_of_sums_makes_another_training(setup: dict) -> None:
    report = investigate(Trainings(sum_order=0.02, **setup), steps=10)
    assert report.verdict == "different"
    assert report.first is not None
    assert report.first.step == 2


def test_the_same_is_a_difference_where_the_order_is_one() -> None:
    assert investigate(Trainings(sum_order=1e-7), steps=10).verdict == "different"


@ANOTHER_ORDER
def test_what_is_hidden_in_rounding_is_held_against_a_run_that_defers_nothing(setup: dict) -> None:
    report = investigate(Trainings(sum_order=1e-7, stale=True, **setup), steps=10)
    assert report.verdict == "different"
    assert report.first is not None
    assert report.first.step == 4
    assert report.first.tensors == NAMES
    assert "most likely: a weight is read before the" in report.text()


def apart(record):
    return replace(record, weights={**record.weights, NAMES[3]: f"of rank {record.rank}"})


def lost(record):
    return replace(record, losses=(*record.losses[:4], *("nan",) * 6))


def begun_elsewhere(record):
    return replace(record, initial={**record.initial, NAMES[3]: "elsewhere"})


def untrained(record):
    return replace(record, weights={**record.weights, NAMES[3]: record.initial[NAMES[3]]})


@ANOTHER_ORDER
@pytest.mark.parametrize(
    ("change", "headline", "said"),
    [
        (apart, "different", f"8 under ddp, 7 under bytescheduler; only under one of both: {NAMES[3]}"),
        (lost, "different from step 5 on", "only under one of both: that of step 5 on rank 0"),
        (begun_elsewhere, f"different: weights differ before the first step, first tensor {NAMES[3]!r}", ""),
        (untrained, "different", f"8 under ddp, 7 under bytescheduler; only under one of both: {NAMES[3]}"),
    ],
)
def test_what_no_order_of_sums_changes_is_a_difference(change, headline: str, said: str, setup: dict) -> None:
    """Even if deferring updates changes nothing, and losses begin like ddp's."""

    def changed(spec, record):
        return change(record) if spec.strategy != "ddp" else record

    report = investigate(Trainings(sum_order=1e-7, change=changed, **setup), steps=10)
    assert report.exit_code == 1
    assert report.headline() == headline
    assert said in report.text()


@pytest.mark.parametrize(
    ("strategy", "verdict", "code"), [("ddp", "unchecked", 2), ("configured", "fails", 1), ("strict", "fails", 1)]
)
def test_a_training_that_fails_is_reported(strategy: str, verdict: str, code: int) -> None:
    report = investigate(Trainings(error={strategy: "ValueError: boom"}), steps=10)
    assert report.verdict == verdict
    assert report.exit_code == code
    assert "boom" in report.headline()


# Two runs are compared.

DDP = RunSpec(strategy="ddp", steps=3)
RECORD = RankRecord(
    rank=0,
    world_size=2,
    steps=3,
    losses=("0x1p+0", "0x1p-1", "0x1p-2"),
    loss_steps=(0, 1, 2),
    weights={"a": "1", "b": "2"},
    trace={1: {"a": "1", "b": "2"}, 2: {"a": "1", "b": "2"}},
)


def test_every_rank_counts() -> None:
    other = replace(RECORD, rank=1, weights={"a": "1", "b": "3"})
    found = compare(made(DDP, RECORD, replace(RECORD, rank=1)), made(DDP, RECORD, other))
    assert found.weights == ("b",)
    assert not found.trained_alike


def test_what_only_one_has_differs() -> None:
    fewer = replace(RECORD, steps=2, losses=RECORD.losses[:2], weights={"a": "1"})
    found = compare(made(DDP, RECORD), made(DDP, fewer))
    assert found.weights == ("b",)
    assert found.losses == 1
    assert found.other == ("rank 0 took 2 steps instead of 3",)


def test_a_loss_shows_in_the_step_it_belongs_to() -> None:
    other = replace(RECORD, losses=("0x1p+0", "0x1p-1", "0x1p-3"))
    found = first_difference(made(DDP, RECORD), made(DDP, other))
    assert found is not None
    assert found.step == 3
    assert found.losses == (0.25, 0.125)


def test_an_update_that_differs_shows_before_the_loss_does() -> None:
    trace = {1: {"a": "1", "b": "2"}, 2: {"a": "1", "b": "9"}}
    other = replace(RECORD, trace=trace, losses=("0x1p+0", "0x1p-1", "0x1p-3"))
    found = first_difference(made(DDP, RECORD), made(DDP, other))
    assert found is not None
    assert found.step == 2
    assert found.losses is None
    assert found.tensors == ("b",)


def test_micro_batches_of_one_step_belong_to_it() -> None:
    accumulated = replace(RECORD, loss_steps=(0, 0, 1))
    other = replace(accumulated, losses=("0x1p+0", "0x1p-7", "0x1p-2"))
    found = first_difference(made(DDP, accumulated), made(DDP, other))
    assert found is not None
    assert found.step == 1


def test_a_loss_may_be_off_by_rounding_but_not_be_lost() -> None:
    near = replace(RECORD, losses=("0x1p+0", "0x1.00001p-1", "0x1.1p-2"))
    found = first_difference(made(DDP, RECORD), made(DDP, near), tolerance=0.01)
    assert found is not None
    assert found.step == 3
    lost = replace(RECORD, losses=("0x1p+0", "nan", "0x1p-2"))
    assert first_difference(made(DDP, lost), made(DDP, lost), tolerance=0.01) is None
    found = first_difference(made(DDP, RECORD), made(DDP, lost), tolerance=0.01)
    assert found is not None
    assert found.step == 2
