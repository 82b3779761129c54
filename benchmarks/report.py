"""Tables, JSON and pictures of what was measured."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import Measured
from lightning_bytescheduler import __version__

__all__ = ["Cell", "draw", "prediction_errors", "save", "show"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One configuration with its contenders.

    Attributes:
        name: Of the configuration.
        ratio: Communication time over compute time; ``None`` where it was not set.
        network: What was trained.
        workers: Number of ranks.
        communication_seconds: At the link's limit; 0 on loopback.
        bounds: Shortest possible steps in seconds, from the compute time as measured; empty for real compute.
        measured: By contender.
        predicted: Seconds of a step by the simulator, by contender; empty for real compute.
    """

    name: str
    ratio: float | None
    network: str
    workers: int
    communication_seconds: float
    bounds: dict[str, float]
    measured: dict[str, Measured]
    predicted: dict[str, float] = field(default_factory=dict)

    def prediction_error(self, contender: str) -> float | None:
        """By how much the simulator was off, as a share of the measured step."""
        if contender not in self.predicted:
            return None
        return self.predicted[contender] / self.measured[contender].median - 1.0

    def bound_of(self, contender: str) -> float | None:
        """The bound that holds for a contender."""
        if contender.endswith("on the wire"):
            return None  # fewer bytes
        return self.bounds.get("any order")

    @property
    def best_ddp(self) -> str | None:
        """The name of DDP at its best bucket size; without compression and clipping."""
        names = [name for name in self.measured if name == "ddp" or name.endswith("MB buckets")]
        return min(names, key=lambda name: self.measured[name].median, default=None)


def machine() -> dict[str, Any]:
    """What results depend on."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": L.__version__,
        "lightning_bytescheduler": __version__,
    }


def show(console: Console, cell: Cell) -> None:
    """Print a configuration's table."""
    table = Table(title=cell.name, title_justify="left")
    for column in ("", "step [ms]", "× bound", "× ddp", "predicted", "MB sent"):
        table.add_column(column, justify="left" if not column else "right")
    reference = cell.measured.get("ddp")
    for name, measured in cell.measured.items():
        bound, error = cell.bound_of(name), cell.prediction_error(name)
        table.add_row(
            f"{name} (best of ddp)" if name == cell.best_ddp else name,
            f"{1e3 * measured.median:.1f}",
            "" if bound is None else f"{measured.median / bound:.3f}",
            "" if reference is None else f"{measured.median / reference.median:.3f}",
            "" if error is None else f"{100 * error:+.1f}%",
            f"{measured.bytes_per_step / 1e6:.1f}" if measured.bytes_per_step else "",
        )
    console.print(table)
    for name, measured in cell.measured.items():
        if any(measured.compressed_share):
            shares = ", ".join(f"{share:.0%}" for share in measured.compressed_share)
            console.print(f"{name}: of the gradients' bytes, compressed {shares}")
        if measured.account:
            spent = ", ".join(f"{what} {1e3 * seconds:.1f}" for what, seconds in measured.account.items())
            console.print(f"{name}: of a step's milliseconds, {spent}")


def prediction_errors(cells: Sequence[Cell]) -> list[float]:
    """By how much the simulator was off, over all configurations and contenders; without sign."""
    errors = (cell.prediction_error(name) for cell in cells for name in cell.measured)
    return [abs(error) for error in errors if error is not None]


def save(path: Path, cells: Sequence[Cell]) -> None:
    """Write everything as JSON: each step of each contender, so that others can take other figures from it."""
    content = {"machine": machine(), "cells": [asdict(cell) for cell in cells]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, default=float) + "\n", encoding="utf-8")


def draw(path: Path, cells: Sequence[Cell]) -> None:
    """Draw step times as multiples of the bound, and speed-ups over DDP, over the ratio."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    bounded = [cell for cell in cells if cell.bounds and cell.ratio is not None]
    if not bounded:
        return
    networks = list(dict.fromkeys(cell.network for cell in bounded))
    figure, axes = pyplot.subplots(2, len(networks), figsize=(3.6 * len(networks), 6.4), squeeze=False, sharey="row")
    lines = (
        ("ddp", "ddp", "tab:gray"),
        ("best", "ddp, best buckets", "tab:blue"),
        ("bytescheduler, overlapped", "bytescheduler", "tab:orange"),
    )
    for column, network in enumerate(networks):
        for workers, style in ((2, "--"), (4, "-")):
            rows = sorted(
                (c for c in bounded if c.network == network and c.workers == workers), key=lambda c: c.ratio or 0.0
            )
            if not rows:
                continue
            ratios = [cell.ratio for cell in rows]
            for key, label, colour in lines:
                names = [cell.best_ddp if key == "best" else key for cell in rows]
                if not all(name in cell.measured for name, cell in zip(names, rows, strict=True)):
                    continue
                medians = [cell.measured[name or ""].median for name, cell in zip(names, rows, strict=True)]
                over = [m / cell.bounds["any order"] for m, cell in zip(medians, rows, strict=True)]
                if not all("ddp" in cell.measured for cell in rows):
                    continue
                faster = [cell.measured["ddp"].median / m for m, cell in zip(medians, rows, strict=True)]
                options: dict[str, Any] = {"color": colour, "linestyle": style, "marker": "o", "markersize": 4}
                axes[0][column].plot(ratios, over, label=f"{label}, {workers} workers", **options)
                axes[1][column].plot(ratios, faster, **options)
        axes[0][column].set_title(network)
        for row in (0, 1):
            axes[row][column].set_xscale("log", base=2)
            axes[row][column].grid(alpha=0.3)
            axes[row][column].axhline(1.0, color="black", linewidth=0.8)
        axes[1][column].set_xlabel("communication / compute")
    axes[0][0].set_ylabel("step time / bound")
    axes[1][0].set_ylabel("speed-up over ddp")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=3, frameon=False)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
