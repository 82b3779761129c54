"""On the path of a run of the tests, this gives them ``pytorch_lightning`` wherever they import ``lightning``.

The package under test must take ``pytorch_lightning`` by itself: if it imports ``lightning`` all the same, that fails.
Every Python that the tests start imports this too; `.ci/run` has the command.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

REAL = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}


def real_name(name: str) -> str | None:
    for alias, real in REAL.items():
        if name == alias or name.startswith(f"{alias}."):
            return real + name[len(alias) :]
    return None


class Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of ``lightning`` in the other package."""

    def find_spec(self, fullname: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "lightning":
            return None
        frame = sys._getframe(1)
        while frame is not None and any(part in frame.f_code.co_filename for part in ("importlib", "registration.py")):
            frame = frame.f_back  # type: ignore[assignment]
        importer = "" if frame is None else frame.f_globals.get("__name__", "")
        if importer.partition(".")[0] == "lightning_bytescheduler":
            raise ImportError(f"{importer} imports {fullname}, but this project uses pytorch_lightning")
        real = real_name(fullname)
        if fullname != "lightning" and (real is None or importlib.util.find_spec(real) is None):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        real = real_name(spec.name)
        if real is not None:
            module = importlib.import_module(real)
            self._spec = module.__spec__
            return module
        module = ModuleType("lightning")
        other = importlib.import_module("pytorch_lightning")
        vars(module).update({name: value for name, value in vars(other).items() if not name.startswith("_")})
        vars(module).update(__version__=other.__version__, __path__=[])
        self._spec = spec
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # its own again


def run_the_other() -> None:
    """What would have been imported without this file, such as that of ``lightning-bytescheduler check``."""
    here = os.path.dirname(os.path.abspath(__file__))
    paths = [path for path in sys.path if os.path.abspath(path or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, Instead())
run_the_other()
