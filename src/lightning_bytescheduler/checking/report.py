"""Which runs a check makes, what follows from their results, and the words for it.

This module knows neither Lightning nor processes: the caller passes a function that makes a run.

The runs are ``ddp``, ``bytescheduler`` as configured, ``ddp`` again (is it reproducible?), and ``bytescheduler`` at
its strictest. If all of them are the same, no other run is needed.

With more than two ranks, or norms, sums may be formed in another order than ``ddp``'s. Then bits are compared with
those of a run that differs in one thing: no update is deferred. The comparison with ``ddp`` is limited to results that
do not depend on the order of sums.

Runs are deterministic, and each records digests of all weights after each step, which show the first step and tensor
that differ. If the difference is gone when no update is deferred, then a weight was read unseen.
"""

from __future__ import annotations

import itertools
import math
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Literal, NoReturn, TypeVar

import msgspec

from lightning_bytescheduler.checks import some_of
from lightning_bytescheduler.registration import __version__

_ROUNDING = 0.01
"""Relative difference of two losses. Rounding does not drive them so far apart within a few steps."""

_SOON = 3  # steps
_EXIT_CODES = {"identical": 0, "rounding": 0, "different": 1, "fails": 1, "not reproducible": 2, "unchecked": 2}
_LIMITS = (
    "Only the first call of Trainer.fit was checked; what follows it was not run.",
    "Checkpoints went to a temporary folder, loggers were replaced, validation took at most 2 batches.",
)
_READ_EARLY = (
    "with no update deferred {}: a weight is read before the update of the last step has landed, by code whose reads "
    "cannot be seen, such as another thread's. With cross_barrier=False it is read in time"
)
_READS_DO_NOT_MATTER = (
    "the difference stays when no update is deferred, so an unseen read of a weight does not explain it"
)

