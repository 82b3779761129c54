"""Which runs to make, and what follows from what they leave behind. Pure: how a run is made is handed in.

``ddp``, ``bytescheduler`` as configured, ``ddp`` again (is it reproducible? and is one run slower than the other?), and
``bytescheduler`` at its strictest. Where both ``ddp`` runs are the same and the others are too, that is all.

Where sums are formed in another order than ``ddp``'s (more than two ranks, norms), bits are compared with those of a
run that is the same but for one thing: no update is deferred. Against ``ddp`` is held what no order of sums changes.

Runs are deterministic, so what differs is made again, traced, which shows the first step and tensor. Is the difference
gone where no update is deferred, then a weight was read unseen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from lightning_bytescheduler.checking.runs import RunResult, RunSpec, StrategyName

__all__ = ["Difference", "Findings", "FirstDifference", "Launch", "compare", "first_difference", "investigate"]

Launch = Callable[[RunSpec, str], RunResult]
"""Makes a run; the text says in a few words what it is for."""

_ROUNDING = 0.01
"""Of a loss. Whatever an optimizer makes of rounding, a few steps from the same weights do not get this far apart."""

_SOON = 3  # steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """What is not the same to the last bit, by name; on any rank.

    Attributes:
        initial: Weights when training began.
        losses: Number of losses that differ.
        weights: Weights and buffers.
        optimizer: Parts of the optimizers' state.
        metrics: Logged metrics.
        other: Anything else, in words.
    """

    initial: tuple[str, ...] = ()
    losses: int = 0
    weights: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    other: tuple[str, ...] = ()

    @property
    def trained_alike(self) -> bool:
        """Whether weights, optimizer state and losses are the same; a metric may hold a time of day."""
        return not (self.initial or self.losses or self.weights or self.optimizer or self.other)


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstDifference:
    """Where two runs part.

    Attributes:
        step: The first optimizer step, counted from 1, whose forward pass has another loss or whose update differs.
        rank: Where it was seen first.
        losses: Both losses of that step, if they differ.
        tensors: Weights that differ after that step, in the order of registration.
    """

    step: int
    rank: int
    losses: tuple[float, float] | None = None
    tensors: tuple[str, ...] = ()


def compare(expected: RunResult, actual: RunResult) -> Difference:
    """What two whole runs differ in."""
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
    """Where two whole runs part: the first loss, and with traces the first weights, that differ.

    Args:
        expected: One of them.
        actual: The other.
        tolerance: Relative difference of two losses that is none.
    """
    found: list[FirstDifference] = []
    for one, two in zip(expected.ranks, actual.ranks, strict=False):
        for step, *texts in zip(one.loss_steps, one.losses, two.losses, strict=False):
            a, b = map(float.fromhex, texts)
            # Not a number is equal to itself here, and beyond every tolerance to anything else.
            if texts[0] != texts[1] and not abs(a - b) <= tolerance * abs(a):
                found.append(FirstDifference(step=step + 1, rank=one.rank, losses=(a, b)))
                break
        for step in sorted(one.trace.keys() & two.trace.keys()):
            if names := _unequal(one.trace[step], two.trace[step]):
                found.append(FirstDifference(step=step, rank=one.rank, tensors=tuple(names)))
                break
    first = min(found, key=lambda each: (each.step, each.losses is None), default=None)
    if first is None:
        return None
    named = (each.tensors for each in found if each.step == first.step and each.tensors)
    return replace(first, tensors=next(named, ()))


@dataclass(kw_only=True)
class Findings:
    """What a check has found; :mod:`report` puts it into words.

    Attributes:
        verdict: ``"identical"``, ``"rounding"``, ``"different"``, ``"fails"`` (only under ``bytescheduler``),
            ``"not reproducible"`` (``ddp`` itself) or ``"unchecked"``.
        reason: Why it was not checked, or what failed, in words.
        runs: All that were made.
        difference: What differs.
        first: Where the runs part.
        variant: Which way of ``bytescheduler`` differs; ``"strict"`` if only that does.
        again: Whether the difference was there when both were run again; ``None`` if that was not tried.
        deferral: Whether the training is ``ddp``'s with no update deferred; ``None`` if that was not tried, as where
            a run that defers nothing is what the others are held against.
        changing_metrics: Logged metrics that differ between two runs of ``ddp``, and so are not compared.
    """

    verdict: str
    reason: str = ""
    runs: list[RunResult] = field(default_factory=list)
    difference: Difference | None = None
    first: FirstDifference | None = None
    variant: str = ""
    again: bool | None = None
    deferral: bool | None = None
    changing_metrics: tuple[str, ...] = ()


class _Ended(Exception):
    """The check is over; carries the findings."""

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings.verdict)
        self.findings = findings


def investigate(launch: Launch, *, steps: int, seed: int = 20240, devices: int | None = None) -> Findings:
    """Make the runs that are needed, and say what they show.

    Args:
        launch: Makes one.
        steps: Optimizer steps of each.
        seed: Of all random numbers.
        devices: What replaces the Trainer's ``devices``, if anything.
    """
    return _Investigation(launch, RunSpec(strategy="ddp", steps=steps, seed=seed, devices=devices)).run()


class _Investigation:
    def __init__(self, launch: Launch, ddp: RunSpec) -> None:
        self._launch = launch
        self._ddp = ddp
        self._runs: list[RunResult] = []

    def run(self) -> Findings:
        try:
            findings = self._compare_all()
        except _Ended as ended:
            findings = ended.findings
        findings.runs = self._runs
        return findings

    def _make(self, why: str, strategy: StrategyName = "ddp", *, traced: bool = False) -> RunResult:
        spec = replace(self._ddp, strategy=strategy, traced=traced)
        result = self._launch(spec, f"{why}, traced" if traced else why)
        self._runs.append(result)
        if result.whole:
            return result
        if result.refused:
            raise _Ended(Findings(verdict="unchecked", reason=result.refused))
        if spec.scheduled:
            raise _Ended(Findings(verdict="fails", reason=result.error, variant=spec.strategy))
        how = "" if len(self._runs) == 1 else ", though not the first time"
        raise _Ended(Findings(verdict="unchecked", reason=f"The script itself fails under 'ddp'{how}: {result.error}"))

    def _compare_all(self) -> Findings:
        first = self._make("ddp")
        if not first.first.steps:
            return Findings(verdict="unchecked", reason="The script's fit ended before its first optimizer step.")
        configured = self._make("bytescheduler", "configured")
        second = self._make("ddp again")
        itself = compare(first, second)
        if not itself.trained_alike:
            return Findings(verdict="not reproducible", difference=itself, first=first_difference(first, second))
        strict = self._make("bytescheduler, at its strictest", "strict")
        if strict.first.world_size > 2 or strict.first.needs_norm:
            expected = self._make("the same with no update deferred", "undeferred")
            findings = self._found(expected, strict, itself.metrics) or _rounded(first, configured, strict)
        else:
            both = (self._found(first, actual, itself.metrics) for actual in (configured, strict))
            findings = next(filter(None, both), None) or Findings(verdict="identical")
        findings.changing_metrics = itself.metrics
        return findings

    def _found(self, expected: RunResult, actual: RunResult, changing: tuple[str, ...]) -> Findings | None:
        """What differs between two runs that are to be the same, if anything does."""
        difference = compare(expected, actual)
        difference = replace(difference, metrics=tuple(n for n in difference.metrics if n not in changing))
        if difference.trained_alike and not difference.metrics:
            return None
        findings = Findings(verdict="different", difference=difference, variant=actual.spec.strategy)
        if not difference.trained_alike and not difference.initial:  # else no step does
            self._explain(findings, expected.spec.strategy, actual.spec.strategy)
        return findings

    def _explain(self, findings: Findings, reference: StrategyName, variant: StrategyName) -> None:
        """Run both again, traced, and where that tells something with no update deferred."""
        expected = self._make("the first of both", reference, traced=True)
        actual = self._make("the second of both", variant, traced=True)
        findings.first = first_difference(expected, actual)
        findings.again = not compare(expected, actual).trained_alike
        if findings.again and reference == "ddp":
            other = self._make("with no update deferred", "undeferred")
            findings.deferral = compare(expected, other).trained_alike


def _rounded(ddp: RunResult, *scheduled: RunResult) -> Findings:
    """Whether runs train as ``ddp`` does, where sums are formed in another order."""
    for run in scheduled:
        difference, first = compare(ddp, run), first_difference(ddp, run, tolerance=_ROUNDING)
        other = (
            f"{what}: {len(one)} under ddp, {len(two)} under bytescheduler; only under one of both: {names[0]}"
            for (what, one), two in zip(_unrounded(ddp).items(), _unrounded(run).values(), strict=True)
            if (names := _unequal(one, two))
        )
        difference = replace(difference, other=(*difference.other, *other))
        if difference.initial or difference.other or (first is not None and first.step <= _SOON):
            return Findings(verdict="different", difference=difference, first=first, variant=run.spec.strategy)
    return Findings(verdict="rounding")


def _unrounded(run: RunResult) -> dict[str, dict[str, str]]:
    """What a run leaves behind that no order of sums changes, by what it is and by name."""
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
