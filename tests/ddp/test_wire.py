"""Which rank an error is blamed on, once another rank has failed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lightning_bytescheduler.ddp.wire import Wire
from lightning_bytescheduler.exceptions import RankFailedError, SchedulerClosedError


def test_a_rank_keeps_an_error_of_its_own_when_another_has_failed() -> None:
    cause = RankFailedError(1, "ValueError: boom")
    board = SimpleNamespace(explain=lambda error: error)
    wire: Any = SimpleNamespace(core=SimpleNamespace(abort_cause=cause), servers=None, board=board)
    own = RuntimeError("Expected to have finished reduction in the prior iteration before starting a new one.")
    assert Wire.explain(wire, own) is own
    for consequence in (
        RuntimeError(f"RankFailedError: {cause} At: hook"),
        SchedulerClosedError("It is closed."),
        cause,
    ):
        assert Wire.explain(wire, consequence) is cause


def test_a_rank_that_may_have_ended_without_an_error_is_thought_of() -> None:
    core = SimpleNamespace(abort_cause=None, abort=lambda cause: None)
    board = SimpleNamespace(explain=lambda error: error)
    wire: Any = SimpleNamespace(core=core, servers=None, board=board)
    found = Wire.on_error(wire, RuntimeError("gloo: Connection closed by peer"))
    assert "has ended earlier without an error, as with fewer batches; this broke here: gloo" in str(found)
