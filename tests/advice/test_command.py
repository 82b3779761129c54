from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_bytescheduler.advice.arguments import load_target
from lightning_bytescheduler.advice.command import _launched, call_target
from lightning_bytescheduler.cli import main
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), (None, "nccl"), ("cuda:0", "nccl")])
def test_ranks_meet_over_what_the_device_speaks(
    device: str | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    met: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", met.append)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    with _launched(device):
        assert met == [backend]


PROJECT = """
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset
from tests.support.models import Tower


class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(12, 12), torch.randn(12, 3)), batch_size=6)


class Own(Tower):
    pass


class Bare(Tower):
    train_dataloader = __import__("lightning").pytorch.LightningModule.train_dataloader


class Sized(Bare):
    def __init__(self, size):
        super().__init__()


def both():
    return Bare(), Data().train_dataloader()


def bare():
    return Bare()


def three():
    return 1, 2, 3


def fails():
    raise ValueError("of the user")


def quits():
    raise SystemExit(3)


bare_module = Bare()
nothing = 3
"""
LINK = ["--workers", "4", "--bandwidth", "500mbit", "--latency", "0.2ms"]


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "advised.py").write_text(PROJECT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "advised", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "samples"),
    [
        (["advised:both"], 6),
        (["advised:Own"], 4),
        (["advised:bare", "--data", "advised:Data"], 6),
        (["advised:bare_module", "--data", "advised:Data"], 6),
        (["advised.py:Own"], 4),
    ],
)
def test_what_can_be_named(argv: list[str], samples: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", *argv, *LINK, "--device", "cpu", "--steps", "1"]) == 0
    output = capsys.readouterr().out
    assert f"a step of {samples} samples" in " ".join(output.split())
    assert "4 workers, 500 Mbit/s each way, 0.2 ms a hop" in " ".join(output.split())
    for start in ("Measured:", "ddp:", "bytescheduler:", "What limits:", "Compression:", "diloco:", "Recommended:"):
        assert any(line.startswith(start) for line in output.splitlines())


def test_a_table_without_rich(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("rich", "rich.console", "rich.table", "rich.text"):
        monkeypatch.setitem(sys.modules, module, None)
    assert main(["advise", "advised:both", *LINK, "--device", "cpu", "--steps", "1"]) == 0
    answer, table_text, *_ = capsys.readouterr().out.split("\n\n")
    assert answer.startswith("Recommended: ")
    title, *table = table_text.splitlines()
    assert title == "Bare"
    assert len({len(line) for line in table}) == 1
    assert table[0].split() == ["a", "step", "speed", "of", "4", "efficiency", "samples/s"]
    assert table[1].split()[-2] == "100%"
    assert len(table) == 11


def test_files(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    files = ["--json", "a.json", "--png", "a.png", "--gradient-clip-val", "0.5", "--precision", "bf16-mixed"]
    assert main(["advise", "advised:both", *LINK, *files, "--device", "cpu", "--steps", "1"]) == 0
    assert (project / "a.png").read_bytes().startswith(b"\x89PNG")
    figures = json.loads((project / "a.json").read_text())
    assert figures["workers"] == 4
    assert figures["norm_needed_by"] == ["gradient norm clipping"]
    assert main(["predict", "--profile", "a.json", *LINK]) == 0
    assert "Bare" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "--profile must be given, where no module is measured"),
        (
            ["advised:both", *LINK, "--compute", "1ms"],
            "--compute='1ms' is not allowed: --compute must be left out where",
        ),
        (["--profile", "uniform", *LINK, "--device", "cpu"], "--device must be left out where none is"),
        (["advised", *LINK], "target='advised' is not allowed"),
        (["advised:absent", *LINK], "a name that advised has"),
        (["not_there:make", *LINK], "not_there"),
        (["advised:nothing", *LINK], "the name of a function or a class"),
        (["advised:Sized", *LINK], "a function or class that needs no arguments"),
        (["advised:three", *LINK], "or a pair of one and its data"),
        (["advised:Data", *LINK], "must be a LightningModule"),
        (["advised:bare", *LINK], "the module has no train_dataloader"),
        (["advised:both", "--data", "advised:Data", *LINK], "left out, as advised:both brings data along"),
        (["advised:both", "--workers", "1", "--bandwidth", "1gbit"], "workers=1"),
        (["advised:both", "--bandwidth", "1gbit"], "--workers must be given with --bandwidth"),
        (["advised:both", "--workers", "2", "--latency", "1ms"], "--bandwidth must be given with --latency"),
        (["advised:both", "--workers", "2", "--messages", "2"], "--bandwidth must be given with --latency"),
        (["advised:both", "--workers", "2", "--bandwidth", "fast"], "--bandwidth='fast' is not allowed"),
        (["advised:both", "--workers", "2", "--bandwidth", "0mbit"], "--bandwidth='0mbit'"),
        (["advised:both"], "There is no link to measure"),
        (["advised:both", *LINK, "--steps", "0"], "steps=0"),
        (["advised:both", *LINK, "--precision", "fp17"], "'fp17'"),
        (["advised:quits", *LINK], "ended the process (exit code 3)"),
        (["advised:both", *LINK, "--json", "absent/a.json"], "'absent' does not exist"),
        (["advised:both", *LINK, "--device", "abacus"], "device='abacus'"),
        (["advised:both", *LINK, "--algorithm", "push_pull"], "architecture='ps'"),
        (["advised:both", *LINK, "--steps", "1", "--device", "cpu", "--png", "a.xyz"], "a.xyz"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line


def test_an_error_of_the_user_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="The training to be measured failed") as caught:
        main(["predict", "advised:fails", *LINK])
    assert isinstance(caught.value.__cause__, ValueError)


def test_ranks_after_the_first_say_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert main(["advise", "advised:both", *LINK, "--device", "cpu", "--steps", "1"]) == 0
    assert capsys.readouterr().out == ""


# What a target names.


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is the current one, but not on the path."""
    (tmp_path / "advised_project.py").write_text("class Outer:\n    number = 3\n\n\ndef make():\n    return 4\n")
    (tmp_path / "advised_broken.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "advised_project", raising=False)
    return tmp_path


def test_names_in_the_current_directory(importable: Path) -> None:
    assert load_target("target", "advised_project:make")() == 4
    assert load_target("target", "advised_project:Outer.number") == 3
    assert sys.path.count(str(importable)) == 1


def test_names_in_a_file(importable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (importable / "elsewhere").mkdir()
    monkeypatch.chdir(importable / "elsewhere")
    monkeypatch.setitem(sys.modules, "advised_project", ModuleType("advised_project"))  # something else has the name
    assert load_target("target", "../advised_project.py:make")() == 4


@pytest.mark.parametrize(
    "text", ["", "advised_project", "advised_project:", ":make", "a b:c", "advised_project:make()"]
)
def test_another_form(importable: Path, text: str) -> None:
    with pytest.raises(OptionError, match=r"package\.module:name"):
        load_target("--data", text)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("advised_project", "advised_project:make"),
        ("advised_project.py", "advised_project:make"),
        ("scripts/advised_project.py:Outer()", "scripts.advised_project:Outer"),
        ("1:2", "my_project.train:make"),
    ],
)
def test_another_form_comes_with_what_was_meant(importable: Path, text: str, meant: str) -> None:
    with pytest.raises(OptionError, match=rf"such as {meant}\.$"):
        load_target("target", text)


def test_misspelt_modules_and_names(importable: Path) -> None:
    with pytest.raises(ImportError, match=r"no module advised_projct, .* did you mean advised_project:make\?"):
        load_target("target", "advised_projct:make")
    with pytest.raises(OptionError, match=r"did you mean make\?"):
        load_target("target", "advised_project:mak")
    with pytest.raises(ImportError, match="target: advised_broken cannot be imported: No module named"):
        load_target("target", "advised_broken:make")


def test_a_script_that_ends_the_process(importable: Path) -> None:
    (importable / "advised_script.py").write_text("raise SystemExit(2)\n")
    with pytest.raises(UnsupportedError, match=r"ended the process \(exit code 2\).*__main__"):
        load_target("target", "advised_script:make")


def test_no_such_name(importable: Path) -> None:
    with pytest.raises(OptionError, match="a name that advised_project has"):
        load_target("target", "advised_project:made")


@pytest.mark.parametrize("text", ["advised_absent:make", "advised_broken:make"])
def test_no_such_module(importable: Path, text: str) -> None:
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
