"""A run's state, saved at the boundaries of its rounds, and found again after a crash.

A saved state is two files. ``state-TERM-VERSION-*.safetensors`` has its tensors; ``state-TERM-VERSION.json``, which is
written when that one is complete and was checked, has the rest, and the name, size and checksum of the first. The state
exists from then on: there is no file that two coordinators would both write, and the newest state is the one with the
highest term, and in it the highest version. What a former coordinator still saves under its own, lower term is never
the newest.

Saving goes on beside the answers, in a thread; if it is slower than the rounds, the newest state is saved next and
those between are left out. A disk that is full does not end the run: it is logged, counted, and tried again with the
next state. Loading takes nothing for granted: sizes, digests and types are checked, nothing is unpickled, and a state
that is damaged is named and the one before taken.

A coordinator takes its lease, makes the store, takes what :meth:`StateStore.load` gives, calls :meth:`StateStore.adopt`
with its term, and acts.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec

from lightning_bytescheduler.checks import importing, require_whole
from lightning_bytescheduler.coordinator.packed_state import Packed, pack, tensor_chunks, unpack
from lightning_bytescheduler.coordinator.state_folder import StateFolder
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices.checksums import WholeChecksum, checksum_of

__all__ = ["RunState", "SaveCounts", "StateStore"]

log = logging.getLogger(__name__)

_FORMAT = 1
_KEPT = 3
_STOP_SECONDS = 60.0
_MANIFEST = re.compile(r"state-(\d{10})-(\d{10})\.json")
_TENSORS = re.compile(r"state-(\d{10})-(\d{10})-[0-9a-f]{8}\.safetensors")
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class RunState(NamedTuple):
    """What there is to save of a run, at the boundary of a round.

    Attributes:
        term: Of the coordinator that saves it.
        version: Of the global weights: rounds that are part of them.
        chain: Of the same.
        state: The rest: plain values and tensors, nested in dicts and lists. Tensors must not change any more: they are
            written later. Tuples come back as lists.
    """

    term: int
    version: int
    chain: str
    state: Mapping[str, Any]


class SaveCounts(NamedTuple):
    """How saving went.

    Attributes:
        saved: States that were.
        failed: That could not be.
        left_out: That were not, as a newer one was there before their turn.
        version: Of the last one that was saved, or None.
        seconds: That it took.
        size: Of it, in bytes.
    """

    saved: int = 0
    failed: int = 0
    left_out: int = 0
    version: int | None = None
    seconds: float = 0.0
    size: int = 0


class _Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: int
    term: _Count
    version: _Count
    chain: str
    tensors: str
    size: _Count
    digest: str
    saved: float
    state: Any


class StateStore:
    """Saves states in a folder, and finds the newest. For any thread; it has one of its own, until :meth:`close`.

    Args:
        folder: Where they are.
        keep: The last ones that are kept, at least 2: one may be damaged, or just be taken over.
        may_save: Asked right before a state is made to exist: whether this coordinator acts.

    Raises:
        OptionError: If ``keep`` is not allowed.
    """

    def __init__(self, folder: StateFolder, *, keep: int = _KEPT, may_save: Callable[[], bool] = lambda: True) -> None:
        self._folder = folder
        self._keep = require_whole("keep", keep, 2)
        self._may_save = may_save
        self._changed = threading.Condition()
        self._next: RunState | None = None
        self._is_busy = False
        self._is_closed = False
        self._counts = SaveCounts()
        self._loaded: _Manifest | None = None
        self._thread: threading.Thread | None = None

    @property
    def counts(self) -> SaveCounts:
        """How saving went."""
        with self._changed:
            return self._counts

    # ── Saving ───────────────────────────────────────────────────────────

    def save(self, state: RunState) -> None:
        """Have a state saved, as soon as the one under way is. Returns at once.

        Args:
            state: Takes the place of one that still waits for its turn.
        """
        with self._changed:
            if self._is_closed:
                return
            if self._next is not None:
                self._counts = self._counts._replace(left_out=self._counts.left_out + 1)
            self._next = state
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="bytescheduler-state-store", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, seconds: float = _STOP_SECONDS) -> bool:
        """Wait until nothing is left to save; returns whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._next is None and not self._is_busy, seconds)

    def close(self, seconds: float = _STOP_SECONDS) -> bool:
        """Save what was handed over, and stop. Returns whether that was done within ``seconds``."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is None:
            return True
        thread.join(seconds)
        if thread.is_alive():
            log.warning("The last state was not saved to %s within %.0f s.", self._folder.url, seconds)
        return not thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                # A timeout for nothing but to be sure: whoever changes something notifies.
                while not self._changed.wait_for(lambda: self._next is not None or self._is_closed, 60.0):
                    pass
                state, self._next = self._next, None
                if state is None:
                    return
                self._is_busy = True
            try:
                self._save_counted(state)
            finally:
                del state  # gigabytes, while it waits for the next
                with self._changed:
                    self._is_busy = False
                    self._changed.notify_all()

    def _save_counted(self, state: RunState) -> None:
        began = time.monotonic()
        try:
            size = self.save_now(state)
        except Exception as error:  # whatever a file system of fsspec raises: the run goes on
            log.warning(
                "The state of round %d was not saved to %s, and the run goes on: %s: %s",
                state.version,
                self._folder.url,
                type(error).__name__,
                error,
            )
            with self._changed:
                self._counts = self._counts._replace(failed=self._counts.failed + 1)
            return
        with self._changed:
            self._counts = self._counts._replace(
                saved=self._counts.saved + 1,
                version=state.version,
                seconds=time.monotonic() - began,
                size=size,
            )

    def save_now(self, state: RunState) -> int:
        """Save a state; for the caller's own thread.

        Returns:
            Its size in bytes.

        Raises:
            Exception: Whatever the file system raises; the states of before are there as they were.
        """
        packed = pack(state.state)
        stem = f"state-{state.term:010d}-{state.version:010d}"
        name = f"{stem}-{secrets.token_hex(4)}.safetensors"
        whole = WholeChecksum()

        def hashed() -> Any:
            for chunk in tensor_chunks(packed.tensors):
                whole.update(chunk)
                yield chunk

        try:
            size = self._folder.publish(name, hashed())
            size += self._publish_manifest(self._manifest_of(state, name, size, str(whole), packed.plain))
        except BaseException:
            self._drop_tensors(name, stem)
            raise
        self._thin_out()
        return size

    def _drop_tensors(self, name: str, stem: str) -> None:
        """Nobody will know of the tensors of a state that was not saved: they would take a full disk's last room."""
        with contextlib.suppress(Exception):
            if f"{stem}.json" not in self._folder.names():
                self._folder.remove(name)

    def _manifest_of(self, state: RunState, name: str, size: int, digest: str, plain: Any) -> _Manifest:
        if not self._may_save():
            raise RuntimeError("this coordinator acts no more")
        return _Manifest(
            format=_FORMAT,
            term=state.term,
            version=state.version,
            chain=state.chain,
            tensors=name,
            size=size,
            digest=digest,
            saved=time.time(),
            state=plain,
        )

    def _publish_manifest(self, manifest: _Manifest) -> int:
        content = msgspec.json.encode(manifest)
        name = f"state-{manifest.term:010d}-{manifest.version:010d}.json"
        return self._folder.publish(name, [content, b"\n", checksum_of(content).encode(), b"\n"])

    def adopt(self, term: int) -> None:
        """Save the state that was loaded anew, under a term that has taken over; its tensors stay where they are.

        From then on nothing that the former coordinator may still save is the newest state. What it left
        half-written is deleted.

        Args:
            term: Of this coordinator.

        Raises:
            Exception: Whatever the file system raises.
        """
        self._folder.sweep()
        if self._loaded is not None:
            self._publish_manifest(msgspec.structs.replace(self._loaded, term=term, saved=time.time()))

    def _thin_out(self) -> None:
        """Delete what is older than the states that are kept; a failure to is no failure to save."""
        try:
            names = self._folder.names()
            manifests = sorted(name for name in names if _MANIFEST.fullmatch(name))
            kept = manifests[-self._keep :]
            needed = set()
            for name in kept:
                with contextlib.suppress(_Damaged):
                    needed.add(self._read_manifest(name).tensors)
            oldest = _MANIFEST.fullmatch(kept[0])
            for name in manifests[: -self._keep]:
                self._folder.remove(name)
            for name in names:
                found = _TENSORS.fullmatch(name)
                # One that is newer may be a state whose manifest is about to be written.
                if found and oldest and found.groups() < oldest.groups() and name not in needed:
                    self._folder.remove(name)
        except Exception as error:
            log.warning("Older states in %s were not deleted: %s", self._folder.url, error)

    # ── Loading ───────────────────────────────────────────────────────────

    def load(self) -> RunState | None:
        """The newest state that is whole; None if there is none at all.

        Logs a warning for each that is damaged, and names its file.

        Raises:
            OptionError: If there are states, and none can be loaded; names each file and what is wrong with it.
            OSError: If the folder cannot be read.
        """
        names = [name for name in self._folder.names() if _MANIFEST.fullmatch(name)]
        wrong = []
        for name in sorted(names, reverse=True):
            try:
                manifest = self._read_manifest(name)
                tensors = self._read_tensors(manifest)
                values = unpack(Packed(manifest.state, tensors))
            except (_Damaged, ValueError, FileNotFoundError) as error:
                wrong.append(f"{self._folder.where(name)}: {error}")
                log.warning("A saved state is damaged, and the one before is taken: %s", wrong[-1])
                continue
            self._loaded = manifest
            return RunState(manifest.term, manifest.version, manifest.chain, values)
        if wrong:
            allowed = f"a folder with a state that can be loaded ({'; '.join(wrong)})"
            raise OptionError("state", self._folder.url, allowed, "Take another folder to start anew.")
        return None

    def _read_manifest(self, name: str) -> _Manifest:
        content, _, checksum = self._folder.read(name).rstrip(b"\n").rpartition(b"\n")
        if checksum.decode(errors="replace") != checksum_of(content):
            raise _Damaged("it is not what was written (its checksum differs)")
        try:
            manifest = msgspec.json.decode(content, type=_Manifest)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise _Damaged(f"it is no saved state ({error})") from error
        if manifest.format != _FORMAT:
            raise _Damaged(f"it is of format {manifest.format}, and this release reads format {_FORMAT}")
        found = _MANIFEST.fullmatch(name)
        if found is None or (manifest.term, manifest.version) != (int(found[1]), int(found[2])):
            raise _Damaged("it is of another round than its name says")
        if not _TENSORS.fullmatch(manifest.tensors):
            raise _Damaged("its file of tensors has a name that none has")
        return manifest

    def _read_tensors(self, manifest: _Manifest) -> dict[str, Any]:
        with importing("A saved state", extra="coordinator"):
            from safetensors import SafetensorError
            from safetensors.torch import load
        content = self._folder.read(manifest.tensors)
        if len(content) != manifest.size:
            raise _Damaged(f"{manifest.tensors} has {len(content)} bytes, and had {manifest.size}")
        whole = WholeChecksum()
        whole.update(content)
        if str(whole) != manifest.digest:
            raise _Damaged(f"{manifest.tensors} is not what was written (its checksum differs)")
        try:
            return load(content)
        except SafetensorError as error:
            raise _Damaged(f"{manifest.tensors} is no file of safetensors ({error})") from error


class _Damaged(Exception):
    """A saved state cannot be loaded; the message says why."""
