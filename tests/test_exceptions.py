"""Errors travel between processes unchanged, with the arguments that they were made from."""

from __future__ import annotations

import copy
import pickle

import pytest

from lightning_bytescheduler import exceptions
from lightning_bytescheduler.exceptions import (
    ByteSchedulerError,
    OptionError,
    RankFailedError,
    RanksDivergedError,
    SchedulerTimeoutError,
    ServerFailedError,
    SliceCorruptError,
    SourceUnavailableError,
)

KINDS = [getattr(exceptions, name) for name in exceptions.__all__]
MADE = [
    *(kind("words") for kind in KINDS if "__init__" not in vars(kind)),
    OptionError("credit", 0, "more than 0", "Leave it out."),
    OptionError("credits", None, "an option", says="There is no option 'credits'."),
    RankFailedError(None, "boom"),
    RanksDivergedError("they wait for each other"),
    ServerFailedError("server 1 is gone"),
    SliceCorruptError("a", "file://a", "it is short"),
    SourceUnavailableError("http://a", 1.5, "404", "Look for it elsewhere."),
]


@pytest.mark.parametrize("error", MADE, ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_elsewhere(error: ByteSchedulerError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert again.args == error.args
        assert vars(again) == vars(error)


def test_each_kind_is_among_them() -> None:
    assert {type(error) for error in MADE} == set(KINDS)
    assert all(issubclass(kind, ByteSchedulerError) for kind in KINDS)
    assert isinstance(SchedulerTimeoutError("late"), TimeoutError)
