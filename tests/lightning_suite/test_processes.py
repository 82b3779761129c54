"""The script's machinery, on a checkout with a few tests of our own."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from tests.lightning_suite.checkout import Checkout, CheckoutError
from tests.lightning_suite.processes import Runner

_TESTS = """
import os

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.testing import _runif_reasons


def run_if(**needs):
    reasons, marks = _runif_reasons(**needs)
    return pytest.mark.skipif(condition=bool(reasons), reason=str(reasons), **marks)


class Derived(DDPStrategy):
    pass


def test_trains(tmp_path):
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=Derived(start_method="spawn"), max_steps=3, limit_val_batches=0,
        default_root_dir=tmp_path, logger=False, enable_checkpointing=False, enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(BoringModel())


def test_dies():
    "Takes ddp down."
    os._exit(3)


def test_comes_after_it():
    assert type(DDPStrategy()).__mro__[1].__name__ == "ByteSchedulerStrategy"


def test_fails():
    assert "ddp" == "ours"


@run_if(min_cuda_gpus=2, standalone=True)
def test_wants_gpus():
    trainer = Trainer(accelerator="gpu", devices=2, strategy="ddp", logger=False)
    assert trainer.strategy.root_device.type == "cpu"


@run_if(tpu=True)
def test_wants_a_tpu_for_ddp():
    pass


def test_of_something_else():
    pass
"""


def _checkout(path: Path, *, lightning: str, tests: str) -> Path:
    (path / "src").mkdir(parents=True)
    (path / "src" / "version.info").write_text(f"{lightning}\n")
    (path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    package = path / "tests" / "tests_pytorch"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "test_some.py").write_text(tests)
    return path


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tests_run_through_our_strategy_and_none_is_lost_sight_of(tmp_path: Path) -> None:
    path = _checkout(tmp_path, lightning=version("lightning"), tests=_TESTS)
    begun: list[str] = []
    runner = Runner(Checkout(path), timeout=250, on_progress=begun.append)

    collected, unreadable = runner.collect()
    outcomes = runner.run([test for test in collected if test.skipped is None])

    assert unreadable == {}
    assert {test.name.partition("::")[2] for test in collected if test.skipped is not None} == {
        "test_wants_a_tpu_for_ddp"
    }
    assert {test.name.partition("::")[2] for test in collected if test.standalone and test.moved} == {"test_wants_gpus"}
    assert {name.partition("::")[2]: outcome.result for name, outcome in outcomes.items()} == {
        "test_trains": "passed",
        "test_dies": "lost",
        "test_comes_after_it": "passed",
        "test_fails": "failed",
        "test_wants_gpus": "passed",
    }
    assert set(begun) == set(outcomes)
    trained = outcomes["tests_pytorch/test_some.py::test_trains"]
    assert (trained.made, trained.ranks, trained.steps, trained.overlapped) == (1, 2, 3, 2)
    of_ddp = [test for test in collected if test.name.endswith(("test_comes_after_it", "test_wants_gpus"))]
    baseline = runner.run(of_ddp, baseline=True)
    assert {name.partition("::")[2]: (o.result, o.made) for name, o in baseline.items()} == {
        "test_comes_after_it": ("failed", 0),
        "test_wants_gpus": ("passed", 0),
    }


def test_another_version_is_refused_unless_it_is_asked_for(tmp_path: Path) -> None:
    path = _checkout(tmp_path, lightning="1.9.0", tests="")

    with pytest.raises(CheckoutError, match=f"is Lightning 1.9.0, but .* git clone --branch {version('lightning')}"):
        Checkout(path)
    assert Checkout(path, any_version=True).version == "1.9.0"


def test_any_other_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckoutError, match=r"no checkout of Lightning's repository. Get it with: git clone"):
        Checkout(tmp_path)


def test_tests_that_cannot_be_collected_are_an_error(tmp_path: Path) -> None:
    path = _checkout(tmp_path, lightning=version("lightning"), tests="import os\n\nDDP = os._exit(3)\n")

    with pytest.raises(CheckoutError, match="could not be collected"):
        Runner(Checkout(path), timeout=250, on_progress=str).collect()
