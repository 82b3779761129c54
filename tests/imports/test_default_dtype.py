"""Tensors say of which dtype they are: Lightning changes torch's default for all threads while a forward pass runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "lightning_bytescheduler"
BY_DEFAULT = {"empty", "zeros", "ones", "rand", "randn", "normal", "linspace", "logspace", "eye"}


def unnamed(source: str) -> Iterator[int]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        made_by, owner = node.func.attr, node.func.value
        of_torch = isinstance(owner, ast.Name) and owner.id == "torch"
        named = any(keyword.arg in ("dtype", "out") for keyword in node.keywords)
        if of_torch and made_by in BY_DEFAULT and not named:
            yield node.lineno


def test_every_tensor_says_its_dtype() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}" for path in PACKAGE.rglob("*.py") for line in unnamed(path.read_text())
    ]
    assert not found


def test_one_that_does_not_is_found() -> None:
    assert list(unnamed("import torch\ntorch.zeros(3)\ntorch.zeros(3, dtype=torch.float32)\n")) == [2]
