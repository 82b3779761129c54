"""What packages offer and import at the first use is there."""

from __future__ import annotations

import importlib

import pytest


def test_each_name_that_is_promised_is_there() -> None:
    module = importlib.import_module("lightning_bytescheduler")
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        module.nothing  # noqa: B018
