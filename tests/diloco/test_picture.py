from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from lightning_bytescheduler.diloco.picture import draw_rounds
from lightning_bytescheduler.exceptions import OptionError
from tests.diloco.records import small_run


def texts(svg: Path) -> list[str]:
    return [text.strip() for text in re.findall(r"<!-- (.*?) -->", svg.read_text(encoding="utf-8"))]


def test_it_draws_the_last_rounds(tmp_path: Path) -> None:
    out = tmp_path / "new" / "rounds.svg"
    draw_rounds(small_run(), out)
    drawn = texts(out)
    assert "Rounds 3 to 8" in drawn
    assert [text for text in drawn if re.fullmatch(r"round \d", text)] == [f"round {n}" for n in range(3, 9)]
    assert {"w0", "w1", "w2", "training", "waiting for the others", "sending its update", "not merged"} <= set(drawn)
    assert any(re.fullmatch(r"\d+ steps(, \d+ samples)?", text) for text in drawn)
    assert any("of their time" in text for text in drawn)


def test_it_draws_the_rounds_asked_for(tmp_path: Path) -> None:
    draw_rounds(small_run(), tmp_path / "r.svg", rounds=(1, 2), title="The first")
    drawn = texts(tmp_path / "r.svg")
    assert "The first" in drawn
    assert "w0" not in drawn  # had not joined yet
    assert "not merged" not in drawn
    draw_rounds(small_run(), tmp_path / "r.png", rounds=(7, 99))
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="among the rounds 1 to 8"):
        draw_rounds(small_run(), tmp_path / "r.png", rounds=(9, 12))
    with pytest.raises(OptionError, match="record"):
        draw_rounds([], tmp_path / "r.png")
    with pytest.raises(OptionError, match="png"):
        draw_rounds(small_run(), tmp_path / "r.xyz")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"lightning-bytescheduler\[plots\]"):
        draw_rounds(small_run(), tmp_path / "r.png")
