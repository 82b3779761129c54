"""Cases of a test, of which some are slow."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest

__all__ = ["cases"]


def cases(of: Mapping[str, Any], *, quick: Collection[str]) -> list[Any]:
    """Cases by their names; those that are not ``quick`` are slow."""
    unknown = set(quick) - set(of)
    assert not unknown, unknown
    return [pytest.param(case, id=name, marks=() if name in quick else pytest.mark.slow) for name, case in of.items()]
