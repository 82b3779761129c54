"""Every module can be imported on a system without what only POSIX has."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

POSIX_MODULES = ["fcntl", "grp", "pwd", "resource", "termios", "tty", "pty", "syslog", "posix"]
POSIX_NAMES = {
    "os": [
        *("fork", "forkpty", "register_at_fork", "sched_getaffinity", "sched_setaffinity", "getuid", "geteuid"),
        *("setsid", "killpg", "getpgid", "pread", "preadv", "pwrite", "fchmod", "O_CLOEXEC", "WNOHANG", "uname"),
    ],
    "signal": ["SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGALRM", "setitimer", "pthread_sigmask"],
    "socket": ["AF_UNIX", "SO_REUSEPORT"],
}
"""What other systems lack: of modules that are there."""

PROGRAM = """
import importlib, json, pkgutil, sys
modules, names, others = json.loads(sys.argv[1])
for name in others:  # first of all, as these have branches for each system
    try:
        importlib.import_module(name)
    except ImportError:
        pass
for module, missing in names.items():
    for name in missing:
        vars(importlib.import_module(module)).pop(name, None)
for name in modules:
    sys.modules[name] = None
sys.platform = "win32"

import lightning_bytescheduler
from lightning_bytescheduler.slices.cache import SliceCache

failed = {}
for found in pkgutil.walk_packages(lightning_bytescheduler.__path__, "lightning_bytescheduler."):
    if found.name.endswith(".ray"):  # tested by itself
        continue
    try:
        importlib.import_module(found.name)
    except Exception as error:
        failed[found.name] = repr(error)
try:
    SliceCache(sys.argv[2], 1000)
    said = None
except lightning_bytescheduler.UnsupportedError as error:
    said = str(error)
lightning_bytescheduler.SliceDataModule("memory://data.txt")
print(json.dumps([failed, said]))
"""
OTHERS = [
    *("lightning.pytorch", "lightning.pytorch.cli", "torch.distributed.run", "torchmetrics", "fsspec.core", "numpy"),
    *("aiohttp.web", "bayes_opt", "filelock", "msgspec", "platformdirs", "rich.console", "tenacity", "xxhash"),
    *("fsspec.implementations.memory", "matplotlib", "multiprocessing.connection", "nbclient", "jsonargparse"),
]


@pytest.mark.slow
def test_modules_are_imported_without_what_only_posix_has(tmp_path) -> None:
    arguments = json.dumps([POSIX_MODULES, POSIX_NAMES, OTHERS])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, arguments, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    failed, said = json.loads(done.stdout.splitlines()[-1])
    assert failed == {}
    assert "file locks as Linux and macOS have them" in said
