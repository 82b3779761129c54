from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_bytescheduler import OptionError, example_files
from lightning_bytescheduler.cli import main

ROOT = Path(__file__).parents[1]


def test_examples_are_copied_and_run_from_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples", "--to", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for name in ("advised", "coordinator", "diloco", "parameter_servers", "slices", "tuning", "unequal"):
        assert f"python -m examples.{name}" in said
        assert (tmp_path / "examples" / f"{name}.py").is_file()
    done = subprocess.run(
        [sys.executable, "-m", "examples.diloco", "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_what_was_changed_is_kept_and_nothing_is_copied(tmp_path: Path) -> None:
    mine = tmp_path / "examples" / "tuning.py"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(OptionError, match=r"--to=.*tuning\.py, which has been changed there"):
        example_files.tables(argparse.Namespace(to=str(tmp_path)))
    assert [path.name for path in mine.parent.iterdir()] == ["tuning.py"]
    assert mine.read_text() == "mine"


def test_a_second_time_is_harmless(tmp_path: Path) -> None:
    for _ in range(2):
        example_files.tables(argparse.Namespace(to=str(tmp_path)))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"--to=.*nowhere.*a folder that is there"):
        example_files.tables(argparse.Namespace(to=str(tmp_path / "nowhere")))


def test_the_wheel_has_all_that_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = re.findall(r'^"examples/(.*?)" = "lightning_bytescheduler/examples/(.*?)"$', _PYPROJECT, flags=re.M)
    wheel = tmp_path / "lightning_bytescheduler"
    for source, target in listed:
        (wheel / "examples" / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "examples" / source, wheel / "examples" / target)
    from_checkout = {path.relative_to(ROOT / "examples") for path in example_files._files(ROOT / "examples")}
    monkeypatch.setattr(example_files, "__file__", str(wheel / "example_files.py"))
    from_wheel = {path.relative_to(wheel / "examples") for path in example_files._files(example_files._source())}
    assert from_wheel == from_checkout
    assert all((wheel / "examples" / path).is_file() for path in from_wheel)


_PYPROJECT = (ROOT / "pyproject.toml").read_text()
