"""The contracts on imports in pyproject.toml hold, and are broken by what they are there for."""

from __future__ import annotations

import logging.config
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[2]
CONTRACT = """
[tool.importlinter]
root_package = "{package}"
contract_types = ["acyclic_modules: tests.imports.acyclic_modules.AcyclicModules"]

[[tool.importlinter.contracts]]
name = "no circle"
type = "acyclic_modules"
"""
UNDER_TYPE_CHECKING = """
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from {package}.room.one import One
"""
FROM_ROOM = "from {package}.room import one\n"
Lint = Callable[[str, dict[str, str]], int]
ALONE = {"room/__init__.py": "", "room/one.py": "from {package}.room import two\n", "room/two.py": ""}


@pytest.fixture(autouse=True)
def loggers_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The linter is a program of its own otherwise, and switches off all loggers that there are."""
    monkeypatch.setattr(logging.config, "dictConfig", lambda _: None)


@pytest.fixture
def lint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lint:
    """Writes a package of the test's own name, and lints it."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(ROOT)

    def lint(package: str, files: dict[str, str]) -> int:
        for name, text in {"__init__.py": "", **files}.items():
            path = tmp_path / package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.format(package=package))
        config = tmp_path / "pyproject.toml"
        config.write_text(CONTRACT.format(package=package))
        return lint_imports(config_filename=str(config), no_cache=True, no_logo=True)

    return lint


def test_the_package_keeps_its_contracts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True, no_logo=True) == 0


def test_imports_that_go_one_way_are_kept(lint: Lint) -> None:
    assert lint("one_way", ALONE) == 0


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("under_type_checking", {"room/two.py": UNDER_TYPE_CHECKING}),
        ("in_a_function", {"room/two.py": f"def late():\n    {FROM_ROOM}"}),
        (
            "through_the_room",
            {"room/__init__.py": "import {package}.room.two\n", "room/two.py": "import {package}.room"},
        ),
        ("through_the_package", {"__init__.py": "import {package}.room.one\n", "room/two.py": "import {package}\n"}),
        (
            "through_another_room",
            {"room/two.py": "import {package}.other\n", "other.py": "import {package}.room.one\n"},
        ),
    ],
)
def test_circles_are_found(lint: Lint, name: str, changed: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert lint(f"circle_{name}", {**ALONE, **changed}) == 1
    assert f"circle_{name}.room.two" in capsys.readouterr().out
