from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from lightning_bytescheduler.diloco.picture import add_arguments, rounds_table
from lightning_bytescheduler.exceptions import OptionError
from tests.diloco.records import small_run, written


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    return parser.parse_args(argv)


def test_it_sums_a_run_up(tmp_path: Path) -> None:
    file = str(written(tmp_path / "rounds.jsonl"))
    title, rows = rounds_table(parse(file))
    assert rounds_table(parse(str(tmp_path))) == (title, rows), "a run's folder will do"
    found = dict(rows)
    assert title == file
    assert found["rounds"] == "8"
    assert found["samples"] == f"{sum(record.samples for record in small_run()):,}"
    steps = sum(worker.steps for record in small_run() for worker in record.workers if worker.worker == "w2")
    assert found["w2"].startswith(f"{steps:,} steps: training ")
    assert [label for label, _ in rows[-3:]] == ["w0", "w1", "w2"]
    assert float(found["waiting"].split("%")[0]) < 20


def test_it_draws_and_chooses_rounds(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file, out = str(written(tmp_path / "rounds.jsonl")), tmp_path / "r.png"
    _, rows = rounds_table(parse(file, "--png", str(out), "--rounds", "2:4"))
    assert dict(rows)["rounds"] == "2"
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("text", ["3", "4:3", "a:b", "2:2", ""])
def test_what_is_no_range(text: str) -> None:
    with pytest.raises(argparse.ArgumentError, match="is not a range A:B"):
        parse("file", "--rounds", text)


def test_what_is_not_there(tmp_path: Path) -> None:
    file = str(written(tmp_path / "rounds.jsonl"))
    with pytest.raises(OptionError, match="among 1 to 8"):
        rounds_table(parse(file, "--rounds", "20:30"))
    (tmp_path / "empty").write_text("")
    with pytest.raises(OptionError, match="one round or more"):
        rounds_table(parse(str(tmp_path / "empty")))
    with pytest.raises(OSError, match="missing"):
        rounds_table(parse(str(tmp_path / "missing")))
