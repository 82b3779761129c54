"""Where the project is at home, for its metadata: known when a release is built, and no sooner.

The address is that of ``REPOSITORY_URL``, else of the job that builds on GitHub, else of the checkout's ``origin``.
A package index shows the README away from the repository, so that its links and pictures get whole addresses there.
Without an address the links stay as they are, and the metadata name none.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]+)\)")


class HomeMetadataHook(MetadataHookInterface):
    """Fills in the project's addresses and its README."""

    def update(self, metadata: dict[str, Any]) -> None:
        """See MetadataHookInterface."""
        readme = (Path(self.root) / "README.md").read_text()
        home = repository_url(self.root)
        if home:
            # A tag for each release; its documentation is the one that was true then.
            tag = f"v{metadata['version']}"
            readme = with_whole_addresses(readme, home, tag)
            metadata["urls"] = {
                "Homepage": home,
                "Documentation": f"{home}/blob/{tag}/docs/index.md",
                "Changelog": f"{home}/blob/{tag}/CHANGELOG.md",
                "Issues": f"{home}/issues",
                "Source": home,
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}


def repository_url(root: str) -> str:
    """The address of the repository in a browser; empty where it is not known."""
    given = os.environ.get("REPOSITORY_URL", "")
    server, repository = os.environ.get("GITHUB_SERVER_URL", ""), os.environ.get("GITHUB_REPOSITORY", "")
    if not given and server and repository:
        given = f"{server}/{repository}"
    if not given:
        try:
            command = ["git", "-C", root, "config", "--get", "remote.origin.url"]
            given = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            given = ""
    given = re.sub(r"^(?:ssh://)?git@([^:/]+)[:/]", r"https://\1/", given)
    return given.removesuffix("/").removesuffix(".git") if given.startswith("https://") else ""


def with_whole_addresses(text: str, home: str, tag: str) -> str:
    """Have links to files and pictures of the repository lead there."""

    def whole(link: re.Match[str]) -> str:
        picture, words, path = link.groups()
        return f"{picture}[{words}]({home}/{'raw' if picture else 'blob'}/{tag}/{path})"

    return _LINK.sub(whole, text)
