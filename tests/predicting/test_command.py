from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightning_bytescheduler.__main__ import main
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError
from lightning_bytescheduler.predicting.command import call_target, load_target, profile_of

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


def with_module():
    return Bare(), Data()


def bare():
    return Bare()


def three():
    return 1, 2, 3


def fails():
    raise ValueError("of the user")


def quits():
    raise SystemExit(3)


made = Own()
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
    "argv",
    [
        ["advised:with_module"],
        ["advised:made"],
        ["advised.py:Own"],
    ],
)
def test_what_can_be_named(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", *argv, *LINK]) == 0
    output = capsys.readouterr().out
    assert "4 workers, 500 Mbit/s each way, 0.2 ms a hop" in " ".join(output.split())
    for start in ("Recommended:", "A step takes", "What limits:", "* Another training", "Not modelled:"):
        assert any(line.startswith(start) for line in output.splitlines())


def test_the_table_is_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "advised:both", *LINK]) == 0
    answer, table_text, *_ = capsys.readouterr().out.split("\n\n")
    assert answer.startswith("Recommended: ")
    title, *table = table_text.splitlines()
    assert title == "Bare"
    assert len({len(line) for line in table if line != table[1]}) == 1  # which has no DDP to compare with
    assert table[0].split() == ["a", "step", "speed", "of", "4", "over", "ddp"]
    assert table[1].split()[-1] == "1.00x"
    assert len(table) == 10


def test_a_picture(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    files = ["--png", "a.png", "--gradient-clip-val", "0.5", "--precision", "bf16-mixed"]
    assert main(["predict", "advised:both", *LINK, *files]) == 0
    assert (project / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "because of gradient norm clipping" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "--profile is missing, or the MODULE:NAME of a module"),
        (
            ["advised:both", *LINK, "--compute", "1ms"],
            "--compute='1ms' is not allowed: --compute must be left out where a",
        ),
        (["--profile", "uniform", *LINK, "--precision", "16-mixed"], "--precision must be left out where no module is"),
        (["advised", *LINK], "target='advised' is not allowed"),
        (["advised:absent", *LINK], "a name that advised has"),
        (["not_there:make", *LINK], "not_there"),
        (["advised:nothing", *LINK], "the name of a function or a class that needs no arguments"),
        (["advised:Sized", *LINK], "the name of a function or a class that needs no arguments"),
        (["advised:three", *LINK], "or a pair of one and its data"),
        (["advised:Data", *LINK], "must be a LightningModule"),
        (["advised:bare", *LINK], "the module has no train_dataloader"),
        (["advised:both", "--data", "advised:Data", *LINK], "there is no option --data"),
        (["advised:both", "--workers", "1", "--bandwidth", "1gbit"], "--workers=1"),
        (["advised:both", "--bandwidth", "1gbit"], "--workers is missing, such as"),
        (["advised:both", "--workers", "2", "--latency", "1ms"], "--bandwidth is missing, such as"),
        (["advised:both", "--workers", "2", "--bandwidth", "fast"], "--bandwidth='fast' is not allowed"),
        (["advised:both", "--workers", "2", "--bandwidth", "0mbit"], "--bandwidth='0mbit'"),
        (["advised:both"], "--bandwidth is missing, such as"),
        (["advice.py:both", *LINK], "target='advice.py:both' is not allowed: target must be in a file that is there"),
        (["advised:both", *LINK, "--precision", "fp17"], "'fp17'"),
        (["advised:quits", *LINK], "ended the process (exit code 3)"),
        (["advised:both", *LINK, "--png", "/dev/null/a.png"], "'/dev/null' is none"),
        (["advised:both", *LINK, "--png", "a.xyz"], "a.xyz"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line


def test_an_error_of_the_user_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"^The training to be measured failed: ValueError: ") as caught:
        main(["predict", "advised:fails", *LINK])
    assert isinstance(caught.value.__cause__, ValueError)


# A network in numbers.

FAST = ["--workers", "4", "--bandwidth", "33gbit"]


def rows(output: str) -> dict[str, list[str]]:
    found = {}
    for line in output.splitlines():
        label, _, value = line.strip().partition("  ")
        found[label.strip()] = value.split()
    return found


@pytest.mark.parametrize("name", ["VGG16", "vgg-16", "ResNet-50"])
def test_networks_are_known_by_their_usual_names(name: str) -> None:
    assert profile_of(name).name == name.lower().replace("-", "")


def test_it_prints_a_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--profile", "vgg16", *FAST]) == 0
    output = capsys.readouterr().out
    found = rows(output)
    assert output.startswith('Recommended: trainer = L.Trainer(strategy="bytescheduler")  # 4 workers 3.9')
    assert "\nvgg16\n" in output
    words = " ".join(output.split())
    assert "Exchanging its 553.4 MB of gradients takes" in words
    assert "1.01 times as long (4 workers, 33 Gbit/s each way)" in words
    assert found["one worker alone"][:2] == ["200.0", "ms"]
    assert found["ddp, best buckets"][3] == "1.00x"
    assert float(found["bytescheduler"][3][:-1]) > 1.25


def test_all_that_a_link_can_be(capsys: pytest.CaptureFixture[str]) -> None:
    link = ["--workers", "8", "--bandwidth", "1gbit", "--latency", "50us", "--servers", "8"]
    assert main(["predict", "--profile", "uniform", *link, "--compute", "1s", "--gradient-clip-val", "1"]) == 0
    output = capsys.readouterr().out
    assert rows(output)["bytescheduler, servers"][1] == "ms"
    assert "Spare servers: with 8, bytescheduler is " in output
    assert rows(output)["one worker alone"][:2] == ["1,000.0", "ms"]
    assert "1.40 times as long" in " ".join(output.split())  # 100 MB over 1 Gbit/s, 1.75 times each way
    assert "because of gradient norm clipping" in output


def test_the_documentation_says_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "is-it-for-me.md").read_text(encoding="utf-8")
    section = text.partition("## Two PCs and 1 GbE")[2]
    command, table = re.findall(r"^```\w+\n(.*?)^```", section, re.DOTALL | re.MULTILINE)[:2]
    argv = command.split()[2:]
    assert main(argv) == 0
    printed = rows(capsys.readouterr().out)
    claimed = {label: row for label, row in rows(table).items() if row and row[-1].endswith("x")}
    assert len(claimed) > 5
    assert claimed.items() <= printed.items()


