from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_bytescheduler.diloco.round_record import (
    RoundFile,
    RoundRecord,
    WorkerRound,
    read_rounds,
    waiting_share,
)
from lightning_bytescheduler.exceptions import OptionError
from tests.diloco.records import small_run, written

HAND_MADE = RoundRecord(
    round=1,
    start=0.0,
    end=10.0,
    decided=7.0,
    workers=(
        WorkerRound(
            worker="a",
            steps=3,
            samples=30,
            merged=True,
            spans=(("receiving", 0.0, 1.0), ("working", 1.0, 8.0), ("sending", 8.0, 9.0), ("waiting", 9.0, 10.0)),
        ),
        WorkerRound(worker="b", steps=9, samples=90, merged=False, spans=(("working", 0.0, 10.0),)),
    ),
)


def test_sums() -> None:
    assert (HAND_MADE.samples, HAND_MADE.merged) == (30, ("a",))
    assert HAND_MADE.workers[0].seconds("working") == 7.0
    assert HAND_MADE.workers[1].seconds("waiting") == 0.0
    assert waiting_share([HAND_MADE]) == 1 / 20
    assert waiting_share([]) == 0.0


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    assert read_rounds(written(tmp_path / "rounds.jsonl")) == list(small_run())


def test_a_run_that_died_while_it_wrote_is_read(tmp_path: Path) -> None:
    file = written(tmp_path / "rounds.jsonl")
    file.write_bytes(file.read_bytes()[:-40])
    assert read_rounds(file) == list(small_run())[:-1]


def test_a_file_of_nothing_has_no_rounds(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    assert read_rounds(tmp_path / "empty") == []


@pytest.mark.parametrize(
    "change",
    [
        {"round": "one"},
        {"end": -1.0},
        {"workers": 3},
        {"workers": [{}]},
        {"workers": [{"worker": "a", "steps": 1, "samples": 1, "merged": True, "spans": [["idle", 0, 1]]}]},
        {"workers": [{"worker": "a", "steps": 1, "samples": 1, "merged": True, "spans": 5}]},
        {"workers": [{"worker": 1, "steps": 1, "samples": 1, "merged": True, "spans": []}]},
        {"more": 1},
    ],
)
def test_what_is_no_record_is_named(tmp_path: Path, change: dict) -> None:
    file = written(tmp_path / "rounds.jsonl")
    lines = file.read_text().splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), **change})
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(OptionError, match=r"rounds\.jsonl:2' .* a file of rounds, one to a line \("):
        read_rounds(file)


@pytest.mark.parametrize("text", ["no JSON", "7", "null", "[1]", "{}"])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "other").write_text(text)
    with pytest.raises(OptionError, match="other:1' "):
        read_rounds(tmp_path / "other")


def test_a_record_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    (tmp_path / "rounds.jsonl").write_text(
        '{"round": 1, "start": 0, "end": 10.0, "decided": null, "workers": [{"worker": "a", "steps": 3, "samples": 30, '
        '"merged": true, "spans": [["working", 0, 10.0]]}]}\n'
    )
    worker = WorkerRound(worker="a", steps=3, samples=30, merged=True, spans=(("working", 0.0, 10.0),))
    assert read_rounds(tmp_path / "rounds.jsonl") == [
        RoundRecord(round=1, start=0.0, end=10.0, decided=None, workers=(worker,))
    ]


def test_a_file_that_the_user_named_is_opened_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=r"^rounds_file=.* must be a file that can be written \("):
        RoundFile(tmp_path / "file" / "rounds.jsonl", append=False, option="rounds_file")
    RoundFile(tmp_path / "file" / "rounds.jsonl", append=False).write(HAND_MADE)  # the run's own may be missing
    named = RoundFile(tmp_path / "new" / "rounds.jsonl", append=False, option="rounds_file")
    named.write(HAND_MADE)
    named.close()
    assert read_rounds(tmp_path / "new" / "rounds.jsonl") == [HAND_MADE]
