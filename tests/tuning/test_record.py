from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.tuning.record import (
    RECORD_NAME,
    StepTimeEstimate,
    TrialEntry,
    add_arguments,
    append_entries,
    draw_tuning,
    fixed_options,
    read_record,
    tables,
)
from lightning_bytescheduler.tuning.sizes import PLAIN_DDP, TuningPoint
from tests.tuning.test_decisions import OPTIMUM, bowl
from tests.tuning.training import CREDITS, Training, tuning

ENTRY = TrialEntry(
    search=0,
    kind="start",
    step=20,
    point=TuningPoint(credit=2048, partition_size=1024),
    time=StepTimeEstimate(seconds=0.3, error=0.01, scale=0.009, steps=20),
)


@pytest.fixture(scope="module")
def searched() -> tuple[TrialEntry, ...]:
    """Two searches, the second after the link has become slower."""
    slower = [1.0]
    shape = bowl(OPTIMUM)
    training = Training(tuning(), lambda point: slower[0] * shape(point)).run(900)
    slower[0] = 1.5
    return training.run(2500).tuning.entries


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(argv)


def test_a_record_grows_and_is_read_back(tmp_path: Path, searched: tuple[TrialEntry, ...]) -> None:
    file = tmp_path / "run" / RECORD_NAME
    for entry in searched:
        append_entries(file, [entry])
    assert read_record(file) == searched


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / RECORD_NAME
    append_entries(file, [ENTRY, replace(ENTRY, kind="ddp", point=PLAIN_DDP)])
    whole = file.read_bytes()
    for length in range(whole.index(b"\n") + 1, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert read_record(file) == (ENTRY,) or length == len(whole) - 1
    file.write_bytes(whole[:40] + b"\n" + whole)
    with pytest.raises(OptionError, match=r"tuning\.jsonl:1'"):
        read_record(file)


@pytest.mark.parametrize("line", ["[]", "1", "{}", '"text"', "nonsense", "\xff"])
def test_what_is_no_record(tmp_path: Path, line: str) -> None:
    file = tmp_path / RECORD_NAME
    file.write_bytes(line.encode("latin-1") + b"\n")
    with pytest.raises(OptionError, match="lines of a tuning record"):
        read_record(file)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "?"),
        ("outcome", ""),
        ("step", -1),
        ("time", {"seconds": 0.3, "error": 0.01, "scale": 0.009, "steps": 1.5}),
        ("time", {"seconds": None, "error": 0.01, "scale": 0.009, "steps": 20}),
        ("time", {"seconds": 0.3, "error": -0.01, "scale": 0.009, "steps": 20}),
        ("point", [2048]),
        ("point", None),
    ],
)
def test_entries_that_cannot_be(tmp_path: Path, field: str, value: object) -> None:
    file = tmp_path / RECORD_NAME
    file.write_text(json.dumps({**msgspec.to_builtins(ENTRY), field: value}) + "\n")
    with pytest.raises(OptionError, match="lines of a tuning record"):
        read_record(file)


def test_the_command_lists_trials_and_says_how_to_keep_the_result(
    tmp_path: Path, searched: tuple[TrialEntry, ...]
) -> None:
    append_entries(tmp_path / RECORD_NAME, searched)
    ((title, rows),) = tables(parsed(str(tmp_path / RECORD_NAME)))
    assert RECORD_NAME in title
    chosen = searched[-1]
    assert chosen.kind == "chosen"
    text = dict(rows)
    assert f"partition_size={chosen.point.partition_size}, credit={chosen.point.credit}" in text["to keep it"]
    assert len(rows) == len(searched) + 1


def test_the_command_without_a_choice_or_trials(tmp_path: Path) -> None:
    file = tmp_path / RECORD_NAME
    append_entries(file, [ENTRY])
    assert tables(parsed(str(file)))[0][1][-1] == ("chosen", "nothing yet")
    file.write_text("")
    with pytest.raises(OptionError, match="at least one trial"):
        tables(parsed(str(file)))
    with pytest.raises(FileNotFoundError):
        tables(parsed(str(tmp_path / "missing")))


def test_options_to_paste() -> None:
    assert fixed_options(PLAIN_DDP) == 'ByteSchedulerStrategy(mode="ddp")'
    found = fixed_options(TuningPoint(credit=262_144, partition_size=65_536))
    assert found == 'ByteSchedulerStrategy(partition_size=65536, credit=262144, mode="overlapped")'


def test_a_picture(tmp_path: Path, searched: tuple[TrialEntry, ...]) -> None:
    pytest.importorskip("matplotlib")
    append_entries(tmp_path / RECORD_NAME, searched)
    out = tmp_path / "new" / "search.png"
    tables(parsed(str(tmp_path / RECORD_NAME), "--png", str(out)))
    assert out.stat().st_size > 5000


def test_pictures_of_little(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_tuning([ENTRY], tmp_path / "one.png")
    ddp = replace(ENTRY, kind="ddp", point=PLAIN_DDP)
    draw_tuning([ddp, replace(ddp, kind="chosen")], tmp_path / "ddp.png")
    # A run that was resumed in the first search's confirmation has that one's choice, but not its trials.
    draw_tuning([replace(ENTRY, kind="chosen"), replace(ENTRY, search=1)], tmp_path / "resumed.png")
    entries = Training(tuning(CREDITS), bowl(OPTIMUM)).run(300).tuning.entries
    draw_tuning(entries, tmp_path / "credits.png")
    assert len(list(tmp_path.glob("*.png"))) == 4
    with pytest.raises(OptionError, match="out"):
        draw_tuning([ENTRY], tmp_path / "search.nonsense")
    append_entries(tmp_path / RECORD_NAME, [replace(ENTRY, kind="chosen")])
    with pytest.raises(OptionError, match="at least one trial"):
        tables(parsed(str(tmp_path / RECORD_NAME), "--png", str(tmp_path / "none.png")))
