from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.rank_pool import RankPool

# Configurations are made here: nothing is ever downloaded. The ranks inherit it.
os.environ["HF_HUB_OFFLINE"] = "1"

_PACKAGES = (
    "diffusers",
    "finetuning_scheduler",
    "lion_pytorch",
    "peft",
    "prodigyopt",
    "schedulefree",
    "torchvision",
    "transformers",
)
_MISSING = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
# First what makes torchvision importable, as Lightning's metrics import it when they find it.
_PRELOADED = ("tests.real_models", "tests.real_models.language_models", "tests.real_models.image_models")


class _Missing(pytest.File):
    """In the place of a test module, which would fail to import what is missing."""

    def collect(self) -> Iterator[Any]:
        pytest.skip(f"needs {', '.join(_MISSING)}: `make real-models` installs what is missing and runs these tests")


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Collector | None:
    return _Missing.from_parent(parent, path=module_path) if _MISSING else None


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    with RankPool(2, preloaded=_PRELOADED) as pool:
        yield pool
