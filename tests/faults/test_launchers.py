"""Under launchers that end the siblings of a dead process, within milliseconds or seconds, the cause is still told."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.ranks import quiet_environment
from tests.support.rank_pool import free_port

# Where LOCAL_RANK is set, Lightning assumes that a launcher has started the ranks, and waits for them.
_FOREIGN = ("BYTESCHEDULER_", "GROUP_", "LOCAL_", "MASTER_", "NODE_", "RANK", "WORLD")
SCRIPT = Path(__file__).with_name("train.py")


def launch(command: list[str], options: dict[str, Any], folder: Path) -> tuple[int, str]:
    """Run to the end; returns the exit code and everything that was written."""
    folder.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    log = folder / "log.txt"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*command, str(SCRIPT), json.dumps({"where": "forward", "devices": 2, **options})],
            env={**environment, **quiet_environment(), "MASTER_PORT": str(free_port())},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait(480.0)
        finally:
            process.kill()
    text = log.read_text(errors="replace")
    assert "FAILED_AT " in text
    return code, text


TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
SIGTERM = {"where": "training_step", "kind": "SIGTERM", "pause": 0.02, "steps": 1000}


@pytest.mark.parametrize(
    ("torchrun", "rank", "options"),
    [
        (False, 0, {}),
        pytest.param(False, 1, {"strategy": "bytescheduler_spawn"}, marks=pytest.mark.slow),
        pytest.param(True, 0, {"kind": "SIGKILL"}, marks=pytest.mark.slow),
    ],
    ids=["popen", "spawn", "torchrun"],
)
def test_the_cause_is_told(torchrun: bool, rank: int, options: dict[str, Any], tmp_path: Path) -> None:
    command = [sys.executable, *([*TORCHRUN, str(free_port())] if torchrun else [])]
    code, text = launch(command, {**options, "ranks": [rank]}, tmp_path / "run")
    cause = "it shows no sign of life" if options.get("kind") else "ValueError: boom"
    assert code != 0, text
    assert f"[rank {1 - rank}] Rank {rank} failed: {cause}" in text, text


@pytest.mark.slow  # the ranks' codes: test_signals.py
@pytest.mark.parametrize(
    ("torchrun", "expected"),
    [(False, 143), (True, 1)],  # torchrun's own code for a rank that failed
    ids=["popen", "torchrun"],
)
def test_a_sigterm_is_the_exit_code(torchrun: bool, expected: int, tmp_path: Path) -> None:
    command = [sys.executable, *([*TORCHRUN, str(free_port())] if torchrun else [])]
    code, text = launch(command, {**SIGTERM, "ranks": [1]}, tmp_path / "run")
    assert code == expected, text
    assert text.count("ends training: exit code 143") == 2, text


@pytest.mark.slow
def test_a_taken_master_port_leaves_no_process_behind(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os\n"
        "print('PROCESS', os.getpid(), flush=True)\n"
        "from lightning.pytorch import Trainer\n"
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "import lightning_bytescheduler\n"
        "Trainer(accelerator='cpu', devices=2, strategy='diloco', logger=False).fit(BoringModel())\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    with socket.create_server(("127.0.0.1", 0)) as taken, (tmp_path / "log.txt").open("wb") as log:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        done = subprocess.run(
            [sys.executable, str(script)],
            env={**environment, **quiet_environment(), **place},
            cwd=tmp_path,
            stdout=log,
            stderr=log,
            timeout=480,
        )
    text = (tmp_path / "log.txt").read_text(errors="replace")
    assert done.returncode == 1, text
    assert "EADDRINUSE" in text
    started = [int(process) for process in re.findall(r"PROCESS (\d+)", text)]
    assert started, text
    deadline = time.monotonic() + 60.0
    try:
        while alive := [process for process in started if _runs(process, script)]:
            assert time.monotonic() < deadline, (alive, text)
            time.sleep(0.1)
    finally:
        for process in (process for process in started if _runs(process, script)):
            os.kill(process, signal.SIGKILL)


def _runs(process: int, script: Path) -> bool:
    """Whether a process is there and is one of the script's."""
    try:
        return str(script).encode() in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False
