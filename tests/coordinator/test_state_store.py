"""A saved state comes back as it was or not at all: whatever breaks while it is written or while it lies there."""

from __future__ import annotations

import errno
import math
import os
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_bytescheduler.coordinator.packed_state import Packed, pack, tensor_chunks, unpack
from lightning_bytescheduler.coordinator.state_folder import StateFolder
from lightning_bytescheduler.coordinator.state_store import RunState, StateStore
from lightning_bytescheduler.exceptions import OptionError

safetensors = pytest.importorskip("safetensors.torch")
CHAIN = "0" * 32


def a_state(version: int = 1, *, term: int = 1) -> RunState:
    generator = torch.Generator().manual_seed(version)
    weights = {"a.weight": torch.randn(3, 5, generator=generator), "b": torch.randn((), generator=generator).bfloat16()}
    optimizer = {"state": {0: {"momentum_buffer": torch.ones(2)}}, "param_groups": [{"lr": 0.7, "betas": (0.9, 0.99)}]}
    slices = {"quarantined": {3: "why"}, "states": torch.arange(4, dtype=torch.uint8), "empty": torch.zeros(0, 3)}
    state = {"weights": weights, "outer": optimizer, "slices": slices, "rate": math.inf, "members": ["anna"]}
    return RunState(term, version, CHAIN, state)


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.fixture(params=["disk", "memory"])
def folder(request, tmp_path) -> StateFolder:
    return StateFolder(str(tmp_path / "state") if request.param == "disk" else f"memory://state-{tmp_path.name}")


def test_a_state_comes_back(folder):
    store = StateStore(folder)
    assert store.load() is None
    for version in range(1, 6):
        store.save(a_state(version))
        assert store.flush()
    assert store.close()
    assert store.counts.saved == 5
    assert store.counts.version == 5
    loaded = StateStore(folder).load()
    assert (loaded.term, loaded.version, loaded.chain) == (1, 5, CHAIN)
    assert same(a_state(5).state, loaded.state)
    # The last three are kept, and nothing else.
    assert [name.partition(".")[2] for name in folder.names()].count("json") == 3
    assert len(folder.names()) == 6


_plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "a.b", "$tensor", "$pairs", "x"]), _plain, max_size=3))
def test_any_plain_values_come_back(value):
    import msgspec

    value = {**value, "t": {"t": torch.ones(2)}, "t.t": torch.zeros(3)}
    packed = pack(value)
    plain = msgspec.json.decode(msgspec.json.encode(packed.plain))
    tensors = safetensors.load(b"".join(map(bytes, tensor_chunks(packed.tensors))))
    assert same(value, unpack(Packed(plain, tensors)))


@pytest.mark.parametrize("wrong", [{"a": object()}, {"a": {1, 2}}, {"a": b"bytes"}, {"a": torch.zeros(1).to_sparse()}])
def test_what_cannot_be_saved_is_named(wrong):
    if isinstance(wrong["a"], torch.Tensor):
        wrong = {"a": torch.zeros(1, dtype=torch.complex64)}
    with pytest.raises(ValueError, match="at 'a'"):
        pack(wrong)


@pytest.mark.parametrize(
    "wrong",
    [[], {"a": {"$tensor": "missing"}}, {"a": {"$number": "1"}}, {"a": {"$pairs": [[[], 1]]}}, {"a": {"$code": "x"}}],
    ids=str,
)
def test_what_was_not_made_by_pack_is_refused(wrong):
    with pytest.raises(ValueError, match="the state"):
        unpack(Packed(wrong, {}))


