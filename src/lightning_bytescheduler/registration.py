"""The names of the strategies, and which Lightning package they belong to.

Lightning is published as ``lightning`` and as ``pytorch_lightning`` (whose Fabric is ``lightning_fabric``), each with
its own classes: the Trainer of one accepts no strategy of the other. Where one is installed, the other is, too. The
adapters take all of Lightning's names from :mod:`~lightning_bytescheduler.lightning_api`. Both are imported only when
it is known which package the project uses:

* A Trainer or a Fabric asks for a strategy by name: then it is the package of that Trainer or Fabric.
* A name such as ``ByteSchedulerStrategy`` is imported: then it is what ``BYTESCHEDULER_LIGHTNING`` says; else the
  package that the importing file imports too, whichever line comes first; else the one that has been imported; else
  ``lightning``.

That settles it for the process. The Trainer of the other package then gets an error that says why. If a Trainer or
Fabric has decided, processes that this one starts find the answer in the environment variable.

This module imports neither Lightning nor torch. It registers the names in each of the two packages once that is
imported. It has the version of this package, too, which the build reads from here.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Literal, NamedTuple, cast, get_args

from lightning_bytescheduler.exceptions import OptionError, UnsupportedError

__version__ = "0.1.0"

LightningPackage = Literal["lightning", "pytorch_lightning"]

VARIABLE = "BYTESCHEDULER_LIGHTNING"

CHECK_VARIABLE = "LIGHTNING_BYTESCHEDULER_CHECK"
"""Environment variable with the path of a run of ``check``, which replaces the Trainer's strategy."""

_PARTS: dict[str, tuple[LightningPackage, str, str]] = {
    "pytorch_lightning": ("pytorch_lightning", "Trainer", "StrategyRegistry"),
    "lightning.pytorch": ("lightning", "Trainer", "StrategyRegistry"),
    "lightning_fabric": ("pytorch_lightning", "Fabric", "STRATEGY_REGISTRY"),
    "lightning.fabric": ("lightning", "Fabric", "STRATEGY_REGISTRY"),
}
"""Modules that have a Trainer or a Fabric: the package, which of both, and the name of its registry of strategies."""


class _Choice(NamedTuple):
    package: LightningPackage
    reason: str


_choice: _Choice | None = None


def choose_package() -> LightningPackage:
    """The package whose names the adapters take, decided at the first call.

    Raises:
        OptionError: If ``BYTESCHEDULER_LIGHTNING`` names neither.
    """
    global _choice
    if _choice is None:
        _choice = _from_environment() or _from_importing_file() or _from_what_is_imported()
    return _choice.package


def use_package(package: LightningPackage, asked: str) -> None:
    """Make the adapters take their names from ``package``, if nothing else is decided yet.

    Args:
        package: The Trainer's package.
        asked: What the Trainer asks of this package, as a sentence.

    Raises:
        UnsupportedError: If the adapters belong to the other one already.
    """
    global _choice
    if _choice is None:
        _choice = _Choice(package, f"a Trainer of {package} had asked for a strategy before")
        os.environ[VARIABLE] = package  # for ranks that are started as new processes
    if _choice.package != package:
        raise UnsupportedError(
            f"{asked}, but lightning-bytescheduler works with '{_choice.package}' in this process, as "
            f"{_choice.reason}. Use one of the two throughout, for Trainer, LightningModule and callbacks alike; to "
            f"say which, set {VARIABLE}={package} before Python starts."
        )


def require_same_package(trainer: object, ours: str) -> None:
    """Require that a Trainer, or a LightningModule, and ``ours`` belong to one package.

    Raises:
        UnsupportedError: If they do not.
    """
    for base in type(trainer).__mro__:
        package = base.__module__.partition(".")[0]
        if package in get_args(LightningPackage):
            use_package(cast(LightningPackage, package), f"{ours} was given a {base.__name__} of {package}")
            return


def _from_environment() -> _Choice | None:
    value = os.environ.get(VARIABLE, "")
    if not value:
        return None
    if value not in get_args(LightningPackage):
        raise OptionError(VARIABLE, value, "'lightning' or 'pytorch_lightning'")
    return _Choice(cast(LightningPackage, value), f"{VARIABLE} says")


def _from_importing_file() -> _Choice | None:
    """The package that the file importing from here imports, too; else that of the file that imports it, and so on."""
    for frame in _frames():
        # The names of a file's own code include its variables and the modules that it imports.
        named = {name.partition(".")[0] for name in frame.f_code.co_names}
        packages = {package for module, (package, *_) in _PARTS.items() if module.partition(".")[0] in named}
        if frame.f_code.co_name == "<module>" and len(packages) == 1:
            return _Choice(packages.pop(), f"{os.path.basename(frame.f_code.co_filename)} imports that")
    return None


