"""A checkout of Lightning's repository, whose tests are run against the installed Lightning."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from tests.lightning_suite.selection import Mentions

__all__ = ["Checkout", "CheckoutError"]

_URL = "https://github.com/Lightning-AI/pytorch-lightning"


class CheckoutError(Exception):
    """The folder is no checkout of the Lightning that is installed, or its tests cannot be read."""


class Checkout:
    """Lightning's repository.

    Args:
        path: Its top folder.
        any_version: Take it also if it is of another version than the installed Lightning.

    Raises:
        CheckoutError: Says how to get the right one.
    """

    def __init__(self, path: Path, *, any_version: bool = False) -> None:
        installed = version("lightning")
        way_out = f"Get it with: git clone --branch {installed} {_URL}"
        self.path = path.resolve()
        self.tests = self.path / "tests"
        version_file = self.path / "src" / "version.info"
        if not version_file.is_file() or not (self.tests / "tests_pytorch").is_dir():
            raise CheckoutError(f"{path} is no checkout of Lightning's repository. {way_out}")
        self.version = version_file.read_text().strip()
        if self.version != installed and not any_version:
            raise CheckoutError(
                f"{path} is Lightning {self.version}, but {installed} is installed. {way_out} (or pass --any-version)"
            )

    def files_that_mention_ddp(self) -> list[str]:
        """Test files, relative to ``tests``."""
        files = sorted((self.tests / "tests_pytorch").rglob("test_*.py"))
        return [file.relative_to(self.tests).as_posix() for file in files if Mentions(file.read_text())]
