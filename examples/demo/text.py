"""Real text without a download: the Python standard library's own source, as windows of characters."""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

# One file in ten is held out.
_VALIDATION_SHARE = 10
# Not the library itself (installed packages, tests), or not programs (tables of characters, prose).
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)
_NEEDED_CHARACTERS = 1_000_000


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive, non-overlapping windows of a text: each item is ``length`` characters and their
    successors.

    Args:
        text: One code per character, uint8, shape ``(characters,)``.
        length: Characters per window.
    """

    def __init__(self, text: Tensor, length: int) -> None:
        self._text = text
        self._length = length

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self._length
        window = self._text[start : start + self._length + 1].long()
        return window[:-1], window[1:]


def training_and_validation_text() -> tuple[Tensor, Tensor]:
    """Reads the standard library's source, split by file; the same on every rank of one installation.

    Returns:
        Training and validation text, one ASCII code per character, uint8.

    Raises:
        RuntimeError: If this Python keeps too little of its library as source files.
    """
    training, validation = bytearray(), bytearray()
    folder = Path(sysconfig.get_path("stdlib"))
    for name, source in _sources(folder):
        # By a checksum of the name, so that a file's side does not depend on which others are installed.
        held_out = zlib.crc32(name.encode()) % _VALIDATION_SHARE == 0
        (validation if held_out else training).extend(source)
    if len(training) < _NEEDED_CHARACTERS or not validation:
        raise RuntimeError(
            f"{folder} holds only {len(training)} characters of Python source to train on, and the demo "
            f"needs {_NEEDED_CHARACTERS}. Run it with a Python that has its standard library as .py files."
        )
    return torch.frombuffer(training, dtype=torch.uint8), torch.frombuffer(validation, dtype=torch.uint8)


def _sources(folder: Path) -> Iterator[tuple[str, bytes]]:
    """The names, relative to ``folder``, and ASCII codes of its Python files, in the order of the names."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    for name in sorted(files):
        if _SKIPPED_FOLDERS.isdisjoint(Path(name).parts):
            source = files[name].read_text(encoding="utf-8", errors="replace")
            # ASCII but for rare names and quotations, whose characters all become question marks.
            yield name, source.encode("ascii", errors="replace")