def _frames() -> Iterator[Any]:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] != __package__:
            yield frame
        frame = frame.f_back  # type: ignore[assignment]


def _from_what_is_imported() -> _Choice:
    for user in ("Trainer", "Fabric"):
        imported = {package for module, (package, its, _) in _PARTS.items() if its == user and module in sys.modules}
        if len(imported) == 1:
            return _Choice(imported.pop(), f"only that had been imported when {__package__}'s names were")
    return _Choice("lightning", f"nothing else was known when {__package__}'s names were imported")


# ---------------------------------------------------------------------- the names


_DDP = "DDP scheduled by ByteScheduler"
_CLASSES = {
    ("Trainer", "bytescheduler"): ("ddp.strategy", "ByteSchedulerStrategy", _DDP),
    ("Fabric", "bytescheduler"): ("ddp.fabric_strategy", "ByteSchedulerFabricStrategy", _DDP),
    ("Trainer", "diloco"): ("diloco.strategy", "DiLoCoStrategy", "Low-communication training of uneven workers"),
}
"""Module, name and description of each strategy's class, by the class that asks and the name that it asks for.

Fabric has no DiLoCo: its rounds end between the Trainer's steps.
"""
_STARTS = (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork"))


def _named(first: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The names that begin with ``first``, with their options; named as DDP's are."""
    for suffix, start_method in _STARTS:
        yield f"{first}{suffix}", {"start_method": start_method}
        for unused in (False, True) if first == "bytescheduler" else ():
            options = {"start_method": start_method, "find_unused_parameters": unused}
            yield f"{first}{suffix}_find_unused_parameters_{str(unused).lower()}", options


class _Registered:
    """Takes a strategy's place in a package's registry, and imports its class when a Trainer asks for it.

    Args:
        package: The package of the registry.
        name: The name in the registry.
        module: The module of the class.
        of: The name of the class.
        user: The class that asks: ``"Trainer"`` or ``"Fabric"``.
    """

    def __init__(self, package: LightningPackage, name: str, module: str, of: str, user: str) -> None:
        self._package = package
        self._name = name
        self._place = module, of
        self._user = user

    def __call__(self, **options: Any) -> Any:
        use_package(self._package, f"strategy={self._name!r} was given to {self._package}'s {self._user}")
        return self.strategy_class()(**options)

    def strategy_class(self) -> Any:
        """The class whose objects are made."""
        module, name = self._place
        return getattr(importlib.import_module(f"{__package__}.{module}"), name)


def registered_class(entry: Any) -> Any:
    """The class of a registry's entry for a strategy. Ours are imported when they are needed."""
    return entry.strategy_class() if isinstance(entry, _Registered) else entry


def register_strategies() -> None:
    """Register all strategies with each of the two packages, at once or when it is imported."""
    waiting = {module for module in _PARTS if not _register(module)}
    if waiting and not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(waiting))


def _register(module: str) -> bool:
    """Register the strategies of one module, if it has been imported; return whether it has."""
    package, user, its = _PARTS[module]
    registry: Any = getattr(sys.modules.get(f"{module}.strategies"), its, None)
    if registry is None:
        return False
    for (whose, first), (place, of, description) in _CLASSES.items():
        for name, options in _named(first) if whose == user else ():
            if name not in registry:  # importing twice, as after a reload, must not raise
                described = ", ".join([description, *(f"{key}={value}" for key, value in options.items())])
                strategy = _Registered(package, name, place, of, user)
                registry.register(name, strategy, description=described, **options)
    return True


class _AfterImport(importlib.abc.MetaPathFinder):
    """Registers the strategies with a package when its import has ended.

    Args:
        waiting: The modules to wait for.
    """

    def __init__(self, waiting: set[str]) -> None:
        self._waiting = waiting

    def find_spec(self, fullname: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._waiting:
            return None
        self._waiting.remove(fullname)
        spec = importlib.util.find_spec(fullname)  # found by the other finders, as this module is not in _waiting now
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return spec
        execute = spec.loader.exec_module

        def then(module: ModuleType) -> None:
            this = module.__spec__ is spec  # a loader may load other modules, too, as that of a zip file does
            try:
                execute(module)
            except BaseException:
                if this:
                    self._waiting.add(fullname)  # the project may repair the failure, and import it again
                raise
            checks = _PARTS[fullname][1] == "Trainer" and os.path.exists(os.environ.get(CHECK_VARIABLE, ""))
            if this and _register(fullname) and checks:
                importlib.import_module(f"{__package__}.checking.injected").install(module)

        spec.loader.exec_module = then  # type: ignore[method-assign]
        return spec
