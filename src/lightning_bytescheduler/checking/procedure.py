"""Which runs to make, and what follows from them. Pure: how a run is made is handed in.

``ddp``, ``bytescheduler`` as configured, ``ddp`` again (is it reproducible? and is one run slower than the other?), and
``bytescheduler`` at its strictest. Where both ``ddp`` runs are the same and the others are too, that is all. Runs are
deterministic, so what differs can be made again:

- ``ddp`` differs from itself: again with deterministic algorithms and one thread; if it still does, there is nothing to
  compare with.
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
from lightning_bytescheduler.checking.runs import RunResult, RunSpec

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
            by code whose reads cannot be seen. Empty where that is not the reason.
        openings: What touched each of them first in the step, if anything did; by name.
        narrowed: Whether each of them was found to be needed.
    """

    parameters: tuple[str, ...]
    openings: dict[str, str]
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
        deterministic: Whether deterministic algorithms and one thread were needed.
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
    deterministic: bool = False


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
    return _Investigation(
        launch, RunSpec(strategy="ddp", steps=steps, seed=seed, devices=devices), search_seconds, clock
    ).run()


class _Investigation:
    def __init__(self, launch: Launch, ddp: RunSpec, search_seconds: float, clock: Callable[[], float]) -> None:
        self._launch = launch
        self._ddp = ddp
        self._search_seconds = search_seconds
        self._clock = clock
        self._runs: list[RunResult] = []
        self._changing: tuple[str, ...] = ()

    def run(self) -> Findings:
        try:
            findings = self._compare_all()
        except _Ended as ended:
            findings = ended.findings
        findings.runs = self._runs
        findings.deterministic = self._ddp.deterministic
        findings.changing_metrics = self._changing
        return findings

    def _make(self, spec: RunSpec, why: str) -> RunResult:
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
        first = self._make(self._ddp, "ddp")
        if not first.first.steps:
            return Findings(verdict="unchecked", reason="The script's fit ended before its first optimizer step.")
        configured = self._make(replace(self._ddp, strategy="configured"), "bytescheduler")
        second = self._make(self._ddp, "ddp again")
        if not compare(first, second).trained_alike:
            first, second = self._made_reproducible()
            configured = self._make(replace(self._ddp, strategy="configured"), "bytescheduler, deterministic")
        self._changing = compare(first, second).metrics
        strict = self._make(replace(self._ddp, strategy="strict"), "bytescheduler, at its strictest")
        compared = [(actual, self._difference(first, actual)) for actual in (configured, strict)]
        different = [(actual, found) for actual, found in compared if not found.trained_alike or found.metrics]
        if not different:
            return Findings(verdict="identical")
        return self._explain(first, different, strict)

    def _difference(self, expected: RunResult, actual: RunResult) -> Difference:
        found = compare(expected, actual)
        return replace(found, metrics=tuple(name for name in found.metrics if name not in self._changing))

    def _made_reproducible(self) -> tuple[RunResult, RunResult]:
        self._ddp = replace(self._ddp, deterministic=True)
        spec = replace(self._ddp, traced=True)
        first = self._make(spec, "ddp, deterministic")
        second = self._make(spec, "ddp again, deterministic")
        difference = compare(first, second)
        if difference.trained_alike:
            return first, second
        raise _Ended(Findings(verdict="not reproducible", difference=difference, first=first_difference(first, second)))

    # ------------------------------------------------------------------ what differs

    def _explain(
        self, expected: RunResult, different: Sequence[tuple[RunResult, Difference]], strict: RunResult
    ) -> Findings:
        actual, difference = different[0]
        findings = Findings(verdict="different", difference=difference, variant=actual.spec.strategy)
        order_may_differ = actual.first.world_size > 2 or actual.first.needs_norm
        if difference.initial or all(found.trained_alike for _, found in different):
            return findings  # only what is logged differs: no step does
        if order_may_differ and not difference.other:
            exact = True
            if not actual.first.needs_norm:
                plain = self._make(replace(self._ddp, strategy="synchronised"), "the same partitions without overlap")
                exact = compare(plain, strict).trained_alike
            nudged = self._make(replace(self._ddp, nudged=True), "ddp, gradients changed by a rounding error")
            findings.rounding = rounding(expected, actual, nudged)
            if exact and findings.rounding.equal:
                findings.verdict = "rounding"
                return findings
            if exact:
                return self._search_beyond_rounding(findings, expected, nudged)
            return self._search(findings, variant="strict", reference="synchronised")
        # At its strictest, parameters are told apart.
        return self._search(findings, variant=different[-1][0].spec.strategy, reference="ddp")

    def _search(self, findings: Findings, *, variant: str, reference: str) -> Findings:
        """Run both again, traced; and then with some parameters not deferred."""
        traced = replace(self._ddp, traced=True)
        expected = self._make(replace(traced, strategy=reference), f"{_named(reference)}, traced")  # type: ignore[arg-type]
        actual = self._make(replace(traced, strategy=variant), f"{_named(variant)}, traced")  # type: ignore[arg-type]
        first = first_difference(expected, actual)
        findings.first = first
        findings.again = first is not None or not compare(expected, actual).trained_alike
        if first is None:
            return findings
        step = first.step
        # Weights after a step are seen when the next one's backward begins.
        short = replace(traced, strategy=variant, steps=min(step + 1, traced.steps))  # type: ignore[arg-type]
        self._find_cause(
            findings, step, short, actual, lambda result: first_difference(expected, result, up_to=step) is None
        )
        return findings

    def _search_beyond_rounding(self, findings: Findings, expected: RunResult, nudged: RunResult) -> Findings:
        """As :meth:`_search`, where losses that are further off than rounding explains are all there is to go by."""
        traced = self._make(replace(self._ddp, strategy="strict", traced=True), "bytescheduler, traced")
        step = first_loss_beyond(expected, traced, nudged)
        findings.again = step is not None
        if step is None:
            return findings
        findings.first = FirstDifference(step=step, rank=0)
        short = replace(traced.spec, steps=step)
        self._find_cause(
            findings, step, short, traced, lambda result: first_loss_beyond(expected, result, nudged) is None
        )
        return findings

    def _find_cause(
        self, findings: Findings, step: int, spec: RunSpec, actual: RunResult, agrees: Callable[[RunResult], bool]
    ) -> None:
        """Which parameters must not be deferred for a run to agree.

        Args:
            findings: Takes the answer.
            step: Where the runs part.
            spec: Of the runs that are made for it.
            actual: The traced run that differs.
            agrees: Whether one of these runs is as it should be.
        """
        found = self._parameters_read_unseen(step, spec, actual, agrees)
        if found is not None:
            names, narrowed = found
            openings = actual.first.openings.get(step, {})
            findings.cause = Cause(
                parameters=names,
                openings={name: openings[name] for name in names if name in openings},
                narrowed=narrowed,
            )

    def _parameters_read_unseen(
        self, step: int, spec: RunSpec, actual: RunResult, agrees: Callable[[RunResult], bool]
    ) -> tuple[tuple[str, ...], bool] | None:
        began = self._clock()
        made = 0

        def may_go_on() -> bool:
            return made < _EXPERIMENTS and self._clock() - began < self._search_seconds

        def gone_without(names: Sequence[str]) -> bool:
            nonlocal made
            made += 1
            what = repr(names[0]) if len(names) == 1 else f"{len(names)} parameters"
            try:
                result = self._make(replace(spec, early=tuple(names)), f"without deferring {what}")
            except _Ended:
                return False
            return agrees(result)

        everything = actual.first.trained
        # What nobody touched before backward is the first suspect: it may have been read all the same.
        suspects = actual.first.untouched.get(step, ())
        if suspects and len(suspects) < len(everything) and gone_without(suspects):
            enough = suspects
        elif gone_without(everything):
            enough = everything
        else:
            return None
        if spec.strategy != "strict":
            return enough, False  # a touch opens all of a bucket, so that halves say little
        names = enough
        while len(names) > 1 and may_go_on():
            one, two = names[: len(names) // 2], names[len(names) // 2 :]
            if gone_without(one):
                names = enough = one
            else:
                names = two  # if it is a single one; that is seen in the end
        if names != enough and may_go_on() and gone_without(names):
            enough = names
        return enough, len(enough) == 1


def _named(strategy: str) -> str:
    return "bytescheduler" if strategy in ("configured", "strict") else strategy
