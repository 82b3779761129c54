"""Every exception this package raises on purpose.

ByteSchedulerError
├── OptionError (ValueError)             an option's value is not allowed, or there is no such option
├── UnsupportedError                     a combination this package does not train
├── TaskStateError (RuntimeError)        a communication task was moved to a state it cannot reach
├── SchedulerClosedError (RuntimeError)  work was handed to a scheduler that has been shut down
├── SchedulerTimeoutError (TimeoutError) a bounded wait ran out
├── LaunchOrderError (RuntimeError)      ranks disagree about what to send next
├── RankFailedError (RuntimeError)       another rank failed; names the rank and the cause
│   ├── RanksDivergedError               no rank failed, but they wait for each other in different places
│   └── ServerFailedError                a parameter server failed; names it
├── RanksUnreachableError (ConnectionError)  ranks found each other at the store, and cannot connect
├── RanksDifferError                     the ranks are not in the same training: another version, other options
├── CoordinatorError (RuntimeError)      the coordinator refuses this worker, and would again; has its words
├── SliceIndexError (ValueError)         an index of slices is damaged, or is none
├── SliceCorruptError (RuntimeError)     a slice's bytes are wrong however often they are fetched; names the slice
├── BadSampleError (ValueError)          a sample of slices cannot be made; names it and the rank
├── SourceUnavailableError (OSError)     a source of slices does not answer, or refuses to; names it and what it said
└── TrackerStateError (ValueError)       a saved state of a slice tracker is of other data, or damaged
"""

from __future__ import annotations

from typing import TYPE_CHECKING

_LONGEST_VALUE = 120  # characters: some objects fill a page


class ByteSchedulerError(Exception):
    """Base of all exceptions raised by this package."""

    def __reduce__(self) -> tuple[object, ...]:
        # The attributes hold the constructor's arguments, and ``args`` holds the text.
        return _blank, (type(self),), {**self.__dict__, "args": self.args}


class OptionError(ByteSchedulerError, ValueError):
    """An option's value is not allowed, or there is no such option.

    Args:
        option: Name of the option or environment variable.
        value: The value that was given.
        allowed: The allowed values, in words.
        hint: The way out in whole sentences, if ``allowed`` is not enough.
        says: The whole text instead, if there is no such option.
    """

    def __init__(self, option: str, value: object, allowed: str, hint: str = "", says: str = "") -> None:
        usual = f"{option}={_shown(value)} is not allowed: {option} must be {allowed}."
        super().__init__(says or f"{usual} {hint}".rstrip())
        self.option = option
        self.value = value
        self.allowed = allowed
        self.hint = hint


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
        cause: That rank's description of its failure.
        says: The whole text instead, if no rank is to blame.
    """

    def __init__(self, rank: int | None, cause: str, says: str = "") -> None:
        who = "Another rank" if rank is None else f"Rank {rank}"
        super().__init__(says or f"{who} failed: {cause}")
        self.rank = rank
        self.cause = cause


class RanksDivergedError(RankFailedError):
    """The ranks wait for each other in different places, as with uneven data: no step will ever end.

    Args:
        cause: Where each rank stands, why, and the ways out. The same on every rank.
    """

    def __init__(self, cause: str) -> None:
        super().__init__(None, cause, says=cause)


class ServerFailedError(RankFailedError):
    """A parameter server failed.

    Args:
        cause: Which server failed, and what is known about the failure, in words.
    """

    def __init__(self, cause: str) -> None:
        super().__init__(None, cause, says=f"The {cause}")


class RanksUnreachableError(ByteSchedulerError, ConnectionError):
    """This rank cannot connect to another one, or another one failed while the ranks connected."""


class RanksDifferError(ByteSchedulerError):
    """The ranks are not in the same training; the message names ranks, hosts and what differs. Raised on every rank."""


class CoordinatorError(ByteSchedulerError, RuntimeError):
    """The coordinator refuses this worker or its message; trying again would not help."""


class SliceIndexError(ByteSchedulerError, ValueError):
    """An index of slices cannot be read: damaged, of another version, or no index at all."""


class SliceCorruptError(ByteSchedulerError, RuntimeError):
    """A slice does not hold what it should, however often it is fetched.

    Args:
        key: Identity of the slice.
        url: Where its bytes are.
        reason: What is wrong with it.
    """

    def __init__(self, key: str, url: str, reason: str) -> None:
        super().__init__(f"Slice {key!r} at {url} is corrupt: {reason}")
        self.key = key
        self.url = url
        self.reason = reason


class BadSampleError(ByteSchedulerError, ValueError):
    """A sample of a slice cannot be decoded, its transform raises, or too many samples were skipped for that."""


class SourceUnavailableError(ByteSchedulerError, OSError):
    """A source of slices did not answer, or refuses to be read.

    Args:
        url: The requested address.
        seconds: For how long reading was tried.
        cause: The error of the last attempt.
        way_out: What to do if the source refuses, which is not retried; ``None`` if it did not answer.
    """

    def __init__(self, url: str, seconds: float, cause: str, way_out: str | None = None) -> None:
        super().__init__(
            f"{url} cannot be read; it was tried for {seconds:.1f} s, and the last answer was: {cause}. "
            "Check that the source is there and reachable, or raise the option 'timeout'."
            if way_out is None
            else f"{url} refuses to be read: {cause}. {way_out}"
        )
        self.url = url


def _blank(kind: type[ByteSchedulerError]) -> ByteSchedulerError:
    return kind.__new__(kind)


def _shown(value: object) -> str:
    text = repr(value)
    if not isinstance(value, str):
        text = " ".join(text.split())  # an optimizer's repr has several lines
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


if not TYPE_CHECKING:
    __all__ = [name for name, kind in globals().items() if isinstance(kind, type)]
