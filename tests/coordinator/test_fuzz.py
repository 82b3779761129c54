"""A few hundred wrong messages on every route; ``tests.coordinator.fuzz`` sends a hundred thousand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("safetensors")


@pytest.mark.slow
def test_wrong_messages_change_nothing() -> None:
    """In a process of its own: half-sent requests leave sockets behind, which are collected whenever that may be."""
    command = [sys.executable, "-m", "tests.coordinator.fuzz", "--messages", "400", "--seed", "1"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "saved states load" in done.stdout
