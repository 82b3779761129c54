from __future__ import annotations

import os
import socket
import sys
from typing import Any

import pytest

from lightning_bytescheduler.collectives import groups
from lightning_bytescheduler.collectives.groups import VARIABLE, choose_interface

MASTER = "192.0.2.10"  # an address that is reserved for examples


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Names and what they resolve to; this machine has an interface that leads to the first one."""
    addresses = {socket.gethostname(): "127.0.1.1", MASTER: MASTER}

    def resolve(host: str, *_: Any, **__: Any) -> list[Any]:
        if host not in addresses:
            raise socket.gaierror(f"{host} has no address")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (addresses[host], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(groups, "_address_towards", lambda host: "192.0.2.11" if host == MASTER else None)
    monkeypatch.setattr(groups, "_interface_of", {"192.0.2.11": "eth7"}.get)
    monkeypatch.setenv(VARIABLE, "")
    return addresses


@pytest.mark.usefixtures("machine")
def test_the_way_to_the_first_machine_is_taken_where_gloo_would_listen_on_loopback() -> None:
    assert choose_interface(MASTER) == "eth7"
    assert os.environ[VARIABLE] == "eth7"


def test_a_machine_whose_name_has_no_address_is_the_same(machine: dict[str, str]) -> None:
    del machine[socket.gethostname()]
    assert choose_interface(MASTER) == "eth7"


def test_a_name_with_an_address_is_left_to_gloo(machine: dict[str, str]) -> None:
    machine[socket.gethostname()] = "198.51.100.3"
    assert choose_interface(MASTER) is None
    assert os.environ[VARIABLE] == ""


@pytest.mark.usefixtures("machine")
def test_what_was_chosen_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "ib0")
    assert choose_interface(MASTER) is None
    assert os.environ[VARIABLE] == "ib0"


def test_a_training_on_loopback_stays_there(machine: dict[str, str]) -> None:
    machine["localhost"] = "127.0.0.1"
    assert choose_interface("localhost") is None


@pytest.mark.usefixtures("machine")
def test_without_a_way_gloo_decides() -> None:
    assert choose_interface("198.51.100.9") is None
    assert os.environ[VARIABLE] == ""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_interfaces_are_known_by_their_addresses() -> None:
    assert groups._address_towards("127.0.0.1") == "127.0.0.1"
    assert groups._interface_of("127.0.0.1") == "lo"
    assert groups._interface_of(MASTER) is None
