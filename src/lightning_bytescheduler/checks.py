"""Checks of options: each says what is wrong, with the option's name, and what is allowed.

Every ``require_*`` returns the value it was given, and raises :class:`OptionError` if that is not allowed.
``importing`` is the same for packages that are not installed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeGuard, TypeVar

from lightning_bytescheduler.exceptions import OptionError

__all__ = [
    "importing",
    "is_finite",
    "is_whole",
    "records_in",
    "require_bool",
    "require_not_negative",
    "require_one_of",
    "require_output",
    "require_path",
    "require_positive",
    "require_seconds",
    "require_share",
    "require_size",
    "require_suffix",
    "require_text",
    "require_whole",
]

_T = TypeVar("_T")


@contextmanager
def importing(feature: str, *, extra: str | None = None) -> Iterator[None]:
    """Imports inside of it say what they are for, and what to install where a package is missing.

    Args:
        feature: What needs the packages, as the subject of a sentence.
        extra: The extra of this package that installs them; None where they are installed by their own names.

    Raises:
        ImportError: If an import inside fails; names the feature, the package and the extra.
    """
    try:
        yield
    except ImportError as error:
        # fsspec raises an error of its own, and the one that names the package is behind it.
        name = error.name or getattr(error.__cause__, "name", None) or "a package"
        package = name.partition(".")[0]
        is_missing = isinstance(error if error.name else error.__cause__ or error, ModuleNotFoundError)
        state = "is not installed" if is_missing else f"cannot be imported ({error})"
        install = f"'lightning-bytescheduler[{extra}]'" if extra else package
        raise ImportError(f"{feature} needs {package}, which {state}: pip install {install}", name=name) from error


def is_whole(value: object, least: int = 0) -> TypeGuard[int]:
    """Whether ``value`` is a whole number, ``least`` or more; ``True`` and ``False`` are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_finite(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a number, neither infinite nor NaN; ``True`` and ``False`` are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def require_bool(option: str, value: object) -> bool:
    """Return ``value`` if it is ``True`` or ``False``.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if not isinstance(value, bool):
        raise OptionError(option, value, "True or False")
    return value


def require_whole(option: str, value: object, least: int) -> int:
    """Return ``value`` if it is a whole number, ``least`` or more.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if not is_whole(value, least):
        raise OptionError(option, value, f"a whole number, {least} or more")
    return value


def require_size(option: str, value: object) -> int:
    """Return ``value`` if it is a size, in parameters: a whole number above 0.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if not is_whole(value, 1):
        raise OptionError(option, value, "a positive whole number of parameters")
    return value


def require_not_negative(option: str, value: object, *, of: str = "") -> float:
    """Return ``value`` if it is a finite number, 0 or more.

    Args:
        option: Its name.
        value: What was given.
        of: Its unit, for the message.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if not is_finite(value) or value < 0:
        raise OptionError(option, value, f"{_finite(of)}, 0 or more")
    return value


def require_positive(option: str, value: object, *, of: str = "") -> float:
    """Return ``value`` if it is a finite number above 0.

    Args:
        option: Its name.
        value: What was given.
        of: Its unit, for the message.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if not is_finite(value) or value <= 0:
        raise OptionError(option, value, f"{_finite(of)}, more than 0")
    return value


def require_seconds(option: str, value: object) -> float:
    """Return ``value`` if it is a finite number of seconds, 0 or more.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    return require_not_negative(option, value, of="seconds")


def require_share(option: str, value: object) -> float:
    """Return ``value`` if it is a number from 0 to 1.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if not is_finite(value) or not 0 <= value <= 1:
        raise OptionError(option, value, "a number from 0 to 1")
    return value


def require_one_of(option: str, value: _T, allowed: Iterable[_T]) -> _T:
    """Return ``value`` if it is one of ``allowed``.

    Raises:
        OptionError: If it is not; names ``option`` and what is allowed.
    """
    choices = list(allowed)
    if value not in choices:
        raise OptionError(option, value, f"one of {', '.join(map(repr, choices))}")
    return value


def require_text(option: str, value: object) -> str:
    """Return ``value`` if it is a text.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if not isinstance(value, str):
        raise OptionError(option, value, "a text")
    return value


def require_path(option: str, value: object) -> str:
    """Return ``value`` as text if it is the path of a file.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path:
        raise OptionError(option, value, "a file path")
    return path


def require_suffix(option: str, value: str | os.PathLike[str], suffixes: Iterable[str]) -> Path:
    """Return ``value`` as a path if it ends in one of ``suffixes``, given without dots.

    Raises:
        OptionError: If it does not; names ``option`` and the suffixes.
    """
    path, allowed = Path(value), list(suffixes)
    if path.suffix[1:].lower() not in allowed:
        raise OptionError(option, os.fspath(value), f"a file name with one of the suffixes {', '.join(allowed)}")
    return path


def require_output(option: str, value: str | os.PathLike[str]) -> Path:
    """Return ``value`` as a path if a file can be written there, so that nobody computes for nothing.

    Raises:
        OptionError: If its folder is missing or read-only, or it is a folder itself; names ``option``.
    """
    path = Path(value)
    folder = path.parent
    allowed = ""
    if not os.fspath(value) or path.is_dir():
        allowed = "the name of a file, not of a folder"
    elif not folder.is_dir():
        kind = "is no folder" if folder.exists() else "does not exist"
        allowed = f"a file in a folder that is there; {os.fspath(folder)!r} {kind}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        allowed = "a file that may be written; its permissions forbid it"
    if allowed:
        raise OptionError(option, os.fspath(value), allowed)
    return path


def records_in(run: str | os.PathLike[str], name: str) -> list[Path]:
    """Find what a run has recorded, the newest first: in a folder, or below it as loggers number their versions.

    Args:
        run: The record itself; the folder that it is in; or one above, such as ``lightning_logs``.
        name: Of the record.

    Raises:
        OptionError: If there is no such record; says where it was looked for.
    """
    path = Path(run)
    if not path.is_dir():
        if path.exists():
            return [path]
        raise OptionError("RUN", os.fspath(run), f"a file or a folder that is there, such as {_versions(name)}")
    direct = path / name
    if direct.is_file():
        return [direct]
    places = (f"version_*/{name}", f"*/version_*/{name}", f"*/{name}", f"*/*/version_*/{name}")
    found = {file for place in places for file in path.glob(place) if file.is_file()}
    if not found:
        raise OptionError("RUN", os.fspath(run), f"a folder with {name} in it, or in one of its folders version_*")
    return sorted(found, key=lambda file: (file.stat().st_mtime_ns, os.fspath(file)), reverse=True)


def _versions(name: str) -> str:
    return f"lightning_logs, lightning_logs/version_0 or {name}"


def _finite(of: str) -> str:
    return f"a finite number of {of}" if of else "a finite number"
