"""Room for uploads is bounded, and given back."""

from __future__ import annotations

import asyncio

import pytest

from lightning_bytescheduler.coordinator.spool import Spool
from lightning_bytescheduler.exceptions import OptionError, SchedulerTimeoutError


def test_who_finds_no_room_waits_until_some_is_given_back() -> None:
    async def work() -> None:
        spool = Spool(10)
        first = await spool.room_for(6, timeout=1)
        with pytest.raises(SchedulerTimeoutError, match="6 of 10 are taken"):
            await spool.room_for(5, timeout=0.01)
        waiting = asyncio.ensure_future(spool.room_for(5, timeout=30))
        await asyncio.sleep(0)
        first.close()
        first.close()
        second = await waiting
        assert spool.taken == 5
        second.write(b"abc")
        with pytest.raises(OptionError, match="5 bytes, as announced"):
            second.write(b"def")
        second.write(b"de")
        assert second.is_complete
        assert bytes(second.payload.tolist()) == b"abcde"

    asyncio.run(work())
