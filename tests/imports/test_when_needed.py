"""What takes long to import, or is an extra, is imported when it is needed and not before."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_bytescheduler

HEAVY = {
    *("aiohttp", "bayes_opt", "filelock", "matplotlib", "platformdirs", "pyarrow", "rich", "s3fs", "scipy"),
    *("sklearn", "tenacity", "xxhash", "zstandard"),
}
ONLY_WHEN_SERVING = "slices/serve.py"  # is aiohttp's, and imported by a function
PACKAGE = Path(lightning_bytescheduler.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))


def imported_at_once(file: Path) -> Iterator[str]:
    """Top-level names of what a module imports as it is imported itself."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_nothing_heavy_is_imported_at_once(file: Path) -> None:
    if file != PACKAGE / ONLY_WHEN_SERVING:
        assert not HEAVY.intersection(imported_at_once(file))
    modules = {node.module for node in ast.parse(file.read_text()).body if isinstance(node, ast.ImportFrom)}
    assert "lightning_bytescheduler.slices.serve" not in modules


@pytest.mark.parametrize("room", ["scheduler", "simulation", "timeline", "tuning"])
def test_pure_rooms_wait_for_no_numpy_either(room: str) -> None:
    for file in (PACKAGE / room).glob("*.py"):
        assert "numpy" not in set(imported_at_once(file)), file
