"""The count of the house: what is code, and what has grown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import house

MODULE = '''"""Docstring,
of two lines."""

# A comment.
import os


class Box:
    """One line."""

    text = """not a
    docstring"""

    def __init__(self) -> None:
        self.one, self.two = 1, 2  # two attributes
        self.one = 3
'''


def test_blank_lines_comments_and_docstrings_are_no_code() -> None:
    assert house.lines_of_code(MODULE) == 7


def test_rooms_imports_and_attributes_are_counted(tmp_path: Path) -> None:
    package = tmp_path / "package"
    for name, text in {
        "__init__.py": "from package.room import one\nimport package.room.two\nimport os\n",
        "room/__init__.py": "",
        "room/one.py": MODULE,
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    counted = house.House.of(package, {})
    assert counted.lines == {"top": 3, "room": 7}
    assert counted.files == {"top": 1, "room": 2}
    assert counted.imports["__init__.py"] == 2
    assert counted.attributes == {"room/one.py:Box": 2}


def test_what_grew_is_named_and_what_shrank_is_not() -> None:
    last = {"lines": {"ddp": 10, "slices": 10}, "files": {}}
    assert house.grown({"lines": {"ddp": 9, "slices": 10}, "files": {}}, last) == []
    assert house.grown({"lines": {"ddp": 11, "new": 1}, "files": {}}, last) == [
        "ddp has 11 lines, and had 10",
        "new has 1 lines, and had 0",
    ]


def test_growth_fails_and_is_not_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package, figures = tmp_path / "package", tmp_path / "house.toml"
    (package / "ddp").mkdir(parents=True)
    (package / "ddp" / "one.py").write_text(MODULE)
    budget = house.FIGURES.read_text().split("[lines]")[0]
    figures.write_text(budget + "[lines]\nddp = 1\n[files]\nddp = 1\n[options]\n")
    for name, value in {"FIGURES": figures, "PACKAGE": package, "own_options": dict}.items():
        monkeypatch.setattr(house, name, value)
    before = figures.read_text()
    assert house.main(["--write"]) == 1
    assert "ddp has 7 lines, and had 1" in capsys.readouterr().out
    assert figures.read_text() == before
    assert house.main(["--write", "--allow-growth"]) == 0
    assert house.main([]) == 0


def test_options_that_ddp_does_not_have_are_counted() -> None:
    assert 10 < house.own_options()["ByteSchedulerStrategy"] < 30
