"""What takes long to import, or is an extra, is imported when it is needed and not before."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_bytescheduler

HEAVY = {
    *("aiohttp", "bayes_opt", "filelock", "matplotlib", "platformdirs", "pyarrow", "rich", "s3fs", "safetensors"),
    *("scipy", "sklearn", "tenacity", "uvloop", "xxhash"),
}
PACKAGE = Path(lightning_bytescheduler.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))


def imported_at_once(file: Path) -> Iterator[str]:
    """Top-level names of what a module imports as it is imported itself."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


def modules_imported_at_once(file: Path) -> set[str | None]:
    return {node.module for node in ast.parse(file.read_text()).body if isinstance(node, ast.ImportFrom)}


# What serves is aiohttp's: a function imports slices/serve.py and coordinator/service.py, and what only these import.
SERVES = {
    file
    for file in (PACKAGE / "slices" / "serve.py", *(PACKAGE / "coordinator").glob("*.py"))
    if "aiohttp" in set(imported_at_once(file))
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_nothing_heavy_is_imported_at_once(file: Path) -> None:
    allowed = {"aiohttp"} if file in SERVES else set()
    assert HEAVY.intersection(imported_at_once(file)) <= allowed
    if file not in SERVES:
        serving = {f"lightning_bytescheduler.{one.parent.name}.{one.stem}" for one in SERVES}
        assert not serving.intersection(modules_imported_at_once(file))


@pytest.mark.parametrize("room", ["predicting", "scheduler", "timeline", "tuning"])
def test_pure_rooms_wait_for_no_numpy_either(room: str) -> None:
    for file in (PACKAGE / room).glob("*.py"):
        assert "numpy" not in set(imported_at_once(file)), file
