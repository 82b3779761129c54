"""Messages about a rank that has failed, and tests for errors that only follow from another rank's.

Ranks send them to each other as JSON on the rendezvous store. :mod:`msgspec` checks it when it is read. Unknown
fields are ignored, so that ranks of different versions can still tell each other that their versions differ.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import torch.distributed as dist

from lightning_bytescheduler.exceptions import ByteSchedulerError, RankFailedError, RanksDivergedError

RANKS_SHOWN = 16
"""Most ranks that one message names."""
_CAUSE_LIMIT = 2000  # characters of an error message that are sent
_COMMUNICATION = re.compile(r"gloo|NCCL|c10d|pair closure|Connection (closed|reset)|Broken pipe", re.IGNORECASE)
_TIMEOUT = re.compile(r"timed? ?out", re.IGNORECASE)
_WHERE_IN_TORCH = re.compile(r"^\[[^\]]*\.(?:cc|cpp|h|hpp):\d+\]\s*")
_ADVICE = re.compile(r"\. This is typically caused by .*", re.DOTALL)


_Message = TypeVar("_Message", bound="StoreMessage")


class StoreMessage(msgspec.Struct, frozen=True):
    """A message that a rank writes to the store for the others."""

    @classmethod
    def decode(cls: type[_Message], text: bytes) -> _Message:
        """Read what :meth:`encode` wrote.

        Raises:
            msgspec.DecodeError: If ``text`` is something else.
        """
        return msgspec.json.decode(text, type=cls)

    def encode(self) -> str:
        """The message as text for the store."""
        return msgspec.json.encode(self, enc_hook=str).decode()  # for subclasses of str, as torch.__version__


class FaultNotice(StoreMessage, frozen=True, kw_only=True):
    """One rank's failure.

    Attributes:
        rank: The rank that failed; ``None`` if unknown.
        cause: Its error, in words.
        by: The rank that says so.
        orderly: Whether the others end by themselves, as all have agreed to.
        step: How many steps' gradients the failed rank has handed over completely; ``None`` if unknown. These still
            arrive everywhere if the other ranks wait a moment; later ones never will.
        diverged: Whether no rank failed, but the ranks wait for each other, as ``cause`` says.
    """

    rank: int | None
    cause: str
    by: int
    orderly: bool = False
    step: int | None = None
    diverged: bool = False

    @classmethod
    def of(cls, error: BaseException, *, by: int, orderly: bool = False, step: int | None = None) -> FaultNotice:
        """The notice of rank ``by`` about ``error``: its own failure, or another rank's that it found out about."""
        if isinstance(error, RankFailedError):
            diverged = isinstance(error, RanksDivergedError)
            return cls(rank=error.rank, cause=error.cause, by=by, orderly=orderly, diverged=diverged)
        return cls(rank=by, cause=phrase(error), by=by, orderly=orderly, step=step)

    def as_error(self) -> RankFailedError:
        """The exception that the other ranks raise."""
        return RanksDivergedError(self.cause) if self.diverged else RankFailedError(self.rank, self.cause)


def names_of(ranks: Sequence[int]) -> str:
    """``rank 1`` or ``ranks 1, 2 and 7 more``."""
    shown = ", ".join(map(str, ranks[:RANKS_SHOWN]))
    more = f" and {len(ranks) - RANKS_SHOWN} more" if len(ranks) > RANKS_SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def phrase(error: BaseException) -> str:
    """``ValueError: boom``, cut to a length that is worth sending."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}"[:_CAUSE_LIMIT] if text else type(error).__name__


def brief(error: BaseException) -> str:
    """A collective's error without the line in torch's sources and advice that this package already follows."""
    return _ADVICE.sub("", _WHERE_IN_TORCH.sub("", str(error)))


def is_communication_error(error: BaseException) -> bool:
    """Whether torch raised ``error`` because a collective or the store failed."""
    if not isinstance(error, RuntimeError) or isinstance(error, ByteSchedulerError):
        return False
    return isinstance(error, dist.DistError) or _COMMUNICATION.search(str(error)) is not None


def is_timeout(error: BaseException) -> bool:
    """Whether ``error``, which a collective raised, says that its time was up."""
    return isinstance(error, TimeoutError) or _TIMEOUT.search(str(error)) is not None
