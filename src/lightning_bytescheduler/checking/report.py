"""What a check found, in words."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from lightning_bytescheduler.__about__ import __version__
from lightning_bytescheduler.checking.procedure import Findings
from lightning_bytescheduler.checking.runs import RunResult

__all__ = ["CheckReport"]

_WARM_UP = 5
_NAMES_SHOWN = 3
_TOO_NOISY = 0.2
_EXIT_CODES = {"identical": 0, "rounding": 0, "different": 1, "fails": 1, "not reproducible": 2, "unchecked": 2}
_LIMITS = (
    "Only the first call of Trainer.fit was checked; what follows it was not run.",
    "Checkpoints went to a temporary folder, loggers were replaced, validation took at most 2 batches.",
    "Step times are those of deterministic algorithms, without cudnn.benchmark: on a GPU yours may be shorter.",
)


@dataclass(kw_only=True)
class CheckReport:
    """The answer of :func:`lightning_bytescheduler.check`; print it.

    Attributes:
        findings: What was found.
        steps: How many optimizer steps were asked for.
    """

    findings: Findings
    steps: int

    @property
    def verdict(self) -> str:
        """``"identical"``, ``"rounding"``, ``"different"``, ``"fails"``, ``"not reproducible"`` or ``"unchecked"``."""
        return self.findings.verdict

    @property
    def equal(self) -> bool:
        """Whether both strategies trained alike, to the last bit or to rounding."""
        return self.exit_code == 0

    @property
    def exit_code(self) -> int:
        """0 if both trained alike, 1 if not, 2 if that could not be checked."""
        return _EXIT_CODES[self.verdict]

    @property
    def step_ms(self) -> dict[str, list[float]]:
        """Median step time of each timed run, in milliseconds, by ``ddp`` and ``bytescheduler``.

        Timed runs take deterministic algorithms, and no ``cudnn.benchmark``.
        """
        times: dict[str, list[float]] = {"ddp": [], "bytescheduler": []}
        for run in self.findings.runs:
            typical = [_median_ms(record.seconds) for record in run.ranks if record.seconds]
            if typical and run.spec.timed:
                times["bytescheduler" if run.spec.scheduled else "ddp"].append(max(typical))
        return times

    @property
    def speedup(self) -> float | None:
        """Step time of ``ddp`` over that of ``bytescheduler``; ``None`` where not both were timed."""
        times = self.step_ms
        if not all(times.values()):
            return None
        return statistics.mean(times["ddp"]) / statistics.mean(times["bytescheduler"])

    def text(self) -> str:
        """All of it, in a few lines."""
        return "\n".join([self.headline(), *(f"  {line}" for line in self._lines())])

    def headline(self) -> str:
        """The answer in one line."""
        found = self.findings
        return {
            "identical": f"identical{self._speed()}",
            "rounding": f"equal to rounding{self._speed()}",
            "different": f"different{self._where()}",
            "fails": f"trains under ddp, but fails under bytescheduler: {found.reason}",
            "not reproducible": f"could not check: the script is not reproducible under ddp itself{self._where()}",
            "unchecked": f"could not check: {found.reason}",
        }[found.verdict]

    def _speed(self) -> str:
        speedup = self.speedup
        if speedup is None:
            return ""
        ddp = self.step_ms["ddp"]
        noise = max(ddp) / min(ddp) - 1.0
        if noise > _TOO_NOISY:
            return f"; which is faster is not to be told here, as two runs of ddp differ by {noise:.0%}"
        if abs(speedup - 1.0) <= max(noise, 0.01):
            return f", as fast ({speedup:.2f}x, where two runs of ddp differ by {noise:.0%})"
        return f", {speedup:.2f}x faster" if speedup > 1.0 else f", {1.0 / speedup:.2f}x slower"

    def _where(self) -> str:
        first, difference = self.findings.first, self.findings.difference
        if difference is not None and difference.initial:
            return f": weights differ before the first step, first tensor {difference.initial[0]!r}"
        if first is not None:
            tensor = f", first tensor {first.tensors[0]!r}" if first.tensors else ""
            return f" from step {first.step} on{tensor}"
        if difference is not None and difference.trained_alike and difference.metrics:
            return f" in what is logged: {_some(difference.metrics)}; weights are identical"
        return ""

    def _lines(self) -> Iterator[str]:
        found = self.findings
        whole = [run for run in found.runs if run.whole]
        if not whole:
            return
        first, times = whole[0].first, self.step_ms
        yield f"{first.steps} steps on {first.world_size} ranks"
        if first.steps < self.steps:
            yield f"{self.steps} steps were asked for; the fit ended before"
        yield from self._what_is_equal(whole[0])
        yield from self._what_differs()
        if self.verdict == "not reproducible":
            yield "several threads may add up in another order each time: OMP_NUM_THREADS=1 may help"
        shown = [f"{name} {' and '.join(f'{t:.1f}' for t in each)} ms" for name, each in times.items() if each]
        if shown:
            yield f"a step, median of each run: {', '.join(shown)} (on this machine and link)"
        configured = [run.first for run in whole if run.spec.strategy == "configured"]
        if configured:
            if configured[-1].as_ddp:
                yield "bytescheduler took steps as DDP takes them at the end, as little could be hidden here"
            yield from (f"bytescheduler's plan: {line.strip()}" for line in configured[-1].plan.splitlines()[1:-1])
        if found.changing_metrics:
            yield f"not compared, as they differ between two runs of ddp: {_some(found.changing_metrics)}"
        yield from _LIMITS
        yield f"lightning-bytescheduler {__version__}, torch {torch.__version__}, Python {platform.python_version()}"

    def _what_is_equal(self, run: RunResult) -> Iterator[str]:
        first = run.first
        counts = {
            "weights and buffers": len(first.weights),
            "parts of the optimizers' state": len(first.optimizer),
            "losses on each rank": len(first.losses),
            "logged values": len(first.metrics) - len(self.findings.changing_metrics),
        }
        same = f"the same to the last bit: {', '.join(f'{count} {name}' for name, count in counts.items() if count)}"
        if self.verdict == "identical":
            yield same
        if self.verdict == "rounding":
            yield "sums are formed in another order; the first losses are within 1% of ddp's, and the same was trained"
            yield f"with and without updates that cross the step boundary, {same}"

    def _what_differs(self) -> Iterator[str]:
        found = self.findings
        first, difference = found.first, found.difference
        if first is not None and first.losses is not None:
            yield (
                f"step {first.step}: the loss on rank {first.rank} is {first.losses[1]:.9g} instead of "
                f"{first.losses[0]:.9g}"
            )
        if first is not None and first.tensors:
            yield f"after step {first.step}, {len(first.tensors)} tensors differ: {_some(first.tensors)}"
        if found.again is False:
            yield (
                "run again, both were the same: the difference depends on timing, as where another thread or process "
                "reads weights"
            )
        elif found.deferral:
            yield (
                "with no update deferred nothing differs: a weight is read before the update of the last step has "
                "landed, by code whose reads cannot be seen. With cross_barrier=False it is read in time"
            )
        elif found.deferral is False:
            yield "the difference stays where no update is deferred, so that no unseen read of a weight explains it"
        elif found.again:
            yield (
                "with every update taken in the step the result is another: most likely a weight is read before the "
                "update of the last step has landed, by code whose reads cannot be seen. Try cross_barrier=False"
            )
        if difference is not None:
            yield from difference.other
            at_end = {
                "weights": difference.weights,
                "parts of the optimizer state": difference.optimizer,
                "logged values": difference.metrics,
            }
            shown = [f"{len(names)} {what} ({_some(names)})" for what, names in at_end.items() if names]
            if shown:
                yield f"different at the end: {'; '.join(shown)}"
        if found.variant == "strict" and found.verdict == "different":
            yield "seen with each tensor behind a gate of its own; with larger buckets a neighbour's touch may hide it"

    def __str__(self) -> str:
        return self.text()


def _median_ms(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.median(seconds[_WARM_UP:] or seconds)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_NAMES_SHOWN]))
    more = len(names) - _NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
