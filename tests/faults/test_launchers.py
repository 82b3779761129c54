"""Under launchers that end the siblings of a dead process, within milliseconds or seconds, the cause is still told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
