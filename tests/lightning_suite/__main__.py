"""Runs Lightning's own tests of ddp with bytescheduler in its place: ``python -m tests.lightning_suite CHECKOUT``."""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.lightning_suite.checkout import Checkout, CheckoutError
from tests.lightning_suite.processes import CollectedTest, Runner
from tests.lightning_suite.record import ARCHITECTURE_VARIABLE
from tests.lightning_suite.report import SuiteReport
from tests.lightning_suite.skips import Skip, SkipFileError, read_skips, skip_of, stale_skips

_SKIPS = Path(__file__).with_name("skips.txt")


def main() -> int:
    options = _parse()
    os.environ[ARCHITECTURE_VARIABLE] = options.architecture  # for the processes that tests run in
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the test's processes end too
    console = Console()
    try:
        report = _run(options, console)
    except (CheckoutError, SkipFileError) as error:
        print(error, file=sys.stderr)
        return 2
    report.show(console)
    return 0 if report.holds else 1


def _run(options: argparse.Namespace, console: Console) -> SuiteReport:
    checkout = Checkout(options.checkout, any_version=options.any_version)
    report = SuiteReport()
    skips = read_skips(_SKIPS)
    progress = Progress(
        BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"), console=console
    )
    with progress:
        bar = progress.add_task("collecting", total=None)
        began = 0

        def on_progress(test: str) -> None:
            nonlocal began
            progress.update(bar, completed=began, description=test.removeprefix("tests_pytorch/"))
            began += 1

        runner = Runner(checkout, timeout=options.timeout, on_progress=on_progress)
        collected, unreadable = runner.collect()
        if options.only is None:
            report.stale = stale_skips(skips, [*unreadable, *(test.name for test in collected)])
            report.unreadable = {file: why for file, why in unreadable.items() if skip_of(file, skips) is None}
        tests = _to_run([test for test in collected if (options.only or "") in test.name], skips, report)
        expected = len(tests)
        progress.update(bar, total=expected)
        for file, grouped in itertools.groupby(tests, key=lambda test: test.file):
            of_file = list(grouped)
            report.outcomes |= runner.run(of_file)
            failed = [test for test in of_file if test.name in report.failures(ours=True)]
            progress.update(bar, total=(expected := expected + len(failed)))
            report.with_ddp |= runner.run(failed, baseline=True)
            if not console.is_terminal:  # where bars are not shown
                console.print(f"{began} of {expected} begun, {file} done", highlight=False)
            for test in failed:
                verdict = "FAILED" if test.name in report.failures(ours=True) else "fails with ddp too"
                progress.console.print(f"{verdict}: {test.name}", markup=False, highlight=False)
        progress.update(bar, completed=began, description="done")
    return report


def _to_run(tests: list[CollectedTest], skips: list[Skip], report: SuiteReport) -> list[CollectedTest]:
    """Tests in the order of their files; what is not run is put into the report."""
    runnable = []
    for test in sorted(tests, key=lambda test: test.file):
        skip = skip_of(test.name, skips)
        if test.skipped is not None:
            report.not_here[test.name] = test.skipped
        elif skip is not None:
            report.skipped[test.name] = skip.reason
        else:
            runnable.append(test)
    return runnable


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.lightning_suite", description=__doc__)
    parser.add_argument("checkout", type=Path, help="a checkout of Lightning's repository")
    parser.add_argument("--any-version", action="store_true", help="take a checkout of another version too")
    parser.add_argument("--only", metavar="TEXT", help="only tests whose id contains this")
    parser.add_argument(
        "--architecture",
        choices=("allreduce", "ps"),
        default="allreduce",
        help="of the strategy (default: %(default)s)",
    )
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds that a test may take (default 180)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
