"""Without Ray, in the tests' own environment; with it: tests/ray_train."""

from __future__ import annotations

import importlib
import importlib.util

import pytest


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_what_is_missing_is_named_with_the_extra() -> None:
    with pytest.raises(
        ImportError, match=r"needs ray, which is not installed: pip install 'lightning-bytescheduler\[ray\]'"
    ):
        importlib.import_module("lightning_bytescheduler.ray")
