"""What packages offer and import at the first use is there."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize("package", ["lightning_bytescheduler", "lightning_bytescheduler.diloco"])
def test_each_name_that_is_promised_is_there(package: str) -> None:
    module = importlib.import_module(package)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        module.nothing  # noqa: B018
