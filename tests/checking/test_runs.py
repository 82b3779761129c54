from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from lightning_bytescheduler.__main__ import main
from lightning_bytescheduler.checking import check as runs
from lightning_bytescheduler.checking.check import end_processes, result_of
from lightning_bytescheduler.checking.report import RankRecord, RunSpec, keep, kept, record_path

ORPHANED = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "pass"])
os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its exit status is not read
print(flush=True)
sys.stdin.read()
"""


def test_what_has_ended_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where orphans are not reaped, as in a container, they stay in their group for good."""
    leader = subprocess.Popen(
        [sys.executable, "-c", ORPHANED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert leader.stdin is not None
    assert leader.stdout is not None
    with leader.stdin, leader.stdout:
        leader.stdout.readline()
        monkeypatch.setattr(runs, "_TERMINATION_SECONDS", 200.0)
        began = time.monotonic()
        # As seen once the leader has ended: only the child, which has ended too, is left of the group.
        end_processes(leader.pid, leader.poll, tmp_path)
        assert leader.wait(60.0) is not None
        assert time.monotonic() - began < 60.0


def test_a_run_that_leaves_nothing_says_what_it_printed(tmp_path: Path) -> None:
    (tmp_path / "output.txt").write_text("step 1\rstep 2\nTypeError: boom\n")
    result = result_of(RunSpec(strategy="ddp", steps=3), tmp_path, code=1, timeout=9.0)
    assert result.error == "exit code 1\n  | step 2\n  | TypeError: boom"
    assert not result.ranks


def test_a_refusal_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "refused.txt").write_text("one device")
    result = result_of(RunSpec(strategy="ddp", steps=3), tmp_path, code=2, timeout=9.0)
    assert result.refused == "one device"
    assert not result.error


def test_records_survive_the_file(tmp_path: Path) -> None:
    record = RankRecord(rank=0, world_size=2, steps=3, losses=["0x1p+0"], trace={1: {"a": "1"}})
    keep(record, record_path(tmp_path, record))
    assert kept(RankRecord, tmp_path / "rank0of2.json") == record
    spec = RunSpec(strategy="ddp", steps=3)
    keep(spec, tmp_path / "run.json")
    assert kept(RunSpec, tmp_path / "run.json") == spec


# A script is run and compared.

SCRIPT = """
import random, sys, time
from pathlib import Path

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.support.models import Tower

assert sys.argv[1:] == ["--depth", "2"]
torch.manual_seed(time.time_ns())  # what the script does itself is arranged for as well, from the fit on
shift = random.random() + np.random.rand()


class Own(Tower):
    def predict(self, inputs):
        return super().predict(inputs + shift + random.random() + np.random.rand())

    def on_train_end(self):
        print("epoch", self.current_epoch)


if __name__ == "__main__":
    torch.manual_seed(int(10 * random.random()))
    trainer = L.Trainer(accelerator="cpu", max_epochs=3, log_every_n_steps=2, strategy="auto")
    trainer.fit(Own(depth=2))
    Path("after.txt").touch()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    root = Path(__file__).parents[2]
    paths = [str(root), str(root / "src"), str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    return tmp_path


@pytest.mark.slow
def test_a_script_is_run_as_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On two devices although it has one; unseeded; what comes after the fit is not run, and no file is left."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "sitecustomize.py").write_text("open('was_here.txt', 'w').close()")
    command = ["check", "--steps", "4", "--devices", "2", "--", "train.py", "--depth", "2"]
    code = main(command)
    said = capsys.readouterr()
    assert code == 0, said.out
    assert said.out.startswith("identical")
    assert "4 steps on 2 ranks" in said.out
    assert "run 4, bytescheduler, at its strictest" in said.err
    assert sorted(path.name for path in folder.iterdir() if path.suffix != "") == [
        "sitecustomize.py",
        "train.py",
        "was_here.txt",
    ]
    assert "bytescheduler's plan: " in said.out


@pytest.mark.slow
def test_a_script_that_fails_by_itself_is_told_from_one_that_fails_here(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text(SCRIPT.replace("print(", "raise ValueError('boom', "))
    assert main(["check", "--steps", "3", "--devices", "2", "--", sys.executable, "train.py", "--depth", "2"]) == 2
    said = capsys.readouterr().out
    assert said.startswith("could not check: The script itself fails under 'ddp': rank ")
    assert "boom" in said


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("print(1)", "ignores PYTHONPATH"),
        slow("import lightning as L; L.Trainer(strategy='fsdp', accelerator='cpu')", "not trained with DDP"),
        slow("import lightning.pytorch", "without a call of Trainer.fit"),
        slow("import pytorch_lightning as pl; pl.Trainer(strategy='fsdp', accelerator='cpu')", "not trained with DDP"),
        slow("from lightning.fabric import Fabric; Fabric(devices=1, accelerator='cpu').backward(None)", "Fabric"),
    ],
)
def test_what_is_no_training_with_ddp_says_so(
    script: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text(script)
    assert main(["check", "--", "train.py"]) == 2
    out = capsys.readouterr().out
    assert out.startswith("could not check: ")
    assert said in out


def test_arguments_are_checked(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "train.py").touch()
    assert main(["check", "--steps", "5"]) == 2
    assert "the command that trains" in capsys.readouterr().err
    assert main(["check", "--steps", "0", "--", "train.py"]) == 2
    assert "steps" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["check", "--", "train.py"]) == 2
    assert "torchrun" in capsys.readouterr().err


def test_a_command_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--", "no-such-program"]) == 2
    assert "no-such-program" in capsys.readouterr().err


WAITS = "import os, time; open('id.txt', 'w').write(str(os.getpid())); time.sleep(600)"


def test_a_check_that_is_terminated_leaves_no_training_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightning_bytescheduler", "check", "--", sys.executable, "-S", "-c", WAITS]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as checking:
        deadline = time.monotonic() + 60.0
        while not (tmp_path / "id.txt").exists() or not (tmp_path / "id.txt").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        checking.send_signal(signal.SIGTERM)
        assert checking.wait(60.0) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "id.txt").read_text()), 0)
