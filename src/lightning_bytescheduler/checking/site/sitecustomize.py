"""Put on the path of the processes that ``lightning-bytescheduler check`` starts; Python imports it when it starts.

It seeds random numbers as their modules are imported, and has ``lightning_bytescheduler.checking.injected`` look after
Lightning once a Trainer is made. A ``sitecustomize`` that was there before runs as well.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

_FABRIC = "The script trains with Fabric, which has no strategy 'bytescheduler'. The check is for Lightning's Trainer."

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_the_other() -> None:
    """What would have been imported without this file."""
    paths = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function when a module has been imported."""

    def __init__(self, actions: dict[str, Callable[[Any], object]]) -> None:
        self._actions = actions

    def find_spec(self, fullname: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        action = self._actions.pop(fullname, None)
        if action is None:
            return None
        spec = importlib.util.find_spec(fullname)  # found by the others: the action is no longer listed here
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return spec
        execute = spec.loader.exec_module

        def then(module: ModuleType) -> None:
            this = module.__spec__ is spec  # a loader may load others too, as that of a zip file does
            execute(module)
            if this:
                action(module)

        spec.loader.exec_module = then  # type: ignore[method-assign]
        return spec


def _at_the_first_trainer(pytorch: Any) -> None:
    """Look after the package of Lightning whose Trainer is made; a script may import both, as when a library does.

    Processes that this one starts find the package in the environment.
    """
    from lightning_bytescheduler import registration
    from lightning_bytescheduler.checking.runs import SPEC_VARIABLE, STARTED, RunSpec, refuse
    from lightning_bytescheduler.exceptions import UnsupportedError

    package: Any = pytorch.__name__.partition(".")[0]
    _, folder = RunSpec.load(Path(os.environ[SPEC_VARIABLE]))
    (folder / STARTED).touch()

    def install() -> None:
        try:
            registration.use_package(package, f"The script trains with {package}")
        except UnsupportedError as error:
            refuse(folder, str(error))
        os.environ[registration.VARIABLE] = package
        from lightning_bytescheduler.checking import injected

        injected.install()

    def backward(*_: Any, **__: Any) -> None:
        refuse(folder, _FABRIC)

    fabric = "lightning.fabric" if package == "lightning" else "lightning_fabric"
    importlib.import_module(fabric).Fabric.backward = backward
    connector = importlib.import_module(f"{pytorch.__name__}.trainer.connectors.accelerator_connector")
    # A rank that is spawned makes no Trainer, but gets one.
    places = [(connector._AcceleratorConnector, "__init__"), (pytorch.Trainer, "_fit_impl")]
    originals = [getattr(owner, name) for owner, name in places]

    def first(owner: Any, name: str, original: Callable[..., Any]) -> None:
        @functools.wraps(original)
        def install_before(self: Any, *arguments: Any, **options: Any) -> Any:
            for (patched, method), before in zip(places, originals, strict=True):
                setattr(patched, method, before)
            install()
            return getattr(owner, name)(self, *arguments, **options)

        setattr(owner, name, install_before)

    for (owner, name), original in zip(places, originals, strict=True):
        first(owner, name, original)


def _watch(path: str) -> None:
    with open(path) as file:
        spec = json.load(file)
    seed = spec["seed"]
    random.seed(seed)
    # Should this process have to be ended: it may be in another process group than its parent.
    with open(os.path.join(spec["folder"], f"process{os.getpid()}.txt"), "w"):
        pass

    def numpy_random(module: Any) -> None:
        module.seed(seed % 2**32)
        make = module.default_rng
        number = itertools.count()

        @functools.wraps(make)
        def default_rng(*arguments: Any, **options: Any) -> Any:
            if arguments[:1] in ((), (None,)) and options.get("seed") is None:
                return make([seed, next(number)])  # would ask the system for a seed
            return make(*arguments, **options)

        module.default_rng = default_rng

    actions: dict[str, Callable[[Any], object]] = {
        "numpy.random": numpy_random,
        "torch": lambda module: module.manual_seed(seed),
        "lightning.pytorch": _at_the_first_trainer,
        "pytorch_lightning": _at_the_first_trainer,
    }
    sys.meta_path.insert(0, _AfterImport(actions))


_run_the_other()
if os.path.exists(os.environ.get("LIGHTNING_BYTESCHEDULER_CHECK", "")):
    _watch(os.environ["LIGHTNING_BYTESCHEDULER_CHECK"])
