"""What a user sees of the strategy while it trains: metrics, timeline, profiler spans, sizes, threads."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from lightning_bytescheduler.timeline.picture import tables
from lightning_bytescheduler.timeline.timeline import COMMUNICATION, COMPUTE, GATE, QUEUE, STEP, read_timeline
from tests.ddp import fits
from tests.support.rank_pool import RankPool

_METRICS = {
    "bytescheduler/exposed_communication_ms",
    "bytescheduler/gate_wait_ms",
    "bytescheduler/megabytes_sent",
    "bytescheduler/deferred_share",
}


@pytest.fixture(scope="module")
def watched(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """An overlapped fit: where its timelines are, and what each rank saw of it."""
    path = tmp_path_factory.mktemp("watched") / "trace.json"
    return path, two_ranks.run(fits.watch, path=str(path), mode="overlapped")


def test_metrics_are_logged(watched: tuple[Path, list[dict[str, Any]]]) -> None:
    for seen in watched[1]:
        logged = seen["metrics"]
        assert set(logged) == _METRICS
        assert logged["bytescheduler/deferred_share"] == pytest.approx(11 / 12)  # the first is synchronised
        assert logged["bytescheduler/megabytes_sent"] > 0
        assert logged["bytescheduler/exposed_communication_ms"] >= logged["bytescheduler/gate_wait_ms"] >= 0


def test_each_rank_writes_a_timeline_with_every_kind_of_span(watched: tuple[Path, list[dict[str, Any]]]) -> None:
    for path in (watched[0], watched[0].with_suffix(".rank1.json")):
        trace = read_timeline(path)
        summary = trace.summary()
        assert summary.steps == 12
        assert summary.sub_tasks == len(trace.select(COMMUNICATION)) == len(trace.select(QUEUE)) > 12
        assert {span.name for span in trace.select(COMPUTE)} == {"forward", "backward"}
        assert trace.select(STEP)


@pytest.mark.parametrize("options", [{"bucket_cap_mb": 1e-4}, {"mode": "auto"}, {"mode": "overlapped"}])
def test_the_timeline_has_the_bytes_that_the_counters_say(
    two_ranks: RankPool, tmp_path: Path, options: dict[str, Any]
) -> None:
    counted = two_ranks.run(fits.fit_as_ddp_with_timeline, path=str(tmp_path / "trace.json"), **options)
    for name, (sent, steps) in zip(("trace.json", "trace.rank1.json"), counted, strict=True):
        trace = read_timeline(tmp_path / name)
        summary = trace.summary()
        assert summary.total_bytes == pytest.approx(sent, abs=1)
        assert summary.steps == steps
        assert summary.communication_seconds > 0
        kind = "overlapped" if options.get("mode") == "overlapped" else "as DDP's"
        if options.get("mode") != "auto":  # which tries what it likes
            assert summary.kinds == {kind: steps - 1, "synchronised": 1}
        assert {span.step for span in trace.select(COMMUNICATION)} == set(range(1, steps + 1))
        assert len(trace.select(COMPUTE, "backward")) == 2 * steps
        if summary.kinds.get("as DDP's") == steps - 1:
            assert summary.exposed_seconds > 0
            assert summary.hidden_share < 1


def waits(path: Path, seen: dict[str, Any]) -> float:
    """How long training waits in a step of a fit, in ms, which metric, timeline and its picture agree on."""
    trace = read_timeline(path)
    summary = trace.summary()
    timeline_ms = 1e3 * summary.exposed_seconds / summary.steps
    ((_, rows),) = tables(Namespace(file=str(path), png=None, steps=None))
    assert f"({timeline_ms:.1f} ms a step)" in dict(rows)["training waits"]
    # What the last step carries over is waited for after the last metric.
    carried = sum(gate.end - gate.start for gate in trace.select(GATE) if gate.step == summary.steps)
    metric_ms = seen["metrics"]["bytescheduler/exposed_communication_ms"]
    assert metric_ms == pytest.approx(timeline_ms - 1e3 * carried / summary.steps, abs=0.05)
    assert metric_ms > 0
    return timeline_ms


def test_how_long_training_waits_is_one_number(watched: tuple[Path, list[dict[str, Any]]]) -> None:
    path, (seen, _) = watched
    said_ms = float(seen["lines"][-1].partition("training waited ")[2].partition(" ms a step for gradients")[0])
    assert said_ms == pytest.approx(waits(path, seen), abs=0.1)


def test_how_long_training_waits_in_steps_as_ddps_is_one_number(two_ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    waits(path, two_ranks.run(fits.watch, path=str(path), mode="ddp")[0])


def test_the_timeline_of_a_failed_fit_is_complete(two_ranks: RankPool, tmp_path: Path) -> None:
    errors = two_ranks.run(fits.fit_with_timeline, path=str(tmp_path / "trace.json"), fail=True)
    assert all("boom" in error for error in errors)
    for name in ("trace.json", "trace.rank1.json"):
        assert read_timeline(tmp_path / name).summary().steps >= 5


def test_an_argument_beats_the_variable_and_nothing_outlives_the_fit(two_ranks: RankPool) -> None:
    """A partition that is larger than the credit is clamped."""
    variables = {"BYTESCHEDULER_CREDIT": "5", "BYTESCHEDULER_PARTITION": "900"}
    for rank, seen in enumerate(two_ranks.run(fits.observe, options={"credit": 700}, environment=variables)):
        assert (seen["partition_size"], seen["credit"]) == (700, 700)
        # completion, counts, dispatcher, fault-watch; others than rank 0 also receive its launch order
        assert len(seen["threads_during"]) == (4 if rank == 0 else 5)
        assert seen["threads_after"] == []
        assert seen["switch_intervals"] == pytest.approx((0.0005, 0.005), abs=1e-5)
        assert "SchedulerHooks" not in seen["callbacks_after"]


@pytest.mark.parametrize("option", ["cross_barrier", "gradient_as_bucket_view"])
def test_synchronised_steps_say_why_and_metrics_can_be_switched_off(two_ranks: RankPool, option: str) -> None:
    for seen in two_ranks.run(fits.observe, options={option: False, "log_metrics": False}, environment={}):
        assert f"{option}=False" in seen["reasons"][0]
        assert seen["deferred_share"] == 0.0
        assert seen["metrics"] == {}
