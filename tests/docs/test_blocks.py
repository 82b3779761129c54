"""Each block of code in the README and in the documentation is run, or parsed as far as that is cheap.

Python: executed, page by page and in order, in a folder that has slices, with a model and data at hand. Only what
trains is replaced, by something with the same signature. Commands: parsed by what would run them. Configurations: made
into a Trainer. What a command prints is a block of ``text``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import metadata
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock, create_autospec

import lightning as L
import pytest
import torch.distributed.run
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from packaging.requirements import Requirement
from torch.utils.data import DataLoader

import lightning_bytescheduler
from lightning_bytescheduler.__main__ import main
from tests.docs.pages import DOCS, PAGES, REPOSITORY, Block, Page
from tests.support.certificates import make_certificate

# Lightning's own use of the parser, not ours.
pytestmark = pytest.mark.filterwarnings(r"ignore:[\s\S]*JSONARGPARSE_DEPRECATION_WARNINGS")

VARIABLES = {
    "DOCS_INTERSPHINX",
    "GLOO_SOCKET_IFNAME",
    "SSL_CERT_FILE",
    *re.findall(r"BYTESCHEDULER_\w+", (DOCS / "options.md").read_text(encoding="utf-8")),
}
TRUSTED = ("curl", "ip", "openssl", "srun")  # no programs of Python's; checked by nothing but the shell's grammar
ASSIGNMENT = re.compile(r"([A-Z_][A-Z0-9_]*)=")


def blocks(*languages: str) -> list[object]:
    return [
        pytest.param(block, id=f"{page.name}:{block.line}")
        for page in PAGES
        for block in page.blocks
        if block.language in languages
    ]


def test_each_block_is_of_a_kind_that_is_checked() -> None:
    known = {"python", "console", "bash", "yaml", "json", "text"}
    for page in PAGES:
        for block in page.blocks:
            assert block.language in known or block.language.startswith("{"), f"{page.name}:{block.line}"


# ---------------------------------------------------------------------- Python


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A working directory with slices of text, a token and a certificate."""
    monkeypatch.chdir(tmp_path)
    Path("token").write_text("secret")
    Path("token").chmod(0o600)
    make_certificate(tmp_path, "server")
    Path("lines.txt").write_text("".join(f"line {number}\n" for number in range(200)))
    assert main(["slices", "make", "lines.txt", "data/slices"]) == 0
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if any(b.language == "python" for b in page.blocks)], ids=str)
def test_python(page: Page, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(L.Trainer, "fit", create_autospec(L.Trainer.fit))
    monkeypatch.setattr(lightning_bytescheduler, "predict", create_autospec(lightning_bytescheduler.predict))
    for name, module in _third_parties().items():
        monkeypatch.setitem(sys.modules, name, module)
    names: dict[str, object] = {
        "L": L,
        "model": BoringModel(),
        "data": DataLoader(RandomDataset(32, 64)),
        "trainer": L.Trainer(devices=2, strategy="bytescheduler", logger=False),
        "token": "secret",
        "encode": str.encode,
    }
    for block in page.blocks:
        if block.language == "python":
            source = "\n" * block.line + block.text  # so that a traceback names the page's line
            exec(compile(source, page.path, "exec"), names)


def _third_parties() -> dict[str, ModuleType]:
    """In the place of packages that only `make real-models` and `make ray` install; what they do is tested there."""

    class FinetuningScheduler(L.Callback):
        def __init__(self, *, allow_untested: bool, custom_strategy_adapters: dict[str, str] | None = None) -> None:
            assert allow_untested

    package, adapters = ModuleType("finetuning_scheduler"), ModuleType("finetuning_scheduler.strategy_adapters")
    vars(package).update(FinetuningScheduler=FinetuningScheduler)
    vars(adapters).update(StrategyAdapter=object)
    modules = [package, adapters]
    for name, stand_ins in _OF_RAY.items():
        modules.append(ModuleType(name))
        vars(modules[-1]).update({one: MagicMock() for one in stand_ins})
    return {module.__name__: module for module in modules}


_OF_RAY = {
    "ray": ["train"],
    "ray.train": ["FailureConfig", "RunConfig", "ScalingConfig"],
    "ray.train.lightning": ["RayLightningEnvironment", "RayTrainReportCallback", "prepare_trainer"],
    "ray.train.torch": ["TorchTrainer"],
    "lightning_bytescheduler.ray": ["RayByteSchedulerStrategy"],
}


# -------------------------------------------------------------------- commands


@pytest.mark.parametrize("block", blocks("console", "bash"))
def test_commands(block: Block, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = list(_lines(block))
    assert lines
    done = subprocess.run(["bash", "-n"], input="\n".join(lines), capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    _parse_only(monkeypatch)
    for line in lines:
        argv = shlex.split(line, comments=True)
        if argv:
            _check(argv, capsys)


def _lines(block: Block) -> Iterator[str]:
    text = block.text.replace("\\\n", " ")
    for line in filter(str.strip, text.splitlines()):
        if block.language == "console":
            assert line.startswith("$ "), line
        yield line.removeprefix("$ ")


def _parse_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let our command parse its arguments, and do nothing."""
    parse = argparse.ArgumentParser.parse_args

    def parse_args(self: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        options = parse(self, arguments)
        options.run = lambda _: 0
        return options

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)


def _check(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if argv[0] == "export":
        argv = argv[1:]
        assert all(ASSIGNMENT.match(word) for word in argv), argv
    while argv and (assigned := ASSIGNMENT.match(argv[0])):
        assert assigned[1] in VARIABLES, argv[0]
        argv = argv[1:]
    if not argv or argv[0] in TRUSTED:
        return
    program, *arguments = argv
    assert program in PROGRAMS, f"no way to check {program!r}"
    PROGRAMS[program](arguments)


def _own_command(arguments: list[str]) -> None:
    assert main(arguments) == 0, arguments


def _torchrun(arguments: list[str]) -> None:
    options = torch.distributed.run.get_args_parser().parse_args(arguments)
    if options.module:
        _python(["-m", options.training_script, *options.training_script_args])


def _python(arguments: list[str]) -> None:
    if arguments[0] == "-c":
        compile(arguments[1], "<command>", "exec")
    elif arguments[0] == "-m":
        _module(arguments[1], arguments[2:])
    else:
        assert arguments[0].endswith(".py")


def _module(name: str, arguments: list[str]) -> None:
    """Check that a module exists, and that its source has the options."""
    if name == "lightning_bytescheduler":
        _own_command(arguments)
        return
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    origin = Path(spec.origin)
    files = origin.parent.glob("*.py") if origin.name == "__init__.py" else [origin]
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    for argument in arguments:
        if argument.startswith("--"):
            assert f'"{argument}"' in source, argument


def _make(arguments: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        ["make", "--dry-run", *arguments],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def _pip(arguments: list[str]) -> None:
    assert arguments[0] == "install"
    extras = set(metadata("lightning-bytescheduler").get_all("Provides-Extra") or ())
    for argument in arguments[1:]:
        requirement = Requirement(re.sub(r"^\.(?=\[|$)", "lightning-bytescheduler", argument))
        if requirement.name == "lightning-bytescheduler":
            assert requirement.extras <= extras


PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    "lightning-bytescheduler": _own_command,
    "make": _make,
    "pip": _pip,
    "python": _python,
    "torchrun": _torchrun,
}


@pytest.mark.parametrize(
    "line",
    [
        "lightning-bytescheduler predict --bandwith 1gbit",
        "lightning-bytescheduler no-such-command",
        "make no-such-target",
        "pip install '.[none]'",
        "python -m examples.none",
        "python -m examples.tuning --none",
        "torchrun --nodes 2 train.py",
        "export BYTESCHEDULER_CREDITS=1",
        "rm -rf data",
    ],
)
def test_a_wrong_command_is_found(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _parse_only(monkeypatch)
    with pytest.raises((AssertionError, SystemExit)):
        _check(shlex.split(line), capsys)


# -------------------------------------------------------------- configurations


@pytest.mark.parametrize("block", blocks("yaml"))
def test_configurations(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(block.text)
    monkeypatch.setattr("sys.argv", ["train.py"])
    cli = LightningCLI(BoringModel, run=False, seed_everything_default=1, args=["--config", str(config)])
    assert type(cli.trainer.strategy).__module__.startswith("lightning_bytescheduler")


@pytest.mark.parametrize("block", blocks("json"))
def test_json(block: Block) -> None:
    json.loads(block.text)
