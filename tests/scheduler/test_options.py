from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.checks import require_size
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.scheduler import ByteCore
from lightning_bytescheduler.scheduler.options import SchedulerOptions
from tests.scheduler.harness import enqueue
from tests.support.waiting import WAIT

SIZES = ("partition_size", "credit")
VARIABLES = {"partition_size": "BYTESCHEDULER_PARTITION", "credit": "BYTESCHEDULER_CREDIT"}
NAN, INF = float("nan"), float("inf")

NOT_SIZES = [0, -1, -3.0, 0.0, 0.5, 2.5, True, False, NAN, INF, -INF, "", "many", "0", "-1", "1.5", "nan", "inf"]
NOT_SIZES += ["-inf", "1e400", "True", "0x10", "4 000", [1], (), {}, b"5", 1j]


@pytest.mark.parametrize("option", SIZES)
@pytest.mark.parametrize("value", NOT_SIZES, ids=repr)
def test_an_argument_that_is_no_size_is_refused_by_name(option: str, value: Any) -> None:
    for make in (SchedulerOptions, SchedulerOptions.resolve):
        with pytest.raises(OptionError) as caught:
            make(**{option: value})
        assert str(caught.value) == (
            f"{option}={value!r} is not allowed: {option} must be a positive whole number of parameters."
        )
        assert (caught.value.option, caught.value.value) == (option, value)
        assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("variable", VARIABLES.values())
@pytest.mark.parametrize("value", [v for v in NOT_SIZES if isinstance(v, str) and v], ids=repr)
def test_a_variable_that_is_no_size_is_refused_by_name(variable: str, value: str) -> None:
    with pytest.raises(OptionError) as caught:
        SchedulerOptions.resolve(environ={variable: value})
    assert str(caught.value) == (
        f"{variable}={value!r} is not allowed: {variable} must be a positive whole number of parameters."
    )


@pytest.mark.parametrize("value", ["", "  "])
def test_an_empty_variable_is_none(value: str) -> None:
    names = ("PARTITION", "CREDIT", "CREDIT_TUNING", "PARTITION_TUNING", "TIMELINE", "DEBUG", "ROOT_IP")
    environ = {f"BYTESCHEDULER_{name}": value for name in names}
    assert SchedulerOptions.resolve(environ=environ) == SchedulerOptions.resolve(environ={})


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("8MB", 2_000_000),
        ("8 mb", 2_000_000),
        ("1MiB", 262_144),
        ("512kB", 128_000),
        ("4000B", 1000),
        ("4_000 bytes", 1000),
        ("8M", 8e6),
    ],
)
def test_other_units_are_converted(value: str, size: float) -> None:
    for make in (SchedulerOptions, SchedulerOptions.resolve):
        with pytest.raises(OptionError, match=rf"= {int(size):,} parameters: partition_size={int(size):_}\.$"):
            make(partition_size=value)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=rf"BYTESCHEDULER_CREDIT={int(size):_}\.$"):
        SchedulerOptions.resolve(environ={"BYTESCHEDULER_CREDIT": value})


@given(size=st.integers(1, 10**30))
def test_sizes_are_read_exactly(size: int) -> None:
    for text in (str(size), f" {size}\n"):
        options = SchedulerOptions.resolve(environ=dict.fromkeys(VARIABLES.values(), text))
        assert (options.partition_size, options.credit) == (size, size)
    assert SchedulerOptions(credit=size).credit == size


@pytest.mark.parametrize(("value", "size"), [("16e6", 16_000_000), ("4.0", 4), (8e6, 8_000_000), ("1_000", 1000)])
def test_sizes_may_be_written_as_floats(value: Any, size: int) -> None:
    assert SchedulerOptions(partition_size=value).partition_size == size
    credit = SchedulerOptions.resolve(environ={"BYTESCHEDULER_CREDIT": str(value)}).credit
    assert credit == size
    assert type(credit) is int


@pytest.mark.parametrize("option", SIZES)
def test_an_argument_beats_its_variable(option: str) -> None:
    options = SchedulerOptions.resolve(**{option: 7}, environ={VARIABLES[option]: "9"})
    assert getattr(options, option) == 7
    # What is not used is not judged either.
    assert getattr(SchedulerOptions.resolve(**{option: 7}, environ={VARIABLES[option]: "many"}), option) == 7
    assert getattr(SchedulerOptions.resolve(environ={VARIABLES[option]: "9"}), option) == 9


