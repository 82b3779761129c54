from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_bytescheduler.advice.advise import call_target, load_target
from lightning_bytescheduler.exceptions import OptionError


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is the current one, but not on the path."""
    (tmp_path / "advised_project.py").write_text("class Outer:\n    number = 3\n\n\ndef make():\n    return 4\n")
    (tmp_path / "advised_broken.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "advised_project", raising=False)
    return tmp_path


def test_names_in_the_current_directory(project: Path) -> None:
    assert load_target("target", "advised_project:make")() == 4
    assert load_target("target", "advised_project:Outer.number") == 3
    assert sys.path.count(str(project)) == 1


@pytest.mark.parametrize(
    "text", ["", "advised_project", "advised_project:", ":make", "a b:c", "advised_project:make()"]
)
def test_another_form(project: Path, text: str) -> None:
    with pytest.raises(OptionError, match=r"package\.module:name"):
        load_target("--data", text)


def test_no_such_name(project: Path) -> None:
    with pytest.raises(OptionError, match="a name that advised_project has"):
        load_target("target", "advised_project:made")


@pytest.mark.parametrize("text", ["advised_absent:make", "advised_broken:make"])
def test_no_such_module(project: Path, text: str) -> None:
    with pytest.raises(ImportError, match=r"advised_absent|a_package_that_nobody_has"):
        load_target("target", text)


class Made:
    pass


def needs(argument: int) -> int:
    return argument


@pytest.mark.parametrize(("target", "kind"), [(Made, Made), (lambda: 7, int), (lambda a=1: a, int)])
def test_functions_and_classes_are_called(target: Any, kind: type) -> None:
    assert isinstance(call_target("target", "m:n", target, instances=()), kind)


def test_what_is_there_already_is_not_called() -> None:
    found = Made()
    assert call_target("target", "m:n", found, instances=(Made,)) is found


@pytest.mark.parametrize(
    ("target", "allowed"), [(needs, "needs no arguments"), (3, "the name of a function or a class")]
)
def test_what_cannot_be_called(target: Any, allowed: str) -> None:
    with pytest.raises(OptionError, match=allowed):
        call_target("target", "m:n", target, instances=(Made,))


def test_an_error_of_the_function_stays_what_it_is() -> None:
    def fails() -> None:
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        call_target("target", "m:n", fails, instances=())
