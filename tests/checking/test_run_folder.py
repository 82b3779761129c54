from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from lightning_bytescheduler.checking.runs import RunSpec, end_processes, result_of

ORPHANED = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "pass"])
os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody asks what with
print(flush=True)
sys.stdin.read()
"""


def test_what_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    """Where nobody collects orphans, as in a container, they stay in their group for good."""
    leader = subprocess.Popen(
        [sys.executable, "-c", ORPHANED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert leader.stdin is not None
    assert leader.stdout is not None
    with leader.stdin, leader.stdout:
        leader.stdout.readline()
        began = time.monotonic()
        # As seen once the leader has ended: only the child, which has ended too, is left of the group.
        end_processes(leader.pid, leader.poll, tmp_path)
        assert leader.wait(5.0) is not None
        assert time.monotonic() - began < 9.0


def test_a_run_that_leaves_nothing_says_what_it_printed(tmp_path: Path) -> None:
    (tmp_path / "started.txt").touch()
    (tmp_path / "output.txt").write_text("step 1\rstep 2\nTypeError: boom\n")
    result = result_of(RunSpec(strategy="ddp", steps=3), tmp_path, code=1, timed_out=False, timeout=9.0)
    assert result.error == "exit code 1\n  | step 2\n  | TypeError: boom"
    assert not result.whole


def test_a_refusal_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "refused.txt").write_text("one device")
    result = result_of(RunSpec(strategy="ddp", steps=3), tmp_path, code=2, timed_out=False, timeout=9.0)
    assert result.refused == "one device"
    assert not result.error
