"""What importing the package brings with it: counted, as time depends on the machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

COUNT = """
import json, sys
before = set(sys.modules)
{code}
brought = set(sys.modules) - before
print(json.dumps(sorted(brought)))
"""


def brought_by(code: str, after: str = "") -> list[str]:
    """The modules that ``code`` imports and ``after`` had not."""
    done = subprocess.run(
        [sys.executable, "-c", after + COUNT.format(code=code)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    brought: list[str] = json.loads(done.stdout.splitlines()[-1])
    return brought


def packages(modules: list[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules} - set(sys.stdlib_module_names)


def test_the_package_itself_is_a_few_modules() -> None:
    brought = brought_by("import lightning_bytescheduler")
    assert packages(brought) == {"lightning_bytescheduler"}
    assert len(brought) < 60  # those of the standard library among them


@pytest.mark.slow
def test_strategies_and_callbacks_bring_one_small_package() -> None:
    """Beside what ``import lightning`` brings."""
    names = "ByteSchedulerStrategy, DiLoCoStrategy, CreditTuner, PerformanceMonitor"
    brought = brought_by(f"from lightning_bytescheduler import {names}", after="import lightning, torch.distributed\n")
    assert packages(brought) == {"lightning_bytescheduler", "msgspec"}
    assert not [module for module in brought if module.startswith("lightning_bytescheduler.slices")]
    assert len(brought) < 207
