"""Each check lets through what is allowed, and names option, value and what would have been allowed."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_bytescheduler import checks
from lightning_bytescheduler.exceptions import OptionError

NAN, INF = float("nan"), float("inf")
NO_NUMBERS = [True, False, None, "1", [1], NAN, INF, -INF]


@pytest.mark.parametrize(
    ("check", "allowed", "refused", "words"),
    [
        (checks.require_bool, [True, False], [0, 1, None, "True"], "True or False"),
        (partial(checks.require_whole, least=2), [2, 10**9], [1, 2.0, *NO_NUMBERS], "a whole number, 2 or more"),
        (checks.require_size, [1, 10**9], [0, -1, 1.0, *NO_NUMBERS], "a positive whole number of parameters"),
        (checks.require_positive, [1, 1e-9], [0, 0.0, -1, *NO_NUMBERS], "a finite number, more than 0"),
        (
            partial(checks.require_positive, of="bytes per second"),
            [1],
            [0],
            "a finite number of bytes per second, more than 0",
        ),
        (checks.require_seconds, [0, 0.0, 0.5], [-0.5, -1e-9, *NO_NUMBERS], "a finite number of seconds, 0 or more"),
        (checks.require_share, [0, 1, 0.5], [-0.1, 1.1, *NO_NUMBERS], "a number from 0 to 1"),
        (partial(checks.require_one_of, allowed=(None, "a")), [None, "a"], ["", "z", 0], "one of None, 'a'"),
        (checks.require_text, ["", "a"], [None, b"a", 1], "a text"),
        (checks.require_new_file, ["a", "a/b.json"], ["", None, b"a", 1], "a file path"),
    ],
)
def test_what_is_let_through_and_what_is_refused(
    check: Callable[..., Any], allowed: list[object], refused: list[object], words: str
) -> None:
    for value in allowed:
        assert check("option", value) is value
    for value in refused:
        with pytest.raises(OptionError) as caught:
            check("option", value)
        assert str(caught.value) == f"option={value!r} is not allowed: option must be {words}."


def test_paths_become_text() -> None:
    assert checks.require_new_file("timeline", Path("a/b")) == "a/b"


def test_truth_values_are_no_numbers() -> None:
    assert checks.is_whole(0)
    assert not checks.is_whole(0, 1)
    assert not any(map(checks.is_whole, [*NO_NUMBERS, 1.0]))
    assert not any(map(checks.is_finite, [*NO_NUMBERS, 10**400]))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("partition", "partition_size"),
        ("credits", "credit"),
        ("Credit", "credit"),
        ("partition-size", "partition_size"),
        ("unused", "find_unused_parameters"),
        ("find_unused_parameter", "find_unused_parameters"),
    ],
)
def test_what_was_meant(given: str, meant: str) -> None:
    names = ["credit", "partition_size", "credit_size", "find_unused_parameters", "timeline"]
    assert checks.did_you_mean(given, names) == f"Did you mean {meant!r}?"


def test_nothing_is_guessed_from_nothing() -> None:
    for value in ("", "x", "zzzz", 3, None):
        assert checks.did_you_mean(value, ["credit", "timeline"]) == ""


def test_a_choice_that_is_nearly_right() -> None:
    with pytest.raises(OptionError, match=r"one of 'auto', 'ddp', None\. Did you mean 'auto'\?$"):
        checks.require_one_of("mode", "Auto", ("auto", "ddp", None))


@checks.options_by_name
class Taker:
    def __init__(self, place: int = 0, *, size: int = 1, name: str = "") -> None:
        self.options = (place, size, name)


@checks.options_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    size: int
    name: str = ""


class Derived(Taker):
    def __init__(self, other: int) -> None:
        super().__init__(other, size=other)


def test_options_by_name_are_taken_as_before() -> None:
    assert Taker(3, size=2, name="a").options == (3, 2, "a")
    assert Derived(other=4).options == (4, 4, "")
    assert pickle.loads(pickle.dumps(Kept(size=2))) == Kept(size=2, name="")
    with pytest.raises(TypeError, match="'size'"):
        Kept()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: Taker(sise=2),
            r"^Taker has no option 'sise'\. Did you mean 'size'\? Its options are place, size, name\.$",
        ),
        (lambda: Kept(sizes=2), "^Kept has no option 'sizes'. Did you mean 'size'?"),
        (lambda: Taker(1, 2), r"^Taker takes its options by name, as in Taker\(size=2\)\.$"),
        (lambda: Taker(1, 2, name="a"), r"as in Taker\(size=2\)"),
        (lambda: Kept(2, "a"), r"^Kept takes its options by name, as in Kept\(size=2, name='a'\)\.$"),
    ],
)
def test_options_by_name_that_there_are_not(make: Callable[[], object], says: str) -> None:
    with pytest.raises(OptionError, match=says) as caught:
        make()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_options_that_belong_elsewhere() -> None:
    with pytest.raises(OptionError, match=r"^It has no option 'devices'\. Trainer has it\. Its options are size\.$"):
        checks.require_known({"devices": 2}, ["size"], of="It", elsewhere={"devices": "Trainer has it."})
    checks.require_known({"size": 2}, ["size"], of="It")


def test_files_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    there = tmp_path / "there"
    there.touch()
    for path in (there, tmp_path / "missing" / "folder" / "file.json"):
        assert checks.require_new_file("timeline", path) == os.fspath(path)
    assert checks.require_new_file("timeline", "trace.json") == "trace.json"
    assert checks.require_new_file("timeline", "~/trace.json") == os.fspath(tmp_path / "trace.json")
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("folder", "a file path, and that is a folder"),
        ("new/", "a file path, and that is a folder"),
        ("file/trace.json", "a file in a folder, and '.*file' is none"),
        ("file/below/trace.json", "a file in a folder, and '.*file' is none"),
        ("locked/trace.json", "a file that may be written, and '.*locked' may not be written to"),
        ("read_only", "a file that may be written, and '.*read_only' may not be written to"),
    ],
)
def test_files_that_cannot_be_written(path: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "locked").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "read_only").touch()
    # Root may write anything, so that file modes show nothing where tests run as root.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name not in ("locked", "read_only"))
    with pytest.raises(OptionError, match=rf"^timeline='{path}' is not allowed: timeline must be {words}\.$"):
        checks.require_new_file("timeline", path)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("BYTESCHEDULER_CREDITS", "Did you mean 'BYTESCHEDULER_CREDIT'?"),
        ("BYTESCHEDULER_PARTITION_SIZE", "Did you mean 'BYTESCHEDULER_PARTITION'?"),
        ("BYTE_SCHEDULER_TIMELINE", "Did you mean 'BYTESCHEDULER_TIMELINE'?"),
        ("BYTESHEDULER_CREDIT", "Did you mean 'BYTESCHEDULER_CREDIT'?"),
        ("bytescheduler_debug", "Did you mean 'BYTESCHEDULER_DEBUG'?"),
    ],
)
def test_variables_that_nothing_reads(name: str, hint: str) -> None:
    assert checks.unknown_variables({name: "1"}) == [f"The environment variable {name} has no meaning here. {hint}"]


def test_variables_that_are_read_or_are_not_ours() -> None:
    names = ["BYTESCHEDULER_CREDIT", "BYTESCHEDULER_ROOT_IP", "BYTEPS_PARTITION_BYTES", "PATH", "SCHEDULER"]
    assert checks.unknown_variables(dict.fromkeys(names, "")) == []


def test_each_variable_that_the_package_reads_is_known() -> None:
    package = Path(checks.__file__).parent
    words = {word for path in package.rglob("*.py") for word in path.read_text(encoding="utf-8").split('"')}
    read = {word for word in words if word.startswith("BYTESCHEDULER_") and word.replace("_", "").isalpha()}
    assert len(read) > 8
    assert checks.unknown_variables(dict.fromkeys(read - {"BYTESCHEDULER_"}, "")) == []
