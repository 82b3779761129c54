"""Buffers that are used again, and never those in use."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from lightning_bytescheduler.coordinator import spool


@pytest.mark.parametrize("fewer", [0, 1])
def test_buffers_in_use_are_not_handed_out(fewer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Python counts fewer references, as some of its versions do."""
    count = sys.getrefcount
    spec = importlib.util.spec_from_file_location("spool_again", spool.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "getrefcount", lambda value: count(value) - 1 - fewer)  # one is the lambda's own
    spec.loader.exec_module(module)
    pool = module.BufferPool()
    kept, other = pool.take(1 << 22), pool.take(1 << 22)
    place = other.data_ptr()
    assert kept.data_ptr() != place
    del other
    assert pool.take(1 << 22).data_ptr() == place
