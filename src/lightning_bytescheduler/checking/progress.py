"""Says what a check is doing: a live line with rich in a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

__all__ = ["Progress"]


class Progress:
    """One line per run.

    Args:
        stream: Where to; stderr by default.
        quiet: Say nothing.
    """

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._quiet = quiet
        self._count = 0

    @contextmanager
    def run(self, what: str, steps: int) -> Iterator[Callable[[int], None]]:
        """Around a run; yields what to call with the number of steps that were taken.

        Args:
            what: The run.
            steps: How many it will take.
        """
        self._count += 1
        label = f"run {self._count}, {what}"
        began = time.monotonic()
        with self._live(label, steps) as tell:
            yield tell
        self._line(f"{label}: {time.monotonic() - began:.0f} s")

    @contextmanager
    def _live(self, label: str, steps: int) -> Iterator[Callable[[int], None]]:
        if self._quiet or not self._stream.isatty():
            self._line(f"{label} ...")
            yield lambda _: None
            return
        try:
            from rich.console import Console
        except ImportError:
            self._line(f"{label} ...")
            yield lambda _: None
            return
        console = Console(file=self._stream)
        with console.status(f"{label}: starting") as status:
            yield lambda taken: status.update(f"{label}: step {min(taken, steps)} of {steps}")

    def _line(self, text: str) -> None:
        if not self._quiet:
            print(text, file=self._stream, flush=True)
