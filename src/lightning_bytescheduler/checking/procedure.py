"""Which runs to make, and what follows from them. Pure: how a run is made is handed in.

``ddp``, ``bytescheduler`` as configured, ``ddp`` again (is it reproducible? and is one run slower than the other?), and
``bytescheduler`` at its strictest. Where both ``ddp`` runs are the same and the others are too, that is all. Runs are
deterministic, so what differs can be made again:

- ``ddp`` differs from itself: there is nothing to compare with.
- Bits differ where sums may be formed in another order: against the same partitions without overlap, whose bits must be
  the same, and against ``ddp`` with gradients changed by a rounding error.
- Anything else: both are traced, which shows the first step that differs. Then that much is run again with some
  parameters not deferred. If the difference is gone, one of these was read unseen; halving tells which.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lightning_bytescheduler.checking.comparison import (
    Difference,
    FirstDifference,
    Rounding,
    compare,
    first_difference,
    first_loss_beyond,
    rounding,
)
from lightning_bytescheduler.checking.runs import RunResult, RunSpec, StrategyName

__all__ = ["Cause", "Findings", "Launch", "investigate"]

Launch = Callable[[RunSpec, str], RunResult]
"""Makes a run; the text says in a few words what it is for."""

_EXPERIMENTS = 12
"""At most so many runs to find which parameter was read unseen: enough for a thousand parameters."""


@dataclass(kw_only=True)
class Cause:
    """Why two runs part, as far as runs with some parameters not deferred can tell.

    Attributes:
        parameters: Parameters without which everything is the same: one of them is read before its update has landed,
            by code whose reads cannot be seen.
        narrowed: Whether each of them was found to be needed.
    """

    parameters: tuple[str, ...]
    narrowed: bool


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
        cause: Why.
        rounding: How far they are apart, where sums may be formed in another order.
        changing_metrics: Logged metrics that differ between two runs of ``ddp``, and so are not compared.
    """

    verdict: str
    reason: str = ""
    runs: list[RunResult] = field(default_factory=list)
    difference: Difference | None = None
    first: FirstDifference | None = None
    variant: str = ""
    again: bool | None = None
    cause: Cause | None = None
    rounding: Rounding | None = None
    changing_metrics: tuple[str, ...] = ()


class _Ended(Exception):
    """The check is over; carries the findings."""

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings.verdict)
        self.findings = findings


def investigate(
    launch: Launch,
    *,
    steps: int,
    seed: int = 20240,
    devices: int | None = None,
    search_seconds: float = 90.0,
    clock: Callable[[], float] = time.monotonic,
) -> Findings:
    """Make the runs that are needed, and say what they show.

    Args:
        launch: Makes one.
        steps: Optimizer steps of each.
        seed: Of all random numbers.
        devices: What replaces the Trainer's ``devices``, if anything.
        search_seconds: After so long in search of the parameter that is read unseen, no further run is begun.
        clock: Seconds.
    """
    ddp = RunSpec(strategy="ddp", steps=steps, seed=seed, devices=devices)
    return _Investigation(launch, ddp, search_seconds, clock).run()


class _Investigation:
    def __init__(self, launch: Launch, ddp: RunSpec, search_seconds: float, clock: Callable[[], float]) -> None:
        self._launch = launch
        self._ddp = ddp
        self._search_seconds = search_seconds
        self._clock = clock
        self._runs: list[RunResult] = []

    def run(self) -> Findings:
        try:
            findings = self._compare_all()
        except _Ended as ended:
            findings = ended.findings
        findings.runs = self._runs
        return findings

    def _make(self, why: str, strategy: StrategyName = "ddp", **changes: object) -> RunResult:
        spec = replace(self._ddp, strategy=strategy, **changes)  # type: ignore[arg-type]
        result = self._launch(spec, why)
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
            parted = first_difference(first, second)
            return Findings(verdict="not reproducible", difference=itself, first=parted)
        strict = self._make("bytescheduler, at its strictest", "strict")
        different = []
        for actual in (configured, strict):
            found = compare(first, actual)
            found = replace(found, metrics=tuple(name for name in found.metrics if name not in itself.metrics))
            if not found.trained_alike or found.metrics:
                different.append((actual, found))
        findings = self._explained(first, different, strict) if different else Findings(verdict="identical")
        findings.changing_metrics = itself.metrics
        return findings

    # ------------------------------------------------------------------ what differs

    def _explained(
        self, expected: RunResult, different: Sequence[tuple[RunResult, Difference]], strict: RunResult
    ) -> Findings:
        actual, difference = different[0]
        findings = Findings(verdict="different", difference=difference, variant=actual.spec.strategy)
        if difference.initial or all(found.trained_alike for _, found in different):
            return findings  # only what is logged differs: no step does
        # At its strictest, parameters are told apart.
        variant, nudged = different[-1][0].spec.strategy, None
        reference: StrategyName = "ddp"
        if (actual.first.world_size > 2 or actual.first.needs_norm) and not difference.other:
            variant = "strict"
            if not actual.first.needs_norm:
                plain = self._make("the same partitions without overlap", "synchronised")
                reference = "ddp" if compare(plain, strict).trained_alike else "synchronised"
            nudged = self._make("ddp, gradients changed by a rounding error", nudged=True)
            findings.rounding = rounding(expected, actual, nudged)
            if reference == "synchronised":
                nudged = None
            elif findings.rounding.equal:
                findings.verdict = "rounding"
                return findings
        self._search(findings, variant, reference, expected, nudged)
        return findings

    def _search(
        self,
        findings: Findings,
        variant: StrategyName,
        reference: StrategyName,
        expected: RunResult,
        nudged: RunResult | None,
    ) -> None:
        """Run both again, traced; and then with some parameters not deferred.

        With ``nudged``, losses that are further off than rounding explains are all there is to go by.
        """
        if nudged is None:
            expected = self._make(f"{_named(reference)}, traced", reference, traced=True)
        actual = self._make(f"{_named(variant)}, traced", variant, traced=True)

        def parted(result: RunResult) -> FirstDifference | None:
            if nudged is None:
                return first_difference(expected, result)
            step = first_loss_beyond(expected, result, nudged)
            return None if step is None else FirstDifference(step=step, rank=0)

        findings.first = first = parted(actual)
        findings.again = first is not None or (nudged is None and not compare(expected, actual).trained_alike)
        if first is None:
            return
        # Weights after a step are seen when the next one's backward begins.
        steps = min(first.step + 1, self._ddp.steps)
        began, made = self._clock(), 0

        def may_go_on() -> bool:
            return made < _EXPERIMENTS and self._clock() - began < self._search_seconds

        def agrees_without(names: tuple[str, ...]) -> bool:
            nonlocal made
            made += 1
            what = repr(names[0]) if len(names) == 1 else f"{len(names)} parameters"
            try:
                result = self._make(f"without deferring {what}", variant, traced=True, steps=steps, early=names)
            except _Ended:
                return False
            found = parted(result)
            return found is None or found.step > first.step

        enough = names = actual.first.trained
        if not agrees_without(names):
            return
        # Otherwise a touch opens all of a bucket, so that halves say little.
        while variant == "strict" and len(names) > 1 and may_go_on():
            one, two = names[: len(names) // 2], names[len(names) // 2 :]
            if agrees_without(one):
                names = enough = one
            else:
                names = two  # if it is a single one; that is seen in the end
        if names != enough and may_go_on() and agrees_without(names):
            enough = names
        findings.cause = Cause(parameters=enough, narrowed=len(enough) == 1)


def _named(strategy: str) -> str:
    return "bytescheduler" if strategy in ("configured", "strict") else strategy
