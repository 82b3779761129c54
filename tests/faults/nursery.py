"""Forks one process per line of its stdin; see ``ranks.py``. Not imported: run as a script."""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import sys
import time
from typing import Any

import lightning.pytorch
import torch.distributed
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_bytescheduler import ByteSchedulerFabricStrategy, ByteSchedulerStrategy, CreditTuner, DiLoCoStrategy

PRELOADED = (
    *(lightning.pytorch, torch.distributed, ModelCheckpoint, OnExceptionCheckpoint),
    *(ByteSchedulerFabricStrategy, ByteSchedulerStrategy, CreditTuner, DiLoCoStrategy),
)


def serve() -> dict[str, Any] | None:
    """Fork as asked. Returns the request in each child, and ``None`` in the parent at the end of stdin."""
    names: dict[int, str] = {}
    pending = ""
    while True:
        readable, _, _ = select.select([0], [], [], 0.02)
        if readable:
            chunk = os.read(0, 65536).decode()
            if not chunk:
                for pid in names:
                    os.kill(pid, signal.SIGKILL)
                return None
            *lines, pending = (pending + chunk).split("\n")
            for line in lines:
                request: dict[str, Any] = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    return request
                names[pid] = request["name"]
                say({"name": request["name"], "pid": pid})
        while names:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            say({"name": names.pop(pid), "code": os.waitstatus_to_exitcode(status), "ended": time.time()})


def say(message: dict[str, Any]) -> None:
    os.write(1, (json.dumps(message) + "\n").encode())


def become(request: dict[str, Any]) -> None:
    """Turn this process into a rank."""
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
    # As after exec(): a fork inherits what it must not share.
    torch.seed()
    sys.argv = [request["script"], request["argument"]]
    sys.path[0] = os.path.dirname(request["script"])
    runpy.run_path(request["script"], run_name="__main__")


if __name__ == "__main__":
    gc.collect()
    gc.freeze()  # or every rank would copy all of torch's objects at its end, just to free them
    asked = serve()
    if asked is not None:
        become(asked)
