"""Runs Lightning's tests in processes that cannot hang."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.lightning_suite.checkout import Checkout, CheckoutError
from tests.lightning_suite.outcome import Outcome, summarise
from tests.lightning_suite.record import BASELINE_VARIABLE, RECORD_VARIABLE, read_events

__all__ = ["CollectedTest", "Runner"]

# Lightning's own, which leave out tests, and ours.
_SELECTING = ("PL_RUN_STANDALONE_TESTS", "RUN_ONLY_CUDA_TESTS", "PL_RUN_TPU_TESTS", BASELINE_VARIABLE)
_ROOT = Path(__file__).parents[2]
# Lightning's tests make an error of each FutureWarning, also of those that newer versions of torch have.
_IGNORED = "ignore:torch.distributed.nn.functional.all_gather is deprecated:FutureWarning"
_START_S = 120.0
_GRACE_S = 30.0
_POLL_S = 0.2


@dataclass(frozen=True)
class CollectedTest:
    """A test that mentions ddp.

    Attributes:
        name: Its id, relative to Lightning's folder ``tests``.
        standalone: It wants a process of its own, which starts its other ranks itself.
        moved: Lightning runs it only with GPUs.
        skipped: Why Lightning skips it here, if it does.
    """

    name: str
    standalone: bool
    moved: bool
    skipped: str | None

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]


class Runner:
    """Starts pytest in Lightning's checkout with our plugin.

    Args:
        checkout: Lightning's repository.
        timeout: Seconds that a test may take.
        on_progress: Called with the name of each test that begins.
    """

    def __init__(self, checkout: Checkout, *, timeout: float, on_progress: Callable[[str], None]) -> None:
        self._checkout = checkout
        self._timeout = timeout
        self._on_progress = on_progress

    def collect(self) -> tuple[list[CollectedTest], dict[str, str]]:
        """The tests that mention ddp, and files that cannot be imported with the reason.

        Raises:
            CheckoutError: If pytest gave up on it.
        """
        tests: list[CollectedTest] = []
        unreadable: dict[str, str] = {}
        files = self._checkout.files_that_mention_ddp()
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder) / "record"
            arguments = ["--collect-only", "--quiet", "--quiet", "--continue-on-collection-errors", *files]
            output = self._run(arguments, record, _environment(record), len(files) * self._timeout)
            events = list(read_events(record))
            if all(event["kind"] != "all collected" for event in events):
                raise CheckoutError(f"Lightning's tests could not be collected.\n{output[-4000:]}")
            for event in events:
                if event["kind"] == "unreadable":
                    unreadable[event["test"]] = event["message"]
                elif event["kind"] == "collected":
                    tests.append(CollectedTest(event["test"], event["standalone"], event["moved"], event["skipped"]))
        return tests, unreadable

    def run(self, tests: Sequence[CollectedTest], *, baseline: bool = False) -> dict[str, Outcome]:
        """Runs tests of one file; standalone ones each in a process of their own.

        Args:
            tests: What to run.
            baseline: With ddp itself.
        """
        outcomes: dict[str, Outcome] = {}
        for test in tests:
            if test.standalone:
                outcomes.update(self._run_some([test.name], baseline=baseline))
        waiting = [test.name for test in tests if not test.standalone]
        while waiting:
            came = self._run_some(waiting, baseline=baseline)
            if not came:  # the process ended before its first test
                came = {waiting[0]: Outcome()}
            outcomes.update(came)
            waiting = [name for name in waiting if name not in came]
        return outcomes

    def _run_some(self, names: list[str], *, baseline: bool) -> dict[str, Outcome]:
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder) / "record"
            environment = _environment(record)
            if baseline:
                environment[BASELINE_VARIABLE] = "1"
            arguments = [f"--timeout={self._timeout}", *names]
            output = self._run(arguments, record, environment, self._timeout + _GRACE_S)
            outcomes = summarise(read_events(record))
        for outcome in outcomes.values():
            if outcome.result == "lost":
                outcome.message = output[-4000:]
        return outcomes

    def _run(self, arguments: list[str], record: Path, environment: dict[str, str], patience: float) -> str:
        """Ends the process and all that it started when nothing was recorded for ``patience`` seconds."""
        command = [sys.executable, "-m", "tests.lightning_suite.pytest_main", "-p", "tests.lightning_suite.plugin"]
        command += ["-p", "no:cacheprovider"]
        # Lightning's own settings, but for the doctests and the strict markers (of plugins that this needs not).
        command += ["-c", str(self._checkout.path / "pyproject.toml"), "-o", "addopts=", "--rootdir=."]
        command += ["-W", _IGNORED, *arguments]
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command,
                cwd=self._checkout.tests,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                self._watch(process, record, patience)
            finally:
                _end(process)
            output.seek(0)
            return output.read().decode(errors="replace")

    def _watch(self, process: subprocess.Popen[bytes], record: Path, patience: float) -> None:
        size, told, deadline = 0, 0, time.monotonic() + _START_S + patience
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            new_size = record.stat().st_size if record.exists() else 0
            if new_size == size:
                continue
            size, deadline = new_size, time.monotonic() + patience
            begun = [event["test"] for event in read_events(record) if event["kind"] == "started"]
            for name in begun[told:]:
                self._on_progress(name)
            told = len(begun)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process, and ranks that it left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment(record: Path) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in _SELECTING}
    environment[RECORD_VARIABLE] = str(record)
    # A folder for all, where each rank's pytest makes its own; with --basetemp they would empty each other's.
    environment["PYTEST_DEBUG_TEMPROOT"] = str(record.parent)
    environment["PYTHONPATH"] = str(_ROOT)  # of the plugin, also in ranks that are started as processes
    return environment