_Kept = TypeVar("_Kept")
StrategyName = Literal["ddp", "configured", "strict", "undeferred"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """Description of a run.

    Attributes:
        strategy: ``"ddp"``; ``"configured"``, ``bytescheduler`` with the script's options or its defaults;
            ``"strict"``, always overlapped, with a gate for each tensor and sizes that do not follow the link;
            ``"undeferred"``, the same with every update in the step itself, so that no read comes before it.
        steps: Optimizer steps after which the fit is stopped.
        devices: Replaces the Trainer's ``devices``, if given.
    """

    strategy: StrategyName
    steps: int
    devices: int | None = None


@dataclass(kw_only=True, slots=True)
class RankRecord:
    """The record of one rank. Digests and numbers are texts: equal texts are equal bits.

    Attributes:
        rank: The rank.
        world_size: Number of ranks.
        steps: Optimizer steps that were taken.
        losses: The loss of each batch, as ``float.hex`` writes it; none if ``training_step`` returns none.
        loss_steps: For each loss, the number of optimizer steps before its forward pass.
        initial: Digests of the weights when training began, by name.
        weights: Digests of weights and buffers at the end, by name.
        optimizer: Digests of the optimizers' state and hyperparameters at the end, by name.
        metrics: Metrics at the end, and at each time they were logged, by name and time.
        trace: Digests of weights after each step.
        plan: What overlapped, in words; empty under ``ddp``.
        needs_norm: Whether updates needed the norm of all gradients.
    """

    rank: int = 0
    world_size: int = 1
    steps: int = 0
    losses: list[str] = field(default_factory=list)
    loss_steps: list[int] = field(default_factory=list)
    initial: dict[str, str] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    optimizer: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, str] = field(default_factory=dict)
    trace: dict[int, dict[str, str]] = field(default_factory=dict)
    plan: str = ""
    needs_norm: bool = False


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a run.

    Attributes:
        spec: The run's description.
        ranks: The records, by rank; empty unless all ranks wrote one.
        refused: Why the training cannot be checked, in words; empty if it can.
        error: The error with which it failed, in words; empty if it did not fail.
    """

    spec: RunSpec
    ranks: list[RankRecord] = field(default_factory=list)
    refused: str = ""
    error: str = ""

    @property
    def first(self) -> RankRecord:
        """The record of rank 0."""
        return self.ranks[0]


# In a run's folder.

PROGRESS = "progress.txt"
"""Where rank 0 writes how many steps it has taken."""

OUTPUT = "output.txt"
"""The output of a run."""

REFUSED = "refused.txt"
"""Says why the training cannot be checked."""


def keep(value: object, path: Path) -> None:
    """Write a run or a record to a file. The file is complete whenever it exists."""
    draft = path.with_suffix(".part")
    draft.write_bytes(msgspec.json.encode(value))
    draft.replace(path)


def kept(of: type[_Kept], path: Path) -> _Kept:
    """Read what :func:`keep` has written."""
    return msgspec.json.decode(path.read_bytes(), type=of)


def refuse(folder: Path, reason: str) -> NoReturn:
    """End this process, as the training cannot be checked."""
    (folder / REFUSED).write_text(reason)
    raise SystemExit(2)


def record_path(folder: Path, record: RankRecord) -> Path:
    """Return the file of a rank's record; its name tells the number of ranks."""
    return folder / f"rank{record.rank}of{record.world_size}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """What differs in any bit, by name, on any rank.

    Attributes:
        initial: Weights when training began.
        losses: Number of losses that differ.
        weights: Weights and buffers.
        optimizer: Parts of the optimizers' state.
        metrics: Logged metrics.
        other: Any other difference, in words.
    """

    initial: tuple[str, ...] = ()
    losses: int = 0
    weights: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    other: tuple[str, ...] = ()

    @property
    def trained_alike(self) -> bool:
        """Whether weights, optimizer state and losses are the same. Metrics do not count: one may be a time."""
        return not (self.initial or self.losses or self.weights or self.optimizer or self.other)


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstDifference:
    """Where two runs diverge.

    Attributes:
        step: The first optimizer step, counted from 1, whose loss or update differs.
        rank: The rank on which it was seen first.
        losses: Both losses of that step, if they differ.
        tensors: Weights that differ after that step, in the order of registration.
    """

    step: int
    rank: int
    losses: tuple[float, float] | None = None
    tensors: tuple[str, ...] = ()


def compare(expected: RunResult, actual: RunResult) -> Difference:
    """The differences of two complete runs."""
    pairs = list(zip(expected.ranks, actual.ranks, strict=False))

    def unequal(what: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(n for one, two in pairs for n in _unequal(getattr(one, what), getattr(two, what))))

    other = [f"rank {a.rank} took {b.steps} steps instead of {a.steps}" for a, b in pairs if a.steps != b.steps]
    if len(expected.ranks) != len(actual.ranks):
        other.insert(0, f"{len(expected.ranks)} ranks became {len(actual.ranks)}")
    return Difference(
        losses=sum(a != b for one, two in pairs for a, b in itertools.zip_longest(one.losses, two.losses)),
        other=tuple(other),
        **{what: unequal(what) for what in ("initial", "weights", "optimizer", "metrics")},
    )


def _unequal(one: Mapping[str, str], two: Mapping[str, str]) -> list[str]:
    return [name for name in dict.fromkeys((*one, *two)) if one.get(name) != two.get(name)]


def first_difference(expected: RunResult, actual: RunResult, *, tolerance: float = 0.0) -> FirstDifference | None:
    """Where two complete runs diverge: the first loss that differs, or the first weights.

    Args:
        expected: One of the runs.
        actual: The other run.
        tolerance: Relative difference of two losses that does not count; weights then do not, either.
    """
    found: list[FirstDifference] = []
    for one, two in zip(expected.ranks, actual.ranks, strict=False):
        for step, *texts in zip(one.loss_steps, one.losses, two.losses, strict=False):
            a, b = map(float.fromhex, texts)
            # NaN counts as equal to itself, and as different from any number.
            if texts[0] != texts[1] and not abs(a - b) <= tolerance * abs(a):
                found.append(FirstDifference(step=step + 1, rank=one.rank, losses=(a, b)))
                break
        for step in () if tolerance else sorted(one.trace.keys() & two.trace.keys()):
            if names := _unequal(one.trace[step], two.trace[step]):
                found.append(FirstDifference(step=step, rank=one.rank, tensors=tuple(names)))
                break
    first = min(found, key=lambda each: (each.step, each.losses is None), default=None)
    if first is None:
        return None
    named = (each.tensors for each in found if each.step == first.step and each.tensors)
    return replace(first, tensors=next(named, ()))


@dataclass(kw_only=True)
class CheckReport:
    """The answer of :func:`lightning_bytescheduler.check`; print it.

    Attributes:
        verdict: ``"identical"``, ``"rounding"``, ``"different"``, ``"fails"`` (only under ``bytescheduler``), ``"not
            reproducible"`` (``ddp`` itself) or ``"unchecked"``.
        reason: Why it was not checked, or what failed, in words.
        steps: The requested number of optimizer steps.
        runs: All runs that were made.
        difference: What differs.
        first: Where the runs diverge.
        variant: Strategy of the run that differs or fails, as in ``RunSpec``.
        cause: What explains the difference, or what does not, in words.
        changing_metrics: Logged metrics that differ between two runs of ``ddp``, and so are not compared.
    """

    verdict: str
    reason: str = ""
    steps: int = 0
    runs: list[RunResult] = field(default_factory=list)
    difference: Difference | None = None
    first: FirstDifference | None = None
    variant: str = ""
    cause: str = ""
    changing_metrics: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether both strategies trained the same, to the last bit or to rounding."""
        return self.exit_code == 0

    @property
    def exit_code(self) -> int:
        """0 if both trained the same, 1 if not, 2 if that could not be checked."""
        return _EXIT_CODES[self.verdict]

    def text(self) -> str:
        """The whole report, in a few lines."""
        return "\n".join([self.headline(), *(f"  {line}" for line in self._lines())])

    __str__ = text

    def headline(self) -> str:
        """The answer in one line."""
        return {
            "identical": "identical",
            "rounding": "equal to rounding",
            "different": f"different{self._where()}",
            "fails": f"trains under ddp, but fails under bytescheduler: {self.reason}",
            "not reproducible": f"could not check: the script is not reproducible under ddp itself{self._where()}",
            "unchecked": f"could not check: {self.reason}",
        }[self.verdict]

    def _where(self) -> str:
        first, difference = self.first, self.difference
        if difference is not None and difference.initial:
            return f": weights differ before the first step, first tensor {difference.initial[0]!r}"
        if first is not None:
            tensor = f", first tensor {first.tensors[0]!r}" if first.tensors else ""
            return f" from step {first.step} on{tensor}"
        if difference is not None and difference.trained_alike and difference.metrics:
            return f" in what is logged: {some_of(difference.metrics)}; weights are identical"
        return ""

    def _lines(self) -> Iterator[str]:
        whole = [run for run in self.runs if run.ranks]
        if not whole:
            return
        first = whole[0].first
        yield f"{first.steps} steps on {first.world_size} ranks"
        if first.steps < self.steps:
            yield f"{self.steps} steps were asked for; the fit ended before"
        yield from self._what_is_equal(whole[0])
        yield from self._what_differs()
        if self.verdict == "not reproducible":
            yield "several threads may add up in another order each time: OMP_NUM_THREADS=1 may help"
        for configured in [run.first for run in whole if run.spec.strategy == "configured"][-1:]:
            yield from (f"bytescheduler's plan: {line.strip()}" for line in configured.plan.splitlines()[1:-1])
        if self.changing_metrics:
            yield f"not compared, as they differ between two runs of ddp: {some_of(self.changing_metrics)}"
        yield from _LIMITS
        yield f"lightning-bytescheduler {__version__}, torch {version('torch')}, Python {platform.python_version()}"

    def _what_is_equal(self, run: RunResult) -> Iterator[str]:
        counts = {
            "weights and buffers": len(run.first.weights),
            "parts of the optimizers' state": len(run.first.optimizer),
            "losses on each rank": len(run.first.losses),
            "logged values": len(run.first.metrics) - len(self.changing_metrics),
        }
        same = f"the same to the last bit: {', '.join(f'{count} {name}' for name, count in counts.items() if count)}"
        if self.verdict == "identical":
            yield same
        if self.verdict == "rounding":
            yield "sums are formed in another order; the first losses are within 1% of ddp's; the same weights changed"
            yield f"with and without updates that cross the step boundary, {same}"

    def _what_differs(self) -> Iterator[str]:
        first, difference = self.first, self.difference
        if first is not None and first.losses is not None:
            was, instead = first.losses
            yield f"step {first.step}: the loss on rank {first.rank} is {instead:.9g} instead of {was:.9g}"
        if first is not None and first.tensors:
            yield f"after step {first.step}, {len(first.tensors)} tensors differ: {some_of(first.tensors)}"
        if self.cause:
            yield self.cause
        if difference is not None:
            yield from difference.other
            at_end = {
                "weights": difference.weights,
                "parts of the optimizer state": difference.optimizer,
                "logged values": difference.metrics,
            }
            shown = [f"{len(names)} {what} ({some_of(names)})" for what, names in at_end.items() if names]
            if shown:
                yield f"different at the end: {'; '.join(shown)}"
        if self.variant == "strict" and self.verdict == "different":
            yield "seen with each tensor behind a gate of its own; with larger buckets a neighbour's touch may hide it"


