"""The demo's progress bars: one over all of it, one over the steps of the training that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class DemoProgress:
    """Shows how far the demo is, from ``with`` to its end.

    Args:
        console: Where to show it.
    """

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<16}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[loss]}"),
            console=console,
        )
        self._done = 0
        self._whole = self._progress.add_task("demo", total=None, loss="")

    def __enter__(self) -> DemoProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def expect(self, steps: int) -> None:
        """Tells how many steps will follow; until then the length of the whole demo is unknown."""
        self._progress.update(self._whole, total=self._done + steps)

    @contextmanager
    def training(self, title: str, steps: int) -> Iterator[Callable[[int, float], None]]:
        """Adds the bar of one training.

        Args:
            title: What the bar is called.
            steps: Steps of the training.

        Yields:
            To be called with the steps done and the loss.
        """
        task = self._progress.add_task(title, total=steps, loss="starting")
        done = 0

        def on_step(step: int, loss: float) -> None:
            nonlocal done
            self._done += step - done
            self._progress.update(self._whole, completed=self._done)
            self._progress.update(task, completed=step, loss=f"loss {loss:.3f}")
            done = step

        yield on_step