def test_timeline_and_debug_beat_their_variables() -> None:
    environ = {"BYTESCHEDULER_TIMELINE": "env.json", "BYTESCHEDULER_DEBUG": "1"}
    from_environment = SchedulerOptions.resolve(environ=environ)
    assert (from_environment.timeline, from_environment.debug) == ("env.json", True)
    from_arguments = SchedulerOptions.resolve(timeline="arg.json", debug=False, environ=environ)
    assert (from_arguments.timeline, from_arguments.debug) == ("arg.json", False)


def test_nothing_given_is_nothing_decided() -> None:
    assert SchedulerOptions.resolve(environ={}) == SchedulerOptions(tunes_credit=True)
    assert SchedulerOptions.resolve(environ={"BYTESCHEDULER_TIMELINE": ""}).timeline is None


def test_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BYTESCHEDULER_CREDIT", "123")
    assert SchedulerOptions.resolve().credit == 123
    assert SchedulerOptions().credit is None


@pytest.mark.parametrize(
    "variable",
    ["BYTESCHEDULER_DEBUG", "BYTESCHEDULER_CREDIT_TUNING", "BYTESCHEDULER_PARTITION_TUNING"],
)
@pytest.mark.parametrize("value", ["2", "-1", "0.5", "nan", "inf", "True", "yes", "no"])
def test_a_switch_is_0_or_1(variable: str, value: str) -> None:
    with pytest.raises(OptionError) as caught:
        SchedulerOptions.resolve(environ={variable: value})
    assert str(caught.value) == f"{variable}={value!r} is not allowed: {variable} must be 0 or 1."


@pytest.mark.parametrize("option", ["cross_barrier", "debug"])
@pytest.mark.parametrize("value", [0, 1, "True", NAN, 1.0, []], ids=repr)
def test_a_flag_is_true_or_false(option: str, value: Any) -> None:
    with pytest.raises(OptionError) as caught:
        SchedulerOptions.resolve(**{option: value}, environ={})
    assert str(caught.value) == f"{option}={value!r} is not allowed: {option} must be True or False."


class BytesPath:
    def __fspath__(self) -> bytes:
        return b"trace.json"

    def __repr__(self) -> str:
        return "BytesPath()"


@pytest.mark.parametrize("value", ["", 0, True, NAN, b"trace.json", BytesPath(), ["a"]], ids=repr)
def test_a_timeline_is_a_path(value: Any) -> None:
    with pytest.raises(OptionError, match="timeline must be a file path") as caught:
        SchedulerOptions(timeline=value)
    assert caught.value.option == "timeline"


@pytest.mark.parametrize("value", [Path("a/b.json"), PurePath("a/b.json"), "a/b.json"])
def test_a_path_becomes_text(value: Any) -> None:
    assert SchedulerOptions(timeline=value).timeline == "a/b.json"


def test_variables_without_effect_are_listed() -> None:
    environ = {"BYTESCHEDULER_ROOT_IP": "10.0.0.1", "BYTESCHEDULER_ROOT_PORT": "99", "BYTESCHEDULER_CREDIT_TUNING": "1"}
    ignored = SchedulerOptions.resolve(environ=environ).ignored_variables
    assert ignored == ("BYTESCHEDULER_ROOT_IP", "BYTESCHEDULER_ROOT_PORT")


