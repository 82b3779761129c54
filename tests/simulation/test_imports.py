"""This room is a core: pure Python that needs no training framework, and no other room but the sizes of tuning."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_bytescheduler import simulation

FILES = sorted(Path(simulation.__file__).parent.glob("*.py"))
ROOMS = ("lightning_bytescheduler.simulation", "lightning_bytescheduler.tuning", "lightning_bytescheduler.exceptions")


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_nothing_but_python_and_the_drawing(file: Path) -> None:
    for name in imported(ast.parse(file.read_text(encoding="utf-8"))):
        drawing = file.stem == "picture" and name.partition(".")[0] == "matplotlib"
        assert name.startswith(ROOMS) or name.partition(".")[0] in sys.stdlib_module_names or drawing, name
