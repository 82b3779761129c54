"""A new user's first training on two machines, as docs/index.md has it: by torchrun, and under SLURM."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.shaped_link import ShapedLink

pytestmark = [pytest.mark.root, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "index.md").read_text()

MODEL = """
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 4))

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(64, 16), torch.zeros(64, dtype=torch.long)), 8)

    def on_train_end(self):
        sums = self.all_gather(sum(p.double().sum() for p in self.parameters()))
        assert len(set(sums.tolist())) == 1, sums
        print("trained", self.trainer.global_step, "steps on", self.trainer.world_size, "ranks", flush=True)
"""
SCRIPT = """
import lightning_bytescheduler
{trainer}
trainer.fit(Net())
"""
CLI = """
from lightning.pytorch.cli import LightningCLI
LightningCLI(Net, save_config_callback=None)
"""
OPTIONS = ["--trainer.num_nodes=2", "--trainer.devices=1", "--trainer.accelerator=cpu", "--trainer.max_epochs=1"]


@pytest.fixture(scope="module")
def link() -> Iterator[ShapedLink]:
    available, reason = ShapedLink.available()
    if not available:
        pytest.skip(reason)
    with ShapedLink(hosts=2, mbit=500.0) as link:
        yield link


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def run(link: ShapedLink, commands: list[list[str]], environments: list[dict[str, str]]) -> list[tuple[int, str]]:
    """Run each machine's command until all have ended, without a launcher's variables."""
    clean = ["env", *(f"-u{name}" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK"))]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    started = [
        link.popen(host, [*clean, *(["-uGLOO_SOCKET_IFNAME"] if "GLOO_SOCKET_IFNAME" not in own else []), *command],
                   env=own, **both)
        for host, (command, own) in enumerate(zip(commands, environments, strict=True))
    ]  # fmt: skip
    said = [process.communicate(timeout=120)[0].decode() for process in started]
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


def torchrun(link: ShapedLink) -> list[list[str]]:
    """The guide's commands, with the link's address."""
    commands = re.findall(r"^\$ (torchrun .*train\.py)$", GUIDE, flags=re.M)
    assert len(commands) == 2
    program = [sys.executable, "-m", "torch.distributed.run"]
    return [[*program, *shlex.split(line.replace("192.168.1.10", link.address(0)))[1:]] for line in commands]


def write_script(folder: Path) -> None:
    (line,) = re.findall(r'^(trainer = .*num_nodes=2, strategy="bytescheduler"\))$', GUIDE, flags=re.M)
    line = line.replace('accelerator="auto"', 'accelerator="cpu", max_epochs=1, enable_checkpointing=False')
    (folder / "train.py").write_text(MODEL + SCRIPT.format(trainer=line))


def test_torchrun(link: ShapedLink, folder: Path) -> None:
    write_script(folder)
    for code, said in run(link, torchrun(link), [{}, {}]):
        assert code == 0, said
        assert "trained 4 steps on 2 ranks" in said


def test_slurm_with_a_config_of_lightning_cli(link: ShapedLink, folder: Path) -> None:
    pytest.importorskip("jsonargparse")
    (config,) = re.findall(r"```yaml\n(.*?)```", GUIDE, flags=re.S)
    (folder / "config.yaml").write_text(config)
    (folder / "train.py").write_text(MODEL + CLI)
    exported = dict(re.findall(r"^export (\w+)=(\w+)$", GUIDE, flags=re.M))
    assert "GLOO_SOCKET_IFNAME" in exported
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NNODES": "2",
        "SLURM_NODELIST": f"{link.address(0)},{link.address(1)}",
        "SLURM_LOCALID": "0",
    }
    ranks = [{**slurm, **exported, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)} for rank in (0, 1)]
    command = [sys.executable, "train.py", "fit", "--config", "config.yaml", *OPTIONS]
    for code, said in run(link, [command, command], ranks):
        assert code == 0, said
        assert "trained 4 steps on 2 ranks" in said
    assert (folder / "trace.json").exists()  # as the config says