class _Ended(Exception):
    """Ends the check; its argument is the report."""


def investigate(launch: Callable[[RunSpec, str], RunResult], *, steps: int, devices: int | None = None) -> CheckReport:
    """Make the runs that are needed, and say what they show.

    Args:
        launch: Makes a run; its text says in a few words what the run is for.
        steps: Optimizer steps of each run.
        devices: Replaces the Trainer's ``devices``, if given.
    """
    runs: list[RunResult] = []

    def make(why: str, strategy: StrategyName = "ddp") -> RunResult:
        result = launch(RunSpec(strategy=strategy, steps=steps, devices=devices), why)
        runs.append(result)
        if result.ranks:
            return result
        if result.refused:
            raise _Ended(CheckReport(verdict="unchecked", reason=result.refused))
        if strategy != "ddp":
            raise _Ended(CheckReport(verdict="fails", reason=result.error, variant=strategy))
        how = "" if len(runs) == 1 else ", though not the first time"
        reason = f"The script itself fails under 'ddp'{how}: {result.error}"
        raise _Ended(CheckReport(verdict="unchecked", reason=reason))

    try:
        report = _compare_all(make)
    except _Ended as ended:
        report = ended.args[0]
    return replace(report, runs=runs, steps=steps)


def _compare_all(make: Callable[..., RunResult]) -> CheckReport:
    first = make("ddp")
    if not first.first.steps:
        return CheckReport(verdict="unchecked", reason="The script's fit ended before its first optimizer step.")
    configured = make("bytescheduler", "configured")
    second = make("ddp again")
    itself = compare(first, second)
    if not itself.trained_alike:
        return CheckReport(verdict="not reproducible", difference=itself, first=first_difference(first, second))
    strict = make("bytescheduler, at its strictest", "strict")
    if strict.first.world_size > 2 or strict.first.needs_norm:
        expected = make("the same with no update deferred", "undeferred")
        report = _compare(make, expected, strict, itself.metrics) or _rounded(first, configured, strict)
    else:
        both = (_compare(make, first, actual, itself.metrics) for actual in (configured, strict))
        report = next(filter(None, both), None) or CheckReport(verdict="identical")
    return replace(report, changing_metrics=itself.metrics)


