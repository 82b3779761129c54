"""Puts what a wheel asks for into an environment, as hard links to the packages of the one that runs this.

    .venv/bin/python tests/smoke/linked_environment.py WHEEL ENVIRONMENT

Nothing is downloaded or unpacked again, and the versions are those that the tests ran with. Only what the wheel's
metadata leads to is there: what it forgets to name is missing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from importlib.util import cache_from_source
from pathlib import Path
from zipfile import ZipFile

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["needed_by"]


def needed_by(requirements: list[Requirement]) -> Iterator[Distribution]:
    """Each installed distribution that these requirements lead to, once for each set of extras."""
    left = [requirement for requirement in requirements if _applies(requirement, {""})]
    done = set[tuple[str, frozenset[str]]]()
    while left:
        requirement = left.pop()
        asked = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if asked in done:
            continue
        done.add(asked)
        found = distribution(requirement.name)
        yield found
        further = map(Requirement, found.requires or ())
        left += [one for one in further if _applies(one, {"", *requirement.extras})]


def _applies(requirement: Requirement, extras: set[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)


def _main(wheel: Path, environment: Path) -> None:
    with ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Metadata.from_email(opened.read(name), validate=False)
    (packages,) = environment.glob("lib/python*/site-packages")
    for found in needed_by(metadata.requires_dist or []):
        for file in found.files or ():
            if ".." not in file.parts:  # a command of the package's, which names its own Python
                _link(Path(str(found.locate_file(file))), packages / file)


def _link(source: Path, target: Path) -> None:
    """Link a file, and what Python has compiled it to."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    os.link(source, target)
    if source.suffix == ".py" and (compiled := Path(cache_from_source(str(source)))).exists():
        _link(compiled, Path(cache_from_source(str(target))))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