def test_it_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("lightning_bytescheduler.predicting.prediction._POINTS", 1)  # to be quick
    assert main(["predict", "--profile", "uniform", *FAST, "--png", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_help_names_the_networks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["predict", "--help"])
    assert caught.value.code == 0
    assert "vgg16, resnet50, transformer, uniform" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "--profile"),
        (["--profile", "vgg16", "--workers", "4"], "--bandwidth"),
        (["--profile", "missing.json", *FAST], "missing.json"),
        (["--profile", "gpt2", *FAST], "Did you mean 'transformer'?"),
        (["--profile", "resnet5", *FAST], "vgg16, resnet50, transformer, uniform"),
        (["--profile", "7bi", *FAST], "or a size such as 350M or 100MB"),
        (["--profile", "resnet5", *FAST], "Did you mean 'resnet50'?"),
        (["--profile", "vgg16", "--workers", "4", "--bandwith", "1gbit"], "Did you mean '--bandwidth'?"),
        (["--model", "vgg16", *FAST], "there is no option --model. Try"),
        (["--profile", "vgg16", *FAST, "--latncy", "1ms"], "Did you mean '--latency'?"),
        (["--profile", "vgg16", "--workers", "four", "--bandwidth", "1gbit"], "'four' is not a whole number"),
        (["--profile", "vgg16", "--workers", "4", "--bandwidth", "1GB"], "in bits, or with a capital B in bytes"),
        (["--profile", "vgg16", "--workers", "0", "--bandwidth", "1gbit"], "workers=0"),
        (["--profile", "vgg16", "--workers", "4", "--bandwidth", "0mbit"], "--bandwidth='0mbit' is not allowed"),
        (
            ["--profile", "vgg16", "--workers", "4", "--bandwidth", "500"],
            "--bandwidth='500' is not allowed: --bandwidth must be a rate above 0 such as 10Gbit/s",
        ),
        (
            ["--profile", "vgg16", *FAST, "--latency", "20"],
            "--latency='20' is not allowed: --latency must be a time with its unit, such as 20ms",
        ),
        (["--profile", "vgg16", *FAST, "--latency", "20mbit"], "--latency='20mbit'"),
        (["--profile", "vgg16", *FAST, "--compute", "0s"], "--compute=0.0 is not allowed"),
        (["--profile", "vgg16", *FAST, "--policy", "fifo"], "there is no option --policy"),
        (["--profile", "uniform", *FAST, "--png", "{file}.xyz"], "{file}.xyz"),
    ],
)
def test_a_network_that_makes_no_sense_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], reason: str
) -> None:
    file = tmp_path / "p"
    assert main(["predict", *(argument.format(file=file) for argument in argv)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason.format(file=file) in line


@pytest.mark.parametrize("rate", ["10GbE", "1.25GB/s"])
def test_rates_are_written_in_many_ways(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--profile", "25M", "--workers", "4", "--bandwidth", rate]) == 0
    assert "4 workers, 10 Gbit/s each way" in " ".join(capsys.readouterr().out.split())


def test_the_answer_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(rate: str) -> str:
        assert main(["predict", "--profile", "100MB", "--workers", "4", "--bandwidth", rate]) == 0
        return capsys.readouterr().out.splitlines()[0]

    assert answer("10Mbit").startswith("Recommended: train on one machine. Over this network 4 workers are slower")
    assert answer("6Gbit").startswith('Recommended: trainer = L.Trainer(strategy="bytescheduler")  # 4 workers 3.')
    assert answer("1000Gbit").startswith('Recommended: trainer = L.Trainer(strategy="ddp")  # 4 workers 4.00x as fast')


# What a target names.


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is the current one, but not on the path."""
    (tmp_path / "advised_project.py").write_text("class Outer:\n    number = 3\n\n\ndef make():\n    return 4\n")
    (tmp_path / "advised_broken.py").write_text("import a_package_that_does_not_exist\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "advised_project", raising=False)
    return tmp_path


def test_names_in_the_current_directory(importable: Path) -> None:
    assert load_target("advised_project:make")() == 4
    assert load_target("advised_project:Outer.number") == 3
    assert sys.path.count(str(importable)) == 1


def test_names_in_a_file(importable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (importable / "elsewhere").mkdir()
    monkeypatch.chdir(importable / "elsewhere")
    monkeypatch.setitem(sys.modules, "advised_project", ModuleType("advised_project"))  # something else has the name
    assert load_target("../advised_project.py:make")() == 4


@pytest.mark.parametrize(
    "text", ["", "advised_project", "advised_project:", ":make", "a b:c", "advised_project:make()"]
)
def test_another_form(importable: Path, text: str) -> None:
    with pytest.raises(OptionError, match=r"package\.module:name"):
        load_target(text)


def test_misspelt_modules_and_names(importable: Path) -> None:
    with pytest.raises(ImportError, match=r"advised_projct cannot be imported: .* Did you mean 'advised_project'\?"):
        load_target("advised_projct:make")
    with pytest.raises(OptionError, match=r"Did you mean 'make'\?"):
        load_target("advised_project:mak")
    with pytest.raises(ImportError, match=r"^advised_broken cannot be imported: No module named"):
        load_target("advised_broken:make")


def test_a_script_that_ends_the_process(importable: Path) -> None:
    (importable / "advised_script.py").write_text("raise SystemExit(2)\n")
    with pytest.raises(UnsupportedError, match=r"ended the process \(exit code 2\).*__main__"):
        load_target("advised_script:make")


def test_no_such_name(importable: Path) -> None:
    with pytest.raises(OptionError, match="a name that advised_project has"):
        load_target("advised_project:made")


@pytest.mark.parametrize("text", ["advised_absent:make", "advised_broken:make"])
def test_no_such_module(importable: Path, text: str) -> None:
    with pytest.raises(ImportError, match=r"advised_absent|a_package_that_does_not_exist"):
        load_target(text)


class Made:
    pass


def needs(argument: int) -> int:
    return argument


@pytest.mark.parametrize(("target", "kind"), [(Made, Made), (lambda: 7, int), (lambda a=1: a, int)])
def test_functions_and_classes_are_called(target: Any, kind: type) -> None:
    assert isinstance(call_target("m:n", target), kind)


@pytest.mark.parametrize(
    ("target", "allowed"),
    [(needs, "needs no arguments"), (3, "the name of a function or a class that needs no arguments")],
)
def test_what_cannot_be_called(target: Any, allowed: str) -> None:
    with pytest.raises(OptionError, match=allowed):
        call_target("m:n", target)


def test_an_error_of_the_function_stays_what_it_is() -> None:
    def fails() -> None:
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        call_target("m:n", fails)
