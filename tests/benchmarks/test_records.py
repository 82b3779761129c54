"""All benchmarks have one command and one format of results."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import __main__ as command
from benchmarks import networks, scheduler_overhead
from benchmarks.configuration import Configuration
from benchmarks.ranks import MeasurementFailed
from benchmarks.record import Results, append, read, record, show

KEYS = {"benchmark", "what", "setting", "medians", "ratios", "seen", "machine"}


def test_a_record_keeps_what_its_medians_are_of(tmp_path: Path) -> None:
    values = {"step [ms]": [3.0, 1.0, 2.0], "events": 4, "none": []}
    one = record("some", "ddp", {"workers": 2}, values, {"/ bound": [1.0, 1.5]}, plan="as it is")
    assert one.medians == {"step [ms]": 2.0, "events": 4.0}
    assert one.ratios == {"/ bound": 1.25}
    assert one.seen == {"step [ms]": [3.0, 1.0, 2.0], "/ bound": [1.0, 1.5], "plan": "as it is"}
    path = tmp_path / "results" / "some.jsonl"
    append(path, [one])
    append(path, [one, record("some", "ours", {}, {"step [ms]": 1.0})])
    assert [found.what for found in read(path)] == ["ddp", "ours"]
    assert read(path)[0] == one
    assert all(json.loads(line).keys() == KEYS for line in path.read_text().splitlines())
    assert read(tmp_path / "nothing.jsonl") == []


def test_a_table_shows_units_and_how_far_ratios_differ() -> None:
    console = Console(record=True, width=100)
    records = [record("some", "ddp", {}, {"step [ms]": 2.0}), record("some", "ours", {}, {}, {"/ ddp": [0.5, 1.0]})]
    show(console, "[a title]", records)
    shown = console.export_text()
    assert "step [ms]" in shown
    assert "[a title]" in shown
    assert "0.750 (0.500 to 1.000)" in shown


@pytest.mark.parametrize("name", command.BENCHMARKS)
def test_every_benchmark_says_what_it_measures(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([name, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"python -m benchmarks {name}" in shown
    assert (importlib.import_module(f"benchmarks.{name}").__doc__ or "").splitlines()[0] in shown


def test_all_benchmarks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in command.BENCHMARKS)
    assert command.main(["nothing"]) == 2
    assert "There is no benchmark 'nothing'." in capsys.readouterr().err


def test_what_was_measured_is_kept_also_if_a_later_one_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(options: argparse.Namespace) -> Iterator[Results]:
        yield "the first", [record("scheduler_overhead", "one", {}, {"seconds": 1.0})]
        raise MeasurementFailed("Rank 1 is gone.")

    monkeypatch.setattr(scheduler_overhead, "measure", measure)
    out = tmp_path / "found.jsonl"
    assert command.main(["scheduler_overhead", "--out", str(out)]) == 1
    assert "Rank 1 is gone." in capsys.readouterr().out
    assert [one.what for one in read(out)] == ["one"]


def test_networks_are_beside_ddp_the_bound_and_the_prediction() -> None:
    steps = {"alone": 0.1, "ddp": 0.4, "ddp, 2 MB buckets": 0.3, "bytescheduler, overlapped": 0.2}
    found = {
        name: [[{"seconds": [seconds, seconds], "account": {"sent": 1e6, "processor": 0.01}}]]
        for name, seconds in steps.items()
    }
    asked = Configuration(network="uniform", ratio=1.0, workers=2)
    records = networks.records_of(asdict(asked), found, asked)
    ratios = {one.what: one.ratios for one in records}
    bound = asked.bounds(0.1)["any order"]
    assert ratios["ddp"]["/ bound"] == pytest.approx(0.4 / bound)
    assert ratios["bytescheduler, overlapped"]["/ ddp"] == pytest.approx(0.5)
    assert ratios["bytescheduler, overlapped"]["/ best of ddp"] == pytest.approx(2 / 3)
    assert ratios["ddp"]["predicted / it"] > 0
    assert "predicted / it" not in ratios["alone"]
