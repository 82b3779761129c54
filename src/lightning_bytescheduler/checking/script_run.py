"""Runs the user's command once, unchanged, in processes of its own, with the check's hooks in every Python of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from lightning_bytescheduler.checking.progress import Progress
from lightning_bytescheduler.checking.run_folder import end_processes, result_of, wait_for
from lightning_bytescheduler.checking.run_spec import SPEC_VARIABLE, RunResult, RunSpec

__all__ = ["RunFolders", "ScriptRuns"]

_SITE = Path(__file__).parent / "site"


class RunFolders:
    """A temporary folder with one for each run; what is large in it goes when the next but one needs it no more."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="bytescheduler-check-"))
        self._count = 0

    def next(self, spec: RunSpec) -> tuple[Path, Path]:
        """Paths of the next run's description and folder."""
        self._count += 1
        folder = self.root / f"run{self._count}"
        folder.mkdir()
        path = self.root / f"run{self._count}.json"
        spec.save(path, folder)
        return path, folder

    def tidy(self, folder: Path) -> None:
        """Remove what the training has written; records and weights stay until the end."""
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)

    def __enter__(self) -> RunFolders:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


class ScriptRuns:
    """Makes runs of one command.

    Args:
        command: The program and its arguments.
        folders: Where runs leave their files.
        timeout: Of each run, in seconds.
        progress: Told what goes on.
    """

    def __init__(self, command: Sequence[str], folders: RunFolders, *, timeout: float, progress: Progress) -> None:
        self._command = list(command)
        self._folders = folders
        self._timeout = timeout
        self._progress = progress

    def __call__(self, spec: RunSpec, why: str) -> RunResult:
        """Make one; see :data:`~lightning_bytescheduler.checking.procedure.Launch`."""
        path, folder = self._folders.next(spec)
        began = time.monotonic()
        with self._progress.run(why, spec.steps) as tell, open(folder / "output.txt", "wb") as output:
            process = subprocess.Popen(
                self._command,
                env=_environment(path, spec),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code, timed_out = wait_for(folder, process.poll, timeout=self._timeout, tell=tell)
            finally:
                end_processes(process.pid, process.poll, folder)
        result = result_of(spec, folder, code=code, timed_out=timed_out, timeout=self._timeout)
        result.seconds = time.monotonic() - began
        self._folders.tidy(folder)
        return result


def _environment(path: Path, spec: RunSpec) -> dict[str, str]:
    environment = dict(os.environ)
    paths = [str(_SITE), *filter(None, [environment.get("PYTHONPATH")])]
    environment.update({"PYTHONPATH": os.pathsep.join(paths), SPEC_VARIABLE: str(path)})
    environment.setdefault("PYTHONHASHSEED", "0")
    environment.pop("BYTESCHEDULER_TIMELINE", None)  # the user's file is not to be written over
    environment["WANDB_MODE"] = "disabled"  # also where the script calls wandb.init itself
    if spec.deterministic:
        environment.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", CUBLAS_WORKSPACE_CONFIG=":4096:8")
    return environment
