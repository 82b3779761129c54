from __future__ import annotations

import pytest

from lightning_bytescheduler.diloco.loaders import resolve_batch_size
from lightning_bytescheduler.exceptions import OptionError


def test_an_argument_beats_the_environment() -> None:
    env = {"BYTESCHEDULER_BATCH_SIZE": "16"}
    assert resolve_batch_size(None, environ=env) == 16
    assert resolve_batch_size(32, environ=env) == 32
    assert resolve_batch_size([12, 6, 2], worker=1, environ=env) == 6
    assert resolve_batch_size(None, environ={"BYTESCHEDULER_BATCH_SIZE": ""}) is None
    assert resolve_batch_size(None, environ={}) is None


def test_the_processs_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BYTESCHEDULER_BATCH_SIZE", "24")
    assert resolve_batch_size(None) == 24


@pytest.mark.parametrize("text", ["0", "-4", "many", "auto", "1.5", "٣"])
def test_what_is_no_batch_size_in_the_environment(text: str) -> None:
    with pytest.raises(OptionError, match="BYTESCHEDULER_BATCH_SIZE="):
        resolve_batch_size(None, environ={"BYTESCHEDULER_BATCH_SIZE": text})


@pytest.mark.parametrize("value", [0, True, 1.5, "16", "auto", [], [12, 0], (12,)])
def test_what_is_no_batch_size(value) -> None:
    with pytest.raises(OptionError, match="batch_size"):
        resolve_batch_size(value, worker=1)
