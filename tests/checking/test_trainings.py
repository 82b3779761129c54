"""Trainings that are checked: what is found of them, and that nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from tests.checking.hidden_reads import ByAddress, FailsWhenGated, Sleeps, Unrepeatable
from tests.support.models import Tower

quiet = {"accelerator": "cpu", "devices": 2, "enable_progress_bar": False, "enable_model_summary": False}
bare = {"max_epochs": 5, "logger": False, "enable_checkpointing": False, "limit_val_batches": 0}


def everything():
    return {
        "max_epochs": 1,
        "callbacks": ModelCheckpoint("mine", every_n_train_steps=2, save_last=True),
        "logger": CSVLogger("logs"),
        "default_root_dir": "root",
        "log_every_n_steps": 2,
        "limit_train_batches": 6,
        "strategy": DDPStrategy(find_unused_parameters=True),
    }


if __name__ == "__main__":
    name, options = sys.argv[1], json.loads(sys.argv[2])
    options = {**quiet, **(everything() if options is None else {**bare, **options})}
    L.Trainer(**options).fit(globals()[name]())
"""


def checked(folder: Path, model: str, options: str = "{}", *, steps: int = 6, timeout: float = 300) -> tuple[int, str]:
    """The exit code, and what is printed."""
    root = Path(__file__).parents[2]
    (folder / "train.py").write_text(SCRIPT)
    paths = [str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]
    checking = ["-m", "lightning_bytescheduler", "check", "--steps", str(steps), "--timeout", str(timeout)]
    done = subprocess.run(
        [sys.executable, *checking, "--", "train.py", model, options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_what_is_the_same_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "last.ckpt").write_text("kept")
    code, said = checked(tmp_path, "Tower", "null", steps=40)
    assert code == 0, said
    assert said.startswith("identical")
    assert "6 steps on 2 ranks\n  40 steps were asked for; the fit ended before" in said
    assert "logged values" in said
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["last.ckpt", "mine", "train.py"]
    assert (tmp_path / "mine" / "last.ckpt").read_text() == "kept"


@pytest.mark.slow
@pytest.mark.parametrize("options", ["{}", '{"gradient_clip_val": 0.1}'])
def test_a_read_through_an_address_is_found(tmp_path: Path, options: str) -> None:
    """Clipped gradients are compared with a run that defers nothing, so no third run is needed."""
    code, said = checked(tmp_path, "ByAddress", options)
    assert code == 1, said
    assert said.startswith("different from step 4 on, first tensor 'first.weight'")
    assert "a weight is read before the update of the last step has landed" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options", "exit_code", "words"),
    [
        ("Tower", '{"gradient_clip_val": 0.1}', 0, "equal to rounding"),
        ("Unrepeatable", "{}", 2, "the script is not reproducible under ddp itself"),
        ("FailsWhenGated", "{}", 1, "trains under ddp, but fails under bytescheduler: rank "),
        ("Tower", '{"devices": 1}', 2, "`--devices 2`"),
        ("Tower", '{"num_nodes": 2, "strategy": "ddp"}', 2, "num_nodes=2"),
    ],
)
def test_what_is_said(tmp_path: Path, model: str, options: str, exit_code: int, words: str) -> None:
    code, said = checked(tmp_path, model, options)
    assert code == exit_code, said
    assert words in said.splitlines()[0]


@pytest.mark.slow
def test_what_hangs_is_ended(tmp_path: Path) -> None:
    code, said = checked(tmp_path, "Sleeps", timeout=20)
    assert code == 2, said
    assert "did not end within 20 s, and stood before its first step" in said
