"""What the script shows at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from tests.lightning_suite.outcome import Outcome
from tests.lightning_suite.skips import Skip

__all__ = ["SuiteReport"]


@dataclass
class SuiteReport:
    """All that came of a run.

    Attributes:
        outcomes: Outcomes by test id.
        with_ddp: The same of those that failed, with ddp itself.
        skipped: What our list of skips leaves out, with the reason.
        not_here: Tests that Lightning skips on this machine, with the reason.
        unreadable: Files that cannot be imported here and are not left out, with the reason.
        stale: Skips that match no test.
    """

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    with_ddp: dict[str, Outcome] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    not_here: dict[str, str] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    stale: list[Skip] = field(default_factory=list)

    def failures(self, *, ours: bool) -> dict[str, Outcome]:
        """Tests that did not pass: those that pass with ddp, or those that do not."""
        return {
            test: outcome
            for test, outcome in self.outcomes.items()
            if outcome.result in ("failed", "lost")
            and ours == (test not in self.with_ddp or self.with_ddp[test].result == "passed")
        }

    @property
    def passed(self) -> dict[str, Outcome]:
        return {test: outcome for test, outcome in self.outcomes.items() if outcome.result == "passed"}

    @property
    def holds(self) -> bool:
        """No test failed that passes with ddp, none is missing, each skip is of use, and some trained with ours."""
        trained = any(outcome.ranks > 1 for outcome in self.passed.values())
        return trained and not self.failures(ours=True) and not self.unreadable and not self.stale

    def show(self, console: Console) -> None:
        """Tracebacks of what failed, then all lists, then the table."""
        ours, anyway = self.failures(ours=True), self.failures(ours=False)
        for test, outcome in ours.items():
            console.rule(f"{test}: {outcome.result}")
            console.print(outcome.message, highlight=False, markup=False)
        idle = [test for test, outcome in self.passed.items() if not outcome.made]
        lightning_skipped = {t: o.message for t, o in self.outcomes.items() if o.result == "skipped"} | self.not_here
        _list(console, "Skipped by Lightning on this machine", _counted(lightning_skipped.values()))
        _list(console, "Cannot be imported here", [f"{file}: {why}" for file, why in self.unreadable.items()])
        _list(console, "Left out", _counted(self.skipped.values()))
        _list(console, "Passed, but never made the strategy, so prove nothing", idle)
        _list(console, "Fail with ddp itself too", [f"{t}: {_last_line(o.message)}" for t, o in anyway.items()])
        _list(console, "Skips that match no test", [skip.pattern for skip in self.stale])
        _list(console, "FAILED, but pass with ddp", [f"{t}: {_last_line(o.message)}" for t, o in ours.items()])
        console.print(self._table(ours, anyway, len(lightning_skipped)))

    def _table(self, ours: Mapping[str, Outcome], anyway: Mapping[str, Outcome], lightning_skipped: int) -> Table:
        table = Table(title="Lightning's own tests of ddp, with bytescheduler in its place")
        table.add_column("")
        for column in ("tests", "made the strategy", "scheduled on several ranks", "with steps across the barrier"):
            table.add_column(column, justify="right")
        for name, outcomes in (("passed", self.passed), ("failed", ours), ("fail with ddp too", anyway)):
            of_them = outcomes.values()
            table.add_row(
                name,
                str(len(outcomes)),
                str(sum(o.made > 0 for o in of_them)),
                str(sum(o.ranks > 1 for o in of_them)),
                str(sum(o.overlapped > 0 for o in of_them)),
            )
        table.add_row("left out", str(len(self.skipped)), "", "", "")
        table.add_row("skipped by Lightning", str(lightning_skipped), "", "", "")
        return table


def _list(console: Console, title: str, lines: Iterable[str]) -> None:
    shown = list(lines)
    if shown:
        console.print(f"\n{title}:", style="bold", markup=False)
        for line in shown:
            console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)


def _counted(reasons: Iterable[str]) -> list[str]:
    return [f"{count:4d}  {reason}" for reason, count in Counter(reasons).most_common()]


def _last_line(message: str) -> str:
    errors = [line for line in message.splitlines() if line.startswith("E  ")] or message.strip().splitlines()
    return errors[-1].removeprefix("E").strip() if errors else "no output"
