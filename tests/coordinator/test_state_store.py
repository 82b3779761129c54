"""A saved state comes back as it was or not at all, whatever breaks while it is written or stored."""

from __future__ import annotations

import errno
import math
import multiprocessing
import os
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.coordinator.state_store import StateStore, pack
from lightning_bytescheduler.exceptions import OptionError

safetensors = pytest.importorskip("safetensors.torch")


def a_state(version: int = 1):
    generator = torch.Generator().manual_seed(version)
    weights = {"a.weight": torch.randn(3, 5, generator=generator), "b": torch.randn((), generator=generator).bfloat16()}
    momentum = {"a.weight": torch.ones(5, 3).t()}
    slices = {
        "quarantined": {"3": "why"},
        "epochs": [
            {
                "states": torch.arange(4, dtype=torch.uint8),
                "none": torch.zeros(0, dtype=torch.int64).as_strided((0,), (0,)),
            }
        ],
    }
    run = {"version": version, "rate": math.inf, "members": ["anna"], "pair": (1, 2)}
    return {"run": run, "weights": weights, "momentum": momentum, "slices": slices, "empty": torch.zeros(0, 3)}


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.fixture(params=["disk", "memory"])
def url(request, tmp_path) -> str:
    return str(tmp_path / "state") if request.param == "disk" else f"memory://state-{tmp_path.name}"


@pytest.fixture
def store(url):
    made = StateStore(url)
    yield made
    made.close()


@pytest.fixture
def on_disk(tmp_path):
    made = StateStore(str(tmp_path))
    yield made
    made.close()


def test_a_state_comes_back(url):
    store = StateStore(url)
    assert store.load() is None
    for version in range(1, 6):
        store.write(a_state(version))
    store.save(a_state(6))
    assert store.close()
    assert store.saved_round == 6
    again = StateStore(url)
    assert same(a_state(6), again.load())
    assert again.saved_round == 6
    assert again._names() == [f"state-000000000{version}.safetensors" for version in (4, 5, 6)]
    again.close()


_plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["a", "a.b", "x"]), _plain, max_size=3))
def test_any_plain_values_come_back(value):
    value = {**value, "run": {"version": 1}, "t": {"t": torch.ones(2)}}
    store = StateStore("memory://plain")
    store.write(value)
    assert same(value, store.load())


@pytest.mark.parametrize("wrong", [object(), {1, 2}, b"bytes"], ids=["object", "set", "bytes"])
def test_what_cannot_be_saved_is_named(wrong):
    with pytest.raises(TypeError, match=type(wrong).__name__):
        pack({"a": wrong})


def damage(path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "cut":
        content = content[: len(content) // 2]
    elif how == "flipped":
        content[-1] ^= 1
    elif how == "other words":
        content = content.replace(b"anna", b"otto")
    elif how == "empty":
        content = bytearray()
    elif how == "pickle":
        torch.save({"a": torch.ones(1)}, path)
        return
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["cut", "flipped", "other words", "empty", "pickle"])
def test_a_damaged_state_is_named_and_the_one_before_is_taken(tmp_path, on_disk, caplog, how):
    for version in (1, 2):
        on_disk.write(a_state(version))
    damaged = max(tmp_path.glob("*.safetensors"))
    damage(damaged, how)
    assert same(a_state(1), on_disk.load())
    assert damaged.name in caplog.text
    # The run goes on from there, and saves over what is damaged.
    on_disk.write(a_state(2))
    assert same(a_state(2), on_disk.load())


def test_a_folder_in_which_nothing_can_be_loaded_is_no_new_run(tmp_path, on_disk):
    on_disk.write(a_state())
    damage(next(tmp_path.glob("*.safetensors")), "flipped")
    with pytest.raises(OptionError, match=r"state-0000000001.*checksum") as caught:
        on_disk.load()
    assert caught.value.option == "state"


def test_a_writer_that_dies_anywhere_leaves_the_state_of_before(tmp_path, on_disk, monkeypatch):
    """Every system call of saving fails once; the state of before is there each time."""
    on_disk.write(a_state(1))
    version = 1
    for name in ("open", "fsync", "replace", "chmod"):
        real = getattr(os, name)
        for failing in range(1, 4):
            calls = 0

            def fails(*args, real=real, failing=failing, **options):
                nonlocal calls
                calls += 1
                if calls == failing:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return real(*args, **options)

            with monkeypatch.context() as patched:
                patched.setattr(os, name, fails)
                try:
                    on_disk.write(a_state(version + 1))
                    is_saved = calls < failing
                except OSError:
                    is_saved = False
            loaded = on_disk.load()
            found = loaded["run"]["version"]
            assert found in ((version + 1,) if is_saved else (version, version + 1))
            assert same(a_state(found), loaded)
            version = found
            assert not list(tmp_path.glob("*.part"))


def test_a_full_disk_does_not_end_the_run(store, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(StateStore, "_publish", full)
        store.save(a_state(1))
        thread = store._thread
        assert thread is None or thread.join(60) is None
    assert "The state of round 1 was not saved" in caplog.text
    assert "No space left" in caplog.text
    assert store.saved_round is None
    assert store.failure == "OSError: [Errno 28] No space left on device"
    store.save(a_state(2))
    assert store.close()
    assert store.saved_round == 2
    assert not store.failure


def test_the_newest_state_wins_where_saving_is_slow_and_a_stop_saves_the_last(store, monkeypatch):
    saving, go_on, published = threading.Event(), threading.Event(), []
    real = StateStore._publish

    def slow(self, part, name):
        saving.set()
        assert go_on.wait(60)
        published.append(name)
        return real(self, part, name)

    monkeypatch.setattr(StateStore, "_publish", slow)
    store.save(a_state(1))
    assert saving.wait(60)
    for version in (2, 3, 4):
        store.save(a_state(version))
    assert not store.close(0.01)
    assert store.failure is not None
    store.save(a_state(5))  # closed: no call waits for it
    go_on.set()
    assert store.close()
    assert published == ["state-0000000001.safetensors", "state-0000000004.safetensors"]
    assert same(a_state(4), store.load())
    assert not [thread for thread in threading.enumerate() if thread.name == "bytescheduler-state-store"]


def hold(folder, ready, go_on) -> None:
    store = StateStore(folder)
    ready.set()
    go_on.wait(60)
    store.close()
    os._exit(0)


def test_a_second_coordinator_is_refused_while_the_first_lives(tmp_path):
    first = StateStore(str(tmp_path))
    with pytest.raises(OptionError, match="a running one uses this"):
        StateStore(str(tmp_path))
    first.close()
    StateStore(str(tmp_path)).close()


def test_one_that_is_killed_does_not_keep_the_state_from_the_next(tmp_path):
    context = multiprocessing.get_context("forkserver")
    ready, go_on = context.Event(), context.Event()
    process = context.Process(target=hold, args=(str(tmp_path), ready, go_on), daemon=True)
    process.start()
    assert ready.wait(60)
    with pytest.raises(OptionError, match="a running one uses this"):
        StateStore(str(tmp_path))
    process.kill()
    process.join()
    StateStore(str(tmp_path)).close()


def test_what_is_no_place_for_a_state(tmp_path):
    (tmp_path / "file").write_text("")
    for wrong in ("", "unknown://x", str(tmp_path / "file"), str(tmp_path / "file" / "below")):
        with pytest.raises(OptionError, match="state="):
            StateStore(wrong)
