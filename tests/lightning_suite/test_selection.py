from __future__ import annotations

import pytest

from tests.lightning_suite.selection import Mentions

_MODULE = """
import ddp_of_somebody

KWARGS = {"strategy": "DDP_spawn"}


def helper():
    return inner()


def inner():
    return KWARGS


class Model:
    ddp = True


def test_direct():
    Trainer(strategy="ddp")


@pytest.mark.parametrize("strategy", ["ddp"])
def test_in_a_decorator(strategy): ...


def test_by_helpers():
    helper()


def test_by_a_class():
    Model()


@pytest.fixture
def trained():
    return helper()


def test_by_a_fixture(trained): ...


def test_devices():
    Trainer(accelerator="cpu", devices=2)


def test_one_device():
    Trainer(accelerator="cpu", devices=1)




class TestInAClass:
    def test_it(self):
        helper()
"""


@pytest.mark.parametrize(
    "name",
    [
        "test_direct",
        "test_in_a_decorator",
        "test_by_helpers",
        "test_by_a_class",
        "test_by_a_fixture",
        "test_devices",
        "TestInAClass",
    ],
)
def test_what_mentions_ddp_in_some_way_is_selected(name: str) -> None:
    assert name in Mentions(_MODULE)


@pytest.mark.parametrize("name", ["test_one_device", "test_unknown"])
def test_what_does_not_is_not(name: str) -> None:
    assert name not in Mentions(_MODULE)


def test_a_module_that_only_imports_it_mentions_nothing() -> None:
    assert not Mentions("from lightning.pytorch.strategies import DDPStrategy\n\n\ndef test_it(): ...\n")
    assert Mentions(_MODULE)
