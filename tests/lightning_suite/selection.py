"""Which of Lightning's tests may use ddp, judged by their source text."""

from __future__ import annotations

import ast
import re

__all__ = ["Mentions"]

# Several CPU devices or nodes without a strategy make Lightning choose ddp.
_DDP = re.compile(r"ddp|devices[\"']?\s*[=:]\s*[\"'(]?[2-9]|num_nodes|num_processes|num_devices", re.IGNORECASE)


class Mentions:
    """The top-level functions and classes of a module that mention ddp, themselves or in what they refer to.

    Args:
        source: Text of the module.
    """

    def __init__(self, source: str) -> None:
        lines = source.splitlines()
        self._mentioning: set[str] = set()
        references: dict[str, set[str]] = {}
        for node in ast.parse(source).body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                continue
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            text = "\n".join(lines[first - 1 : node.end_lineno])
            # By name only: a local variable of the same name selects a test too many, never one too few.
            referred = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
            arguments = {child.arg for child in ast.walk(node) if isinstance(child, ast.arg)}  # fixtures
            for name in _bound_names(node):
                references[name] = referred | arguments
                if _DDP.search(text):
                    self._mentioning.add(name)
        grown = True
        while grown:
            reached = {name for name, referred in references.items() if referred & self._mentioning}
            grown = not reached <= self._mentioning
            self._mentioning |= reached

    def __bool__(self) -> bool:
        return bool(self._mentioning)

    def __contains__(self, name: object) -> bool:
        return name in self._mentioning


def _bound_names(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
        return [node.name]
    return [child.id for child in ast.walk(node) if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)]
