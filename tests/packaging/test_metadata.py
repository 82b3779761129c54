"""What a package index is told: addresses, the README with whole links, and the fewest dependencies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

# The newest hatchling is what the environment of the tests has; the module is not installed with the package.
pytest.importorskip("hatchling")

from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

ROOT = Path(__file__).parents[2]
HOME = "https://example.org/group/lightning-bytescheduler"
CORE = {"lightning", "torch", "torchmetrics", "bayesian-optimization", "fsspec"}


def metadata() -> ProjectMetadata:
    return ProjectMetadata(str(ROOT), PluginManager())


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REPOSITORY_URL", "GITHUB_SERVER_URL", "GITHUB_REPOSITORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_DIR", str(ROOT / "no-such-folder"))


@pytest.mark.usefixtures("nowhere")
def test_without_an_address_links_stay_as_they_are() -> None:
    core = metadata().core
    assert core.readme == (ROOT / "README.md").read_text()
    assert core.urls == {}


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize(
    "variables",
    [
        {"REPOSITORY_URL": f"{HOME}/"},
        {"REPOSITORY_URL": "git@example.org:group/lightning-bytescheduler.git"},
        {"GITHUB_SERVER_URL": "https://example.org", "GITHUB_REPOSITORY": "group/lightning-bytescheduler"},
    ],
)
def test_links_and_pictures_lead_to_the_repository(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    core = metadata().core
    assert core.urls["Source"] == HOME
    assert "![Three steps of a training" in core.readme
    assert re.search(rf"!\[[^\]]*\]\({HOME}/raw/v[0-9.a-z]+/docs/\w+\.png\)", core.readme)
    relative = re.findall(r"\]\((?!https://|#)([^)]*)\)", core.readme)
    assert relative == []


def test_the_core_needs_little() -> None:
    names = {re.split(r"[^\w-]", dependency)[0] for dependency in metadata().core.dependencies}
    # And what reads the messages between ranks, and what bayesian-optimization and torchmetrics work on.
    assert names == CORE | {"msgspec", "numpy"}