def _compare(
    make: Callable[..., RunResult], expected: RunResult, actual: RunResult, changing: tuple[str, ...]
) -> CheckReport | None:
    """Report the difference of two runs that should be the same; ``None`` if there is none.

    A run is made with no update deferred, if that can tell something.
    """
    difference = compare(expected, actual)
    difference = replace(difference, metrics=tuple(n for n in difference.metrics if n not in changing))
    if difference.trained_alike and not difference.metrics:
        return None
    report = CheckReport(verdict="different", difference=difference, variant=actual.spec.strategy)
    if not difference.trained_alike and not difference.initial:  # else no step differs
        report.first = first_difference(expected, actual)
        if expected.spec.strategy != "ddp":
            report.cause = _READ_EARLY.format("the result changes, so most likely")
        elif compare(expected, make("with no update deferred", "undeferred")).trained_alike:
            report.cause = _READ_EARLY.format("nothing differs")
        else:
            report.cause = _READS_DO_NOT_MATTER
    return report


def _rounded(ddp: RunResult, *scheduled: RunResult) -> CheckReport:
    """Whether runs train as ``ddp`` does when sums are formed in another order."""
    for run in scheduled:
        difference, first = compare(ddp, run), first_difference(ddp, run, tolerance=_ROUNDING)
        other = (
            f"{what}: {len(one)} under ddp, {len(two)} under bytescheduler; only under one of both: {names[0]}"
            for (what, one), two in zip(_unrounded(ddp).items(), _unrounded(run).values(), strict=True)
            if (names := _unequal(one, two))
        )
        difference = replace(difference, other=(*difference.other, *other))
        if difference.initial or difference.other or (first is not None and first.step <= _SOON):
            return CheckReport(verdict="different", difference=difference, first=first, variant=run.spec.strategy)
    return CheckReport(verdict="rounding")


def _unrounded(run: RunResult) -> dict[str, dict[str, str]]:
    """Return results of a run that do not depend on the order of sums, by kind and name."""
    weights = run.first.weights
    found = {
        "weights and buffers with the same bits on all ranks": [
            name for name, bits in weights.items() if all(one.weights.get(name) == bits for one in run.ranks)
        ],
        "weights and buffers that training changed": _unequal(run.first.initial, weights),
        "losses that are numbers": [
            f"that of step {step + 1} on rank {one.rank}"
            for one in run.ranks
            for step, loss in zip(one.loss_steps, one.losses, strict=False)
            if math.isfinite(float.fromhex(loss))
        ],
    }
    return {what: dict.fromkeys(names, "") for what, names in found.items()}
