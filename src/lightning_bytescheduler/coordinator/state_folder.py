"""The folder of a coordinator's state, behind any URL that fsspec opens: files appear whole, or not at all.

Three things are asked of it. A file that is *published* appears under its name when all of it is there. A file that is
*created* is created by one of those who try at the same time. A file that is *rewritten* stays the same file, and who
opens it afterwards reads what was written.

On a disk, publishing is writing under another name, fsync and rename; creating is a hard link, which NFS makes on its
server, so that of several hosts one succeeds; rewriting goes into the file itself, as NFS promises that who opens a
file after it was closed elsewhere reads what is in it, and promises less of names. On S3 and Google Cloud Storage an
object appears when its upload is complete, and is created with a condition (``If-None-Match: *``), which not every
store and not every version of s3fs knows: :meth:`StateFolder.creates_exclusively` tries it out. Other file systems
publish by a name of their own and a move, and create by looking first, which two may do at the same time.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from fsspec.core import url_to_fs

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices.urls import join, local_path, require_protocols, require_storage_options

__all__ = ["StateFolder"]

_PART = ".part"  # end of the name of a file that is being written
_WHOLE_OBJECTS = ("s3", "s3a", "gs", "gcs", "memory")
"""Protocols whose files appear when they are complete."""
_CONDITIONAL = ("s3", "s3a", "gs", "gcs")
"""Protocols that may create a file on condition that there is none."""
_CHUNK = 2**22

_in_memory = threading.Lock()  # memory:// is one for a process, and so is this


class StateFolder:
    """Files by name in one folder. For any thread.

    Args:
        url: The folder; it is made when it is missing.
        storage_options: For fsspec's file system.
        option: What an error calls ``url``.

    Raises:
        OptionError: If nobody knows the URL's protocol, or the folder cannot be made.
        ImportError: If a package is missing that it needs.
    """

    def __init__(self, url: str, *, storage_options: Mapping[str, Any] | None = None, option: str = "state") -> None:
        if not isinstance(url, str) or not url:
            raise OptionError(option, url, "a folder, or a URL such as s3://bucket/run")
        require_protocols(option, (url,))
        options = require_storage_options((url,), storage_options)
        self.url = url
        self._option = option
        self._disk = local_path(url)
        self._fs, self._path = url_to_fs(url, **options)
        self._protocol = "file" if self._disk is not None else url.partition("://")[0]
        try:
            self._make()
        except OSError as error:
            reason = error.strerror or str(error)
            raise OptionError(option, url, f"a folder that is there or can be made: {reason}") from error

    def _make(self) -> None:
        if self._disk is not None:
            os.makedirs(self._disk, exist_ok=True)
        elif self._protocol not in _CONDITIONAL:  # buckets are not made, and have no folders
            self._fs.makedirs(self._path, exist_ok=True)

    def __repr__(self) -> str:
        return f"StateFolder({self.url!r})"

    def where(self, name: str) -> str:
        """The URL of a file, for messages."""
        return join(self.url, name)

    def _at(self, name: str) -> str:
        return f"{str(self._path).rstrip('/')}/{name}"

    def names(self) -> list[str]:
        """Of the files that are complete, sorted.

        Raises:
            OSError: If the folder cannot be read.
        """
        if self._disk is not None:
            found = os.listdir(self._disk)
        else:
            self._fs.invalidate_cache()
            try:
                found = [str(name).rstrip("/").rpartition("/")[2] for name in self._fs.ls(self._path, detail=False)]
            except FileNotFoundError:  # a folder without files is none
                found = []
        return sorted(name for name in found if not name.endswith(_PART))

    def read(self, name: str) -> bytes:
        """The content of a file.

        Raises:
            FileNotFoundError: If there is none.
            OSError: If it cannot be read.
        """
        if self._disk is not None:
            with open(os.path.join(self._disk, name), "rb") as file:
                return file.read()
        content: bytes = self._fs.cat_file(self._at(name))
        return content

    def path_on_disk(self, name: str) -> str | None:
        """The path of a file of this machine's file system; None elsewhere."""
        return None if self._disk is None else os.path.join(self._disk, name)

    def size(self, name: str) -> int:
        """Bytes of a file.

        Raises:
            FileNotFoundError: If there is none.
            OSError: If it cannot be found out.
        """
        if self._disk is not None:
            return os.stat(os.path.join(self._disk, name)).st_size
        self._fs.invalidate_cache()
        return int(self._fs.info(self._at(name))["size"])

    def publish(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        """Write a file that appears when it is complete, in the place of one of that name.

        Args:
            name: Of the file.
            chunks: Its content.

        Returns:
            Bytes that were written, and that the file has.

        Raises:
            OSError: If it could not be written; there is no such file then, or the one of before.
        """
        part = f"{name}.{secrets.token_hex(4)}{_PART}"
        try:
            if self._disk is not None:
                written = self._write_on_disk(part, chunks)
                os.replace(os.path.join(self._disk, part), os.path.join(self._disk, name))
                self._sync_folder()
            else:
                direct = self._protocol in _WHOLE_OBJECTS
                written = 0
                with self._fs.open(self._at(name if direct else part), "wb") as file:
                    for chunk in chunks:
                        written += len(chunk)
                        file.write(chunk)
                if not direct:
                    self._fs.mv(self._at(part), self._at(name))
        except BaseException:
            with contextlib.suppress(Exception):
                self.remove(part)
            raise
        size = self.size(name)
        if size != written:
            raise OSError(f"{self.where(name)} has {size} bytes, and {written} were written.")
        return written

    def create(self, name: str, content: bytes) -> bool:
        """Create a small file, unless there is one.

        Args:
            name: Of the file.
            content: That nobody else would write: if an answer is lost on its way, it tells whose file it is.

        Returns:
            Whether this call created it. Where :meth:`creates_exclusively`, one of those who try gets True.

        Raises:
            OSError: If it cannot be written.
        """
        if self._disk is not None:
            return self._create_on_disk(name, content)
        if self._protocol == "memory":
            with _in_memory:
                if self._fs.exists(self._at(name)):
                    return False
                self._fs.pipe_file(self._at(name), content)
                return True
        if self._protocol not in _CONDITIONAL:
            if self._fs.exists(self._at(name)):
                return False
            self.publish(name, [content])
            return True
        try:
            self._fs.pipe_file(self._at(name), content, mode="create")
        except FileExistsError:
            return self.read(name) == content  # the store may have taken it at a first attempt whose answer was lost
        return True

    def rewrite(self, name: str, content: bytes) -> None:
        """Write a small file anew, which stays the same file.

        Raises:
            FileNotFoundError: If it was removed, on a disk.
            OSError: If it cannot be written.
        """
        if self._disk is None:
            self._fs.pipe_file(self._at(name), content)
            return
        descriptor = os.open(os.path.join(self._disk, name), os.O_WRONLY)
        try:
            os.pwrite(descriptor, content, 0)
            os.ftruncate(descriptor, len(content))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, name: str) -> None:
        """Delete a file; one that is not there is none."""
        with contextlib.suppress(FileNotFoundError):
            if self._disk is not None:
                os.unlink(os.path.join(self._disk, name))
            else:
                self._fs.rm_file(self._at(name))

    def creates_exclusively(self) -> str | None:
        """None if of several who create a file one succeeds; else why that is not so, and the way out.

        Raises:
            OSError: If the folder cannot be written to.
        """
        if self._protocol == "memory":
            return None
        ways_out = "a folder of a disk or of NFS does, and so do s3:// and gs:// with recent s3fs and gcsfs"
        if self._disk is None and self._protocol not in _CONDITIONAL:
            return f"{self._protocol}:// does not create a file for one of several writers alone; {ways_out}"
        probe = f"probe-{secrets.token_hex(8)}"
        try:
            try:
                first, second = self.create(probe, b"1"), self.create(probe, b"2")
            except TypeError:  # a version whose pipe_file knows no mode
                first, second = True, True
            except PermissionError:
                raise
            except OSError as error:  # a disk without hard links
                return f"{self.url} does not create files exclusively ({error}); {ways_out}"
        finally:
            with contextlib.suppress(Exception):
                self.remove(probe)
        if first and not second:
            return None
        return f"{self.url} creates a file that is there already; {ways_out}"

    def sweep(self) -> None:
        """Delete what a writer that died has left half-written."""
        if self._disk is None:
            return
        for name in os.listdir(self._disk):
            if name.endswith(_PART):
                self.remove(name)

    def _write_on_disk(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        path = os.path.join(self._disk or "", name)
        written = 0
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb", buffering=0) as file:
            for chunk in chunks:
                view = memoryview(chunk)
                while view:  # a disk may take a part
                    taken = file.write(view[:_CHUNK])
                    written += taken
                    view = view[taken:]
            os.fsync(file.fileno())
        return written

    def _create_on_disk(self, name: str, content: bytes) -> bool:
        part = f"{name}.{secrets.token_hex(4)}{_PART}"
        own, target = os.path.join(self._disk or "", part), os.path.join(self._disk or "", name)
        try:
            self._write_on_disk(part, [content])
            try:
                os.link(own, target)
            except FileExistsError:
                # The server of NFS may have made the link, and its answer was lost.
                return os.stat(own).st_nlink == 2
            self._sync_folder()
            return True
        finally:
            self.remove(part)

    def _sync_folder(self) -> None:
        descriptor = os.open(self._disk or "", os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
