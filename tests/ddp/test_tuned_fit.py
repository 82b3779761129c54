"""Real fits of two ranks that are tuned, or are not."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from lightning_bytescheduler.__main__ import main
from lightning_bytescheduler.ddp.decided_fit import FitTuning, announce
from lightning_bytescheduler.ddp.wire import AgreedSizes
from lightning_bytescheduler.scheduler.options import SchedulerOptions
from lightning_bytescheduler.tuning import credit_tuner
from lightning_bytescheduler.tuning.record import read_record
from lightning_bytescheduler.tuning.sizes import SchedulerSizes
from tests.ddp.fits import Paced
from tests.ddp.tuned_fits import Seen, record_of, tuned_fit
from tests.support.rank_pool import RankPool

# Few and short trials, so that a fit of a second ends settled, whatever the clock says.
SIZED = {"credit": 800, "partition_size": 400, "tuning": "credit"}  # the same in each run, whatever the link
HASTY = {"trials": 2, "steps_per_trial": 4}


def test_default_on(two_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zero, one = two_ranks.run(tuned_fit, steps=80, logs=str(tmp_path), slow=True)
    assert zero.points == one.points
    assert all(zero.is_decided)
    assert all(zero.tunes_sizes[:20])
    assert zero.tuners == one.tuners == 1
    assert zero.left == one.left == []
    assert len(set(zero.points[:20])) == 1, "nothing changes in a run of a few steps"
    record = read_record(record_of(tmp_path))
    assert [entry.kind for entry in record[:2]] == ["start", "ddp"]
    partitions = {entry.point.partition_size for entry in record if not entry.point.is_plain_ddp}
    assert partitions == {zero.points[0][1]}, "partitions are not tuned by default"
    assert one.entries == ()
    assert not [name for name in zero.metrics if name.startswith("bytescheduler")], "nothing in the progress bar"
    assert zero.said[0].startswith("bytescheduler: 2 ranks, all-reduce ")
    assert "Steps overlap, because the link is slow for this model" in zero.said[0]
    assert "fastest" in (zero.plan or "")
    assert len(zero.said) == len(set(zero.said)) <= 3, "the start; the end of the search; the end of the fit"
    assert one.said == []
    assert "rank 0 times steps" in (one.plan or "")
    assert main(["tuning", str(tmp_path)]) == 0
    assert "plain DDP" in capsys.readouterr().out


def overlapping_soon(rank: int) -> Seen:
    """A fit on a fast link in which overlapped steps pay."""
    paced = partial(Paced, ddp_ms=40.0, overlapped_ms=30.0, hideable_ms=20.0)
    with patch.object(credit_tuner, "CreditTuning", paced):
        return tuned_fit(rank, steps=60)


def test_tuned_from_when_on_overlap_pays(two_ranks: RankPool) -> None:
    zero, one = two_ranks.run(overlapping_soon)
    assert zero.points == one.points
    assert all(zero.is_decided)
    first = zero.points.index(next(point for point in zero.points if point != (0, 0)))
    assert first < 10
    assert (0, 0) not in zero.points[first:]
    assert (
        zero.tunes_sizes == [False] * first + [True] * (60 - first) or zero.tunes_sizes[first + 1 :].count(False) == 0
    )
    assert [entry.kind for entry in zero.entries[:2]] == ["start", "guess"]
    assert len({entry.point.credit for entry in zero.entries}) > 2, "other credits are tried"
    assert one.entries == ()
    assert zero.left == one.left == []


@pytest.mark.parametrize(
    ("given", "tuned"),
    [
        ({"steps": 8}, False),
        ({"steps": 19, "slow": True}, False),
        ({"steps": 20, "slow": True}, True),
        ({"steps": 8, "tuner": {}}, True),
        ({"steps": 20, "environment": {"CREDIT_TUNING": "0"}, "slow": True}, False),
        ({"steps": 8, "environment": {"CREDIT_TUNING": "0"}, "tuner": {}, "options": {"tuning": "credit"}}, True),
        ({"steps": 8, "environment": {"PARTITION_TUNING": "1"}, "tuner": {}}, True),
        ({"steps": 8, "tuner": {}, "options": {"credit": 500}}, False),
        ({"steps": 8, "tuner": {}, "options": {"cross_barrier": False}}, False),
        ({"steps": 8, "tuner": {}, "options": {"mode": "ddp"}}, False),
    ],
)
def test_what_is_tuned(two_ranks: RankPool, given: dict[str, Any], tuned: bool) -> None:
    zero, one = two_ranks.run(tuned_fit, **given)
    assert any(zero.tunes_sizes) == tuned
    for seen in (zero, one):
        assert seen.tuners == (1 if "tuner" in given or "environment" not in given else 0)
        assert seen.left == []


def settled(two_ranks: RankPool, folder: Path) -> Seen:
    saved = {22: str(folder / "early.ckpt"), 150: str(folder / "late.ckpt")}
    zero, one = two_ranks.run(tuned_fit, steps=150, tuner=HASTY, options=SIZED, save=saved)
    assert zero.points == one.points
    assert zero.is_settled[-1]
    found: Seen = zero
    return found


@pytest.mark.slow
def test_resumed(two_ranks: RankPool, tmp_path: Path) -> None:
    before = settled(two_ranks, tmp_path)
    state = torch.load(tmp_path / "late.ckpt", weights_only=True)["bytescheduler_tuning"]
    chosen = tuple(state["current"])
    assert before.points[-1] == chosen

    zero, one = two_ranks.run(tuned_fit, steps=170, tuner=HASTY, options=SIZED, resume=str(tmp_path / "late.ckpt"))
    assert zero.points == one.points == [chosen] * 20, "tuned from the first step on"
    assert all(zero.is_settled)

    # As after a crash in the first trial: what was measured is not measured again, and the search ends.
    zero, one = two_ranks.run(tuned_fit, steps=150, tuner=HASTY, options=SIZED, resume=str(tmp_path / "early.ckpt"))
    assert zero.points == one.points
    assert zero.is_settled[-1]
    known = torch.load(tmp_path / "early.ckpt", weights_only=True)["bytescheduler_tuning"]["trials"]
    assert len(known) + sum(entry.is_trial for entry in zero.entries) == HASTY["trials"]


def test_the_published_tuners_root_is_ignored_with_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"BYTESCHEDULER_ROOT_IP": "10.0.0.1", "BYTESCHEDULER_ROOT_PORT": "99"}
    options = SchedulerOptions.resolve(environ=environ)
    sizes = SchedulerSizes(partition_size=10, credit=20, bucket_bytes=80)
    with caplog.at_level(logging.INFO):
        announce(options, AgreedSizes(sizes=sizes, link=None))
    (line,) = (line for line in caplog.messages if "ignored" in line)
    assert "BYTESCHEDULER_ROOT_IP, BYTESCHEDULER_ROOT_PORT ignored" in line


def test_a_fit_after_one_with_debug_logs_as_before() -> None:
    logger, sizes = (
        logging.getLogger("lightning_bytescheduler"),
        SchedulerSizes(partition_size=10, credit=20, bucket_bytes=80),
    )
    before, handlers = logger.level, list(logger.handlers)
    try:
        for debug in (True, True, False):
            announce(SchedulerOptions(debug=debug), AgreedSizes(sizes=sizes, link=None))
            assert (logger.level == logging.DEBUG) == debug
        assert logger.level == before
    finally:
        logger.setLevel(before)
        logger.handlers[:] = handlers


def test_what_was_decided_is_known_when_a_script_has_destroyed_its_groups() -> None:
    tuning = FitTuning(SchedulerOptions(), timeout=None)
    tuning._in_force = Mock()  # as on a rank that decides nothing
    assert "rank 0 times steps" in tuning.standing
