from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.diloco.batch_size import find_batch_size, resolve_batch_size
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError


class Machine:
    """A step takes a fixed time and some per sample, beyond ``parallel`` samples; memory is for ``most``."""

    def __init__(self, *, parallel: int, most: int) -> None:
        self.parallel, self.most = parallel, most
        self.tried: list[int] = []

    def __call__(self, size: int) -> float | None:
        self.tried.append(size)
        return 0.01 * max(size / self.parallel, 1.0) if size <= self.most else None


def test_it_grows_until_throughput_stops_it() -> None:
    machine = Machine(parallel=64, most=10**9)
    assert find_batch_size(machine) == 64
    assert machine.tried == [1, 2, 4, 8, 16, 32, 64, 128]


@pytest.mark.parametrize("most", [1, 2, 3, 100, 1000])
def test_it_grows_until_memory_stops_it(most: int) -> None:
    machine = Machine(parallel=10**9, most=most)
    found = find_batch_size(machine)
    assert most * 7 / 8 - 1 < found <= most
    assert len(machine.tried) < 16


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 64), st.integers(0, 500))
def test_it_finds_what_is_nearly_the_best(parallel: int, most: int, start: int, more: int) -> None:
    machine = Machine(parallel=parallel, most=most)
    limit = start + more
    if start > most:
        with pytest.raises(UnsupportedError, match=f"a batch of {start}"):
            find_batch_size(machine, start=start, limit=limit)
        return
    found = find_batch_size(machine, start=start, limit=limit)
    assert start <= found <= min(most, limit)
    rate = found / (0.01 * max(found / parallel, 1.0))
    assert all(size / seconds < rate * 1.05 for size in list(machine.tried) if (seconds := machine(size)) is not None)
    useful = min(parallel, most, limit)
    assert found >= useful * 0.49


def test_the_limit_is_tried_and_not_passed() -> None:
    machine = Machine(parallel=10**9, most=10**9)
    assert find_batch_size(machine, start=3, limit=40) == 40
    assert machine.tried == [3, 6, 12, 24, 40]


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"start": 0}, "start"), ({"start": 8, "limit": 4}, "limit")],
)
def test_what_is_not_allowed(options: dict, reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        find_batch_size(lambda size: 1.0, **options)


def test_a_time_that_cannot_be() -> None:
    with pytest.raises(OptionError, match=r"try_batch=0\.0"):
        find_batch_size(lambda size: 0.0)


def test_an_argument_beats_the_environment() -> None:
    env = {"BYTESCHEDULER_BATCH_SIZE": "16"}
    assert resolve_batch_size(None, environ=env) == 16
    assert resolve_batch_size(32, environ=env) == 32
    assert resolve_batch_size("auto", environ=env) == "auto"
    assert resolve_batch_size([12, 6, 2], worker=1, environ=env) == 6
    assert resolve_batch_size(None, environ={"BYTESCHEDULER_BATCH_SIZE": " auto "}) == "auto"
    assert resolve_batch_size(None, environ={"BYTESCHEDULER_BATCH_SIZE": ""}) is None
    assert resolve_batch_size(None, environ={}) is None


def test_the_processs_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BYTESCHEDULER_BATCH_SIZE", "24")
    assert resolve_batch_size(None) == 24


@pytest.mark.parametrize("text", ["0", "-4", "many", "1.5", "٣"])
def test_what_is_no_batch_size_in_the_environment(text: str) -> None:
    with pytest.raises(OptionError, match="BYTESCHEDULER_BATCH_SIZE="):
        resolve_batch_size(None, environ={"BYTESCHEDULER_BATCH_SIZE": text})


@pytest.mark.parametrize("value", [0, True, 1.5, "16", [], [12, 0], (12,)])
def test_what_is_no_batch_size(value) -> None:
    with pytest.raises(OptionError, match="batch_size"):
        resolve_batch_size(value, worker=1)
