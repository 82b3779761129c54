"""What ``package.module:name`` on a command line stands for."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from typing import Any

from lightning_bytescheduler.exceptions import OptionError

__all__ = ["call_target", "load_target"]


def load_target(option: str, text: str) -> Any:
    """Import what ``text`` names; modules in the current directory are found too.

    Args:
        option: What the text was given for.
        text: ``package.module:name``.

    Raises:
        OptionError: If the text has another form, or the module has no such name.
        ImportError: If there is no such module, or it imports what is missing.
    """
    module_name, _, name = text.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *name.split("."))):
        raise OptionError(option, text, "package.module:name, such as my_project.train:make")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does, and a console script does not
    found: Any = importlib.import_module(module_name)
    for part in name.split("."):
        if not hasattr(found, part):
            raise OptionError(option, text, f"a name that {module_name} has")
        found = getattr(found, part)
    return found


def call_target(option: str, text: str, target: Any, *, instances: tuple[type, ...]) -> Any:
    """What a function returns or a class makes; what is one of ``instances`` already is left as it is.

    Args:
        option: What the text was given for.
        text: What named the target.
        target: What was imported.
        instances: Classes whose instances are not called, though they could be.

    Raises:
        OptionError: If it is neither, or needs arguments.
    """
    if isinstance(target, instances):
        return target
    if not callable(target):
        raise OptionError(option, text, "the name of a function or a class")
    try:
        inspect.signature(target).bind()
    except TypeError:
        raise OptionError(
            option, text, "a function or class that needs no arguments; wrap it in a function that gives them"
        ) from None
    return target()
