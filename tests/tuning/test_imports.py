"""This room is a core: it needs no training framework, and nothing heavy before a search or a picture is asked for."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_bytescheduler import tuning

FILES = sorted(Path(tuning.__file__).parent.glob("*.py"))
ROOMS = ("lightning_bytescheduler.tuning", "lightning_bytescheduler.exceptions")
LIBRARIES = {"search": ("numpy", "bayes_opt", "sklearn"), "picture": ("matplotlib",)}


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_nothing_but_python_the_search_and_the_drawing(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for name in imported(tree):
        library = name.partition(".")[0] in LIBRARIES.get(file.stem, ())
        assert name.startswith(ROOMS) or name.partition(".")[0] in sys.stdlib_module_names or library, name
    at_import = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    for node in at_import:
        for name in imported(node):
            assert name.partition(".")[0] not in ("numpy", "bayes_opt", "sklearn", "matplotlib"), "only when needed"