def damage(path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
        return
    if how == "cut":
        content = content[: len(content) // 2]
    elif how == "flipped":
        content[len(content) // 2] ^= 1
    elif how == "empty":
        content = bytearray()
    elif how == "pickle":
        torch.save({"a": torch.ones(1)}, path)
        return
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["missing", "cut", "flipped", "empty", "pickle"])
@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_a_damaged_state_is_named_and_the_one_before_is_taken(tmp_path, caplog, suffix, how):
    store = StateStore(StateFolder(str(tmp_path)))
    for version in (1, 2):
        store.save_now(a_state(version))
    damaged = max(tmp_path.glob(f"*.{suffix}"))
    damage(damaged, how)
    loaded = StateStore(StateFolder(str(tmp_path))).load()
    assert loaded.version == 1
    assert same(a_state(1).state, loaded.state)
    if (suffix, how) != ("json", "missing"):  # then it was never complete
        assert damaged.name.replace(".safetensors", "")[:27] in caplog.text
    # The run goes on from there, and saves over what is damaged.
    store.save_now(a_state(2))
    assert StateStore(StateFolder(str(tmp_path))).load().version == 2


def test_a_folder_in_which_nothing_can_be_loaded_is_no_new_run(tmp_path):
    StateStore(StateFolder(str(tmp_path))).save_now(a_state())
    damage(next(tmp_path.glob("*.safetensors")), "flipped")
    with pytest.raises(OptionError, match=r"state-0000000001-0000000001.*checksum") as caught:
        StateStore(StateFolder(str(tmp_path))).load()
    assert caught.value.option == "state"


def test_a_writer_that_dies_anywhere_leaves_the_state_of_before(tmp_path, monkeypatch):
    """Every system call of saving fails once; the state of before is there each time."""
    folder = StateFolder(str(tmp_path))
    StateStore(folder).save_now(a_state(1))
    version = 1
    for name in ("open", "fsync", "replace"):
        real = getattr(os, name)
        for failing in range(1, 9):
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
                    StateStore(folder).save_now(a_state(version + 1))
                    is_saved = calls < failing
                except OSError:
                    is_saved = False
            loaded = StateStore(folder).load()
            assert loaded.version in ((version + 1,) if is_saved else (version, version + 1))
            assert same(a_state(loaded.version).state, loaded.state)
            version = loaded.version
            assert not list(tmp_path.glob("*.part"))


def test_a_full_disk_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    store = StateStore(StateFolder(str(tmp_path)))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(StateFolder, "publish", full)
        store.save(a_state(1))
        assert store.flush()
    assert "No space left" in caplog.text
    store.save(a_state(2))
    assert store.close()
    assert store.counts._replace(seconds=0, size=0) == (1, 1, 0, 2, 0, 0)


def test_a_state_whose_last_file_has_no_room_leaves_nothing_that_takes_room(folder, monkeypatch):
    store = StateStore(folder)
    store.save_now(a_state(1))
    before = folder.names()
    publish = StateFolder.publish

    def full(self, name, chunks):
        if name.endswith(".json"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return publish(self, name, chunks)

    monkeypatch.setattr(StateFolder, "publish", full)
    with pytest.raises(OSError, match="No space left"):
        store.save_now(a_state(2))
    assert folder.names() == before


def test_a_state_that_is_there_keeps_its_tensors_though_saving_it_has_failed(folder, monkeypatch):
    """As on an object store whose last answer was lost."""
    publish = StateFolder.publish

    def lost(self, name, chunks):
        written = publish(self, name, chunks)
        if name.endswith(".json"):
            raise ConnectionError("the answer was lost")
        return written

    monkeypatch.setattr(StateFolder, "publish", lost)
    store = StateStore(folder)
    with pytest.raises(ConnectionError):
        store.save_now(a_state(2))
    assert StateStore(folder).load().version == 2


def test_the_newest_state_wins_where_saving_is_slow_and_a_stop_saves_the_last(folder, monkeypatch):
    saving, go_on = threading.Event(), threading.Event()
    real = StateFolder.publish

    def slow(self, name, chunks):
        saving.set()
        assert go_on.wait(30)
        return real(self, name, chunks)

    monkeypatch.setattr(StateFolder, "publish", slow)
    store = StateStore(folder)
    store.save(a_state(1))
    assert saving.wait(30)
    for version in (2, 3, 4):
        store.save(a_state(version))
    assert not store.close(0.01)
    store.save(a_state(5))  # closed: nobody waits for it
    go_on.set()
    assert store.close()
    assert (store.counts.saved, store.counts.left_out, store.counts.version) == (2, 2, 4)
    assert StateStore(folder).load().version == 4
    assert not [thread for thread in threading.enumerate() if thread.name == "bytescheduler-state-store"]


def test_an_older_terms_state_is_never_the_newest(folder):
    former = StateStore(folder)
    former.save_now(a_state(7, term=1))
    heir = StateStore(folder)
    assert heir.load().version == 7
    heir.adopt(2)
    former.save_now(a_state(8, term=1))
    former.save_now(a_state(9, term=1))
    loaded = StateStore(folder).load()
    assert (loaded.term, loaded.version) == (2, 7)
    assert same(a_state(7).state, loaded.state)
    for version in range(8, 12):
        heir.save_now(a_state(version, term=2))
    assert StateStore(folder).load().version == 11
    assert len(folder.names()) == 6


def test_who_acts_no_more_saves_nothing(folder):
    store = StateStore(folder, may_save=lambda: False)
    store.save(a_state())
    assert store.close()
    assert store.counts.failed == 1
    assert folder.names() == []


def test_what_is_no_place_for_a_state(tmp_path):
    (tmp_path / "file").write_text("")
    for wrong in ("", "nobody://x", str(tmp_path / "file"), str(tmp_path / "file" / "below")):
        with pytest.raises(OptionError, match="state="):
            StateFolder(wrong)
    with pytest.raises(OptionError, match="keep="):
        StateStore(StateFolder(str(tmp_path)), keep=1)


def test_what_a_dead_writer_left_is_swept(tmp_path):
    folder = StateFolder(str(tmp_path))
    (tmp_path / "state-1.json.abcd.part").write_text("half")
    assert folder.names() == []
    folder.sweep()
    assert list(tmp_path.iterdir()) == []
