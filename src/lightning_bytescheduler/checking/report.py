"""What a check found, in words and as JSON, to attach to a report of a bug."""

from __future__ import annotations

import contextlib
import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning_bytescheduler.checking.procedure import Findings
from lightning_bytescheduler.checking.runs import RunResult

__all__ = ["CheckReport", "hide_secrets"]

_WARM_UP = 5
_NAMES_SHOWN = 3
_TOO_NOISY = 0.2
_EXIT_CODES = {"identical": 0, "rounding": 0, "different": 1, "fails": 1, "not reproducible": 2, "unchecked": 2}
_PARTS = ("difference", "first", "cause", "rounding")  # of findings, with names for their parts
_SECRET_WORDS = ("key", "token", "secret", "passw", "credential", "auth")


@dataclass(kw_only=True)
class CheckReport:
    """The answer of :func:`lightning_bytescheduler.check`; print it, or save it.

    Attributes:
        findings: What was found.
        command: What was checked.
        steps: How many optimizer steps were asked for.
        limits: What was not looked at, in words.
    """

    findings: Findings
    command: str
    steps: int
    limits: tuple[str, ...] = field(
        default=(
            "Only the first call of Trainer.fit was checked; what follows it was not run.",
            "Checkpoints went to a temporary folder, loggers were replaced, validation took at most 2 batches.",
            "Step times are those of deterministic algorithms, without cudnn.benchmark: on a GPU yours may be shorter.",
        )
    )

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
            if run.whole and run.spec.timed:
                typical = [_median_ms(record.seconds) for record in run.ranks if record.seconds]
                if typical:
                    times["bytescheduler" if run.spec.scheduled else "ddp"].append(max(typical))
        return times

    @property
    def speedup(self) -> float | None:
        """Step time of ``ddp`` over that of ``bytescheduler``; ``None`` where not both were timed."""
        times = self.step_ms
        if not times["ddp"] or not times["bytescheduler"]:
            return None
        return statistics.mean(times["ddp"]) / statistics.mean(times["bytescheduler"])

    def text(self) -> str:
        """All of it, in a few lines."""
        return "\n".join([self.headline(), *(f"  {line}" for line in self._lines())])

    def headline(self) -> str:
        """The answer in one line."""
        found = self.findings
        if found.verdict == "identical":
            return f"identical{self._speed()}"
        if found.verdict == "rounding" and found.rounding is not None:
            where = f" in {found.rounding.tensor!r}" if found.rounding.tensor else ""
            return f"equal to rounding (largest relative difference {found.rounding.largest:.1e}{where}){self._speed()}"
        if found.verdict == "different":
            return f"different{self._where()}"
        if found.verdict == "fails":
            return f"trains under ddp, but fails under bytescheduler: {found.reason}"
        if found.verdict == "not reproducible":
            return f"could not check: the script is not reproducible under ddp itself{self._where()}"
        return f"could not check: {found.reason}"

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
        found = self.findings
        if found.difference is not None and found.difference.initial:
            return f": weights differ before the first step, first tensor {found.difference.initial[0]!r}"
        if found.first is not None:
            tensor = f", first tensor {found.first.tensors[0]!r}" if found.first.tensors else ""
            return f" from step {found.first.step} on{tensor}"
        if found.difference is not None and found.difference.trained_alike and found.difference.metrics:
            return f" in what is logged: {_some(found.difference.metrics)}; weights are identical"
        return ""

    def _lines(self) -> list[str]:
        found, lines = self.findings, []
        whole = [run for run in found.runs if run.whole]
        if whole:
            ranks = whole[0].first.world_size
            lines.append(f"{whole[0].first.steps} steps of `{self.command}` on {ranks} ranks")
            if whole[0].first.steps < self.steps:
                lines.append(f"{self.steps} steps were asked for; the fit ended before")
        lines += self._what_is_equal(whole)
        lines += self._what_differs()
        if self.verdict == "not reproducible":
            lines.append("several threads may add up in another order each time: OMP_NUM_THREADS=1 may help")
        times = self.step_ms
        if times["ddp"]:
            shown = [f"{name} {' and '.join(f'{t:.1f}' for t in each)} ms" for name, each in times.items() if each]
            lines.append(f"a step, median of each run: {', '.join(shown)} (on this machine and link)")
        configured = [run.first for run in whole if run.spec.strategy == "configured"]
        if configured:
            if configured[-1].as_ddp:
                lines.append("bytescheduler took steps as DDP takes them at the end, as little could be hidden here")
            lines += [f"bytescheduler's plan: {line.strip()}" for line in configured[-1].plan.splitlines()[1:-1]]
        if found.changing_metrics:
            lines.append(f"not compared, as they differ between two runs of ddp: {_some(found.changing_metrics)}")
        if whole:
            lines += self.limits
        return lines

    def _what_is_equal(self, whole: Sequence[RunResult]) -> list[str]:
        if self.verdict != "identical":
            return []
        first = whole[0].first
        counts = {
            "weights and buffers": len(first.weights),
            "parts of the optimizers' state": len(first.optimizer),
            "losses on each rank": len(first.losses),
            "logged values": len(first.metrics) - len(self.findings.changing_metrics),
        }
        return [f"the same to the last bit: {', '.join(f'{count} {name}' for name, count in counts.items() if count)}"]

    def _what_differs(self) -> list[str]:
        found, lines = self.findings, []
        first, difference = found.first, found.difference
        if found.rounding is not None:
            lines.append(
                f"measured against ddp with gradients changed by a rounding error in each step: "
                f"{found.rounding.tensor!r} differs by {found.rounding.largest:.1e} of its norm, where "
                f"{found.rounding.allowed:.1e} is rounding"
            )
        if found.verdict == "rounding":
            return lines
        if first is not None and first.losses is not None:
            lines.append(
                f"step {first.step}: the loss on rank {first.rank} is {first.losses[1]:.9g} instead of "
                f"{first.losses[0]:.9g}"
            )
        if first is not None and first.tensors:
            lines.append(f"after step {first.step}, {len(first.tensors)} tensors differ: {_some(first.tensors)}")
        if found.cause is not None:
            one = len(found.cause.parameters) == 1
            lines.append(
                f"{_some(found.cause.parameters)} {'is' if one else 'or some of these are'} read before the update of "
                f"the last step has landed, by code whose reads cannot be seen: with {'it' if one else 'them'} not "
                "deferred, the training is ddp's"
            )
        elif found.verdict == "different" and found.again is False:
            lines.append(
                "run again, both were the same: the difference depends on timing, as where another thread or process "
                "reads weights"
            )
        elif found.verdict == "different" and first is not None and found.rounding is None:
            lines.append(
                "the difference stays where no update is deferred, so that no unseen read of a weight explains it"
            )
        if difference is not None:
            lines += difference.other
            at_end = {
                "weights": difference.weights,
                "parts of the optimizer state": difference.optimizer,
                "logged values": difference.metrics,
            }
            shown = [f"{len(names)} {what} ({_some(names)})" for what, names in at_end.items() if names]
            if shown:
                lines.append(f"different at the end: {'; '.join(shown)}")
        if found.variant == "strict" and found.verdict == "different":
            lines.append(
                "seen with each tensor behind a gate of its own; with larger buckets a neighbour's touch may hide it"
            )
        return lines

    # ------------------------------------------------------------------ to a file

    def as_dict(self) -> dict[str, Any]:
        """Everything a report of a bug needs, and nothing of the environment."""
        found = {field.name: getattr(self.findings, field.name) for field in fields(self.findings)}
        return {
            "text": self.text(),
            "exit_code": self.exit_code,
            "command": self.command,
            "steps": self.steps,
            "versions": _versions(),
            "speedup": self.speedup,
            "step_ms": self.step_ms,
            **{name: asdict(value) if value and name in _PARTS else value for name, value in found.items()},
            "runs": [_run(run) for run in self.findings.runs],
        }

    def save(self, path: str | Path) -> None:
        """Write :meth:`as_dict` to ``path``, as JSON."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=2, default=str) + "\n")

    def __str__(self) -> str:
        return self.text()


def _median_ms(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.median(seconds[_WARM_UP:] or seconds)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_NAMES_SHOWN]))
    more = len(names) - _NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _run(run: RunResult) -> dict[str, Any]:
    result = {"how": asdict(run.spec), "seconds": run.seconds, "error": run.error, "refused": run.refused}
    if run.whole:
        shown = ("strategy", "world_size", "options", "plan", "steps")
        result.update({name: getattr(run.first, name) for name in shown})
        result["step_ms"] = [_median_ms(record.seconds) for record in run.ranks if record.seconds]
        result["losses"] = [[float.fromhex(loss) for loss in record.losses] for record in run.ranks]
    return result


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    ours = ("lightning-bytescheduler", "torch", "lightning", "torchmetrics", "numpy", "transformers", "peft", "timm")
    for name in ours:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def hide_secrets(arguments: Sequence[str]) -> str:
    """A command's text, without the values of options that look like secrets."""
    shown: list[str] = []
    hide_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        secret = name.startswith("-") and any(word in name.lower() for word in _SECRET_WORDS)
        if hide_next and not argument.startswith("-"):
            shown.append("...")
        elif secret and equals:
            shown.append(f"{name}=...")
        else:
            shown.append(argument)
        hide_next = secret and not equals
    return " ".join(shown)
