"""``python -m tests.house``: how large the package is, room by room, beside its budget.

Code is what is neither blank, nor a comment, nor a docstring. ``house.toml`` has the budget and the last figures of the
package. The command fails where a room, or the options of a strategy, grew since. ``--write`` notes smaller figures.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["House", "grown", "lines_of_code", "main"]

PACKAGE = Path(__file__).parents[1] / "src" / "lightning_bytescheduler"
FIGURES = Path(__file__).with_suffix(".toml")
# Rooms that have one budget.
TOGETHER = {"checking": "tools", "predicting": "tools", "timeline": "tools"}
SHOWN = 5

Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def lines_of_code(text: str, tree: ast.Module | None = None) -> int:
    """How many lines of a module are neither blank, nor a comment, nor part of a docstring."""
    docstrings = {
        line
        for node in ast.walk(ast.parse(text) if tree is None else tree)
        if isinstance(node, Definition) and ast.get_docstring(node, clean=False) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    return sum(
        1
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip() and not line.strip().startswith("#") and number not in docstrings
    )


@dataclass(frozen=True)
class House:
    """What the package comes to.

    Attributes:
        lines: Lines of code of each room.
        files: Files of each room.
        options: Own options of what users configure.
        imports: How many modules of the package each module imports.
        attributes: How many attributes each class sets on itself.
    """

    lines: Mapping[str, int]
    files: Mapping[str, int]
    options: Mapping[str, int]
    imports: Mapping[str, int]
    attributes: Mapping[str, int]

    @classmethod
    def of(cls, package: Path, options: Mapping[str, int]) -> House:
        """Count a package's folder."""
        lines: dict[str, int] = defaultdict(int)
        files: dict[str, int] = defaultdict(int)
        imports, attributes = {}, {}
        for file in sorted(package.rglob("*.py")):
            text, name = file.read_text(encoding="utf-8"), file.relative_to(package)
            room = name.parts[0] if len(name.parts) > 1 else "top"
            room = TOGETHER.get(room, room)
            tree = ast.parse(text)
            lines[room] += lines_of_code(text, tree)
            files[room] += 1
            imports[str(name)] = len(set(_imported(tree, package.name)))
            attributes.update({f"{name}:{of}": count for of, count in _attributes(tree)})
        return cls(lines, files, options, imports, attributes)

    @property
    def figures(self) -> dict[str, dict[str, int]]:
        """What may not grow, as ``house.toml`` keeps it."""
        return {"lines": dict(self.lines), "files": dict(self.files), "options": dict(self.options)}


def _imported(tree: ast.Module, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == package)


def _attributes(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield (
                node.name,
                len(
                    {
                        part.attr
                        for part in ast.walk(node)
                        if isinstance(part, ast.Attribute)
                        and isinstance(part.ctx, ast.Store)
                        and isinstance(part.value, ast.Name)
                        and part.value.id == "self"
                    }
                ),
            )


def own_options() -> dict[str, int]:
    """Options of strategies that DDPStrategy does not have, of the data module, and of the coordinator's command."""
    from lightning.pytorch.strategies import DDPStrategy

    from lightning_bytescheduler import ByteSchedulerStrategy, DiLoCoStrategy, SliceDataModule
    from lightning_bytescheduler.coordinator.command import add_arguments

    known = {*inspect.signature(DDPStrategy).parameters, "args", "kwargs"}
    command = argparse.ArgumentParser(add_help=False)
    add_arguments(command)
    counted = {
        of.__name__: len(inspect.signature(of).parameters.keys() - known)
        for of in (ByteSchedulerStrategy, DiLoCoStrategy, SliceDataModule)
    }
    return {**counted, "coordinator": len(command._actions)}


def grown(now: Mapping[str, Mapping[str, int]], last: Mapping[str, Mapping[str, int]]) -> list[str]:
    """What is larger than it was last, in words."""
    return [
        f"{name} has {count} {kind}, and had {last[kind].get(name, 0)}"
        for kind, counts in now.items()
        for name, count in sorted(counts.items())
        if count > last[kind].get(name, 0)
    ]


def _read(text: str) -> dict[str, dict[str, int]]:
    """What ``_written`` wrote: tables of whole numbers, as Python 3.10 has no reader of TOML."""
    tables: dict[str, dict[str, int]] = {}
    for line in text.splitlines():
        if found := re.fullmatch(r"\[([\w.]+)\]", line):
            table = tables.setdefault(found[1], {})
        elif found := re.fullmatch(r"(\w+) = (\d+)", line):
            table[found[1]] = int(found[2])
    return tables


def _written(tables: Mapping[str, Mapping[str, int]]) -> str:
    head = "# Written by `python -m tests.house --write`; the budget is written by hand.\n"
    return head + "".join(
        f"\n[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in sorted(table.items()))
        for name, table in tables.items()
    )


def _report(house: House, budget: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    yield f"{'room':12}{'lines':>8}{'budget':>8}{'files':>8}{'budget':>8}"
    for room in sorted(house.lines, key=lambda room: -house.lines[room]):
        wanted = budget["lines"].get(room, 0), budget["files"].get(room, 0)
        yield f"{room:12}{house.lines[room]:8}{wanted[0]:8}{house.files[room]:8}{wanted[1]:8}"
    lines, files = sum(house.lines.values()), sum(house.files.values())
    yield f"{'all':12}{lines:8}{budget['all']['lines']:8}{files:8}{budget['all']['files']:8}"
    yield ""
    for name, count in house.options.items():
        yield f"{count:4} own options of {name} (budget {budget['options'].get(name, 0)})"
    for what, counts in (("imports of", house.imports), ("attributes of", house.attributes)):
        yield ""
        for name in sorted(counts, key=lambda name: -counts[name])[:SHOWN]:
            yield f"{counts[name]:4} {what} {name}"


def main(argv: list[str] | None = None) -> int:
    """Print the figures; 1 where something grew."""
    parser = argparse.ArgumentParser(prog="python -m tests.house", description=__doc__)
    parser.add_argument("--write", action="store_true", help="note the figures in house.toml, where nothing grew")
    parser.add_argument("--allow-growth", action="store_true", help="with --write: even where something grew")
    chosen = parser.parse_args(argv)
    kept = _read(FIGURES.read_text(encoding="utf-8"))
    budget = {name.removeprefix("budget."): table for name, table in kept.items() if name.startswith("budget.")}
    house = House.of(PACKAGE, own_options())
    print("\n".join(_report(house, budget)))
    larger = grown(house.figures, kept)
    if larger and not chosen.allow_growth:
        print("", *larger, sep="\n")
        print("A feature enters when one of its size leaves: make room for it in the same room.")
        return 1
    if chosen.write:
        tables = {**{name: table for name, table in kept.items() if name.startswith("budget.")}, **house.figures}
        FIGURES.write_text(_written(tables), encoding="utf-8")
    elif house.figures != {kind: kept[kind] for kind in house.figures}:
        print("", "Smaller than house.toml says: note it with --write.", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
