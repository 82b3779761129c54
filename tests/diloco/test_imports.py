"""This room is a core: neither Lightning, nor torch.distributed, nor sockets, nor another room."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from lightning_bytescheduler import diloco

FILES = sorted(Path(diloco.__file__).parent.glob("*.py"))
ROOMS = ("lightning_bytescheduler.diloco", "lightning_bytescheduler.exceptions")
WITH_TENSORS = {"accumulation", "fragments", "outer_optimizer", "wire"}
NOT_HERE = {"socket", "threading", "time", "random", "pickle"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_nothing_but_python_tensors_and_the_drawing(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            top = name.partition(".")[0]
            drawing = file.stem == "round_picture" and top == "matplotlib"
            tensors = file.stem in WITH_TENSORS and name in ("torch", "torch.optim")
            python = top in sys.stdlib_module_names and top not in NOT_HERE
            assert name.startswith(ROOMS) or drawing or tensors or python, name
