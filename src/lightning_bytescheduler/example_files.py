"""``lightning-bytescheduler examples``: the examples of an installed package, as files to run and to change."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

from lightning_bytescheduler.exceptions import OptionError

__all__ = ["add_arguments", "tables"]

_FOLDER = "examples"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument(
        "--to",
        metavar="FOLDER",
        default=".",
        help=f"where the folder '{_FOLDER}' is made (default: the current folder)",
    )


def tables(options: argparse.Namespace) -> list[tuple[str, list[tuple[str, str]]]]:
    """Copy the examples, and say of each what it shows.

    Args:
        options: Of the command line.

    Returns:
        The table's title, and its rows: the command that runs an example, and what it shows.

    Raises:
        OptionError: If there is no such folder, or a file there has been changed. Nothing is copied then.
    """
    to = Path(options.to)
    if not to.is_dir():
        raise OptionError("--to", options.to, "a folder that is there")
    source = _source()
    copies = {to / _FOLDER / path.relative_to(source): path.read_bytes() for path in _files(source)}
    for target, content in copies.items():
        if target.exists() and target.read_bytes() != content:
            raise OptionError("--to", options.to, f"a folder without {target}, which has been changed there")
    for target, content in copies.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    rows = [(f"python -m {_FOLDER}.{path.stem}", _shows(path)) for path in copies if path.parent.name == _FOLDER]
    return [(f"wrote {to / _FOLDER}; run them from {to.resolve()}", rows)]


def _source() -> Path:
    here = Path(__file__).parent
    installed = here / _FOLDER
    return installed if installed.is_dir() else here.parents[1] / _FOLDER  # of a checkout


def _files(source: Path) -> Iterator[Path]:
    yield from sorted(source.glob("*.py"))
    # What the examples share with the demo, which needs a checkout itself.
    yield from (source / "demo" / f"{name}.py" for name in ("__init__", "model", "size", "text"))


def _shows(path: Path) -> str:
    lines = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()
    return lines[0] if lines else ""
