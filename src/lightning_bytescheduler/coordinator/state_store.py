"""Saves a run's state between its rounds, and finds it again after a crash.

A saved state is one safetensors file, ``state-VERSION.safetensors``. Its metadata hold everything that is not a tensor,
as JSON. The file is written under another name and then moved, so it is either complete or absent. Loading compares the
checksum and unpickles nothing. A warning names a damaged state, and the one before it is used.

One coordinator at a time owns a state. In a folder on a disk or on NFS it locks a file; the system releases the lock
when the process ends, however that happens. A folder at another URL has no lock.

A thread saves states while the coordinator goes on answering. If saving is slower than the rounds, the newest state is
saved next and older ones are skipped. A full disk does not end the run: the error is logged, and the next state is
saved as usual.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import tempfile
import threading
from collections.abc import Mapping
from typing import Any

import torch
from fsspec.core import url_to_fs
from torch import Tensor

from lightning_bytescheduler.coordinator.update_sum import view_of
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices.slice import xxhash
from lightning_bytescheduler.slices.urls import join, local_path, require_protocols

log = logging.getLogger(__name__)

_KEPT = 3
_STOP_SECONDS = 60.0
_NAME = re.compile(r"state-\d{10}\.safetensors")
_PART = "state.part"
_TENSOR = "$tensor"
_PLAIN = "lightning-bytescheduler"  # key of the metadata


class StateStore:
    """The states of one run. For any thread.

    Args:
        url: URL or path of the folder, as fsspec opens it; the folder is made if it is missing.

    Raises:
        OptionError: If the folder cannot be used, or another coordinator uses it.
        ImportError: If a package that the URL needs is missing.
    """

    def __init__(self, url: str) -> None:
        if not isinstance(url, str) or not url:
            raise OptionError("state", url, "a folder, or a URL such as s3://bucket/run")
        require_protocols("state", (url,))
        self.url = url
        self._disk = local_path(url)
        self._fs, root = url_to_fs(url)
        self._root = str(root).rstrip("/")
        self._lock: Any = None
        try:
            self._fs.makedirs(self._root, exist_ok=True)
            self._require_alone()
        except OSError as error:
            reason = error.strerror or str(error)
            raise OptionError("state", url, f"a folder that is there or can be made: {reason}") from error
        self._changed = threading.Lock()
        self._next: Mapping[str, Any] | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self.saved_round: int | None = None
        """The last round that is part of a saved state."""
        self.failure: str | None = None
        """Why the newest state is not saved, if that has failed."""

    def _require_alone(self) -> None:
        import filelock

        if self._disk is None:
            log.warning("There is no lock at %s: start only one coordinator there.", self.url)
            return
        self._lock = filelock.FileLock(os.path.join(self._disk, "lock"), thread_local=False)
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            allowed = "one that no other coordinator uses, and a running one uses this"
            raise OptionError(
                "state",
                self.url,
                allowed,
                "End that one and try again, or take another folder.",
            ) from None

    # ── Saving ───────────────────────────────────────────────────────────

    def save(self, state: Mapping[str, Any]) -> None:
        """Save a state on the thread, after the save that is in progress. Returns at once.

        Args:
            state: Plain values and tensors, in dicts and lists; ``run`` has a ``version``. Tensors must not change
                afterwards, as they are written later. It replaces a state that still waits to be saved.
        """
        with self._changed:
            if self._is_closed:
                return
            self._next = state
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="bytescheduler-state-store", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                state, self._next = self._next, None
                if state is None:
                    self._thread = None
                    return
            try:
                self.write(state)
                self.failure = None
            except Exception as error:  # fsspec's file systems raise any kind of error; the run goes on
                self.failure = f"{type(error).__name__}: {error}"
                version = state["run"]["version"]
                log.warning(
                    "The state of round %d was not saved to %s; the run goes on. %s", version, self.url, self.failure
                )

    def flush(self, seconds: float = _STOP_SECONDS) -> bool:
        """Wait until the newest state is saved, or could not be; returns whether that took less than ``seconds``."""
        with self._changed:
            thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    def close(self, seconds: float = _STOP_SECONDS) -> bool:
        """Wait until the last state is saved, and release the folder for another coordinator. May be repeated.

        Returns:
            Whether it was saved within ``seconds``.
        """
        with self._changed:
            self._is_closed = True
        if not self.flush(seconds):
            self.failure = f"it was not saved within {seconds:.0f} s"
            log.warning("The last state was not saved to %s within %.0f s.", self.url, seconds)
            return False
        if self._lock is not None:
            self._lock.release()
        return True

    def write(self, state: Mapping[str, Any]) -> None:
        """Save a state in the caller's own thread.

        Raises:
            Exception: Whatever the file system raises; earlier states are unchanged then.
        """
        from safetensors.torch import save_file

        version = int(state["run"]["version"])
        text, tensors = pack(state)
        name = f"state-{version:010d}.safetensors"
        with tempfile.TemporaryDirectory() if self._disk is None else contextlib.nullcontext(self._disk) as folder:
            part = os.path.join(folder, _PART)
            try:
                save_file(tensors, part, metadata={_PLAIN: text, "checksum": _checksum(text, tensors)})
                os.chmod(part, 0o600)
                self._publish(part, name)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(part)
                raise
        self.saved_round = version
        try:
            for former in self._names()[:-_KEPT]:
                self._fs.rm_file(f"{self._root}/{former}")
        except Exception as error:  # not a failure to save
            log.warning("Older states in %s were not deleted: %s", self.url, error)

    def _publish(self, part: str, name: str) -> None:
        if self._disk is None:
            self._fs.put_file(part, f"{self._root}/{_PART}")
            self._fs.mv(f"{self._root}/{_PART}", f"{self._root}/{name}")
            return
        _sync(part)
        os.replace(part, os.path.join(self._disk, name))
        _sync(self._disk)

    # ── Loading ───────────────────────────────────────────────────────────

    def load(self) -> dict[str, Any] | None:
        """Load the newest complete state; ``None`` if there is none. Tuples have become lists, and keys strings.

        Logs a warning with the file's name for each damaged state.

        Raises:
            OptionError: If there are states, but none can be loaded; names each file and what is wrong with it.
            OSError: If the folder cannot be read.
        """
        wrong = []
        for name in reversed(self._names()):
            try:
                state = self._read(name)
                self.saved_round = int(state["run"]["version"])
                return state
            except ValueError as error:
                wrong.append(f"{join(self.url, name)}: {error}")
                log.warning("A saved state is damaged, and the one before is taken: %s", wrong[-1])
        if wrong:
            allowed = f"a folder with a state that can be loaded ({'; '.join(wrong)})"
            raise OptionError("state", self.url, allowed, "Take another folder to start anew.")
        return None

    def _names(self) -> list[str]:
        self._fs.invalidate_cache()
        try:
            found = [str(path).rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._root, detail=False)]
        except FileNotFoundError:  # an object store has no folder without files
            return []
        return sorted(name for name in found if _NAME.fullmatch(name))

    def _read(self, name: str) -> dict[str, Any]:
        from safetensors import SafetensorError, safe_open

        with contextlib.ExitStack() as stack:
            if self._disk is None:
                path = os.path.join(stack.enter_context(tempfile.TemporaryDirectory()), name)
                self._fs.get_file(f"{self._root}/{name}", path)
            else:
                path = os.path.join(self._disk, name)
            try:
                with safe_open(path, "pt") as file:
                    metadata = file.metadata() or {}
                    tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # it is no dict
            except SafetensorError as error:
                raise ValueError(f"it is not a safetensors file ({error})") from error
        text = metadata.get(_PLAIN, "")
        if metadata.get("checksum") != _checksum(text, tensors):
            raise ValueError("it is not what was written (its checksum differs)")
        state: dict[str, Any] = json.loads(
            text, object_hook=lambda found: tensors[found[_TENSOR]] if list(found) == [_TENSOR] else found
        )
        return state


def pack(state: Mapping[str, Any]) -> tuple[str, dict[str, Tensor]]:
    """Return a state as JSON, and its tensors by name: a tensor's keys in the state, joined with dots.

    Raises:
        TypeError: If the state holds something that JSON cannot.
    """
    tensors: dict[str, Tensor] = {}

    def packed(value: Any, place: str) -> Any:
        if isinstance(value, Tensor):
            tensors[place] = value.detach().cpu().contiguous()
            return {_TENSOR: place}
        if isinstance(value, Mapping):
            return {key: packed(one, f"{place}.{key}" if place else key) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [packed(one, f"{place}.{index}") for index, one in enumerate(value)]
        return value

    return json.dumps(packed(state, "")), tensors


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    whole = xxhash().xxh3_64()
    whole.update(text.encode())
    for name in sorted(tensors):
        whole.update(name.encode())
        if tensors[name].numel():
            whole.update(view_of(tensors[name].flatten().view(torch.uint8)))
    return f"xxh3_64:{whole.hexdigest()}"


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
