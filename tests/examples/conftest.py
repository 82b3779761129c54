from __future__ import annotations

from tests.faults.conftest import nursery

__all__ = ["nursery"]
