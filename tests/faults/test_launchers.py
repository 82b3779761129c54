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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.faults.ranks import quiet_environment
from tests.faults.scenario import BOUND_S
from tests.support.rank_pool import free_port

# With LOCAL_RANK there, Lightning takes it that somebody else has started the ranks, and waits for them.
_FOREIGN = ("BYTESCHEDULER_", "GROUP_", "LOCAL_", "MASTER_", "NODE_", "RANK", "WORLD")
SCRIPT = Path(__file__).with_name("train.py")


def launch(command: list[str], options: dict[str, Any], folder: Path) -> tuple[int, float, str]:
    """Run to the end; returns exit code, seconds from the failure to the end, and everything that was written."""
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
            code = process.wait(120.0)
        finally:
            process.kill()
    ended = time.time()
    text = log.read_text(errors="replace")
    failed = [float(line.split("FAILED_AT ")[1]) for line in text.splitlines() if "FAILED_AT " in line]
    assert failed, text
    return code, ended - failed[0], text


def test_launchers(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    runs: list[tuple[str, list[str], dict[str, Any]]] = [
        ("popen", [sys.executable], {"ranks": [1]}),
        ("popen_zero", [sys.executable], {"ranks": [0]}),
        ("spawn", [sys.executable], {"ranks": [1], "strategy": "bytescheduler_spawn"}),
        ("torchrun", [*torchrun, str(free_port())], {"ranks": [1]}),
        ("torchrun_zero_killed", [*torchrun, str(free_port())], {"ranks": [0], "kind": "SIGKILL"}),
    ]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda run: launch(run[1], run[2], tmp_path / run[0]), runs))
    for (name, _, options), (code, took, text) in zip(runs, results, strict=True):
        print(f"{name}: exit code {code} after {took:.2f} s")
        rank = options["ranks"][0]
        cause = "it shows no sign of life" if options.get("kind") else "ValueError: boom"
        assert code != 0, f"{name}\n{text}"
        assert f"[rank {1 - rank}] Rank {rank} failed: {cause}" in text, f"{name}\n{text}"
        assert took < BOUND_S, f"{name}\n{text}"


def test_a_sigterm_is_the_exit_code(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    options = {"where": "training_step", "ranks": [1], "kind": "SIGTERM", "pause": 0.02, "steps": 1000}
    with ThreadPoolExecutor(2) as pool:
        commands = [sys.executable], [*torchrun, str(free_port())]
        results = list(pool.map(lambda name: launch(commands[name], options, tmp_path / str(name)), range(2)))
    for (code, _, text), expected in zip(results, (143, 1), strict=True):  # torchrun's own code for a rank that failed
        assert code == expected, text
        assert text.count("ends training: exit code 143") == 2, text


@pytest.mark.parametrize("strategy", ["bytescheduler", "diloco"])
def test_a_taken_master_port_leaves_no_process_behind(strategy: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "print('PROCESS', os.getpid(), flush=True)\n"
        "from lightning.pytorch import Trainer\n"
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "import lightning_bytescheduler\n"
        "Trainer(accelerator='cpu', devices=2, strategy=sys.argv[1], logger=False).fit(BoringModel())\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    with socket.create_server(("127.0.0.1", 0)) as taken, (tmp_path / "log.txt").open("wb") as log:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        done = subprocess.run(
            [sys.executable, str(script), strategy],
            env={**environment, **quiet_environment(), **place},
            cwd=tmp_path,
            stdout=log,
            stderr=log,
            timeout=100,
        )
    text = (tmp_path / "log.txt").read_text(errors="replace")
    assert done.returncode == 1, text
    assert "EADDRINUSE" in text
    started = [int(process) for process in re.findall(r"PROCESS (\d+)", text)]
    assert started, text
    deadline = time.monotonic() + 20.0
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
