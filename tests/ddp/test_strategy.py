"""Every name the package promises, and what it stands for."""

import subprocess
import sys

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry

import lightning_bytescheduler
from lightning_bytescheduler import ByteSchedulerStrategy

_START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_UNUSED = {
    "": None,
    "_find_unused_parameters_true": True,
    "_find_unused_parameters_false": False,
}


@pytest.mark.parametrize("start", _START_METHODS)
@pytest.mark.parametrize("unused", _UNUSED)
def test_each_name_makes_the_strategy_it_describes(start: str, unused: str) -> None:
    strategy = Trainer(accelerator="cpu", devices=2, strategy=f"bytescheduler{start}{unused}").strategy
    assert type(strategy) is ByteSchedulerStrategy
    assert strategy._start_method == _START_METHODS[start]
    assert strategy._ddp_kwargs.get("find_unused_parameters") is _UNUSED[unused]


def test_names_mirror_those_of_ddp() -> None:
    names = [name for name, entry in StrategyRegistry.items() if not entry["description"].startswith("an error")]
    ours = {name.removeprefix("bytescheduler") for name in names if name.startswith("bytescheduler")}
    theirs = {name.removeprefix("ddp") for name in names if name.startswith("ddp")}
    assert ours == theirs | {""}


@pytest.mark.slow
def test_without_the_import_the_name_is_unknown_and_lightning_says_so() -> None:
    code = "from lightning.pytorch import Trainer; Trainer(accelerator='cpu', strategy='bytescheduler')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode != 0
    assert "bytescheduler" in run.stderr


def test_reloading_the_package_is_harmless() -> None:
    import importlib

    importlib.reload(lightning_bytescheduler)
    assert "bytescheduler" in StrategyRegistry


def test_the_strategy_takes_everything_ddp_takes_by_name() -> None:
    given = {"start_method": "spawn", "timeout": None, "process_group_backend": "gloo", "parallel_devices": None}
    strategy = ByteSchedulerStrategy(**given)
    assert (strategy._start_method, strategy._timeout, strategy._process_group_backend) == ("spawn", None, "gloo")
    assert not given.keys() & strategy._ddp_kwargs.keys()
    with pytest.raises(TypeError, match="positional"):
        ByteSchedulerStrategy(131072)  # type: ignore[call-arg]


def test_public_names_exist() -> None:
    for name in lightning_bytescheduler.__all__:
        assert getattr(lightning_bytescheduler, name) is not None
