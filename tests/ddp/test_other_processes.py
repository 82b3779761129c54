from __future__ import annotations

import os
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_bytescheduler.ddp.entry_points import _reduce_opened, watch_entry_points
from lightning_bytescheduler.ddp.gates import GatedParameter, arm, disarm


class Engine:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def before_fork(self) -> None:
        self.calls.append("before")

    def after_fork(self, *, in_child: bool) -> None:
        self.calls.append("child" if in_child else "parent")

    def backward_pass(self) -> AbstractContextManager[None]:
        return nullcontext()


class Gate:
    def __init__(self, *, opens: bool) -> None:
        self.opens = opens
        self.touches: list[bool] = []

    def touched(self, parameter: nn.Parameter, gradient_only: bool) -> None:
        self.touches.append(gradient_only)
        if self.opens:
            disarm([parameter])

    def open_all(self, reason: str) -> None:
        """Nothing here begins what would need that."""


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_engines_are_told_on_both_sides_of_a_fork() -> None:
    engine = Engine()
    leave = watch_entry_points(engine)
    child = os.fork()
    if child == 0:
        os._exit(0 if engine.calls == ["before", "child"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    leave()
    assert engine.calls == ["before", "parent"]


def test_a_program_that_is_started_costs_nothing() -> None:
    engine = Engine()
    leave = watch_entry_points(engine)
    subprocess.run([sys.executable, "-c", ""], check=True)
    leave()
    assert engine.calls == []


@pytest.mark.parametrize("opens", [True, False])
def test_over_a_pipe_goes_a_plain_parameter_after_its_touch(opens: bool) -> None:
    parameter, gate = nn.Parameter(torch.ones(3)), Gate(opens=opens)
    arm([parameter], gate)
    arguments: tuple[Any, ...] = _reduce_opened(parameter)[1]
    disarm([parameter])
    assert gate.touches[0] is False
    assert nn.Parameter in arguments
    assert GatedParameter not in arguments


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["bytescheduler_notebook", "bytescheduler_spawn"])
def test_the_process_that_started_those_of_a_fit_knows_what_came_of_it_and_saves(strategy: str, tmp_path: Path) -> None:
    """It takes no step itself, and the model has no trainer then."""
    command = [sys.executable, "-m", "tests.ddp.spawned_fit", strategy, str(tmp_path / "after.ckpt")]
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **quiet}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "plan: overlapped steps: 3, saved" in done.stdout


@pytest.mark.slow
def test_ranks_that_are_forked_after_their_parent_has_computed_do_not_wait_for_its_threads(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.ddp.spawned_fit", "bytescheduler_notebook", str(tmp_path / "x.ckpt"), "yes"]
    environment = {**os.environ, "OMP_NUM_THREADS": "4", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "steps: 3, saved" in done.stdout
