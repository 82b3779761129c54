"""Rank 0 ends while its collectives are under way, which fail in the last moments of the interpreter.

Arguments: rank, port. The other rank is killed by the first.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from datetime import timedelta

rank, port = map(int, sys.argv[1:])
peer: list[int] = []


def kill_the_peer() -> None:
    for pid in peer:
        os.kill(pid, signal.SIGKILL)


if rank == 0:
    # Registered before all others, so called after them: a second without a break for other threads, after which the
    # interpreter goes down.
    atexit.register(sum, range(60_000_000))
    atexit.register(kill_the_peer)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from lightning_bytescheduler.collectives.groups import leave  # noqa: E402

store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=timedelta(seconds=240))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
group = dist.new_group(backend="gloo")
dist.all_reduce(torch.ones(1), group=group)
if rank == 1:
    store.set("pid", str(os.getpid()))
    time.sleep(600)  # ended by the first, or by the test
    sys.exit()
peer.append(int(store.get("pid")))
for _ in range(3):
    dist.all_reduce(torch.ones(10), group=group, async_op=True)
leave(group, idle=False)
