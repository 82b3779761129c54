"""A few hundred wrong messages on every route; ``benchmarks.coordinator_fuzz`` sends a hundred thousand."""

from __future__ import annotations

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("safetensors")


@pytest.mark.parametrize("seed", [1, 2])
def test_wrong_messages_change_nothing(seed):
    from benchmarks.coordinator_fuzz import fuzz

    said: list[str] = []
    fuzz(400, seed=seed, say=said.append)
    assert any("saved states load" in line for line in said)
