"""Every exception this package raises on purpose.

ByteSchedulerError
├── OptionError (ValueError)             an option's value is not allowed
├── UnsupportedError                     a combination this package does not train
├── TaskStateError (RuntimeError)        a communication task was moved to a state it cannot reach
├── SchedulerClosedError (RuntimeError)  work was handed to a scheduler that has been shut down
├── SchedulerTimeoutError (TimeoutError) a bounded wait ran out
├── LaunchOrderError (RuntimeError)      ranks disagree about what to send next
├── TrackerStateError (ValueError)       a saved state of a slice tracker is of other data, or damaged
└── RankFailedError (RuntimeError)       another rank failed; names the rank and the cause
"""

from __future__ import annotations

__all__ = [
    "ByteSchedulerError",
    "LaunchOrderError",
    "OptionError",
    "RankFailedError",
    "SchedulerClosedError",
    "SchedulerTimeoutError",
    "TaskStateError",
    "TrackerStateError",
    "UnsupportedError",
]


class ByteSchedulerError(Exception):
    """Base of all exceptions raised by this package."""


class OptionError(ByteSchedulerError, ValueError):
    """An option's value is not allowed.

    Args:
        option: Name of the option or environment variable.
        value: The value that was given.
        allowed: What would have been allowed, in words.
    """

    def __init__(self, option: str, value: object, allowed: str) -> None:
        super().__init__(f"{option}={value!r} is not allowed: {option} must be {allowed}.")
        self.option = option
        self.value = value
        self.allowed = allowed

    def __reduce__(self) -> tuple[type[OptionError], tuple[str, object, str]]:
        return (type(self), (self.option, self.value, self.allowed))


class UnsupportedError(ByteSchedulerError):
    """The requested combination cannot be trained by this package; the message names the way out."""


class TaskStateError(ByteSchedulerError, RuntimeError):
    """A communication task was asked for a transition its state does not allow."""


class SchedulerClosedError(ByteSchedulerError, RuntimeError):
    """Work was handed to a scheduler that has been shut down."""


class SchedulerTimeoutError(ByteSchedulerError, TimeoutError):
    """A bounded wait ran out; the message names what was still outstanding."""


class LaunchOrderError(ByteSchedulerError, RuntimeError):
    """Rank 0's launch decision does not fit what this rank holds: the ranks run different programs."""


class TrackerStateError(ByteSchedulerError, ValueError):
    """A saved state of a slice tracker does not fit the slices there are now, or is damaged; the message says how."""


class RankFailedError(ByteSchedulerError, RuntimeError):
    """Another rank failed.

    Args:
        rank: The failing rank, or ``None`` when it could not be determined.
        cause: What that rank said of its failure.
    """

    def __init__(self, rank: int | None, cause: str) -> None:
        who = "Another rank" if rank is None else f"Rank {rank}"
        super().__init__(f"{who} failed: {cause}")
        self.rank = rank
        self.cause = cause

    def __reduce__(self) -> tuple[type[RankFailedError], tuple[int | None, str]]:
        return (type(self), (self.rank, self.cause))