@pytest.mark.parametrize(
    ("given", "variables", "expected"),
    [
        ({}, {}, (True, False)),
        ({}, {"CREDIT_TUNING": "1", "PARTITION_TUNING": "1"}, (True, True)),
        ({}, {"CREDIT_TUNING": "0"}, (False, False)),
        ({}, {"CREDIT_TUNING": "", "PARTITION_TUNING": " "}, (True, False)),
        ({"tuning": False}, {"CREDIT_TUNING": "1"}, (False, False)),
        ({"tuning": "both"}, {"CREDIT_TUNING": "0"}, (True, True)),
        ({"tuning": "credit"}, {"PARTITION_TUNING": "1"}, (True, False)),
        # A size that is given is kept, unless it is asked for that it is only a start.
        ({"credit": 9}, {}, (False, False)),
        ({"credit": 9, "tuning": "credit"}, {}, (True, False)),
        ({"credit": 9, "partition_size": 3}, {"CREDIT_TUNING": "1", "PARTITION_TUNING": "1"}, (False, False)),
        # The variable alone says where to start, as published.
        ({}, {"CREDIT": "9"}, (True, False)),
        ({}, {"CREDIT": "9", "CREDIT_TUNING": "0"}, (False, False)),
        ({"mode": "overlapped"}, {"CREDIT": "9"}, (False, False)),
        ({}, {"CREDIT": "9", "CREDIT_TUNING": "1"}, (True, False)),
        ({"partition_size": 3}, {}, (True, False)),
        # A fixed way of taking steps is left as it is, too; but sizes may be found for it.
        ({"mode": "overlapped"}, {}, (False, False)),
        ({"mode": "overlapped"}, {"CREDIT_TUNING": "1"}, (True, False)),
        ({"mode": "overlapped", "tuning": "partition"}, {}, (False, True)),
        ({"mode": "ddp"}, {"CREDIT_TUNING": "1", "PARTITION_TUNING": "1"}, (False, False)),
    ],
)
def test_what_is_tuned(given: dict[str, Any], variables: dict[str, str], expected: tuple[bool, bool]) -> None:
    environ = {f"BYTESCHEDULER_{name}": value for name, value in variables.items()}
    options = SchedulerOptions.resolve(**given, environ=environ)
    assert (options.tunes_credit, options.tunes_partition) == expected


@pytest.mark.parametrize("tuning", ["credit", "partition", "both"])
def test_steps_as_ddps_have_no_sizes_to_tune(tuning: str) -> None:
    with pytest.raises(OptionError, match="tuning must be False, or left out, where mode='ddp'"):
        SchedulerOptions.resolve(mode="ddp", tuning=tuning, environ={})
    with pytest.raises(OptionError, match="tuning must be one of False, 'credit', 'partition', 'both'"):
        SchedulerOptions.resolve(tuning=f"{tuning}s", environ={})


def test_options_cannot_change_and_can_travel() -> None:
    options = SchedulerOptions(partition_size=5, credit=9, timeline="t.json")
    with pytest.raises(AttributeError):
        options.credit = 3  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(options)) == options


# ---------------------------------------------------------------------- the core's own arguments


@pytest.fixture
def core() -> Iterator[ByteCore]:
    with ByteCore(partition_size=10, credit=40) as core:
        yield core


@pytest.mark.parametrize("option", SIZES)
@pytest.mark.parametrize("value", [*NOT_SIZES, 4.0, "7", None], ids=repr)
def test_the_core_takes_whole_numbers_only(core: ByteCore, option: str, value: Any) -> None:
    message = "must be a positive whole number of parameters"
    with pytest.raises(OptionError, match=f"^{option}=.*{message}"):
        ByteCore(**{"partition_size": 10, "credit": 40, option: value})
    with pytest.raises(OptionError, match=f"^{option}=.*{message}"):
        setattr(core, option, value)
    assert (core.partition_size, core.credit) == (10, 40)
    with pytest.raises(OptionError, match=f"^{option}=.*{message}"):
        require_size(option, value)


def test_a_partition_above_the_credit_is_clamped(core: ByteCore) -> None:
    core.partition_size = 100
    assert core.partition_size == 40
    core.credit = 15
    assert core.partition_size == 15
    core.credit = 1000
    assert core.partition_size == 100
    with ByteCore(partition_size=8, credit=3) as small:
        assert small.partition_size == 3


def test_each_start_is_logged_at_level_debug(caplog: pytest.LogCaptureFixture) -> None:
    for level in (logging.INFO, logging.DEBUG):
        with (
            caplog.at_level(level, "lightning_bytescheduler"),
            ByteCore(partition_size=10, credit=40) as core,
        ):
            task = enqueue(core, lambda sub: sub.notify_finish(), f"task at {level}", 20)
            task.wait(WAIT)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert all(f"task at {logging.DEBUG}" in message and "credit=40" in message for message in messages)
