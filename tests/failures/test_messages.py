from __future__ import annotations

import msgspec
import pytest
import torch.distributed as dist

from lightning_bytescheduler.exceptions import RankFailedError, SchedulerClosedError, SchedulerTimeoutError
from lightning_bytescheduler.failures.messages import FaultNotice, brief, is_communication_error, is_timeout, phrase

CLOSED = (
    "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:14227. "
    "This is typically caused by a remote worker crashing. Check the logs of the remote worker."
)


def test_what_was_written_is_read() -> None:
    notice = FaultNotice(rank=3, cause='ValueError: "ä"\n', by=1, orderly=True, step=7)
    assert FaultNotice.decode(notice.encode().encode()) == notice


def test_a_newer_ranks_notice_is_read_and_a_damaged_one_is_not() -> None:
    assert FaultNotice.decode(b'{"rank": null, "cause": "gone", "by": 1, "since": 3}').cause == "gone"
    for text in (b'{"rank": null, "by": 1}', b'{"rank": "0", "cause": "gone", "by": 1}', b"gone"):
        with pytest.raises(msgspec.DecodeError):
            FaultNotice.decode(text)


def test_a_rank_reports_its_own_failure_or_that_of_another() -> None:
    own = FaultNotice.of(KeyboardInterrupt(), by=2, step=4)
    assert (own.rank, own.cause, own.by, own.step) == (2, "KeyboardInterrupt", 2, 4)
    found = FaultNotice.of(RankFailedError(0, "it is gone"), by=2, step=4)
    assert (found.rank, found.cause, found.by, found.step) == (0, "it is gone", 2, None)
    assert str(found.as_error()) == "Rank 0 failed: it is gone"


@pytest.mark.parametrize(
    ("error", "communication", "timeout"),
    [
        (RuntimeError(CLOSED), True, False),
        (RuntimeError("Application timeout caused pair closure"), True, True),
        (RuntimeError("[gloo/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation"), True, True),
        (dist.DistNetworkError("Failed to recv"), True, False),
        (RuntimeError("NCCL error: unhandled system error"), True, False),
        (RuntimeError("CUDA out of memory"), False, False),
        (ValueError("gloo"), False, False),
        (SchedulerClosedError("gloo"), False, False),
        (SchedulerTimeoutError("late"), False, True),
    ],
)
def test_errors_are_told_apart(error: BaseException, communication: bool, timeout: bool) -> None:
    assert is_communication_error(error) is communication
    assert is_timeout(error) is timeout


def test_messages_are_short() -> None:
    assert brief(RuntimeError(CLOSED)) == "Connection closed by peer [127.0.0.1]:14227"
    assert brief(ValueError("[1, 2] is not allowed")) == "[1, 2] is not allowed"
    assert phrase(ValueError(" boom\n")) == "ValueError: boom"
    assert phrase(SystemExit()) == "SystemExit"
    assert len(phrase(ValueError("x" * 10_000))) == 2000
