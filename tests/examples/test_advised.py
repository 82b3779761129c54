from __future__ import annotations

import shlex

import pytest

from examples import advised
from lightning_bytescheduler.cli import main


def test_the_command_in_its_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    assert advised.__doc__ is not None
    (command,) = (line.strip() for line in advised.__doc__.splitlines() if line.startswith("    "))
    program, *argv = shlex.split(command)
    assert program == "lightning-bytescheduler"
    assert main([*argv, "--device", "cpu", "--steps", "2"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "Classifier" in words
    assert "A step takes" in words
    assert "4 workers, 1 Gbit/s each way, 0.1 ms a hop" in words
