"""Which of Lightning's two packages is used: decided once, whatever the order of imports, and said to the other."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from lightning_bytescheduler import OptionError, UnsupportedError, registration

# Lightning as far as its registry, which is imported in a moment.
PACKAGE = """
import sys, types
strategies = types.ModuleType(__name__ + ".strategies")
class Registry(dict):
    def register(self, name, strategy, description, **options):
        self[name] = {"strategy": strategy, "init_params": options}
strategies.StrategyRegistry = Registry()
sys.modules[strategies.__name__] = strategies
"""


@pytest.fixture(autouse=True)
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "_choice", None)
    # As if absent, and restored in the end whatever a test leaves there.
    monkeypatch.setenv(registration.VARIABLE, "")


def imported(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    for module in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    for module in modules:
        monkeypatch.setitem(sys.modules, module, ModuleType(module))


def chosen_by(file: str, *, through: str = "") -> str:
    """What a file chooses that imports one of our names before all else."""
    answers: list[str] = []
    names = {"__name__": "project", "choose": lambda: answers.append(registration.choose_package())}
    if through:
        names["choose"] = partial(exec, compile("choose()", "helper.py", "exec"), dict(names))
    exec(compile(f"choose()\nif not choose:\n    {file}", "train.py", "exec"), names)
    return answers[0]


@pytest.mark.parametrize(
    ("line", "package"),
    [
        ("import pytorch_lightning as pl", "pytorch_lightning"),
        ("from pytorch_lightning.callbacks import Timer", "pytorch_lightning"),
        ("import lightning as L", "lightning"),
        ("from lightning.pytorch import Trainer", "lightning"),
        ("import torch", "lightning"),
    ],
)
@pytest.mark.parametrize("through", ["", "a helper module"])
def test_the_importing_file_says_which(line: str, package: str, through: str, monkeypatch: pytest.MonkeyPatch) -> None:
    imported(monkeypatch)
    assert chosen_by(line, through=through) == package


def test_a_library_that_imported_the_other_one_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    imported(monkeypatch, "lightning.pytorch")
    assert chosen_by("import pytorch_lightning") == "pytorch_lightning"


@pytest.mark.parametrize(
    ("modules", "package"),
    [
        (["lightning.pytorch"], "lightning"),
        (["pytorch_lightning"], "pytorch_lightning"),
        (["lightning.pytorch", "pytorch_lightning"], "lightning"),
    ],
)
def test_what_is_imported_decides_where_no_file_does(
    modules: list[str], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported(monkeypatch, *modules)
    monkeypatch.setattr(registration, "_frames", lambda: iter(()))
    assert registration.choose_package() == package


def test_the_variable_beats_all(monkeypatch: pytest.MonkeyPatch) -> None:
    imported(monkeypatch, "lightning.pytorch")
    monkeypatch.setenv(registration.VARIABLE, "pytorch_lightning")
    assert chosen_by("import lightning") == "pytorch_lightning"


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registration.VARIABLE, "pl")
    with pytest.raises(OptionError, match=r"BYTESCHEDULER_LIGHTNING='pl'.*'pytorch_lightning'"):
        registration.choose_package()


def test_a_trainer_decides_and_processes_started_later_know(monkeypatch: pytest.MonkeyPatch) -> None:
    registration.use_package("pytorch_lightning", "strategy='diloco' was given")
    assert registration.choose_package() == "pytorch_lightning"
    assert os.environ[registration.VARIABLE] == "pytorch_lightning"


def test_the_other_trainer_gets_the_reason_and_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    imported(monkeypatch)
    chosen_by("import lightning")
    with pytest.raises(UnsupportedError) as told:
        registration.use_package("pytorch_lightning", "strategy='bytescheduler' was given to its Trainer")
    said = str(told.value)
    assert said.startswith(
        "strategy='bytescheduler' was given to its Trainer, but lightning-bytescheduler works with 'l"
    )
    assert "train.py imports that" in said
    assert "BYTESCHEDULER_LIGHTNING=pytorch_lightning" in said


@pytest.fixture
def two_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both packages as stand-ins that are not imported yet."""
    for package in ("lightning/pytorch", "pytorch_lightning"):
        folder = tmp_path / package
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(PACKAGE)
    (tmp_path / "lightning" / "__init__.py").touch()  # or the real one would come before it
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.usefixtures("two_packages")
@pytest.mark.parametrize("module", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("first", [True, False])
def test_names_are_registered_whichever_is_imported_first(module: str, first: bool) -> None:
    lines = [f"import {module}", "import lightning_bytescheduler"]
    done = run("\n".join(lines if first else lines[::-1]) + f"\nprint(*{module}.strategies.StrategyRegistry)")
    ends = ("", "_find_unused_parameters_true", "_find_unused_parameters_false")
    starts = ("", "_spawn", "_fork", "_notebook")
    ours = {f"bytescheduler{start}{end}" for start in starts for end in ends} | {f"diloco{start}" for start in starts}
    assert {name for name in done.stdout.split() if "byte" in name or "loco" in name} == ours, done.stderr


@pytest.mark.usefixtures("two_packages")
def test_an_import_that_failed_may_be_made_again() -> None:
    done = run(
        "import sys, lightning_bytescheduler\n"
        "sys.modules['types'] = None\n"
        "try:\n    import pytorch_lightning\nexcept ImportError:\n    del sys.modules['types']\n"
        "import pytorch_lightning\nprint('diloco' in pytorch_lightning.strategies.StrategyRegistry)"
    )
    assert done.stdout.strip() == "True", done.stderr


def test_neither_package_nor_torch_is_imported_for_the_names() -> None:
    done = run("import sys, lightning_bytescheduler; print('torch' in sys.modules, 'lightning' in sys.modules)")
    assert done.stdout.split() == ["False", "False"], done.stderr


TRAINERS = """
import lightning_bytescheduler
import pytorch_lightning as pl
trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="bytescheduler")
assert isinstance(trainer.strategy, lightning_bytescheduler.ByteSchedulerStrategy)
assert isinstance(trainer.strategy, pl.strategies.DDPStrategy)
import sys
assert "lightning" not in sys.modules
callback = lightning_bytescheduler.CreditTuner()
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel
for strategy in ["bytescheduler", lightning_bytescheduler.ByteSchedulerStrategy()]:
    try:
        L.Trainer(accelerator="cpu", devices=2, strategy=strategy)
    except Exception as error:
        print(error)
try:
    L.Trainer(accelerator="cpu", callbacks=[callback], logger=False).fit(BoringModel())
except Exception as error:
    print(error)
try:
    lightning_bytescheduler.check(L.Trainer(accelerator="cpu", devices=1), None)
except Exception as error:
    print(error)
"""


@pytest.mark.slow
def test_both_packages_in_one_process() -> None:
    done = run(TRAINERS)
    by_name, by_object, by_callback, by_check = done.stdout.splitlines()
    assert "strategy='bytescheduler' was given to lightning's Trainer" in by_name, done.stderr
    assert "ByteSchedulerStrategy of 'pytorch_lightning'" in by_object
    assert "CreditTuner" in by_callback
    for said in (by_callback, by_check):
        assert "was given a Trainer of lightning, but lightning-bytescheduler works with 'pytorch_lightning'" in said
    assert "check()" in by_check


FROM_CONFIG = """
import sys
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
assert "lightning_bytescheduler" not in sys.modules
options = {"accelerator": "cpu", "devices": 2, "logger": False, "strategy": {"class_path": CLASS}}
print(type(LightningCLI(BoringModel, run=False, args={"trainer": options}).trainer.strategy).__name__)
"""


@pytest.mark.slow
def test_a_config_names_the_class_and_needs_no_import() -> None:
    done = run("CLASS = 'lightning_bytescheduler.ByteSchedulerStrategy'" + FROM_CONFIG)
    assert done.stdout.split() == ["ByteSchedulerStrategy"], done.stderr
