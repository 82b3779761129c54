"""Nobody connects to a group's port once its members have."""

from __future__ import annotations

import os
import random
import socket
import sys
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.group_port import close_port, listening
from lightning_bytescheduler.collectives.push_pull import ByteShares, PushPull
from lightning_bytescheduler.collectives.summing_server import SummingServer
from tests.collectives.test_summing_server import leave, world

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="packets are dropped by Linux")


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def knock(host: str, port: int, times: int) -> int:
    """Send what no member would say; returns how often somebody was there to hear it."""
    heard = 0
    for _ in range(times // 200):
        sockets = [socket.socket() for _ in range(200)]  # at once
        for one in sockets:
            one.setblocking(False)
            one.connect_ex((host, port))
        for one in sockets:
            with suppress(OSError):
                heard += one.send(random.randbytes(64)) > 0
            one.close()
    return heard


def test_ten_thousand_messages_at_a_groups_port_change_nothing() -> None:
    before = {port for *_, port in listening()}
    groups = world(2)
    server = SummingServer(groups[2], workers=2)
    sides = [PushPull(group, workers=2, servers=1, shares=ByteShares((1.0,))) for group in groups[:2]]
    ports = [(host, port) for _, _, host, port in listening() if port not in before]
    assert len(ports) == 3
    descriptors, threads = open_descriptors(), len(os.listdir("/proc/self/task"))
    for number in range(1, 6):
        parts = [torch.full((1000,), float(rank + number)) for rank in range(2)]
        started = [side.reduce(side.group, part, number) for side, part in zip(sides, parts, strict=True)]
        assert [knock(host, port, 1000) for host, port in ports] == [0, 0, 0]
        for one in started:
            one.works[0].wait()
        assert all(torch.equal(part, torch.full((1000,), number + 0.5)) for part in parts)
    assert open_descriptors() <= descriptors  # groups of other tests may go meanwhile
    assert len(os.listdir("/proc/self/task")) <= threads
    leave(sides)
    server.wait(lambda: False)


def test_a_port_that_is_not_the_groups_stays_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as own:
        groups = world(1)
        with socket.create_connection(own.getsockname(), timeout=10.0):
            pass
        assert not close_port(dist.HashStore(), 0), "no address is known"
        del groups
